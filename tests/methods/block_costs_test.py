"""Tests of `block_size="auto"` from `decode`: what is measured and kept, and the settings it excludes.

No test looks at the size of a time.
"""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.methods import block_costs, speculation
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Level
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.stopping.block_planner import LENGTHS
from tests.support import conformance, planning

AUTO = {"block_size": "auto"}
FEW = (0, 2)
"""The lengths that are timed here: each is a part of the program, which takes seconds to compile."""


@pytest.fixture(scope="module")
def pair():
    """Returns a pair whose distributions depend on the whole prefix."""
    target, draft = (BoundModel(params=(), model=Fake(16, **more)) for more in ({"seed": 2}, {"noise": 0.3, "seed": 1}))
    return sc.Pair(target=target, draft=draft)


@pytest.fixture
def kept(pair, monkeypatch, tmp_path):
    """Returns the empty folder of kept costs; nothing is known yet, and timing is short, with few lengths."""
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(speculation, "LENGTHS", FEW)
    monkeypatch.setattr(block_costs, "SECONDS", 0.0)
    monkeypatch.setattr(block_costs, "STEADY", np.inf)
    forget(pair, monkeypatch)
    return tmp_path / "auto"


@pytest.fixture
def timed(monkeypatch):
    """Returns a list that grows by one with every timing."""
    seen, real = [], block_costs.Rounds.timed
    monkeypatch.setattr(block_costs.Rounds, "timed", lambda self: seen.append(self) or real(self))
    return seen


def forget(pair, monkeypatch):
    """Forgets the measurements, as another process would."""
    monkeypatch.setattr(block_costs, "_KNOWN", {})
    pair.decoders.clear()


def decode(pair, rows=2, **more):
    settings = {"max_new_tokens": 16, "temperature": 0.0} | AUTO | more
    return sc.decode(pair, [[3, 4]] * rows, **settings)


@pytest.mark.laws
def test_costs_are_measured_once_and_kept(pair, kept, timed, monkeypatch):
    first, compiled = decode(pair), compilations()
    assert len(timed) == 1
    files = {path.name: path.read_text() for path in kept.iterdir()}
    assert [name.partition("-")[0] for name in files] == ["rounds"], "acceptance over so few drafts is not saved"
    content = json.loads(next(iter(files.values())))
    assert content["steady"] and len(content["rounds"]) == len(FEW) and content["rounds"] == sorted(content["rounds"])
    again = decode(pair)
    forget(pair, monkeypatch)
    later = decode(pair, seed=3)
    assert len(timed) == 1 and compilations() == compiled, "timing, counting and decoding share one program"
    for output in (again, later):
        np.testing.assert_array_equal(first.tokens, output.tokens)
    np.testing.assert_array_equal(first.tokens, decode(pair, block_size=3).tokens)
    assert {path.name: path.read_text() for path in kept.iterdir()} == files
    decode(pair, rows=3)
    assert len(timed) == 2 and len(list(kept.iterdir())) == 2


@pytest.mark.laws
def test_acceptance_over_many_drafts_is_saved_too(pair, kept, monkeypatch):
    monkeypatch.setattr(block_costs, "TELLING", 5)
    decode(pair)
    content = next(json.loads(path.read_text()) for path in kept.glob("acceptance-*"))
    assert content["examined"] >= 5 and 0 <= content["kept"] <= content["examined"] and content["ended"] <= 2


DAMAGED = (
    "", "{", "[]", '{"rounds": [1, 2, 3], "prefill": 0, "steady": true}',
    '{"rounds": [1, 2], "prefill": "x", "steady": true}', '{"rounds": [-1.0, 2], "prefill": 0, "steady": true}',
)  # fmt: skip


@pytest.mark.laws
def test_costs_of_a_damaged_file_are_measured_again(pair, kept, timed, monkeypatch):
    decode(pair)
    path = next(kept.glob("rounds-*"))
    for times, content in enumerate(DAMAGED, 2):
        path.write_text(content)
        forget(pair, monkeypatch)
        decode(pair)
        assert len(timed) == times and json.loads(path.read_text())["prefill"] >= 0


