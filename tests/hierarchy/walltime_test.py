"""What calls would take at constant costs, from the counts of real runs."""

import pytest

from speccascade_jax.core.types import BoundModel
from speccascade_jax.engine.measures import level_counters, summarise, tail_steps
from speccascade_jax.evaluation.points import Level, Settings
from speccascade_jax.hierarchy import walltime
from speccascade_jax.methods.build import build
from speccascade_jax.methods.build_drafter import levels_of
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import make_prompt

COSTS = {"target": 10.0, "middle": 2.0, "draft": 0.5}


@pytest.fixture(scope="module")
def pair():
    small, middle, target = (BoundModel((), Fake(16, noise=n, seed=s)) for s, n in enumerate((0.4, 0.2, 0.0)))
    return Pair(target, small, others={"middle": middle})


def record_of(pair, settings):
    """A record's counts of one generation, by hand."""
    decoder = build(pair, settings)
    out = decoder.generate(make_prompt(pair, [[3, 4]]), controls=decoder.controls(1), max_new_tokens=40)
    tails = [{} if each is None else {"tail_steps": int(each.sum())} for each in tail_steps(out.inner)]
    levels = zip(levels_of(settings.drafters), level_counters(out.inner), tails[1:], strict=False)
    counts = summarise(out.stats) | tails[0]
    return {"counts": counts, "levels": [{"model": at.model, **summarise(own), **tail} for at, own, tail in levels]}


STACK = Level(model="middle", budget=3, block_size=2)


def test_every_call_is_counted_once(pair):
    single = record_of(pair, plain := Settings(method="spec_decode", block_size=3))
    calls = walltime.calls(single, plain)
    assert calls == {"target": single["counts"]["target_calls"], "draft": single["counts"]["draft_steps"]}
    stack = record_of(pair, settings := Settings(method="spec_decode", drafters=(STACK,)))
    calls = walltime.calls(stack, settings)
    (level,) = stack["levels"]
    assert level["model"] == "middle" and level["kept"] > 0
    assert calls["draft"] == level["draft_steps"] and calls["middle"] >= level["target_calls"]
    expected = (10 * calls["target"] + 2 * calls["middle"] + 0.5 * calls["draft"]) / stack["counts"]["committed"]
    assert walltime.seconds_per_token(stack, settings, COSTS) == pytest.approx(expected)
    assert walltime.improvement(stack, settings, COSTS) == pytest.approx(10 / expected)


def test_a_tails_calls_are_its_models(pair):
    """Under a level that is the target itself all is kept: then it is known who was called how often."""
    sure = Pair(pair.target, pair.draft, others={"middle": pair.target})
    settings = Settings(method="spec_decode", drafters=(STACK,), tail="draft", tail_size=2)
    record = record_of(sure, settings)
    calls, (level,) = walltime.calls(record, settings), record["levels"]
    tail = record["counts"]["tail_steps"]
    assert tail > 0 and calls["draft"] == level["draft_steps"] + tail
    # its own calls, and those that catch up with what the tail wrote: one a round, however much that was
    caught_up = calls["middle"] - level["target_calls"]
    assert 0 < caught_up <= record["counts"]["rounds"]


def test_a_tail_behind_a_draft_is_counted_apart(pair):
    settings = Settings(method="spec_decode", block_size=2, tail="middle", tail_size=2)
    record = record_of(pair, settings)
    calls = walltime.calls(record, settings)
    assert calls["draft"] + calls["middle"] == record["counts"]["draft_steps"]
    assert calls["middle"] == record["counts"]["tail_steps"] > 0 and calls["draft"] > 0
    del record["counts"]["tail_steps"]
    with pytest.raises(ValueError, match="how often the tail 'middle' was called"):
        walltime.calls(record, settings)
