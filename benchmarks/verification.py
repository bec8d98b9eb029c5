"""Section `verification`: time to verify a block divided by the time to read q̃ and p̃ once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.setting import Bench, Rows
from speccascade_jax.core import rngs, sampling
from speccascade_jax.core.controls import make_sampling
from speccascade_jax.core.types import Array, Draft, LawPair, Sampling
from speccascade_jax.rules import deferral
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.rule import Rule

BLOCK = 5
TRANSFORMS = {"T 0": (0.0, 1.0), "T 1": (1.0, 1.0), "T 1, top-p 0.9": (1.0, 0.9)}
"""Sampling transforms by name: temperature and top-p."""


def run(bench: Bench) -> Rows:
    """Returns the table `verification` (a row per rule and vocabulary size) and `sampling` (per transform and size)."""
    decided, transformed = [], []
    sizes = bench.settings.vocab_sizes
    for size, name in bench.track([(size, name) for size in sizes for name in (*bench.settings.rules, *TRANSFORMS)]):
        pair, draft, key = _laws(size)
        if name in TRANSFORMS:
            arguments = (jnp.log(pair.p), make_sampling(1, *TRANSFORMS[name]))
            compiled = _transform.lower(*arguments, jnp.int32(1)).compile()
            transformed.append({"sampling": name, "vocab_size": size} | _row(bench, compiled, arguments, size))
        else:
            rule_arguments = (pair, draft, key, jnp.full((1,), middle(deferral.RULES[name], size)))
            compiled = _verify.lower(deferral.RULES[name], *rule_arguments, jnp.int32(1)).compile()
            decided.append({"rule": name, "vocab_size": size} | _row(bench, compiled, rule_arguments, size))
    return {"verification": decided, "sampling": transformed}


def _row(bench: Bench, compiled: jax.stages.Compiled, arguments: tuple[Any, ...], size: int) -> dict[str, Any]:
    """Measures the µs and the memory of a program that processes a block of γ + 1 positions in a loop.

    The floor is the time to move 2 · (γ + 1) · V · 4 bytes at the bandwidth of arrays much larger than the caches. A
    verifier reads `q̃` and `p̃` once; a sampling transform reads logits and writes a distribution. `temporary_ratio` is
    the program's temporary memory over the same bytes.
    """
    loop = measure.long_enough(lambda count: compiled(*arguments, jnp.int32(count)), bench.settings.loop_seconds)
    stream = bench.stream(bench.settings.working_set)
    turns = measure.interleave({"loop": loop, "stream": stream.loop}, 2 * bench.settings.repeats)
    seconds, floor_bytes = turns["loop"] / loop.count, 2 * (BLOCK + 1) * size * 4
    floor = measure.floor_seconds(floor_bytes, stream.bandwidth(turns["stream"]))
    temporary = measure.memory(compiled).temp_size_in_bytes
    return {
        "microseconds": measure.spread(seconds * 1e6),
        "floor_microseconds": measure.spread(floor * 1e6),
        "ratio": measure.spread(seconds / floor),
        "floor_megabytes": floor_bytes / 1e6,
        "temporary_megabytes": temporary / 1e6,
        "temporary_ratio": temporary / floor_bytes,
    }


def _laws(size: int) -> tuple[LawPair, Draft, Array]:
    """Returns random, similar distributions of draft and target, a block drawn from the draft's, and a random key."""
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 2.0 * jax.random.normal(keys[0], (1, BLOCK + 1, size))
    q, p = jax.nn.softmax(logits), jax.nn.softmax(logits + jax.random.normal(keys[1], logits.shape))
    greedy = jnp.zeros((1, BLOCK + 1, 1), bool)
    draft = Draft(
        tokens=jax.random.categorical(keys[2], logits[:, :BLOCK]).astype(jnp.int32),
        length=jnp.full((1,), BLOCK, jnp.int32),
        q=q,
        q_tilde=q,
        greedy=greedy[:, 0, 0],
        steps=jnp.zeros((1,), jnp.int32),
        bad=jnp.zeros((1, BLOCK + 1), bool),
    )
    pair = LawPair(q=q, p=p, q_tilde=jnp.copy(q), p_tilde=jnp.copy(p), greedy=greedy)
    return pair, draft, rngs.row_keys(keys[2], jnp.zeros((1,), jnp.int32), 0)


def middle(rule: Rule, size: int) -> float:
    """Returns an α in the middle of the rule's range."""
    return 0.0 if rule.alpha is None else sum(rule.alpha.bounds(size)) / 2


@partial(jax.jit, static_argnums=0)
def _verify(rule: Rule, pair: LawPair, draft: Draft, keys: Array, alpha: Array, count: Array) -> Array:
    def body(_: Any, rounds: Array) -> Array:
        # the barrier makes the compiler see new distributions each round, so that no work is hoisted out of the loop
        now, block, rounds = jax.lax.optimization_barrier((pair, draft, rounds))
        verdict = Speculative(rule).verify(now, block, rngs.RoundKeys(keys, rounds, rounds), alpha, "rule")
        seen = verdict.num_kept + verdict.rejected + verdict.final
        return rounds + 1 + (seen < 0)

    return jax.lax.fori_loop(0, count, body, jnp.zeros((1,), jnp.int32))


@jax.jit
def _transform(logits: Array, how: Sampling, count: Array) -> Array:
    def body(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The barrier serves as in `_verify`. The counter passes through it and is used afterwards; otherwise XLA would
        # split the barrier.
        now, rounds = jax.lax.optimization_barrier((logits, carry[1]))
        return sampling.transform(now, how), rounds + 1

    return jax.lax.fori_loop(0, count, body, (jnp.zeros_like(logits), jnp.int32(0)))[0]
