"""Tests of paired bootstrap intervals: against sacrebleu, against scipy, by example id, and their coverage.

Coverage of latency intervals is tested on simulated machines, which are noisy and sometimes busy.
"""

import json

import numpy as np
import pytest
import sacrebleu
from scipy import stats

from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.metrics import quality
from speccascade_jax.results.analysis import bootstrap as paired
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.significance import CALLS
from speccascade_jax.storage.files import plain


def record(scores=(), ids=None, *, method="opt", metric="rougeL", seed=0, ms=(), target_ms=(), examples="same"):
    """Returns the parts of a record that a comparison reads; `scores` are the statistics of its examples."""
    ids = list(range(len(scores))) if ids is None else list(ids)
    return {
        "key": f"{method}-{seed}-record", "point": {"method": method, "alpha": 0.5, "seed": seed, "first_example": 0},
        "fingerprints": {"examples": examples},
        "quality": {"metric": metric, "per_example": {"ids": ids, "statistics": {metric: plain(np.asarray(scores))}}},
        "latency": {"per_example_ms": list(ms)}, "target_latency": {"per_example_ms": list(target_ms)},
    }  # fmt: skip


def corpus(dropped: float, seed: int) -> tuple[list[str], list[str]]:
    """Returns real sentences, and copies with words dropped or doubled; one is empty, one has no match."""
    rng = np.random.default_rng(seed)
    references = [example.reference for example in get_task("tiny_translation").load(limit=60)]
    times = [rng.choice(3, len(text.split()), p=[dropped, 1 - 1.2 * dropped, 0.2 * dropped]) for text in references]
    predictions = [" ".join(np.repeat(text.split(), n).tolist()) for text, n in zip(references, times, strict=True)]
    predictions[3:5] = ["", "xyz"]
    return predictions, references


def measured(dropped: float, seed: int, order=None) -> dict:
    """Returns a BLEU record as an evaluation writes it, read back from JSON, with its examples in `order`."""
    predictions, references = corpus(dropped, seed)
    order = range(len(references)) if order is None else order
    texts, truth = [predictions[n] for n in order], [references[n] for n in order]
    scored = quality.measure(["bleu", "rougeL"], [100 + n for n in order], texts, truth)
    return record(metric="bleu") | {"quality": json.loads(json.dumps(plain(scored)))}


def test_bleu_of_every_resample_equals_sacrebleus_exactly():
    (predictions, references), recorded = corpus(0.2, 0), measured(0.2, 0)["quality"]
    statistics = np.asarray(recorded["per_example"]["statistics"]["bleu"])
    assert recorded["value"] == sacrebleu.corpus_bleu(predictions, [references]).score
    for drawn in np.random.default_rng(1).integers(60, size=(20, 60)):
        texts, truth = [predictions[n] for n in drawn], [references[n] for n in drawn]
        (expected_score,) = quality.get_metric("bleu").from_sums(
            (np.bincount(drawn, minlength=60) @ statistics)[None], 60
        )
        assert expected_score == sacrebleu.corpus_bleu(texts, [truth]).score


@pytest.mark.parametrize(
    "predictions",
    [["a b c", "e f", "", "h i"], ["a b c d x", "e f g", "", "h i j k"], ["", "", "", ""]],
    ids=["no 4-gram at all", "4-grams without a match", "nothing written"],
)
def test_bleu_of_a_corpus_that_needs_smoothing_equals_sacrebleus(predictions):
    references = ["a b c x y", "e f g h", "l m", "h i k j"]
    statistics = quality.measure(["bleu"], range(4), predictions, references)["per_example"]["statistics"]["bleu"]
    (expected_score,) = quality.get_metric("bleu").from_sums(np.sum(statistics, axis=0, keepdims=True), 4)
    assert expected_score == sacrebleu.corpus_bleu(predictions, [references]).score


def test_the_value_is_the_difference_of_the_two_corpus_scores():
    ours, theirs = measured(0.1, 0), measured(0.3, 1)
    difference = Bootstrap().quality_difference([ours], [theirs])
    assert difference.value == ours["quality"]["value"] - theirs["quality"]["value"] > 0
    assert (
        difference.low < difference.value < difference.high
        and difference.excludes(0)
        and not difference.excludes(difference.value)
    )