def test_times_of_a_busy_machine_are_not_kept(pair, kept, monkeypatch):
    monkeypatch.setattr(block_costs, "STEADY", 0.0)
    decode(pair)
    assert not list(kept.glob("rounds-*"))


def test_other_numbers_need_new_acceptance_but_no_new_times(pair, kept, timed, monkeypatch):
    walked, counts = [], block_costs.Walked(40, 100, 1, 9)
    monkeypatch.setattr(block_costs.Rounds, "walked", lambda self: walked.append(self) or counts)
    for temperature in (0.5, 0.9, 0.9):
        decode(pair, temperature=temperature)
    assert len(walked) == 2 and len(timed) == 1
    chance = (40 + block_costs.USUAL * block_costs.USUAL_TOKENS) / (100 + block_costs.USUAL_TOKENS)
    known = [value for value in block_costs._KNOWN.values() if isinstance(value, block_costs.Costs)]
    np.testing.assert_allclose([value.acceptance for value in known], chance, rtol=1e-6)


@pytest.mark.laws
def test_stream_gives_the_tokens_of_decode(pair, kept):
    settings = AUTO | {"max_new_tokens": 16, "temperature": 1.0, "seed": 4}
    streamed = sc.stream(pair, [3, 4], **settings)
    assert not kept.exists(), "nothing is measured before the first token is requested"
    ids = [token.id for token in streamed]
    assert ids == sc.decode(pair, [[3, 4]], **settings).tokens[0].tolist()


def test_an_engine_without_costs_names_the_function_that_measures_them(pair):
    engine, params = assemble(pair, **AUTO)
    prompt = Prompt(jnp.ones((1, 2), jnp.int32), jnp.full(1, 2))
    with pytest.raises(ValueError, match=r"no costs of block lengths: .*methods\.block_costs\.ready"):
        generate(engine, params, prompt, controls=conformance.controls(1), max_new_tokens=4)
    with_costs = planning.told(params, planning.forcing(LENGTHS, 0))
    assert block_costs.ready(pair, engine, with_costs, prompt, conformance.controls(1), max_new_tokens=4) is with_costs
    plain, plain_params = assemble(pair)
    assert (
        block_costs.ready(pair, plain, plain_params, prompt, conformance.controls(1), max_new_tokens=4) is plain_params
    )


def test_a_draft_that_never_pays_is_left_out(pair, monkeypatch):
    engine, params = assemble(pair, **AUTO)
    prompt = Prompt(jnp.ones((1, 2), jnp.int32), jnp.full(1, 2))
    for length, parts in ((0, {"costs"}), (3, {"costs", "model"})):
        known = planning.forcing(LENGTHS, length)
        monkeypatch.setattr(block_costs, "costs", lambda *_, known=known: known)
        ready_params = block_costs.ready(pair, engine, params, prompt, conformance.controls(1), max_new_tokens=4)
        assert set(ready_params["drafter"]) == parts and ready_params["drafter"]["costs"] is known


@pytest.mark.parametrize(("settings", "words"), [
    ({"stop": "confidence", "stop_threshold": 0.5}, "and stop='confidence' both set the block length"),
    ({"method": "stop_entropy", "stop_threshold": 1.0}, "and stop='entropy' both set the block length"),
    ({"method": "oracle_cascade", "alpha": 0.1}, "has a fixed block size of 1: leave block_size='auto' out"),
    ({"rule": "opt", "alpha": 0.1, "bonus": "target"}, "needs bonus='rule' or 'none'"),
    ({"method": "fuzzy", "alpha": 0.1}, "needs bonus='rule' or 'none'"),
    ({"method": "seq_cascade", "alpha": -3.0}, "block_size"),
    ({"drafters": (Level(model="draft", budget=3),)}, "plans drafts of the pair's models only"),
    ({"block_size": "five"}, "block_size='five' is not a whole number or 'auto' or None"),
])  # fmt: skip
def test_settings_that_exclude_auto_are_refused(pair, settings, words):
    with pytest.raises(ValueError, match=words):
        sc.decode(pair, [[1]], **AUTO | settings)


def test_a_level_needs_a_number_as_block_size():
    with pytest.raises(ValueError, match="level 'draft': block_size='auto' is only for the drafter of the target"):
        Level(model="draft", budget=3, block_size="auto")


