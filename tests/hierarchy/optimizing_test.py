"""Tests of measuring, solving and running on a tiny pair: the printed and written results."""

import json
import types
from dataclasses import replace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import hierarchy
from speccascade_jax.engine.counters import level_counters, summarise, tail_steps
from speccascade_jax.evaluation.points import Evaluation, Level, ModelPair, Settings
from speccascade_jax.hierarchy import optimizing
from speccascade_jax.hierarchy.latency import Hierarchy
from speccascade_jax.methods.build import build
from speccascade_jax.methods.build_drafter import levels_of
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import made_records, tiny_pair

ROWS, TOKENS = 100, 400
SMALL = {"task": "tiny_translation", "keep_outputs": False, "keep_traces": 0, "max_new_tokens": 8}


def chain(*models, budgets):
    return Hierarchy(models, budgets, 1.0, 1.0, "paper")


def test_a_stack_is_a_method_of_the_engine():
    names = ("a", "b", "c", "target")
    alone = optimizing.settings_of(chain(3, budgets=()), names)
    assert alone.method == "autoregressive"
    single = optimizing.settings_of(chain(1, 3, budgets=(4,)), names)
    assert (single.drafters, single.block_size) == (("b",), 4)
    deep = optimizing.settings_of(chain(0, 1, 2, 3, budgets=(2, 5, 7)), names)
    below = Level(model="b", budget=5, block_size=2, drafters=("a",))
    assert deep.drafters == (Level(model="c", budget=7, drafters=(below,)),)


def test_coins_replace_rules_with_the_same_calls():
    acceptance = np.array([[1, 0.5, 0.3], [0.5, 1, 0.8], [0.3, 0.8, 1]])
    settings = optimizing.settings_of(chain(0, 1, 2, budgets=(2, 5)), ("a", "b", "target"), coins=acceptance)
    (level,) = settings.drafters
    assert settings.method == "speculative" and settings.rule == level.rule == "random_accept"
    assert (settings.alpha, level.alpha) == (0.8, 0.5)
    # as under a lossless rule, neither a draft nor a level is called after its own block
    assert settings.bonus == level.bonus == "target" and (settings.accept, level.accept) == ("deferral", "deferral")


@pytest.mark.laws
@pytest.mark.parametrize(("budgets", "rates"), [((2, 5), (0.6, 0.8)), ((4, 3), (0.9, 0.7))])
def test_the_engine_by_coin_makes_the_calls_that_the_overshoot_latency_counts(budgets, rates):
    """Checks the calls against the overshoot latency; they differ from those of levels that stop at their budget."""
    pair = sc.Pair(*(sc.TableLM(np.zeros((5, 5), np.float32)) for _ in range(2)), others={"b": sc.TableLM(np.eye(5))})
    acceptance = np.array([[1, rates[0], 0.5], [rates[0], 1, rates[1]], [0.5, rates[1], 1]])
    settings = optimizing.settings_of(chain(0, 1, 2, budgets=budgets), ("draft", "b", "target"), coins=acceptance)
    decoder = build(pair, replace(settings, temperature=1.0))
    prompt = make_prompt(pair, [[0]] * ROWS)
    out = decoder.generate(prompt, controls=decoder.controls(ROWS), max_new_tokens=TOKENS)
    assert int(out.lengths.sum()) == ROWS * TOKENS
    measured = [float(stats.target_calls.sum()) / (ROWS * TOKENS) for stats in (out.stats, out.inner["counters"])]

    def counted(objective):
        """Returns the calls of the target and of the level, by the linearity of latency in the costs."""
        tiny = [1e-9, 1e-9, 1.0], [1e-9, 1.0, 1.0]
        last, with_level = (hierarchy.latency(costs, acceptance, (0, 1, 2), budgets, objective) for costs in tiny)
        return [last, with_level - last]

    np.testing.assert_allclose(measured, counted("overshoot"), rtol=0.02)
    assert np.abs(np.divide(measured, counted("paper")) - 1).max() > 0.03


def test_tails_are_added_at_every_level_but_their_own():
    names = ("a", "b", "c", "target")
    deep = optimizing.settings_of(chain(0, 1, 2, 3, budgets=(2, 5, 7)), names, tail="a")
    (upper,), ((lower,),) = deep.drafters, (level.drafters for level in deep.drafters)
    assert (deep.tail, upper.tail, lower.tail) == ("a", "a", None)
    assert optimizing.settings_of(chain(1, 3, budgets=(2,)), names, tail="a").tail == "a"
    assert optimizing.settings_of(chain(0, 3, budgets=(2,)), names, tail="a").tail is None