def test_the_interval_equals_that_of_sacrebleu_on_resampled_texts():
    """Checks against scores of the same resamples, computed from texts one by one."""
    corpora, bootstrap = [corpus(0.1, 0), corpus(0.15, 1)], Bootstrap(samples=20)
    differences = []
    for counts in bootstrap._resamples(60)[1:].astype(int):
        drawn = np.repeat(np.arange(60), counts)
        scores = [sacrebleu.corpus_bleu([p[n] for n in drawn], [[r[n] for n in drawn]]).score for p, r in corpora]
        differences.append(scores[0] - scores[1])
    difference = bootstrap.quality_difference([measured(0.1, 0)], [measured(0.15, 1)])
    assert (difference.low, difference.high) == pytest.approx(
        tuple(np.quantile(differences, [0.025, 0.975])), rel=1e-12
    )


def test_a_record_does_not_differ_from_itself():
    timed_record = measured(0.2, 0) | {
        "latency": {"per_example_ms": [3.0] * 9},
        "target_latency": {"per_example_ms": [4.0] * 9},
    }
    assert Bootstrap().quality_difference([timed_record], [timed_record]) == (0, 0, 0)
    assert Bootstrap().quality_difference([timed_record], [json.loads(json.dumps(timed_record))]) == (0, 0, 0)
    assert Bootstrap().latency_ratio([timed_record], [timed_record]) == (1, 1, 1)


def test_examples_are_paired_by_id_not_by_position():
    shuffled = np.random.default_rng(3).permutation(60)
    same = Bootstrap().quality_difference([measured(0.2, 0)], [measured(0.2, 0, shuffled)])
    assert same == (0, 0, 0)
    straight = Bootstrap().quality_difference([measured(0.1, 0)], [measured(0.3, 1)])
    assert straight == Bootstrap().quality_difference([measured(0.1, 0, shuffled)], [measured(0.3, 1)])