def test_rules_that_read_q_always_draft(pair):
    assert assemble(pair, rule="token_v3", **AUTO)[0].drafter.lengths == LENGTHS[1:]
    assert assemble(pair, rule="spec_decode", **AUTO)[0].drafter.lengths == LENGTHS


# --- rounds and acceptance computed from trials


def test_the_end_of_an_output_counts_as_a_rejected_draft():
    """One of two rows ends before all the rounds of the trial."""
    bound = BoundModel(params=(), model=Fake(16))
    engine, params = assemble(Pair(target=bound, draft=bound), block_size="auto")
    rounds = np.array([block_costs.WALKED, block_costs.WALKED - 1])
    counts = {"kept": np.array([5, 3]), "tried": np.array([6, 4]), "committed": np.array([21, 9])}
    generation = SimpleNamespace(stats=SimpleNamespace(rounds=rounds, **counts))
    assert block_costs.Rounds(engine, params, lambda *_: generation).walked() == block_costs.Walked(8, 11, 1, 30)


def test_unfinished_outputs_count_in_the_mean_length():
    """30 tokens and one end, plus an output that ends half-way; a length cannot exceed the room."""
    assert block_costs.Walked(8, 11, 1, 30).length(20) == (30 + 10) / 2
    assert block_costs.Walked(8, 11, 0, 30).length(20) == 20
    assert block_costs.Walked(8, 11, 0, 0).acceptance == pytest.approx((8 + 7) / 21)


def test_round_times_and_the_drafts_prefill_are_computed_from_timed_calls():
    """Calls take 5 seconds before the rounds, 3 without a draft; rounds take 1, 1.5 and 2, in different numbers."""
    before, reading, round_seconds, rounds = 5.0, 3.0, (1.0, 1.5, 2.0), (9, 6, 4)
    calls = {(place, 9): (before + n * t, n) for place, (t, n) in enumerate(zip(round_seconds, rounds, strict=True))}
    alone = block_costs.ALONE
    calls |= {(0, 1): (before + 1.0, 1), (alone, 1): (reading + 1.0, 1), (alone, 9): (reading + 9.0, 9)}
    computed = block_costs.told_from(calls, 9, (0, 1, 3), True)
    np.testing.assert_allclose(computed.rounds, round_seconds)
    assert computed.prefill == pytest.approx(before - reading) and computed.steady
    always = {call: calls[call] for call in calls if call[0] != alone}
    np.testing.assert_allclose(block_costs.told_from(always, 9, (1, 2, 3), False).rounds, round_seconds)
    calls[2, 9] = (before + 2.0, 1)  # this call ended after one round, so the cost of a round is unknown
    np.testing.assert_allclose(block_costs.told_from(calls, 9, (0, 1, 3), True).rounds, (1.0, 1.5, 2.5))


@pytest.mark.parametrize(("seconds", "expected"), [
    ([1.0, 1.1, 1.3], (1.0, 1.1, 1.3)),
    ([1.2, 1.1, 1.3], (1.1, 1.1, 1.3)),
    ([1.0, 1.1, np.nan], (1.0, 1.1, 1.3)),
    ([1.0, np.nan, 1.3], (1.0, 1.1, 1.3)),
    ([1.0, np.nan, np.nan], (1.0, 2.0, 4.0)),
    ([np.nan] * 3, (1.0, 2.0, 4.0)),
])  # fmt: skip
def test_missing_and_disturbed_times_are_filled_in(seconds, expected):
    np.testing.assert_allclose(block_costs.rising(seconds, (0, 1, 3)), expected)


@pytest.mark.parametrize(("noise", "precise"), [(0.001, True), (0.2, False)])
def test_precision_depends_on_the_spread_of_the_shares(noise, precise):
    """A machine that is slower from turn to turn, equally for all calls, does not change the shares."""
    random = np.random.default_rng(0)
    turns = np.outer(random.uniform(1, 3, 12), [1.0, 2.0, 4.0]) * random.normal(1, noise, (12, 3))
    assert block_costs.precise(turns) is precise and not block_costs.agree(turns)
