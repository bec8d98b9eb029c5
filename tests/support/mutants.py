"""Planted bugs, kept as a fixture: each of them must be found by the tests of laws.

Every entry of `MUTANTS` runs one experiment, with the bug or without it, and returns its p-value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.protocols import Decision
from speccascade_jax.core.types import LMOutput
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.planned import PlannedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods.build import assemble
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed
from tests.support import conformance, planning, reference

ROWS = 40_000


def trial(engine, params, law, *, alpha=0.4, length=7, temperature=1.0, **controls):
    """p-value of whole sequences against the chain `law`."""
    tokens = conformance.run_rows(engine, params, ROWS, alpha, [(temperature, 1.0)], length=length, **controls)
    return conformance.sequence_p_value(tokens[0], law)


def tabular(rule, *, block=3, alpha=0.4, seed=11, draft_temperature=None, **more):
    """Engine, parameters and `π` of a pair of tabular models over V = 3."""
    q, p = conformance.tables(3, seed=seed)
    engine, params = assemble(conformance.tabular_pair(q, p), rule=rule, block_size=block, **more)
    return engine, params, reference.transitions(rule, q, p, alpha, 1.0, draft_temperature=draft_temperature)


# --- no rollback: a model whose cache matters


@flax.struct.dataclass
class TokenCache:
    """The consumed tokens, `[B, S]`, and how many."""

    tokens: jax.Array
    length: jax.Array


@dataclass(frozen=True)
class SecondOrder:
    """Logits by the two last tokens; the older one is read from the cache."""

    vocab_size: int
    rolls_back: bool = True

    def prefill(self, params, prompt, max_len, max_rollback=None):
        return TokenCache(jnp.zeros((prompt.tokens.shape[0], max_len), jnp.int32), prompt.length - 1)

    def extend(self, params, cache, tokens):
        slots = write_slots(cache.tokens, tokens, cache.length, axis=1)
        at = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
        older = jnp.where(at > 0, jnp.take_along_axis(slots, jnp.maximum(at - 1, 0), axis=1), 0)
        return LMOutput(params[older, tokens]), TokenCache(slots, cache.length + tokens.shape[1])

    def rollback(self, cache, length):
        return TokenCache(cache.tokens, length) if self.rolls_back else cache

    def consumed(self, cache):
        return cache.length


def no_rollback(*, mutated):
    """The target's cache keeps rejected tokens."""
    rng = np.random.default_rng(3)
    p = rng.normal(size=(3, 3, 3)).astype(np.float32) * 1.5
    q = (p + rng.normal(size=p.shape)).astype(np.float32)
    engine = Engine(
        target=SecondOrder(3, rolls_back=not mutated),
        drafter=ModelDrafter(SecondOrder(3), Fixed(2)),
        verifier=Speculative(RULES["spec_decode"]),
    )
    params = {"target": jnp.asarray(p), "drafter": {"model": jnp.asarray(q)}}
    length = 5
    tokens = conformance.run_rows(engine, params, ROWS, 0.0, [(1.0, 1.0)], length=length)[0]
    # the chain over pairs of tokens (older, last)
    probability, older, last = np.ones(1), np.array([0]), np.array([0])
    for _ in range(length):
        steps = np.stack([reference.softmax(p[a, b]) for a, b in zip(older, last, strict=True)])
        probability = (probability[:, None] * steps).reshape(-1)
        older, last = np.repeat(last, 3), np.tile(np.arange(3), len(last))
    index = (tokens * 3 ** np.arange(length - 1, -1, -1)).sum(-1)
    return conformance.pooled_p_value(np.bincount(index, minlength=3**length), probability * ROWS)


# --- wrong replacement, bonus, divisor


@dataclass(frozen=True)
class ReplaceFromTarget(Speculative):
    """Keeps like `Speculative`, but replaces from `p̃` instead of the residual."""

    def __call__(self, pair, alpha):
        return super().__call__(pair, alpha)._replace(replacement=pair.p_tilde)


def replacement_from_target(*, mutated):
    """The replacement is drawn from `p̃`."""
    engine, params, law = tabular("spec_decode")
    accept = ReplaceFromTarget(RULES["spec_decode"]) if mutated else engine.verifier
    return trial(replace(engine, verifier=accept), params, law)


def bonus_from_target(*, mutated):
    """Under a cascade rule the bonus is drawn from `p̃`."""
    engine, params, law = tabular("token_v3", block=1)
    return trial(replace(engine, bonus="target" if mutated else "rule"), params, law)


