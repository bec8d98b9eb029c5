"""Negative controls: the exactness tests find planted bugs, and the same runs without them pass."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import rngs
from speccascade_jax.core.protocols import Decision
from speccascade_jax.core.types import BoundModel
from speccascade_jax.drafters.model import ModelDrafter, PlannedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.rules import branching
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.stopping.policies import Fixed
from tests.support import blocks, conformance, engines, planning, reference

pytestmark = pytest.mark.laws
ROWS = 40_000


def trial(engine, params, law, **controls):
    """Returns the p-value of whole sequences against the chain `law`."""
    tokens = conformance.run_rows(engine, params, ROWS, 0.4, [(1.0, 1.0)], length=7, **controls)
    return conformance.sequence_p_value(tokens[0], law)


def tabular(rule="spec_decode", block=3, draft_temperature=None):
    """Returns engine, parameters and `π` of a pair of tabular models over V = 3."""
    q, p = conformance.tables(3, seed=11)
    engine, params = assemble(conformance.tabular_pair(q, p), rule=rule, block_size=block)
    return engine, params, reference.transitions(rule, q, p, 0.4, 1.0, draft_temperature=draft_temperature)


# --- wrong replacement, bonus, divisor


@dataclass(frozen=True)
class ReplaceFromTarget(Speculative):
    """A planted bug: keeps like `Speculative`, but replaces from `p̃` instead of the residual."""

    def __call__(self, pair, alpha):
        return super().__call__(pair, alpha)._replace(replacement=pair.p_tilde)


def replaced_from_target(engine):
    return replace(engine, verifier=ReplaceFromTarget(engine.verifier.rule))


def bonus_from_target(engine):
    return replace(engine, bonus="target")


@dataclass(frozen=True)
class DividesBySoftLaw(ModelDrafter):
    """A planted bug: claims that its (greedy) tokens were drawn from the soft distribution."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        return replace(draft, q_tilde=draft.q), state, cache


def divided_by_soft_law(engine):
    return replace(engine, drafter=DividesBySoftLaw(engine.drafter.model, engine.drafter.stop))


# --- wrong bits


@flax.struct.dataclass
class SharedBits(rngs.RoundKeys):
    """A planted bug: the replacement is drawn with the bits that rejected the draft."""

    def uniform(self, slots, purpose):
        return super().uniform(slots, jnp.where(jnp.asarray(purpose) == rngs.REPLACE, rngs.ACCEPT, purpose))


@flax.struct.dataclass
class PositionKeys(rngs.RoundKeys):
    """A planted bug: bits by position in the sequence instead of round and slot."""

    def uniform(self, slots, purpose):
        starts = self.length.reshape(-1, *([1] * (slots.ndim - 1)))
        still = rngs.RoundKeys(self.row, jnp.zeros_like(self.round), self.length)
        return still.uniform(slots + starts, purpose)


@dataclass(frozen=True, kw_only=True)
class KeyedEngine(Engine):
    """An engine with another kind of bits."""

    kind: type = rngs.RoundKeys

    def round_keys(self, state):
        return self.kind(state.keys, state.rounds, state.length)


def keyed(engine, kind):
    """Returns the same engine with bits of `kind`."""
    parts = {name: getattr(engine, name) for name in ("target", "drafter", "verifier", "bonus")}
    return KeyedEngine(**parts, kind=kind)


def shared_bits(engine):
    return keyed(engine, SharedBits)


def position_keys(engine):
    return keyed(engine, PositionKeys)


