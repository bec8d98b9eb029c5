"""Counters against a recount in NumPy: deferral rates, blocks nobody verified, blocks of nothing."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.engine.generate import generate
from speccascade_jax.engine.measures import summarise
from speccascade_jax.methods import table
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Settings
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import conformance, engines, reference
from tests.support.drafters import Repeats

ROWS, LENGTH, VOCAB, STOP = 24, 11, 5, 4
Q, P = conformance.tables(VOCAB, seed=61)
PROMPTS = [[row % 4] for row in range(ROWS)]


def trace(turn):
    return {
        "new": turn.num_new, "drafted": turn.draft.length, "unverified": turn.unverified, "tokens": turn.tokens,
        "active": turn.active, "kept": turn.num_kept, "rejected": turn.rejected, "draft": turn.draft.tokens,
    }  # fmt: skip


METHODS = {
    "token_cascade": {"method": "token_cascade", "alpha": 0.5},
    "token_cascade_log": {"method": "token_cascade_log", "alpha": 1.2},
    "bild": {"method": "bild", "alpha": 0.7, "stop_threshold": 0.7},
    "fuzzy": {"method": "fuzzy", "rule": "fuzzy_tv", "alpha": 0.3, "block_size": 2},
    "target's bonus": {"rule": "token_v3", "alpha": 0.4, "block_size": 2, "bonus": "target"},
    "rule's bonus": {"rule": "token_v3", "alpha": 0.4, "block_size": 2},
    "no bonus": {"rule": "chow", "alpha": 0.5, "block_size": 2, "bonus": "none"},
}


def generated(settings, rows=ROWS):
    """The generation and its rounds, at temperature 1."""
    pair = conformance.tabular_pair(Q, P)
    given = settings | {"temperature": 1.0}
    engine, params = assemble(pair, stop_ids=[STOP], **given)
    chosen = Settings.of("test", given)
    controls = table.get(chosen.method).controls(chosen, rows)
    prompt = make_prompt(pair, PROMPTS[:rows])
    out = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=LENGTH, record=trace)
    return engine, out, {name: np.asarray(x)[: int(out.num_rounds)] for name, x in out.record.items()}


def recount(name, engine, record, bonus):
    """`η` of every committed position: the rule's, 1 where the target wrote behind a block, 0 in unverified blocks."""
    rule, alpha = engine.verifier.rule.name, METHODS[name]["alpha"]
    cold = 0.0 if name == "fuzzy" else None
    etas = []
    for row in range(ROWS):
        last = PROMPTS[row][-1]
        for turn in np.flatnonzero(record["active"][:, row]):
            for slot in range(record["new"][turn, row]):
                if record["unverified"][turn, row]:
                    eta = 0.0
                elif slot >= record["drafted"][turn, row] and bonus == "target":
                    eta = 1.0
                else:
                    r = reference.decision(rule, Q[last], P[last], alpha, 1.0, draft_temperature=cold)
                    eta = (r * reference.scale(Q[last], 1.0 if cold is None else cold)).sum()
                etas.append(eta)
                last = record["tokens"][turn, row, slot]
    return etas


@pytest.mark.parametrize(
    "name", [name if name == "token_cascade" else pytest.param(name, marks=pytest.mark.laws) for name in METHODS]
)
def test_the_deferral_rate_is_the_mean_over_committed_positions(name):
    """METHODS section 9: the bonus included; of a token cascade it is the share that the target wrote."""
    engine, out, record = generated(METHODS[name])
    measured = summarise(out.stats, out.lengths)
    etas = recount(name, engine, record, engine.bonus)
    assert len(etas) == measured["committed"] == int(out.stats.decided.sum())
    assert measured["deferral_rate"] == pytest.approx(np.mean(etas), abs=1e-5)
    assert 0.02 < measured["deferral_rate"] < 0.98
    if name.startswith("token_cascade"):
        assert measured["unverified_tokens"] > 0
        assert measured["deferral_rate"] == pytest.approx(1 - measured["draft_share"], abs=1e-6)


def test_deferred_drafts_by_position_and_those_kept_all_the_same():
    """Examined drafts that the rule defers, and of these the kept ones, which speculative acceptance has."""
    _, out, record = generated(METHODS["rule's bonus"])
    deferred, kept = np.zeros(2), np.zeros(2)
    for row in range(ROWS):
        last = PROMPTS[row][-1]
        for turn in np.flatnonzero(record["active"][:, row]):
            before = [last, *record["draft"][turn, row]]
            for slot in range(record["kept"][turn, row] + record["rejected"][turn, row]):
                r = reference.decision("token_v3", Q[before[slot]], P[before[slot]], 0.4, 1.0)[before[slot + 1]]
                deferred[slot] += r
                kept[slot] += r * (slot < record["kept"][turn, row])
            last = record["tokens"][turn, row, record["new"][turn, row] - 1]
    assert (kept > 0).all() and (kept < deferred).all()
    np.testing.assert_allclose(out.stats.deferred_at.sum(0), deferred)
    np.testing.assert_allclose(out.stats.kept_although_deferred_at.sum(0), kept)


def test_what_the_target_writes_behind_a_drafter_without_a_law_is_deferred():
    """No rule could be asked there. At α = 1 it keeps all drafts, so that the target writes nothing else."""
    target, prompt, numbers = sc.TableLM(P), engines.prompts(*[[0, 1, 2, 0]] * 16), {"alpha": 1.0, "temperature": 1.0}
    engine = engines.engine(target.model, Repeats(2, VOCAB), "token_v3")
    out = engines.generated(engine, {}, prompt, LENGTH, target=target.params, numbers=numbers, seed=1)
    measured = summarise(out.stats, out.lengths)
    assert measured["rejected"] == 0 < measured["kept"]
    assert measured["deferral_rate"] == pytest.approx(1 - measured["draft_share"])


@pytest.mark.parametrize("verify", ["token", "block"])
def test_tried_are_drafts_up_to_the_first_that_is_not_kept(verify):
    """What planned lengths are chosen by, whichever way blocks are examined; first rounds are not cut."""
    pair = conformance.tabular_pair(Q, P)
    engine, params = assemble(pair, rule="token_v3", block_size=3, verify=verify)
    out = generate(
        engine, params, make_prompt(pair, PROMPTS), 2, controls=make_controls(ROWS, alpha=0.4, temperature=1.0),
        max_new_tokens=60, most_rounds=8, record=trace,
    )  # fmt: skip
    seen = {name: np.asarray(out.record[name]) for name in ("kept", "rejected", "active")}
    tried = ((seen["kept"] + seen["rejected"]) * seen["active"]).sum(0)
    np.testing.assert_array_equal(out.stats.tried, tried)
    assert (np.asarray(out.stats.examined) == tried).all() == (verify == "token")
    assert (np.asarray(out.stats.examined) <= np.asarray(out.stats.drafted)).all()
