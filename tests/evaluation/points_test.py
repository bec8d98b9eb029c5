"""Tests of a sweep's points, of errors and warnings before anything is loaded, and of their gin files."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.evaluation import enumeration, experiment, points
from speccascade_jax.evaluation.curves import curve, facts
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.points import Evaluation, Level, ModelPair, Point, Settings, recorded, validate
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.storage.files import point_key
from tests.support import eagle3_files, gemma4_assistant_files
from tests.support.recipes import resolve, stop_before_loading  # noqa: F401 (a fixture)


def _points(**changes):
    arguments = {"pair": ModelPair(name="pair"), "evaluation": Evaluation(task="tiny_translation"), "methods": ("opt",)}
    return enumerate_points(**{**arguments, **changes})


@pytest.mark.parametrize(("flags_set", "said"), [((), 1), (("methods",), 0), (("methods", "alphas"), 1)])
def test_unused_alphas_of_a_file_are_expected_if_the_command_line_replaces_its_methods(monkeypatch, flags_set, said):
    monkeypatch.setattr(enumeration, "on_command_line", lambda name: name in flags_set)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _points(alphas={"chow": (0.5,)})
    assert sum("the alphas of chow are not used" in str(warning.message) for warning in caught) == said


@pytest.mark.parametrize("kind", ["head", "head in the package's format", "assistant", "exit:1", "absent/draft"])
def test_a_draft_that_needs_its_target_is_not_measured_alone(kind, tmp_path):
    draft = tmp_path / "draft"
    if "head" in kind:
        eagle3_files.write(draft)
    if "format" in kind:
        checkpoints.save(tmp_path / "saved", *checkpoints.load(draft))
        draft = tmp_path / "saved"
    if kind == "assistant":
        gemma4_assistant_files.write(draft)
    if kind in ("exit:1", "absent/draft"):
        draft = kind
    first = [group[0].settings.method for group in _points(pair=ModelPair(name="pair", target="target", draft=draft))]
    assert ("autoregressive_draft" in first) == (kind in ("exit:1", "absent/draft"))


def test_target_and_draft_alone_come_first_for_every_sampling_and_seed():
    arguments = {"methods": ("spec_decode", "opt"), "alphas": {"opt": (0.0, 0.5)}, "block_sizes": (3, 5)}
    groups = _points(**arguments, samplings=[{"temperature": 0}, {"temperature": 1}], seeds=(0, 1))
    names = [[(p.settings.method, p.settings.alpha, p.settings.block_size) for p in group] for group in groups]
    once = [
        [("autoregressive", None, None)], [("autoregressive_draft", None, None)],
        [("spec_decode", None, 3)], [("opt", 0.0, 3), ("opt", 0.5, 3)],
        [("spec_decode", None, 5)], [("opt", 0.0, 5), ("opt", 0.5, 5)],
    ]  # fmt: skip
    assert names == once * 4
    settings = {(p.settings.temperature, p.seed) for group in groups for p in group}
    assert settings == {(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)}


def test_stop_thresholds_and_heads_are_swept_like_alphas():
    with_threshold = Settings(method="specdecpp", rule="opt", alpha=0.1, stop_threshold=0.9)
    arguments = {"heads": ("x/a.msgpack", "x/b.msgpack"), "block_sizes": (2, 4)}
    arguments |= {"alphas": {"specdecpp[opt]:b@0.9": (0.1,), "specdecpp[opt]:a@0.9": (0.2,)}}
    arguments |= {"stop_thresholds": {"specdecpp": (0.3, 0.5), "stop_entropy": (2.0,)}}
    groups = _points(methods=("spec_decode", "specdecpp", "stop_entropy", with_threshold), **arguments)
    curves = [(curve(p.settings), p.settings.block_size, p.settings.alpha) for group in groups for p in group]
    assert curves[2:] == [
        ("spec_decode", 2, None), ("specdecpp:a@0.3", 20, None), ("specdecpp:b@0.3", 20, None),
        ("specdecpp:a@0.5", 20, None), ("specdecpp:b@0.5", 20, None), ("stop_entropy@2", 20, None),
        ("specdecpp[opt]:a@0.9", 20, 0.2), ("specdecpp[opt]:b@0.9", 20, 0.1), ("spec_decode", 4, None),
    ]  # fmt: skip
    assert groups[3][0].coordinates()["family"] == "specdecpp:a"


def test_heads_with_equal_file_names_are_refused():
    with_head = Settings(method="specdecpp", stop_threshold=0.9, head="runs/a/x.msgpack")
    arguments = {"stop_thresholds": {"specdecpp": (0.3,)}}
    both_methods = {"methods": ("specdecpp", with_head)}
    twice = {"methods": ("specdecpp",), "heads": ("runs/a/x.msgpack", "runs/b/x.msgpack")}
    for more in (twice, {"heads": ("x.msgpack",), **both_methods}):
        with pytest.raises(ValueError, match=r"heads .*x\.msgpack and .*x\.msgpack would both be called 'x': rename"):
            _points(**arguments, **more)
    assert len(_points(**arguments, heads=("./runs/a/x.msgpack", "runs/a/y.msgpack"), **both_methods)) == 5


def test_rules_without_alphas_get_their_usual_range_and_every_value_is_valid():
    swept = [name for name, rule in RULES.items() if rule.alpha is not None]
    grids = {name: _points(methods=(name,))[-1] for name in swept}
    for point in (point for grid in grids.values() for point in grid):
        validate(point)
    assert (grids["chow"][0].settings.alpha, grids["chow"][-1].settings.alpha) == (0.0, 1.0)
    assert sum(point.settings.alpha > 0.9 for point in grids["token_v3"]) >= 4


def _point(number, alpha=1.0, **evaluation):
    """Returns a point whose whole numbers all have the type `number`."""
    sizes = ("first_example", "quality_examples", "quality_batch", "latency_examples", "latency_trials", "resamples")
    level = Level(model="draft", budget=number(4), block_size=number(2), top_k=number(3), alpha=alpha)
    counts = {"max_new_tokens": number(8)} | {name: number(16) for name in sizes} | evaluation
    chosen = {"block_size": None, "drafters": (level,), "temperature": alpha, "top_k": number(5)}
    settings = Settings(method="opt", alpha=alpha, **chosen)
    evaluation = Evaluation(task="tiny_translation", **counts)
    return Point(pair=ModelPair(name="p"), evaluation=evaluation, settings=settings, seed=number(0))


@pytest.mark.parametrize("number", [float, np.float64, np.float32, np.int64, np.uint8])
def test_integers_and_equal_floats_give_the_same_point(number):
    assert _point(number, alpha=1) == _point(int)
    assert _point(number).configuration() == _point(int).configuration()
    assert _point(number, alpha=0.0).configuration() == _point(number, alpha=-0.0).configuration()
    assert point_key(point=_point(number).coordinates()) == point_key(point=_point(int).coordinates())


@pytest.mark.parametrize(("made", "message"), [
    (lambda: Point(**vars(_point(int)) | {"seed": 2.5}), r"seed=2\.5 is not a whole number: write 2 or 3"),
    (lambda: _point(int, quality_examples=63.5), r"quality_examples=63\.5 is not a whole number: write 63 or 64"),
    (lambda: _point(int, resamples=math.inf), "resamples=inf is not a whole number: write one"),
    (lambda: _point(int, first_example=0.5), r"first_example=0\.5 is not a whole number: write 0 or 1"),
    (lambda: recorded(Settings(top_k=0.5)), r"top_k=0\.5 is not a whole number: write 0 or 1"),
    (lambda: Level(model="draft", budget=4.5), "level 'draft': budget=4.5 is not a whole number: write 4 or 5"),
])  # fmt: skip
def test_fractional_counts_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize(("changes", "message"), [
    ({"methods": ("optt",)}, "unknown method 'optt': did you mean opt"),
    ({"methods": ("lossy",), "alphas": {"lossy": (0.5, 1.0)}}, r"alpha=1 is outside the domain \[0, 1\)"),
    ({"alphas": {"opt": (float("nan"),)}}, r"alphas\['opt'\]\[0\]=nan is not a finite number"),
    ({"alphas": {"chw": (0.5,)}}, "alphas names chw, which is not among the methods: there are opt"),
    ({"methods": (Settings(method="speculative", rule="chow"),), "alphas": {"chow": (0.5,)}},
     r"alphas names chow, which is not among the methods: .*speculative\[chow\]"),
    ({"alphas": {"opt": ()}}, "gives method 'opt' no value"),
    ({"alphas": {"opt": (0.5, 0.5)}}, "names a point twice: opt alpha=0.5"),
    ({"methods": ("spec_decode",), "alphas": {"spec_decode": (0.5,)}}, "'spec_decode' has no alpha"),
    ({"methods": ("lossy_greedy",), "samplings": [{"temperature": 1.0}]}, "temperature 0 only"),
    ({"samplings": [{"temperature": -1.0}]}, "temperature=-1 .*is negative"),
    ({"samplings": [{"top_p": 0.0}]}, r"top_p=0 .*outside \(0, 1\]"),
    ({"samplings": [{"top_k": -2}]}, "top_k=-2"),
    ({"samplings": [{"draft_temperature": -0.5}]}, "temperature=-0.5"),
    ({"block_sizes": (0,)}, "block_size=0 is not a whole number >= 1"),
    ({"methods": ("specdecpp",)},
     "'specdecpp' needs stop_threshold, or in a sweep stop_thresholds: it drafts until the predicted chance"),
    ({"stop_thresholds": {"specdecpp": (0.5,)}}, "which is not among the methods that lack a stop threshold: none"),
    ({"methods": ("specdecpp",), "stop_thresholds": {"specdecpp": ()}}, r"stop_thresholds\['specdecpp'\]=\(\) is"),
    ({"methods": ("specdecpp",), "stop_thresholds": {"specdecpp": (0.7, 70)}},
     "stop_threshold=70 is outside 0 … 1; method 'specdecpp': it drafts until the predicted chance"),
    ({"methods": (Settings(method="stop_entropy", stop_threshold=-1),)}, "stop_threshold=-1 is outside 0 … inf"),
    ({"methods": (Settings(method="chow", alpha=0.1, head="a"),)},
     "'chow' uses no acceptance head: leave head='a' out"),
    ({"methods": ("stop_oracle",), "samplings": [{"temperature": 1.0}]}, "oracle of greedy decoding, got"),
    ({"methods": (Settings(method="seq_cascade", alpha=-3.0, block_size=3),)},
     "'seq_cascade' has no block_size, got 3: the draft writes whole outputs"),
    ({"methods": (Settings(method="seq_cascade", bonus="rule"),)}, "'seq_cascade' has no bonus, got 'rule': the"),
    ({"bonus": "maybe"}, "unknown bonus 'maybe': choose one of rule, target, none"),
    ({"seeds": (-1,)}, "seed=-1"),
    ({"evaluation": Evaluation(task="tiny")}, "unknown task 'tiny'"),
    ({"evaluation": Evaluation(task="tiny_translation", split="dev")}, "no split 'dev'; its splits: test"),
    ({"evaluation": Evaluation(task="tiny_translation", quality_examples=0)}, "quality_examples=0"),
    ({"evaluation": Evaluation(task="tiny_translation", max_new_tokens=-3)}, "max_new_tokens=-3"),
    ({"evaluation": Evaluation(task="tiny_translation", first_example=-1)}, "first_example=-1 is not a whole"),
])  # fmt: skip
def test_invalid_values_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        _points(**changes)


def test_a_single_point_needs_its_alpha():
    point = _points()[0][0]
    for settings, message in (
        (Settings(method="opt"), "'opt' needs alpha, for example 0.2"),
        (Settings(method="spec_decode", alpha=0.1), "'spec_decode' has no alpha"),
        (Settings(method="autoregressive", alpha=0.1), "'autoregressive' has no alpha"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(replace(point, settings=settings))


TWO = ModelPair(name="two", target="a/target", draft=Path("a/draft"), vocabulary="a/tokenizer.json")


MIDDLE = Level(model="draft", budget=3, drafters=(Level(model="draft", budget=2),))
STACK = Settings(method="chow", alpha=0.2, drafters=(MIDDLE,))


@pytest.mark.parametrize(("number", "pair"), [*((n, ModelPair(name="pair")) for n in range(5)), (3, TWO)])
@pytest.mark.usefixtures("stop_before_loading")
def test_a_points_configuration_is_a_gin_file_that_reproduces_the_point(number, pair, tmp_path):
    """Checks the target and the draft alone, rules with and without an α, a stack of levels, and two checkpoints."""
    arguments = {"methods": ("spec_decode", "opt", STACK), "samplings": [{"temperature": 0.7}], "seeds": (3,)}
    point = _points(pair=pair, **arguments)[number][-1]
    (tmp_path / "point.gin").write_text(point.configuration())
    assert resolve(experiment.run, [tmp_path / "point.gin"]) == point


def test_coordinates_are_flat_and_complete():
    coordinates = _points(alphas={"opt": (0.5,)})[-1][0].coordinates()
    assert coordinates["method"] == "opt" and coordinates["pair"] == "pair" and coordinates["alpha"] == 0.5
    assert not any(isinstance(value, dict) for value in coordinates.values())
    assert {"task", "split", "seed", "temperature", "block_size", "bonus", "max_new_tokens"} <= set(coordinates)
    assert coordinates["law"] == "opt" and (coordinates["split"], coordinates["max_new_tokens"]) == ("test", 64)


def test_two_checkpoints_are_distinguished_under_any_name():
    arguments = {"pair": TWO, "alphas": {"opt": (0.5,)}}
    point, named = _points(**arguments)[-1][0], _points(**arguments | {"pair": ModelPair(name="two")})[-1][0]
    paths = {"target": "a/target", "draft": "a/draft", "vocabulary": "a/tokenizer.json"}
    assert point.coordinates() == named.coordinates() | paths
    assert point.configuration() != named.configuration()


@pytest.mark.parametrize(("parts", "message"), [
    ({"target": "a"}, "the pair 'two' has no draft: give both target and draft, or the name alone"),
    ({"draft": "a", "vocabulary": "b"}, "the pair 'two' has no target"),
    ({"dtype": "float8"}, "dtype='float8' is not one of float32, bfloat16, float16, int8"),
    ({"mesh": (2,)}, r"mesh=\(2,\) has 1 numbers: give two"),
    ({"draft_dtype": "int4"}, "draft_dtype='int4' is not one of float32, bfloat16, float16, int8"),
    ({"vocabulary": "b"}, "vocabulary='b' needs a target and a draft: give them too, or leave vocabulary out"),
])  # fmt: skip
def test_an_incomplete_pair_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        ModelPair(name="two", **parts)


def test_the_target_alone_is_also_judged_at_lower_temperatures_but_not_timed():
    """Checks the points that show how much of a rule's gain at T > 0 is sharpening, which needs no rule."""
    samplings = [{"temperature": heat, "top_p": 0.9, "draft_temperature": 0.0} for heat in (0.0, 0.8, 1.0)]
    arguments = {"pair": ModelPair(name="p"), "evaluation": Evaluation(task="tiny_translation"), "methods": ("chow",)}
    seeded = arguments | {"samplings": samplings, "seeds": (0, 3)}
    plain, more = (enumerate_points(**seeded, cooler=shares) for shares in ((), (0.0, 0.5)))
    added = [point for group in more for point in group if group not in plain]
    assert more[: len(plain)] == plain and {point.settings.method for point in added} == {"autoregressive"}
    colder = sorted((point.settings.temperature, point.seed) for point in added)
    assert colder == [(0.4, 0), (0.4, 3), (0.5, 0), (0.5, 3)]
    assert all(point.evaluation.latency_examples == 0 and point.settings.top_p == 0.9 for point in added)
    # the sweep already has the target at T = 0
    assert not [point for point in added if point.settings.temperature == 0.0]
    alone = enumerate_points(**arguments, samplings=samplings[2:], seeds=(3, 0), cooler=(0.0,))[-1]
    assert (alone[0].settings.temperature, alone[0].seed) == (0.0, 3)  # greedy outputs do not depend on the seed
    assert len(enumerate_points(**arguments, samplings=samplings[2:], seeds=(3, 0), cooler=(0.0,))) == 2 * 3 + 1
    for strange in ((1.0,), (-0.5,), (float("nan"),)):
        with pytest.raises(ValueError, match="give shares of the temperature, in|nan is not a finite"):
            enumerate_points(**arguments, cooler=strange)


