"""Section `block_wise`: time of block verification divided by that of token-wise verification, on the same blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from benchmarks.random_models import held_as, random
from benchmarks.setting import Bench, Rows
from benchmarks.verification import BLOCK, middle
from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls, make_sampling
from speccascade_jax.core.sampling import make_law_pair
from speccascade_jax.core.types import Array, Draft, Prompt, Sampling
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.verification import Verifier

SMALLEST = 4096
DRAFTS = 64


def run(bench: Bench) -> Rows:
    """Measures the µs of verifying a block token by token and as a block, by rule and vocabulary size.

    The timed work is the computation of `p̃` (and `p`, if the rule reads it) from logits at T = 1, and `verify`; the
    models and the draft's distributions are excluded. `ratio` is the block-wise time over the token-wise time of the
    same turn. The loop goes through `DRAFTS` different blocks, so that rejections are at various positions, as in a
    generation. `kept` is the mean number of accepted tokens out of 5.
    """
    rows, sizes = [], bench.settings.vocab_sizes
    sizes = (min(SMALLEST, sizes[0]), *sizes[1:])
    for size, name in bench.track([(size, name) for size in sizes for name in bench.settings.either_way]):
        rule = deferral.RULES[name]
        arguments = (*_laws(size), make_sampling(1, 1.0, 1.0), jnp.full((1,), middle(rule, size)))
        ways = {"token_wise": Speculative(rule), "block_wise": BlockWise(rule)}
        compiled = {way: _rounds.lower(verifier, *arguments, jnp.int32(1)).compile() for way, verifier in ways.items()}
        loops = {way: _loop(program, arguments, bench.settings.loop_seconds) for way, program in compiled.items()}
        turns = measure.interleave(loops, 4 * bench.settings.repeats)
        seconds = {way: turns[way] / loop.count for way, loop in loops.items()}
        rows.append(
            {
                "rule": name,
                "vocab_size": size,
                **{f"{way}_microseconds": measure.spread(way_seconds * 1e6) for way, way_seconds in seconds.items()},
                "ratio": measure.spread(seconds["block_wise"] / seconds["token_wise"]),
                **{f"{way}_kept": _kept(program, arguments) for way, program in compiled.items()},
            }
        )
    whole = [_round(bench, size, name) for size in sizes for name in bench.settings.whole_rounds]
    return {"block_wise": rows, "block_wise_rounds": whole}


def _round(bench: Bench, size: int, name: str) -> dict[str, Any]:
    """Measures the ms per round with each verification: the time of a generation at T = 1 over its number of rounds."""
    pair, rule = _models(size), deferral.RULES[name]
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, size, (1, 16)), jnp.int32)
    prompt = jax.device_put(Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), tokens))
    controls = jax.device_put(make_controls(1, alpha=middle(rule, size), temperature=1.0))
    calls, rounds = {}, {}
    for verify in ("token", "block"):
        engine, params = assemble(pair, rule=rule, block_size=BLOCK, verify=verify)
        run = partial(
            generate, engine, params, prompt, 0, controls=controls, max_new_tokens=bench.settings.max_new_tokens
        )
        rounds[verify], calls[verify] = int(run().stats.rounds.sum()), run
    turns = measure.interleave(calls, 2 * bench.settings.repeats)
    round_seconds = {verify: turns[verify] / rounds[verify] for verify in calls}
    return {
        "rule": name,
        "vocab_size": size,
        **{f"{verify}_milliseconds": measure.spread(spent * 1e3) for verify, spent in round_seconds.items()},
        "ratio": measure.spread(round_seconds["block"] / round_seconds["token"]),
    }


def _models(size: int) -> Pair:
    """Returns a pair of random T5s, so small that work over the vocabulary takes a large share of a round."""
    target = T5Config(size, size, 256, 4, 64, 1024, 2, 4)
    draft = T5Config(size, size, 128, 2, 64, 384, 2, 1)
    return Pair(held_as(random(target), "float32"), held_as(random(draft), "float32"), name=f"{size}")


def _loop(program: jax.stages.Compiled, arguments: tuple[Any, ...], seconds: float) -> measure.Loop:
    return measure.long_enough(lambda count: program(*arguments, jnp.int32(count)), seconds)


def _kept(program: jax.stages.Compiled, arguments: tuple[Any, ...], count: int = 4 * DRAFTS) -> float:
    """Returns the accepted tokens per block, averaged over `count` rounds."""
    return float(program(*arguments, jnp.int32(count))[1].sum()) / count


def _laws(size: int) -> tuple[Array, Array, Array, Array]:
    """Returns random inputs: the target's logits, the draft's distribution, blocks drawn from it, and a random key."""
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 2.0 * jax.random.normal(keys[0], (1, BLOCK + 1, size))
    theirs = logits + jax.random.normal(keys[1], logits.shape)
    drafts = jax.random.categorical(keys[2], logits[:, :BLOCK], shape=(DRAFTS, 1, BLOCK)).astype(jnp.int32)
    return theirs, jax.nn.softmax(logits), drafts, rngs.row_keys(keys[2], jnp.zeros((1,), jnp.int32), 0)


@partial(jax.jit, static_argnums=0)
def _rounds(
    verifier: Verifier, logits: Array, q: Array, drafts: Array, keys: Array, how: Sampling, alpha: Array, count: Array
) -> tuple[Array, Array]:
    """Runs `count` rounds; returns the number of rounds and of accepted tokens."""

    def body(turn: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # the barrier makes the compiler see new distributions each round, so that no work is hoisted out of the loop
        theirs, ours, rounds = jax.lax.optimization_barrier((logits, q, carry[0]))
        draft = Draft(
            tokens=drafts[turn % DRAFTS],
            length=jnp.full((1,), BLOCK, jnp.int32),
            q=ours,
            q_tilde=ours,
            greedy=jnp.zeros((1,), bool),
            steps=jnp.zeros((1,), jnp.int32),
            bad=jnp.zeros((1, BLOCK + 1), bool),
        )
        pair = make_law_pair(draft.q, draft.q_tilde, draft.greedy, theirs, how, None)
        verdict = verifier.verify(pair, draft, rngs.RoundKeys(keys, rounds, rounds), alpha, "rule")
        seen = verdict.num_kept + verdict.rejected + verdict.final
        return rounds + 1 + (seen < 0), carry[1] + verdict.num_kept

    none = jnp.zeros((1,), jnp.int32)
    done: tuple[Array, Array] = jax.lax.fori_loop(0, count, body, (none, none))
    return done
