"""Tests of choosing a drafter per row: outputs keep the target's distribution, and unused drafters are not called."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters import selected
from speccascade_jax.drafters.chooser import Chooser
from speccascade_jax.drafters.model import ModelDrafter, NoDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.drafters.selected import SelectedDrafter
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Arm
from speccascade_jax.models import ngrams
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.policy_files import Card, Policy
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.verification import ByArm
from speccascade_jax.stopping.policies import Confidence, Fixed
from tests.methods.build_selection_test import t5
from tests.support import conformance, engines, tiny_decoders
from tests.support.drafters import Repeats

LOSSLESS, LOSSY = engines.LOSSLESS, Speculative(RULES["token_v3"])
ROWS = 12
PROMPT = engines.prompts(*[[3, 4, 5], [3], [3, 4, 5, 0]] * 4)
SMALL, MIDDLE, LARGE = Fake(16, noise=0.5, seed=1), Fake(16, noise=0.3, seed=2), Fake(16, seed=3)
ARMS = (
    engines.drafting(SMALL, 4),
    NoDrafter(),
    NestedDrafter(engines.engine(MIDDLE, engines.drafting(SMALL, 2)), 3),
    ModelDrafter(MIDDLE, Confidence(3)),
    Repeats(2, 16),
)
OWN = (engines.FAKE, {}, {"target": (), "drafter": engines.FAKE}, engines.FAKE, ())


def engine_of(drafter, verifier=LOSSLESS, target=LARGE, **more):
    return engines.engine(target, drafter, verifier, **more)


def among(arms=ARMS, **more):
    return SelectedDrafter(arms, Chooser(draws="dynamic"), **more)


def run(engine, params, temperature=1.0, length=24, rows=range(ROWS), **more):
    ids = np.asarray(rows)
    inner = (make_controls(len(ids), temperature=temperature),)
    numbers = make_controls(len(ids), alpha=0.3, temperature=temperature, inner=inner, stop_threshold=0.6)
    prompt = jax.tree.map(lambda x: x[ids], PROMPT)
    return engines.generated(engine, params, prompt, length, numbers=numbers, example_ids=ids, **more)


def selection(own=OWN, scores=None):
    return {"arms": own, "policy": {"scores": np.zeros(len(own), np.float32) if scores is None else scores}}


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize(("verifier", "bonus"), [(LOSSLESS, "rule"), (LOSSLESS, "none"), (LOSSY, "rule")])
def test_every_row_of_a_mixed_batch_equals_its_drafter_alone(verifier, bonus):
    """Compares every token and count with batches in which all rows have the same drafter.

    The tokens of the fake models depend on the whole prefix, so an overwritten buffer, a stale cache or shared random
    bits would change them.
    """
    mixed = run(engine_of(among(), verifier, bonus=bonus), selection())
    choice = np.asarray(mixed.inner["choice"])
    assert set(choice) == set(range(len(ARMS))), choice
    for place, (arm, arm_params) in enumerate(zip(ARMS, OWN, strict=True)):
        rows = np.flatnonzero(choice == place)
        # an engine without a drafter accepts no rule that reads the draft's distribution, so it gets the lossless rule
        alone = run(engine_of(arm, verifier if arm.block else LOSSLESS, bonus=bonus), arm_params, rows=rows)
        np.testing.assert_array_equal(np.asarray(mixed.tokens)[rows], alone.tokens, str(arm))
        for name in ("rounds", "target_calls", "drafted", "kept", "rejected", "draft_steps"):
            together = np.asarray(getattr(mixed.stats, name))[rows]
            np.testing.assert_array_equal(together, getattr(alone.stats, name), name)
    assert int(mixed.stats.kept.sum()) > 20 and int(mixed.stats.rejected.sum()) > 0


def _tabular(seed, chooser=Chooser(draws="dynamic"), kind=SelectedDrafter):  # noqa: B008 (frozen)
    q_table, p_table = conformance.tables(3, seed=seed)
    arms = tuple(sc.TableLM(table) for table in (q_table, -q_table))
    drafters = (*(ModelDrafter(arm.model, Fixed(size)) for arm, size in zip(arms, (2, 1), strict=True)), NoDrafter())
    arm_params = (*({"model": arm.params} for arm in arms), {})
    engine = engine_of(kind(drafters, chooser), target=sc.TableLM(p_table).model)
    params = {"target": jnp.asarray(p_table), "drafter": selection(arm_params)}
    return engine, params, conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 0.8, 1.0)


def sampled(engine, params, rows):
    """Returns sampled tokens `[rows, 5]` after one prompt, and each row's arm; some drafts must be rejected."""
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32))
    out = generate(engine, params, prompt, 3, controls=make_controls(rows, temperature=0.8), max_new_tokens=5)
    assert out.stats.kept.sum() > 0 and out.stats.rejected.sum() > 0
    return np.asarray(out.tokens), np.asarray(out.inner["choice"])