def test_speed_ups_are_per_token_and_their_intervals_over_examples():
    """Covers outputs half as long in half the time: no gain per token."""
    record = made_records.point("spec_decode", ratio=0.5)
    record["relative_latency"]["per_token"] = 2 * record["relative_latency"]["value"]
    record["latency"] |= {"ms_per_token": {"value": 4.0}, "examples": 16}
    record["target_latency"] |= {"ms_per_token": {"value": 8.0}}
    row = optimizing._timed(record)
    assert row["speed_up"] == pytest.approx(1.0, abs=0.03)
    low, high = row["interval"]
    assert low < row["speed_up"] < high and high - low < 0.2
    few = record | {"latency": record["latency"] | {"examples": 3}}
    assert optimizing._timed(few)["interval"] is None and optimizing._timed(record | {"latency": None}) == {}


def test_acceptance_is_measured_under_the_runs_own_sampling(monkeypatch):
    monkeypatch.setattr(optimizing.surveying, "write", lambda session, point: [])
    monkeypatch.setattr(optimizing, "measure", lambda *args, **keywords: keywords)
    sampling = Settings(temperature=0.8, draft_temperature=0.5, top_p=0.9, top_k=7)
    pair = types.SimpleNamespace(models={"target": None, "draft": None})
    point = types.SimpleNamespace(settings=sampling)
    keywords_seen = optimizing._measured(types.SimpleNamespace(pair=pair), point, None)
    expected = {"temperature": {"target": 0.8, "draft": 0.5}, "top_p": 0.9, "top_k": 7, "costs": None}
    assert keywords_seen == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tail": "midle"}, "the pair has no draft 'midle' to use as a tail: did you mean middle"),
        ({"tail": "target"}, "the pair has no draft 'target' to use as a tail"),
        ({"costs": {"target": 1.0, "draft": 0.1}}, "one for each of draft, middle, target"),
        ({"costs": {"target": 1.0, "draft": 0.1, "middle": 0.0}}, "must be positive"),
        ({"max_budget": 0}, "max_budget"),
        (
            {"pair": ModelPair(name="x", mesh=(2, 1))},
            r"mesh=\(2, 1\) splits rows .*: give costs, or a mesh",
        ),
    ],
)
def test_models_that_the_pair_lacks_are_refused(tmp_path, settings, message):
    """Covers drafts in the pair's folder too."""
    folder = tiny_pair.write(tmp_path, middle=True)
    evaluation = Evaluation(**SMALL, quality_examples=2, latency_examples=0)
    arguments = {"pair": ModelPair(name=str(folder)), "evaluation": evaluation, "settings": Settings()}
    with pytest.raises(ValueError, match=message):
        optimizing.optimize(**(arguments | settings), output=str(tmp_path / "h.json"))


def test_the_best_single_draft_is_the_best_of_all_pairs():
    acceptance = np.array([[1, 0.9, 0.4], [0.9, 1, 0.8], [0.4, 0.8, 1]])
    measured = hierarchy.Measured(("a", "b", "target"), (0.1, 1.0, 10.0), acceptance, 1, 0.0)
    best = optimizing.best_single(measured, 8)
    every = [hierarchy.latency(measured.costs, acceptance, (i, 2), (t,)) for i in range(2) for t in range(1, 9)]
    assert best.latency == pytest.approx(min(every)) and best.models[-1] == 2