def test_ways_to_verify_are_swept_by_methods_with_speculative_acceptance():
    block_wise = Settings(method="opt", alpha=0.3, verify="block")
    groups = _points(methods=("spec_decode", "fuzzy", block_wise), alphas={"fuzzy": (0.2,)}, verify=("token", "block"))
    swept = [(curve(p.settings), p.settings.verify) for group in groups for p in group][2:]
    assert swept == [
        ("spec_decode", "token"), ("spec_decode[block]", "block"), ("fuzzy", "token"), ("opt[block]", "block"),
    ]  # fmt: skip
    assert "block-wise" in facts(block_wise)["details"]
    assert facts(block_wise)["law"] == facts(Settings(method="opt", alpha=0.3))["law"]
    tree = Settings(method="opt", alpha=0.3, tree=(2, 1))
    ((point,),) = _points(methods=(tree,), verify=("token", "block"), bonus="none")[2:]
    assert point.settings.tree == (2, 1) and point.settings.verify == "token" and point.settings.bonus == "none"
    assert curve(point.settings) == "opt[tree 2·1]" and not point.method.sweeps_block(point.settings)
    # trees that do not branch have no γ either
    ones = [Settings(method="opt", alpha=0.3, tree=(1,) * depth) for depth in (2, 3)]
    swept = [p.settings for group in _points(methods=ones, block_sizes=(3, 5))[2:] for p in group]
    assert [(settings.tree, settings.block_size) for settings in swept] == [((1, 1), None), ((1, 1, 1), None)]
    with pytest.raises(ValueError, match="accept='deferral' accepts less"):
        _points(methods=("fuzzy",), alphas={"fuzzy": (0.2,)}, verify=("block",))
    with pytest.raises(ValueError, match="unknown verify='blocks'"):
        _points(methods=("spec_decode",), verify=("blocks",))