def test_a_random_policy_keeps_the_targets_distribution_in_every_arm():
    """Tests all rows together, and the rows of each arm, because the choice must be independent of the tokens."""
    engine, params, law = _tabular(11)
    rows = 20_000
    tokens, choice = sampled(engine, params, rows)
    counts = np.bincount(choice, minlength=3)
    assert conformance.pooled_p_value(counts, np.full(3, rows / 3)) > 1e-3
    p_values = [conformance.sequence_p_value(tokens, law)]
    p_values += [conformance.sequence_p_value(tokens[choice == arm], law) for arm in range(3)]
    assert conformance.holm(p_values) > 1e-3, p_values


@dataclass(frozen=True)
class Peeking(SelectedDrafter):
    """A planted bug: both arms draft, and the arm whose first token is smaller is chosen."""

    def propose(self, params: Any, state: Any, request: Any) -> Any:
        def drafted(choice):
            return SelectedDrafter.propose(self, params, replace(state, choice=choice), request)

        first, second = (drafted(jnp.full_like(state.choice, arm))[0].tokens[:, 0] for arm in range(2))
        return drafted((second < first).astype(jnp.int32))


@pytest.mark.laws
def test_a_planted_choice_by_the_arms_own_draft_is_found():
    """Expects that the test of the distribution finds a planted bug, in which the choice depends on the drafts."""
    q_table, p_table = conformance.tables(3, seed=11)
    arms = tuple(sc.TableLM(table) for table in (q_table, np.roll(q_table, 1, axis=1)))
    drafters = tuple(engines.drafting(arm.model, 1) for arm in arms)
    arm_params = tuple({"model": arm.params} for arm in arms)
    law = conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 0.8, 1.0)
    p_values = {}
    for kind in (SelectedDrafter, Peeking):
        engine = engine_of(kind(drafters, Chooser(draws="dynamic")), target=sc.TableLM(p_table).model)
        params = {"target": jnp.asarray(p_table), "drafter": selection(arm_params)}
        (tokens,) = conformance.run_rows(engine, params, 15_000, 0.0, [(0.8, 1.0)], length=4, conclusive=True)
        p_values[kind] = conformance.sequence_p_value(tokens, law)
    assert p_values[SelectedDrafter] > 1e-3 and p_values[Peeking] < 1e-6, p_values


@pytest.mark.laws
def test_arms_can_have_their_own_rules():
    """Compares the rows of each arm with those of an engine that has this arm's rule alone."""
    arms, params = (engines.drafting(SMALL, 4),) * 2, (engines.FAKE,) * 2
    mixed = run(engine_of(among(arms, tells_arm=True), ByArm((LOSSLESS, LOSSY))), selection(params))
    choice = np.asarray(mixed.inner["choice"])
    for place, verifier in enumerate((LOSSLESS, LOSSY)):
        rows = np.flatnonzero(choice == place)
        alone = run(engine_of(arms[0], verifier), params[0], rows=rows)
        np.testing.assert_array_equal(np.asarray(mixed.tokens)[rows], alone.tokens)
    expected_tokens = [run(engine_of(arms[0], verifier), params[0]).tokens for verifier in (LOSSLESS, LOSSY)]
    assert (np.asarray(expected_tokens[0]) != np.asarray(expected_tokens[1])).any(), "both rules give the same tokens"
    with pytest.raises(ValueError, match="depends on which arm drafted"):
        ByArm((LOSSLESS, LOSSY)).law(None, None)


CALLS: list[str] = []


@dataclass(frozen=True)
class Counting(Fake):
    """A model that records every call with its number of tokens; its prompt feature is the prompt's length."""

    name: str = ""

    def prefill(self, params: Any, prompt: Any, max_len: int, max_rollback: int | None = None) -> Any:
        jax.debug.callback(lambda: CALLS.append(f"{self.name} reads"))
        return super().prefill(params, prompt, max_len, max_rollback)

    def extend(self, params: Any, cache: Any, tokens: Any) -> Any:
        jax.debug.callback(lambda: CALLS.append(f"{self.name} {tokens.shape[1]}"))
        return super().extend(params, cache, tokens)

    def prompt_features(self, cache: Any) -> Any:
        return cache.length[:, None].astype(jnp.float32)