@dataclass(frozen=True)
class DividesBySoftLaw(ModelDrafter):
    """Claims that its (greedy) tokens were drawn from the soft law."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        return replace(draft, q_tilde=draft.q), state, cache


def greedy_draft_divided_by_soft_law(*, mutated):
    """A greedy draft is divided by its soft `q`."""
    engine, params, law = tabular("spec_decode", draft_temperature=0.0)
    drafter = DividesBySoftLaw(engine.drafter.model, engine.drafter.stop) if mutated else engine.drafter
    return trial(replace(engine, drafter=drafter), params, law, draft_temperature=0.0)


# --- wrong bits


@flax.struct.dataclass
class SharedBits(rngs.RoundKeys):
    """The replacement is drawn with the bits that rejected the draft."""

    def uniform(self, slots, purpose):
        return super().uniform(slots, jnp.where(jnp.asarray(purpose) == rngs.REPLACE, rngs.ACCEPT, purpose))


@flax.struct.dataclass
class PositionKeys(rngs.RoundKeys):
    """Bits by position in the sequence instead of round and slot."""

    def uniform(self, slots, purpose):
        at = self.length.reshape(-1, *([1] * (slots.ndim - 1)))
        still = rngs.RoundKeys(self.row, jnp.zeros_like(self.round), self.length)
        return still.uniform(slots + at, purpose)


@dataclass(frozen=True, kw_only=True)
class KeyedEngine(Engine):
    """An engine with another kind of bits."""

    kind: type = rngs.RoundKeys

    def round_keys(self, state):
        return self.kind(state.keys, state.rounds, state.length)


def keyed(engine, kind):
    """The same engine with bits of `kind`."""
    return KeyedEngine(
        target=engine.target, drafter=engine.drafter, verifier=engine.verifier, bonus=engine.bonus, kind=kind
    )


def shared_bits(*, mutated):
    """Accept and replacement share their bits."""
    engine, params, law = tabular("spec_decode")
    return trial(keyed(engine, SharedBits if mutated else rngs.RoundKeys), params, law)


@dataclass(frozen=True)
class Remembers:
    """Stops before a token when the second token of the last block was token 0.

    It reads which token was drafted from the law that follows it. A legal stopping time: what it saw was discarded
    or committed, and says nothing about the bits to come, unless those are used again.
    """

    block: int = 3
    adaptive: ClassVar[bool] = True
    threshold: ClassVar[str] = ""

    def init(self, batch_size):
        return {"seen": jnp.zeros((batch_size,), bool), "stop": jnp.zeros((batch_size,), bool)}

    def __call__(self, params, state, step, controls):
        first_row = jnp.abs(step.q - params[0]).max(-1) < 1e-6  # the last token was token 0
        stop = jnp.where(step.slot == 0, state["seen"], False)
        seen = jnp.where(step.slot == 2, first_row, jnp.where(step.slot == 0, False, state["seen"]))
        yes = jnp.ones(step.q.shape[:1], bool)
        return Decision(draw=~stop, proceed=yes & (step.slot + 1 < self.block)), {"seen": seen, "stop": stop}


def keys_by_position(*, mutated):
    """Bits by position, with a policy that remembers what was discarded."""
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
    law = reference.transitions("spec_decode", q, p, 0.0, 1.0)
    return trial(keyed(engine, PositionKeys if mutated else rngs.RoundKeys), params, law)


# --- a stop that comes too late


@dataclass(frozen=True)
class TakesBack(ModelDrafter):
    """Hands over a block without its last token where the draft gave that one a low probability."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        last = jnp.maximum(draft.length - 1, 0)[:, None]
        token = jnp.take_along_axis(draft.tokens, last, axis=1)
        law = jnp.take_along_axis(draft.q, last[..., None], axis=1)[:, 0]
        unlikely = jnp.take_along_axis(law, token, axis=1)[:, 0] < 0.5
        return replace(draft, length=draft.length - (unlikely & (draft.length > 0))), state, cache


def takes_back(*, mutated):
    """A stop policy sees a token before it decides, and takes it back."""
    engine, params, law = tabular("spec_decode")
    drafter = TakesBack(engine.drafter.model, engine.drafter.stop) if mutated else engine.drafter
    return trial(replace(engine, drafter=drafter), params, law)


@dataclass(frozen=True)
class Peeks(ModelDrafter):
    """Makes a block one token long where the second token that it has drafted is token 0."""

    def propose(self, *args, **kwargs):
        draft, state, cache = super().propose(*args, **kwargs)
        shorter = jnp.minimum(draft.length, 1)
        return replace(draft, length=jnp.where(draft.tokens[:, 1] == 0, shorter, draft.length)), state, cache


@dataclass(frozen=True)
class PlansByPeeking(PlannedDrafter):
    """What it drafts says how long the block is."""

    @property
    def drafters(self):
        return *super().drafters[:-1], Peeks(self.model, Fixed(self.block))


def plans_by_what_it_drafts(*, mutated):
    """The length of a block is chosen by its own tokens."""
    engine, params, q, p = planning.planned(11, lengths=(0, 1, 3))
    drafter = PlansByPeeking(engine.drafter.model, engine.drafter.plan) if mutated else engine.drafter
    told = planning.told(params, planning.forcing((0, 1, 3), 3))
    return trial(replace(engine, drafter=drafter), told, reference.transitions("spec_decode", q, p, 0.0, 1.0))


MUTANTS = {
    "no rollback": no_rollback,
    "replacement from p": replacement_from_target,
    "bonus from p under a cascade rule": bonus_from_target,
    "greedy draft divided by its soft q": greedy_draft_divided_by_soft_law,
    "the same bits for accept and replacement": shared_bits,
    "keys by position": keys_by_position,
    "a seen token is taken back": takes_back,
    "a block's length is chosen by its tokens": plans_by_what_it_drafts,
}