SIZE = 10_000
LN = math.log(SIZE)


def _said(*methods: Settings, **more) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        points.warn_of_ranges(methods, **({"vocab_size": SIZE} | more))
    return [str(warning.message) for warning in caught]


def test_numbers_outside_at_any_vocabulary_size_are_warned_of_first_and_once():
    chow, log = Settings(method="chow", alpha=1.5), Settings(method="chow_log", alpha=LN + 0.1)
    assert _said(chow, log, vocab_size=points._LARGE) == ["alpha=1.5 of 'chow' lies outside 0 … 1: " + points.BEYOND]
    (later,) = _said(chow, log, warned=True)
    assert later.startswith("alpha=9.31034 of 'chow_log' lies outside 0 … 9.21034: ")


LEVEL = Level(model="draft", budget=3, rule="chow", alpha=2, stop="entropy", stop_threshold=11)


@pytest.mark.parametrize(("settings", "message"), [
    ({"method": "chow", "alpha": 1.5}, "alpha=1.5 of 'chow' lies outside 0 … 1"),
    ({"method": "token_v3", "alpha": -0.1}, "alpha=-0.1 of 'token_v3' lies outside 0 … 1"),
    ({"method": "opt", "alpha": 100}, "alpha=100 of 'opt' lies outside -1 … 1"),
    ({"method": "chow_log", "alpha": LN + 0.1}, "alpha=9.31034 of 'chow_log' lies outside 0 … 9.21034"),
    ({"method": "diff_log", "alpha": -10}, "alpha=-10 of 'diff_log' lies outside -9.21034 … 9.21034"),
    ({"method": "fuzzy", "alpha": 1.01}, "alpha=1.01 of 'fuzzy' lies outside 0 … 1"),
    ({"method": "bild", "alpha": -1, "stop_threshold": 0.5}, "alpha=-1 of 'bild' lies outside 0 … inf"),
    ({"method": "seq_cascade", "alpha": 1}, "alpha=1 of 'seq_cascade' lies outside -inf … 0"),
    ({"method": "stop_entropy", "stop_threshold": 10}, "stop_threshold=10 of 'stop_entropy' lies outside 0 … 9.21034"),
    ({"method": "speculative", "drafters": (LEVEL,)},
     "alpha=2 of level 'draft' lies outside 0 … 1; stop_threshold=11 of level 'draft' lies outside 0 … 9.21034"),
])  # fmt: skip
def test_values_outside_the_useful_range_are_named(settings, message):
    (said,) = _said(Settings(**settings))
    assert said.startswith(message) and said.endswith(": beyond it hardly anything changes; is this intended?")