@pytest.mark.laws
def test_a_policy_reads_one_prefill_and_idle_arms_are_never_called():
    """Checks every model call of two rows with different arms, next to a third arm that no row chose.

    The chooser reads the prompt. Target calls must not be wider than the drafted blocks need.
    """
    draft, second_draft = (Counting(16, noise=0.4, seed=n, name=f"draft{n}") for n in (1, 2))
    arms = (engines.drafting(draft, 3), engines.drafting(second_draft, 5), NoDrafter())
    drafter = SelectedDrafter(arms, Chooser("perceptron", "greedy"))
    layer = {"kernel": np.array([[1, -9, 0]], np.float32), "bias": np.array([-1, -9, 0], np.float32)}
    params = {"arms": (engines.FAKE, engines.FAKE, {}), "policy": {"layers_0": layer}}
    CALLS.clear()
    out = run(engine_of(drafter, target=Counting(16, seed=3, name="target")), params, rows=[0, 1], length=8)
    jax.effects_barrier()
    assert np.asarray(out.inner["choice"]).tolist() == [0, 2]
    counted = {name: CALLS.count(name) for name in sorted(set(CALLS))}
    drafted, rounds = int(out.stats.rounds[0]), int(out.stats.rounds.max())
    assert counted == {
        "draft1 1": counted["draft1 1"], "draft1 3": 1, "draft1 reads": 1,
        "target 1": rounds - drafted, "target 3": 1, "target 4": drafted, "target reads": 1,
    }  # fmt: skip
    assert counted["draft1 1"] == int(out.stats.draft_steps[0])


def test_a_selection_without_arms_is_refused():
    with pytest.raises(ValueError, match="no drafters to choose from"):
        SelectedDrafter((), Chooser())


@pytest.mark.laws
def test_the_choice_of_a_row_depends_only_on_its_id_and_the_seed():
    """Compares choices at two temperatures, and in batches with the rows in another order."""
    engine, arm_params = engine_of(among()), selection()
    first = np.asarray(run(engine, arm_params).inner["choice"])
    assert len(set(first)) > 1
    np.testing.assert_array_equal(first, run(engine, arm_params, temperature=0.3).inner["choice"])
    other_ids = [7, 2, 9, 0, 4, 11, 5, 3, 7, 7, 0, 9]  # with 12 choices, equal results by chance are rare
    np.testing.assert_array_equal(first[other_ids], run(engine, arm_params, rows=other_ids).inner["choice"])


# --- planted bugs: the comparison that passes without a bug must fail with it. Every bug has its own drafter class,
# because otherwise a program that was compiled without the bug would run again.


@dataclass(frozen=True)
class InEverybodysRows(SelectedDrafter):
    """A planted bug: an arm's block is written into all rows, not only into its own."""


@dataclass(frozen=True)
class Untold(SelectedDrafter):
    """A planted bug: the arms' field `sits_out` is not set."""


@dataclass(frozen=True)
class Unprotected(SelectedDrafter):
    """A planted bug: the arms' field `sits_out` is not set, and rows of other arms are not protected."""


@dataclass(frozen=True)
class SharedBits(SelectedDrafter):
    """A planted bug: the random bits that draw the first draft token also choose the arm."""

    def init(self, params, start):
        keys, first = rngs.RoundKeys, start.prompt.length
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rngs, "CHOOSE", rngs.DRAFT)
            patch.setattr(rngs, "RoundKeys", lambda rows, round, length: keys(rows, round=round, length=first))
            return super().init(params, start)


def rows_differ(kind):
    """Returns whether any row of a mixed batch differs from the same row in a batch with its drafter alone."""
    mixed = run(engine_of(kind(ARMS, Chooser(draws="dynamic"))), selection())
    choice = np.asarray(mixed.inner["choice"])
    for place, (arm, arm_params) in enumerate(zip(ARMS, OWN, strict=True)):
        rows = np.flatnonzero(choice == place)
        alone = run(engine_of(arm), arm_params, rows=rows)
        if not np.array_equal(np.asarray(mixed.tokens)[rows], alone.tokens):
            return True
    return False