def test_a_mean_agrees_with_scipys_paired_bootstrap():
    rng = np.random.default_rng(0)
    ours = rng.normal(50, 10, 80)
    theirs = ours + rng.normal(-1, 2, 80)
    difference = Bootstrap(samples=20_000).quality_difference([record(ours)], [record(theirs)])
    expected = stats.bootstrap(
        (ours, theirs), lambda x, y, axis: np.mean(x - y, axis), paired=True, n_resamples=20_000, method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert difference.value == pytest.approx(np.mean(ours - theirs))
    assert (difference.low, difference.high) == pytest.approx(tuple(expected), abs=0.02)


def test_the_difficulty_of_examples_cancels():
    rng = np.random.default_rng(0)
    hard = rng.normal(50, 20, 100)
    difference = Bootstrap().quality_difference([record(hard + 1)], [record(hard + rng.normal(0, 1, 100))])
    # the interval of either mean is about 8 wide
    assert difference.excludes(0) and difference.high - difference.low < 1


def test_the_interval_has_its_nominal_coverage():
    rng, bootstrap, inside = np.random.default_rng(0), Bootstrap(samples=500), 0
    for _ in range(400):
        hard = rng.normal(50, 10, 60)
        ours, theirs = (hard + gain + rng.normal(0, 3, 60) for gain in (1, 0))
        inside += not bootstrap.quality_difference([record(ours)], [record(theirs)]).excludes(1)
    assert 0.915 <= inside / 400 <= 0.975  # 0.944 is what 64 normal numbers give; 0.012 is one standard deviation


def test_seeds_are_averaged_on_every_resample():
    rng = np.random.default_rng(0)
    first, second, third = (rng.normal(50, 10, 40) for _ in range(3))
    pooled = Bootstrap().quality_difference([record(first), record(second, seed=1)], [record(third)])
    assert pooled == pytest.approx(Bootstrap().quality_difference([record((first + second) / 2)], [record(third)]))


def test_equal_seeds_give_equal_intervals():
    ours, theirs = [measured(0.1, 0)], [measured(0.15, 1)]
    assert Bootstrap().quality_difference(ours, theirs) == Bootstrap().quality_difference(ours, theirs)
    assert Bootstrap(seed=1).quality_difference(ours, theirs) != Bootstrap().quality_difference(ours, theirs)


def test_latencies_are_ratios_of_totals():
    rng = np.random.default_rng(0)
    target = rng.uniform(50, 150, 30)
    fast, slow = (target * ratio * rng.normal(1, 0.05, 30) for ratio in (0.5, 0.9))
    ours, theirs = record(ms=fast, target_ms=target), record(ms=slow, target_ms=target)
    alone = Bootstrap().latency_ratio([ours])
    assert alone.value == pytest.approx(fast.sum() / target.sum()) and alone.low < 0.5 < alone.high < 0.55
    versus = Bootstrap().latency_ratio([ours], [theirs])
    assert versus.value == pytest.approx(fast.sum() / slow.sum()) and versus.low < 5 / 9 < versus.high


def test_drift_of_the_machine_makes_no_method_better():
    """Checks methods timed at different times: in each record examples agree to the last digit, trials do not."""
    target = np.linspace(50, 150, 16)

    def drifting(name, *ratios):
        return record(ms=[target * ratio for ratio in ratios], target_ms=[target] * len(ratios), method=name)

    first, second = drifting("opt", 0.82, 0.77, 0.80, 0.79), drifting("diff", 0.825, 0.85, 0.81, 0.80)
    alone, ratios = Bootstrap().latency_ratio([first]), np.asarray([0.82, 0.77, 0.80, 0.79])
    half = stats.t.ppf(0.975, 3) * ratios.std(ddof=1) / ratios.mean() / 2
    assert np.log([alone.low, alone.high]) == pytest.approx(np.log(ratios.mean()) + [-half, half], abs=0.005)
    assert not Bootstrap().latency_ratio([first], [second]).excludes(1)
    assert Bootstrap().latency_ratio([first], [drifting("diff", 0.9, 0.95, 0.93, 0.92)]).excludes(1)


def test_rates_count_the_tokens_of_both_sides():
    """Checks sampled outputs, which differ in length: twice the tokens in twice the time are no slower."""
    rng = np.random.default_rng(0)
    target, tokens = rng.uniform(50, 150, (3, 12)), rng.integers(5, 50, (3, 12))
    sampled = record(ms=target, target_ms=target / 2)
    sampled["latency"] |= {f"per_example_{name}": 2 * tokens for name in ("tokens", *CALLS)}
    sampled["target_latency"] |= {f"per_example_{name}": tokens for name in ("tokens", *CALLS)}
    rate, over = Bootstrap().rates([sampled])
    assert rate[0] == pytest.approx(2 * tokens.sum() / target.sum() * 1e3) and over == pytest.approx(np.ones(1001))
    assert Bootstrap().rates([sampled, sampled])[0][0] == pytest.approx(rate[0])


def test_whole_requests_sent_at_random_have_the_expected_statistics():
    ours, theirs = measured(0.1, 0), measured(0.3, 1)
    bootstrap = Bootstrap(samples=50)
    sides = bootstrap.qualities([ours], [theirs])
    for share, expected in zip((0.0, 1.0), sides, strict=True):
        assert bootstrap.mixed([ours], [theirs], share) == pytest.approx(expected)
    half = bootstrap.mixed([ours], [theirs], 0.5)[0]
    statistics = [np.asarray(side["quality"]["per_example"]["statistics"]["bleu"]) for side in (ours, theirs)]
    drawn = [np.where(np.random.default_rng(n).random(60)[:, None] < 0.5, *statistics).sum(0) for n in range(500)]
    assert half == pytest.approx(quality.get_metric("bleu").from_sums(np.asarray(drawn), 60).mean(), abs=0.2)
    shares = np.linspace(0, 1, 51)
    assert bootstrap.mixed([ours], [theirs], shares)[[0, -1]] == pytest.approx([sides[0][0], sides[1][-1]])


@pytest.mark.parametrize(("change", "message"), [
    ({"ids": range(1, 11)}, r"opt α=0\.5 seed=0 \(record opt-0-re\) and chow .* have different examples and cannot"),
    ({"examples": "others"}, "and chow .* have different examples"),
    ({"metric": "exact_match"}, "and chow .* have different metrics"),
])  # fmt: skip
def test_records_that_cannot_be_paired_are_refused_and_named(change, message):
    changed = record([1.0] * 10, method="chow", **change)
    with pytest.raises(ValueError, match=message):
        Bootstrap().quality_difference([record([1.0] * 10)], [changed])


@pytest.mark.parametrize(("times", "first_example"), [(9, 0), (8, 8)])
def test_times_of_other_examples_are_refused(times, first_example):
    ours, theirs = record(ms=[1.0] * 8, target_ms=[1.0] * 8), record(ms=[1.0] * 8, target_ms=[1.0] * 8, method="chow")
    assert Bootstrap().latency_ratio([ours], [theirs]) == (1, 1, 1)
    for entry in ("latency", "target_latency"):
        theirs[entry]["per_example_ms"] = [1.0] * times
    theirs["point"]["first_example"] = first_example
    with pytest.raises(ValueError, match=r"opt .* and chow .* have different examples"):
        Bootstrap().latency_ratio([ours], [theirs])


def test_intervals_are_those_of_the_returned_resamples():
    ours, theirs = measured(0.1, 0), measured(0.15, 1)
    first, second = Bootstrap().qualities([ours], [theirs])
    assert first.shape == (1001,) and (first[0], second[0]) == (ours["quality"]["value"], theirs["quality"]["value"])
    assert Bootstrap().interval(first - second) == Bootstrap().quality_difference([ours], [theirs])
    timed = record(ms=np.linspace(5, 9, 9), target_ms=np.linspace(10, 12, 9))
    assert Bootstrap().interval(Bootstrap().latencies([timed])) == Bootstrap().latency_ratio([timed])


def test_records_without_single_examples_or_with_too_few_are_refused():
    old = record([1.0] * 10, method="chow")
    del old["quality"]["per_example"], old["latency"]
    few = record([1.0] * 7, ms=[1.0] * 7, target_ms=[1.0] * 7)
    for untested in (old, few):
        assert not paired.has_quality(untested) and not paired.has_latency(untested)
        with pytest.raises(ValueError, match="holds no quality of 8 or more single examples; measure it again"):
            Bootstrap().quality_difference([record([1.0] * 10)], [untested])
        with pytest.raises(ValueError, match="holds no latency"):
            Bootstrap().latency_ratio([untested])


def answers(right, name="opt", **more):
    """Returns a record of answers that are right or wrong, bool `[N]`."""
    answered = record(100 * np.asarray(right, int), method=name, metric="exact_match")
    return answered | {"point": answered["point"] | more}


def test_equal_answers_on_few_examples_do_not_prove_a_lossy_method_equal():
    """Four of 64 examples gained and none lost may be chance too: the sign test gives 0.125."""
    target, same = answers([True] * 5 + [False] * 3, "autoregressive", lossless=True), [True] * 5 + [False] * 3
    lossy = Bootstrap().quality_difference([answers(same)], [target])
    assert lossy.value == 0 and lossy.low < -10 and lossy.high > 10
    lossless = Bootstrap().quality_difference([answers(same, "spec_decode", lossless=True)], [target])
    assert lossless == (0, 0, 0)
    some, none = np.arange(64) < 4, np.zeros(64, bool)
    assert not Bootstrap().quality_difference([answers(some)], [answers(none, "chow")]).excludes(0)
    assert Bootstrap().quality_difference([answers(np.arange(64) < 12)], [answers(none, "chow")]).excludes(0)


def test_seeds_of_one_setting_share_made_up_answers_and_program_outcomes_count_as_answers():
    first, second = answers([True] * 8, seed=0), answers([True] * 8, seed=1)
    assert Bootstrap().quality_difference([first], [second]) == (0, 0, 0)
    programs = record([[1, 0, 0]] * 8, metric="pass_at_1")
    expected, passed = Bootstrap().qualities([first], [first])[0], Bootstrap().qualities([programs], [programs])[0]
    assert passed[0] == 100 and passed.min() < 90
    assert np.quantile(passed, 0.3) == pytest.approx(np.quantile(expected, 0.3), abs=3)


def coverage(examples, ours, theirs, many=1000):
    """Returns the share of 95% intervals that contain the true value: of the difference, and of our quality alone.

    Args:
        ours, theirs: the shares of examples on which only this side is right; on 70% both sides are right.
    """
    rng, inside, bootstrap = np.random.default_rng(examples), np.zeros(2), Bootstrap(samples=400)
    for n in range(many):
        place = rng.random(examples)
        first, second = place < 0.7 + ours, (place < 0.7) | (place > 1 - theirs)
        ends = bootstrap.quality_difference([answers(first, f"ours {n}")], [answers(second, f"theirs {n}")])
        alone = quality._interval("exact_match", 100.0 * first[:, None], 400)
        inside += not ends.excludes(100 * (ours - theirs)), alone[0] <= 100 * (0.7 + ours) <= alone[1]
    return inside / many


@pytest.mark.laws
@pytest.mark.parametrize("examples", [8, 16, 64])
def test_intervals_of_answers_that_seldom_differ_contain_the_true_difference(examples):
    """Without made-up answers, intervals of the first two differences cover only 57, 76, 93% and 22, 37, 85%."""
    for ours, theirs in ((0.1, 0.05), (0.03, 0.0), (0.15, 0.0), (0.08, 0.08)):
        difference, alone = coverage(examples, ours, theirs)
        assert min(difference, alone) > 0.93, (ours, theirs)  # 0.007 is one standard deviation of this share


RATIO = 0.7


def timed(rng, trials, examples, ratio=RATIO, spread=0.25, drift=0.03):
    """Returns milliseconds of a method and of the target beside it, `[trials, examples]` each.

    Outputs and speed-ups differ by example (log-normal), runs by 8%; one run in fifty takes twice as long; busy periods
    of 20 runs on average slow down all runs in them by 1.2 to 2.5; a whole trial of either side varies by `drift`.
    """
    target = np.exp(rng.normal(3.4, 0.4, examples))
    method_ms = target * ratio * np.exp(rng.normal(-(spread**2) / 2, spread, examples))
    runs = np.exp(rng.normal(0, 0.08, (2, trials, examples))) * np.where(rng.random((2, trials, examples)) < 0.02, 2, 1)
    busy, position = np.ones(2 * trials * examples), 0
    while position < len(busy):
        position += rng.geometric(1 / 60)
        length = rng.geometric(1 / 20)
        busy[position : position + length] *= rng.uniform(1.2, 2.5)
        position += length
    runs *= np.moveaxis(busy.reshape(trials, examples, 2), -1, 0)
    return method_ms * runs[0] * np.exp(rng.normal(0, drift, (trials, 1))), target * runs[1]


def simulated(key, own, target):
    return record(ms=own, target_ms=target) | {"key": key}


def found(rng, n, *, trials, examples, **world) -> Interval:
    method_ms, target = timed(rng, trials, examples, **world)
    return Bootstrap(samples=400).latency_ratio([simulated(f"{n}-{rng.integers(1 << 30)}", method_ms, target)])


@pytest.mark.laws
@pytest.mark.parametrize("trials", [3, 4, 5, 7, 10])
def test_intervals_contain_the_true_ratio_in_93_to_97_percent_of_cases(trials):
    rng, inside, many = np.random.default_rng(trials), 0, 0
    for examples in (8, 12, 16, 64):
        for spread in (0.05, 0.25):
            for drift in (0.0, 0.03):
                for n in range(150):
                    interval = found(rng, n, trials=trials, examples=examples, spread=spread, drift=drift)
                    assert 0 < interval.low <= interval.value <= interval.high < np.inf
                    inside, many = inside + (interval.low <= RATIO <= interval.high), many + 1
    assert 0.93 <= inside / many <= 0.97, inside / many  # 0.0045 is one standard deviation of this share


def test_two_trials_far_apart_leave_no_interval_below_zero():
    """Checks the data of a past error, `2.01× [1.47, -28.09]`: extrapolated weights gave negative totals."""
    target = np.linspace(50, 150, 12)
    ratio = Bootstrap().latency_ratio([simulated("a", [target * 0.2, target * 1.4], [target, target])])
    assert 0 < ratio.low < 0.2 and ratio.high > 1.4
    ratio_apart = Bootstrap().latency_ratio([simulated("a", [target, target * 7], [target * 7, target])])
    assert 0 < ratio_apart.low < ratio_apart.value < ratio_apart.high


def test_an_interval_is_no_narrower_than_the_floor():
    assert Interval(1.0, 0.99, 1.02).at_least(np.log(1.25)) == pytest.approx((1.0, 0.8, 1.25))
    assert Interval(2.0, 1.0, 4.0).at_least(np.log(1.25)) == (2.0, 1.0, 4.0)


@pytest.mark.parametrize("examples", [8, 9, 16, 64, 500])
def test_intervals_of_few_examples_widen_as_students_t_does(examples):
    expected = stats.t.ppf(0.975, examples - 1) / stats.norm.ppf(0.975) * (examples / (examples - 1)) ** 0.5
    assert paired._wider(examples) == pytest.approx(expected, rel=1e-3)