@dataclass(frozen=True)
class Remembers:
    """A policy that stops before a token when the second token of the last block was token 0.

    It infers which token was drafted from the distribution that follows it. It is a legal stopping time: the tokens it
    saw were discarded or committed, and say nothing about later bits, unless those are used again.
    """

    block: int = 3
    adaptive: ClassVar[bool] = True
    threshold: ClassVar[str] = ""

    def init(self, batch_size):
        return {"seen": jnp.zeros((batch_size,), bool), "stop": jnp.zeros((batch_size,), bool)}

    def __call__(self, params, state, step, controls):
        first_row = jnp.abs(step.q - params[0]).max(-1) < 1e-6  # recognises that the last token was token 0
        stop = jnp.where(step.slot == 0, state["seen"], False)
        seen = jnp.where(step.slot == 2, first_row, jnp.where(step.slot == 0, False, state["seen"]))
        yes = jnp.ones(step.q.shape[:1], bool)
        return Decision(draw=~stop, proceed=yes & (step.slot + 1 < self.block)), {"seen": seen, "stop": stop}


def remembering():
    """Returns engine, parameters and `π` under a policy that remembers discarded tokens."""
    rng = np.random.default_rng(5)
    p = rng.normal(size=(3, 3)).astype(np.float32)
    q = (
        np.tile(rng.normal(size=(1, 3)), (3, 1)).astype(np.float32)
        + 1e-3 * np.arange(3, dtype=np.float32)[:, None] * (np.arange(3, dtype=np.float32)[None])
    )
    engine, params = assemble(conformance.tabular_pair(q, p), rule="spec_decode", block_size=3)
    policy_laws = jnp.asarray(np.stack([reference.softmax(row) for row in q]), jnp.float32)
    params = {**params, "drafter": {**params["drafter"], "stop": policy_laws}}
    engine = replace(engine, drafter=ModelDrafter(engine.drafter.model, Remembers()))
    return engine, params, reference.transitions("spec_decode", q, p, 0.0, 1.0)


# --- a stop that comes too late


@dataclass(frozen=True)
class TakesBack(ModelDrafter):
    """A planted bug: returns a block without its last token if the draft gave that one a low probability."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        last = jnp.maximum(draft.length - 1, 0)[:, None]
        token = jnp.take_along_axis(draft.tokens, last, axis=1)
        law = jnp.take_along_axis(draft.q, last[..., None], axis=1)[:, 0]
        unlikely = jnp.take_along_axis(law, token, axis=1)[:, 0] < 0.5
        return replace(draft, length=draft.length - (unlikely & (draft.length > 0))), state, cache


def takes_back(engine):
    return replace(engine, drafter=TakesBack(engine.drafter.model, engine.drafter.stop))


@dataclass(frozen=True)
class Peeks(ModelDrafter):
    """A planted bug: makes a block one token long if its second drafted token is token 0."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        shorter = jnp.minimum(draft.length, 1)
        return replace(draft, length=jnp.where(draft.tokens[:, 1] == 0, shorter, draft.length)), state, cache


@dataclass(frozen=True)
class PlansByPeeking(PlannedDrafter):
    """A planted bug: the drafted tokens decide the length of the block."""

    @property
    def drafters(self):
        return *super().drafters[:-1], Peeks(self.model, Fixed(self.block))


def plans_by_peeking(engine):
    return replace(engine, drafter=PlansByPeeking(engine.drafter.model, engine.drafter.plan))


def planned():
    """Returns engine, parameters and `π` with planned blocks of three tokens."""
    engine, params, q, p = planning.planned(11, lengths=(0, 1, 3))
    params = planning.told(params, planning.forcing((0, 1, 3), 3))
    return engine, params, reference.transitions("spec_decode", q, p, 0.0, 1.0)


COLD = {"draft_temperature": 0.0}
MUTANTS = {
    "replacement from p": (replaced_from_target, tabular, {}),
    "bonus from p under a cascade rule": (bonus_from_target, partial(tabular, "token_v3", 1), {}),
    "greedy draft divided by its soft q": (divided_by_soft_law, partial(tabular, **COLD), COLD),
    "the same bits for accept and replacement": (shared_bits, tabular, {}),
    "keys by position": (position_keys, remembering, {}),
    "a drafted token is removed after it was seen": (takes_back, tabular, {}),
    "a block's length is chosen by its tokens": (plans_by_peeking, planned, {}),
}
"""Name -> the function that plants the bug into an engine, the function that makes the engine, and controls."""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name):
    """Each planted bug gives p < 1e-6, and the same run without it does not."""
    bug, make, controls = MUTANTS[name]
    engine, params, law = make()
    assert trial(engine, params, law, **controls) > 1e-3
    assert trial(bug(engine), params, law, **controls) < 1e-6