@pytest.mark.tools
def test_a_whole_run_prints_and_writes_its_rows(tmp_path, capsys):
    folder = tiny_pair.write(tmp_path)
    pair = ModelPair(name=str(folder), others={"exit0": "exit:0", "copies": "lookup:4", "dear": "exit:1"})
    # batch 1 for quality and for time, so one program serves both
    evaluation = Evaluation(**SMALL, quality_examples=4, quality_batch=1, latency_examples=1)
    # with these costs, stacks are faster than single drafts
    costs = {"target": 100.0, "draft": 20.0, "exit0": 1.0, "copies": 0.1, "dear": 101.0}
    arguments = {"pair": pair, "evaluation": evaluation, "settings": Settings(temperature=1.0, top_p=0.9)}
    output = str(tmp_path / "h.json")
    rows = optimizing.optimize(**arguments, max_budget=4, costs=costs, tail="copies", output=output)
    report = json.loads((tmp_path / "h.json").read_text())
    assert report["names"] == ["copies", "exit0", "draft", "target"] and report["left_out"] == ["dear"]
    assert report["unit"] == "as given"
    single, paper, overshoot, tails = rows
    assert [row["name"] for row in rows[:3]] == ["best single draft", "paper optimum", "overshoot optimum"]
    assert single["predicted"]["paper"] >= paper["predicted"]["paper"] - 1e-9 and "predicted" not in tails
    assert paper["predicted"]["overshoot"] >= overshoot["predicted"]["overshoot"] - 1e-9
    for row in rows:
        assert row["budgets"] and row["swi"] == pytest.approx(100.0 / row["at_artificial_cost"])
        spent = sum(report["costs"][report["names"].index(name)] * n for name, n in row["calls_per_token"].items())
        assert row["at_artificial_cost"] == pytest.approx(spent) and row["speed_up"] > 0
        assert ("speed_up_by_coin" in row) == (row is not tails)
    assert [row["models"] for row in rows] == [row["models"] for row in report["rows"]]
    shown = capsys.readouterr().out
    assert "costs at least as much as a call of the target: dear" in shown
    assert "cost of a call" in shown and "overshoot optimum" in shown and "with tails of copies" in shown


COSTS = {"target": 10.0, "middle": 2.0, "draft": 0.5}


@pytest.fixture(scope="module")
def pair():
    small, middle, target = (sc.BoundModel((), Fake(16, noise=n, seed=s)) for s, n in enumerate((0.4, 0.2, 0.0)))
    return sc.Pair(target, small, others={"middle": middle})


def record_of(pair, settings):
    """Returns a record's counts of one generation, computed by hand."""
    decoder = build(pair, settings)
    out = decoder.generate(make_prompt(pair, [[3, 4]]), controls=decoder.controls(1), max_new_tokens=40)
    tails = [{} if steps is None else {"tail_steps": int(steps.sum())} for steps in tail_steps(out.inner)]
    levels = zip(levels_of(settings.drafters), level_counters(out.inner), tails[1:], strict=False)
    counts = summarise(out.stats) | tails[0]
    return {
        "counts": counts,
        "levels": [{"model": part.model, **summarise(stats), **tail} for part, stats, tail in levels],
    }


STACK = Level(model="middle", budget=3, block_size=2)


def test_every_call_is_counted_once(pair):
    single = record_of(pair, plain := Settings(method="spec_decode", block_size=3))
    calls = optimizing.calls(single, plain)
    assert calls == {"target": single["counts"]["target_calls"], "draft": single["counts"]["draft_steps"]}
    stack = record_of(pair, settings := Settings(method="spec_decode", drafters=(STACK,)))
    calls = optimizing.calls(stack, settings)
    (level,) = stack["levels"]
    assert level["model"] == "middle" and level["kept"] > 0
    assert calls["draft"] == level["draft_steps"] and calls["middle"] >= level["target_calls"]
    expected = (10 * calls["target"] + 2 * calls["middle"] + 0.5 * calls["draft"]) / stack["counts"]["committed"]
    assert optimizing.seconds_per_token(stack, settings, COSTS) == pytest.approx(expected)
    assert optimizing.improvement(stack, settings, COSTS) == pytest.approx(10 / expected)


@pytest.mark.tools
def test_the_calls_of_a_tail_count_for_its_model(pair):
    """Uses a level that is the target itself: it accepts all tokens, so the calls of each model are known."""
    sure = sc.Pair(pair.target, pair.draft, others={"middle": pair.target})
    settings = Settings(method="spec_decode", drafters=(STACK,), tail="draft", tail_size=2)
    record = record_of(sure, settings)
    calls, (level,) = optimizing.calls(record, settings), record["levels"]
    tail = record["counts"]["tail_steps"]
    assert tail > 0 and calls["draft"] == level["draft_steps"] + tail
    # its own calls, and one call a round that catches up with the tail's tokens, however many
    caught_up = calls["middle"] - level["target_calls"]
    assert 0 < caught_up <= record["counts"]["rounds"]


def test_a_tail_after_a_draft_is_counted_separately(pair):
    settings = Settings(method="spec_decode", block_size=2, tail="middle", tail_size=2)
    record = record_of(pair, settings)
    calls = optimizing.calls(record, settings)
    assert calls["draft"] + calls["middle"] == record["counts"]["draft_steps"]
    assert calls["middle"] == record["counts"]["tail_steps"] > 0 and calls["draft"] > 0
    del record["counts"]["tail_steps"]
    with pytest.raises(ValueError, match="how often the tail 'middle' was called"):
        optimizing.calls(record, settings)