@pytest.mark.laws
def test_a_planted_block_in_the_rows_of_other_arms_is_found(monkeypatch):
    assert not rows_differ(SelectedDrafter)
    merged = selected._merged
    monkeypatch.setattr(selected, "_merged", lambda rows, *drafts: merged(rows | True, *drafts))
    assert rows_differ(InEverybodysRows)


@pytest.mark.laws
def test_planted_overwritten_distributions_are_found(monkeypatch):
    monkeypatch.setattr(selected, "_leaving_rows_alone", lambda arm, rows: arm)
    assert not rows_differ(Untold), "rows stay protected from a drafter that ignores sits_out"
    monkeypatch.setattr(selected, "_needs_protection", lambda drafter, rows: False)
    assert rows_differ(Unprotected)


@pytest.mark.laws
def test_a_planted_choice_by_the_drafts_random_bits_is_found():
    """Expects biased outputs in the rows of one arm, because the same random bits choose the arm and draw tokens."""
    p_values = {}
    for kind in (SelectedDrafter, SharedBits):
        engine, params, law = _tabular(11, kind=kind)
        tokens, choice = sampled(engine, params, 20_000)
        p_values[kind] = conformance.holm(
            [conformance.sequence_p_value(tokens[choice == arm], law) for arm in range(3)]
        )
    assert p_values[SelectedDrafter] > 1e-3 and p_values[SharedBits] < 1e-6, p_values


# --- all kinds of drafters in one batch: a model, an early exit, n-grams and none; targets are T5 and decoder-only

KINDS = ("draft", "exit", "lookup", "autoregressive")
KIND_PROMPTS = [[n, 5, n + 1, 5, 1] for n in range(2, 10)] * 3
DECODER = replace(tiny("gemma2_2b", vocab_size=64), num_layers=4)


def _pair(target, draft):
    lookup = ngrams.prompt_lookup(target.model.vocab_size, 3, encoder_decoder=target.model.is_encoder_decoder)
    return sc.Pair(target=target, draft=draft, others={"exit": early_exit(target, 1), "lookup": lookup}, name="kinds")


@pytest.fixture(scope="module", params=["t5", pytest.param("decoder", marks=pytest.mark.laws)])
def pair(request):
    if request.param == "t5":
        return _pair(t5(0, 3), t5(1))
    return _pair(tiny_decoders.bound(DECODER), tiny_decoders.bound(DECODER, noise=0.3))


def decoded(pair, temperature, **chosen):
    return sc.decode(pair, KIND_PROMPTS, temperature=temperature, max_new_tokens=12, seed=4, block_size=3, **chosen)


def target_alone(pair, temperature=0.0):
    return sc.decode(
        pair, KIND_PROMPTS, method="autoregressive", temperature=temperature, max_new_tokens=12, seed=4
    ).tokens


@pytest.mark.sample(1)
@pytest.mark.laws
def test_greedy_rows_equal_the_target_and_sampled_rows_their_drafter_alone(pair):
    """Compares every token, because an early exit that drafts in the target's cache must not affect other rows."""
    greedy = decoded(pair, 0.0, drafters=KINDS, choose="random")
    np.testing.assert_array_equal(greedy.tokens, target_alone(pair))
    mixed = decoded(pair, 1.0, drafters=KINDS, choose="random")
    choice = np.asarray(mixed.generation.inner["choice"])
    assert set(choice) == set(range(len(KINDS)))
    for place, arm in enumerate(KINDS):
        alone = target_alone(pair, 1.0) if arm == "autoregressive" else decoded(pair, 1.0, drafters=(arm,)).tokens
        rows = choice == place
        np.testing.assert_array_equal(np.asarray(mixed.tokens)[rows], np.asarray(alone)[rows], arm)


@pytest.mark.laws
def test_a_policy_chooses_by_the_prompt_and_keeps_greedy_outputs(pair):
    prints = build_selection.prints(pair, tuple(Arm(drafter=name) for name in KINDS))
    target, features = build_selection.target_of(pair)
    kernel = 5 * np.random.default_rng(2).normal(size=(features, len(KINDS))).astype(np.float32)
    card = Card(
        scores="perceptron", features=features, arms=tuple(prints), prints=tuple(prints.values()), target=target
    )
    policy = Policy({"layers_0": {"kernel": kernel, "bias": np.zeros(len(KINDS), np.float32)}}, card)
    decoded_batch = decoded(pair, 0.0, drafters=KINDS, choose="greedy", policy=policy)
    assert len(set(np.asarray(decoded_batch.generation.inner["choice"]))) > 1
    np.testing.assert_array_equal(decoded_batch.tokens, target_alone(pair))