@dataclass(frozen=True)
class NoRollback(Fake):
    """A planted bug: its cache keeps rejected tokens."""

    def rollback(self, cache, length):
        return cache


def test_a_cache_that_keeps_rejected_tokens_is_found():
    """The target's distribution depends on the whole prefix: compares all sequences of five tokens."""
    written = np.array(list(itertools.product(range(3), repeat=5)), np.int32)
    logits = along(BoundModel((), Fake(3, sharpness=1.5)), engines.prompts(*[[0]] * len(written)), written)
    chances = np.take_along_axis(np.asarray(jax.nn.softmax(logits), np.float64), written[..., None], axis=-1)
    p_values = []
    for target in (Fake(3, sharpness=1.5), NoRollback(3, sharpness=1.5)):
        engine = engines.engine(target, engines.drafting(Fake(3, noise=0.7, seed=1, sharpness=1.5), 2))
        params = {"target": (), "drafter": engines.FAKE}
        tokens = conformance.run_rows(engine, params, ROWS, 0.0, [(1.0, 1.0)], length=5, conclusive=True)[0]
        index = (tokens * 3 ** np.arange(4, -1, -1)).sum(-1)
        p_values.append(conformance.pooled_p_value(np.bincount(index, minlength=3**5), chances.prod((1, 2)) * ROWS))
    assert p_values[0] > 1e-3 and p_values[1] < 1e-6, p_values


def test_one_percent_less_chance_of_acceptance_is_found(monkeypatch):
    """Whole sequences hide it in their many cells, and an identity without sampling does not see the engine."""
    kept_at = Speculative.kept_at
    monkeypatch.setattr(Speculative, "kept_at", lambda *arguments: 0.99 * kept_at(*arguments))
    rule = conformance.REPRESENTATIVE["lossy_tuned"]
    with pytest.raises(AssertionError, match="all transitions: p = .*e-"):
        conformance.check_sequence_law(rule, block_size=3, length=8)  # a program of its own


TREE_BUGS = {
    "π is not reduced by a rejected sibling": (branching.laws, "normalise", lambda mass, fallback: fallback),
    "the residual is not normalised": (branching.laws, "normalise", lambda mass, fallback: mass),
    "siblings are verified with replacement": (branching, "without", lambda q_tilde, q, taken: q_tilde),
}


@pytest.mark.parametrize(
    ("way", "bug"),
    [("block", bug) for bug in (None, *blocks.BUGS)] + [("tree", bug) for bug in (None, *TREE_BUGS)],
)
def test_bugs_in_blocks_and_trees_are_found(way, bug, monkeypatch):
    # with this seed the replacement's bug changes the distribution by 4%, with others by 1%
    rng = np.random.default_rng(55)
    q_table, p_table = (rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    law = reference.transitions("spec_decode", q_table, p_table, 0.0, 1.0)
    settings = {"block_size": 4, "verify": "block"} if way == "block" else {"tree": (2, 2)}
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule="spec_decode", **settings)
    if bug in blocks.BUGS:
        engine = replace(engine, verifier=blocks.BUGS[bug](engine.verifier.rule))
    elif bug is not None:
        monkeypatch.setattr(*TREE_BUGS[bug])
        engine = replace(engine, stop_ids=(1000 + list(TREE_BUGS).index(bug),))  # a program of its own
    tokens = conformance.run_rows(engine, params, 40_000, 0.0, [(1.0, 1.0)], length=5)
    p_value = conformance.sequence_p_value(tokens[0], law)
    assert p_value > 1e-3 if bug is None else p_value < 1e-6