def test_one_warning_covers_a_sweep_and_lists_the_first_few_of_many():
    sweep = [Settings(method="chow", alpha=alpha, block_size=block) for alpha in (0.5, 1.5, 2.5) for block in (2, 3)]
    (said,) = _said(*sweep)
    assert said.count("alpha=") == 2
    (said,) = _said(*(Settings(method="chow", alpha=2 + n) for n in range(50)))
    assert said.count("alpha=") == 5 and "and 45 more" in said


def test_usual_values_of_sweeps_cause_no_warning():
    swept = {name: rule.alpha.usual(7, SIZE) for name, rule in RULES.items() if rule.alpha}
    rules = [Settings(method=name, alpha=alpha) for name, alphas in swept.items() for alpha in alphas]
    shipped = [
        Settings(method="lossy", alpha=0.95), Settings(method="seq_cascade", alpha=-40.0),
        Settings(method="fuzzy_kl", alpha=30.0), Settings(method="bild_star", alpha=12.0),
        Settings(method="opt_log", alpha=-3.0),
        Settings(method="stop_entropy", stop_threshold=5.7), Settings(method="token_cascade_log", alpha=5.7),
        Settings(method="autoregressive"), Settings(method="spec_decode"),
    ]  # fmt: skip
    assert _said(*rules, *shipped) == []
    usual = [Settings(method="chow_log", alpha=alpha) for alpha in RULES["chow_log"].alpha.usual()]
    points.warn_of_ranges(usual, 320)  # the usual range fits a larger vocabulary than this


def test_timing_single_examples_on_a_split_batch_is_refused():
    timed = Evaluation(task="tiny_translation", latency_examples=3)
    point = Point(pair=ModelPair(name="p", mesh=(2, 4)), evaluation=timed, settings=Settings(method="spec_decode"))
    with pytest.raises(ValueError, match=r"latency_examples=3 .* mesh=\(2, 4\) .* or time on a mesh of \(1, 4\)"):
        validate(point)
    validate(replace(point, pair=ModelPair(name="p", mesh=(1, 8))))
    validate(point, timed=False)  # surveys and data time nothing
    validate(replace(point, evaluation=replace(timed, latency_examples=0)))
