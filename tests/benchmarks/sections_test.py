"""Tests of the benchmarks' sections against values computed by hand, or from known times."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import acceptance, calls, measure, memory, rounds
from benchmarks.setting import SPEC_DECODE, Bench, Sizes, quick
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.pairs.pair import load_pair

EXAMPLES = 35  # one full batch, and a part of another
SMALL = replace(quick(Sizes(acceptance_task="tiny_translation")), acceptance_examples=EXAMPLES)


def test_agreement_compares_the_distributions_along_the_outputs(tabular):
    bench, task = Bench(SMALL, tabular), acceptance.get_task("tiny_translation")
    prompts = acceptance.prompts_of(bench, task, [task.build_prompt(example) for example in task.load(limit=EXAMPLES)])
    # sampled outputs, because all greedy outputs of a table are equal
    outputs = acceptance.write(bench, recorded(Settings(method=TARGET)), 1.0, prompts, task)
    agreement = acceptance._agreement(bench, prompts, outputs)
    p, q = (np.asarray(jax.nn.softmax(bound.params)) for bound in (tabular.target, tabular.draft))
    pending = np.take_along_axis(np.asarray(prompts.tokens), np.asarray(prompts.length)[:, None] - 1, axis=1)
    before = np.concatenate([pending, outputs.tokens[:, :-1]], axis=1)
    seen = before[np.arange(before.shape[1])[None] < outputs.lengths[:, None]]
    assert agreement["positions"] == len(seen) > 8 * 32
    assert agreement["shared_mass"] == pytest.approx(np.minimum(p, q)[seen].sum(-1).mean(), rel=1e-5)
    assert agreement["greedy_agreement"] == pytest.approx((p[seen].argmax(-1) == q[seen].argmax(-1)).mean())
    assert 0.1 < agreement["shared_mass"] < 0.9


def test_a_draft_that_is_the_target_is_always_accepted(tabular):
    tables = acceptance.run(Bench(SMALL, replace(tabular, draft=tabular.target)))
    assert tables["agreement"][0]["greedy_agreement"] == 1.0
    assert tables["agreement"][0]["shared_mass"] == pytest.approx(1.0)
    rows = {(row["method"], row["temperature"]): row for row in tables["acceptance"]}
    assert rows["spec_decode", 0.0]["acceptance_rate"] == 1.0 == rows["spec_decode", 1.0]["acceptance_rate"]
    assert rows["spec_decode", 0.0]["quality"] == rows["autoregressive", 0.0]["quality"]
    assert rows["spec_decode", 0.0]["block_efficiency"] > 2 and "acceptance_rate" not in rows["autoregressive", 0.0]


@pytest.mark.laws
def test_outside_time_is_the_median_of_differences_within_turns(tabular, monkeypatch):
    program = np.array([1.0, 5.0, 2.0, 9.0]) * 1e-3
    seconds = {"decode": program + np.array([0.4, 0.1, 0.2, 0.3]) * 1e-3, "program": program}
    monkeypatch.setattr(measure, "interleave", lambda loops, repeats: {name: seconds[name] for name in loops})
    rows = calls.run(Bench(quick(Sizes()), tabular))["calls"]
    assert [row["method"] for row in rows] == ["autoregressive", "spec_decode"]
    for row in rows:
        assert row["outside_ms"] == pytest.approx({"value": 0.25, "low": 0.1, "high": 0.4})
        assert row["program_ms"]["value"] == pytest.approx(3.5) and row["calls"] == 4


def test_a_call_and_a_program_with_different_tokens_are_not_compared(tabular, monkeypatch):
    wrong = type("Wrong", (), {"tokens": np.zeros(1)})()
    monkeypatch.setattr(calls, "_programs", lambda bench, method, texts: [lambda: wrong] * len(texts))
    with pytest.raises(RuntimeError, match="different tokens for example 0: their times cannot be compared"):
        calls.run(Bench(quick(Sizes()), tabular))


@pytest.mark.laws
def test_an_exit_needs_only_the_targets_weights_and_a_head(folder):
    pair = load_pair(folder)
    rows = memory.run(Bench(replace(quick(Sizes()), batches=(1,)), pair))["memory"]
    megabytes = {row["drafts"]: row["arguments_megabytes"] for row in rows}
    assert list(megabytes) == ["nothing", "the draft", "exit:1", "exit:1, own head"]
    config = pair.target.model.config
    head = config.d_model * config.num_embeddings * 4 / 1e6
    # only the sampling settings of a draft are added
    assert megabytes["exit:1"] == pytest.approx(megabytes["nothing"], abs=1e-4)
    assert megabytes["exit:1, own head"] == pytest.approx(megabytes["nothing"] + head, rel=0.01)
    assert megabytes["the draft"] > megabytes["exit:1"]


TURNS = {
    "engine": (0.5, 0.7, 0.6),
    "prefill": (0.1, 0.1, 0.2),
    "draft": (0.01, 0.02, 0.03),
    "target": (0.05, 0.06, 0.04),
}


def test_predicted_times_are_call_counts_times_measured_times(tabular, monkeypatch):
    settings = Sizes(pair="tabular", max_new_tokens=4, examples=1, batches=(1,), loop_seconds=1e-4)
    loop = measure.Loop(lambda count: None, 1)
    monkeypatch.setattr(rounds, "call_loops", lambda bench, block: {"draft": loop, "target": loop})
    monkeypatch.setattr(measure, "interleave", lambda calls, repeats: {name: np.array(TURNS[name]) for name in calls})
    row = rounds._row(Bench(settings, tabular), SPEC_DECODE, 0.0)
    draft, target = np.array(TURNS["draft"]), np.array(TURNS["target"])
    expected = row["draft_steps"] * draft + row["target_calls"] * target
    inside = np.subtract(TURNS["engine"], TURNS["prefill"])
    assert row["draft_steps"] >= row["target_calls"] >= 1
    # the median of sums, not the sum of medians
    assert row["calls_ms"]["value"] == pytest.approx(1e3 * np.median(expected))
    assert row["engine_ms"]["value"] == pytest.approx(1e3 * np.median(inside))
    assert row["ratio"] == pytest.approx(measure.spread(inside / expected))
