"""Section `calls`: the time that a call of `decode` spends outside its compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.setting import Bench, Rows
from speccascade_jax.api import decode
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import TARGET
from speccascade_jax.engine.generate import compiled_for
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.pairs.prompts import make_prompt

GROUPS = 5


def run(bench: Bench) -> Rows:
    """Measures one row per method: ms of a call with a text, ms of its program alone, and the difference."""
    return {
        "calls": [_row(bench, method) for method in bench.track((recorded(Settings(method=TARGET)), bench.lossless))]
    }


def _row(bench: Bench, method: Settings) -> dict[str, Any]:
    """Times, in each turn, a warm call of `decode` with a text, and the call's compiled program alone.

    Differences of single turns vary far more than medians, so the spread is over the medians of `GROUPS` groups.
    """
    texts = bench.texts[: bench.settings.examples]
    whole = _in_turn([_call(bench, method, text) for text in texts])
    program = _in_turn(_programs(bench, method, texts))
    for example in range(len(texts)):
        _check_same(example, whole(), program())
    seconds = measure.interleave({"decode": whole, "program": program}, bench.settings.calls)
    groups = np.array_split((seconds["decode"] - seconds["program"]) * 1e3, min(GROUPS, bench.settings.calls))
    outside = measure.spread(np.asarray([np.median(group) for group in groups]))
    return {
        "method": method.method,
        "block_size": method.block_size,
        "calls": bench.settings.calls,
        "decode_ms": measure.spread(seconds["decode"] * 1e3),
        "program_ms": measure.spread(seconds["program"] * 1e3),
        "outside_ms": outside | {"value": float(np.median(np.concatenate(groups)))},
    }


def _in_turn(calls: Sequence[measure.Call]) -> measure.Call:
    """Returns a call that runs the next of `calls` each time, and starts again after the last one."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def _call(bench: Bench, method: Settings, text: str) -> Callable[[], Any]:
    longest = bench.settings.max_new_tokens
    settings: dict[str, Any] = {} if method.block_size is None else {"block_size": method.block_size}
    return lambda: decode(bench.pair, text, method=method.method, max_new_tokens=longest, **settings)


def _programs(bench: Bench, method: Settings, texts: Sequence[str]) -> list[Callable[[], Any]]:
    """Returns the compiled programs that the calls run, with their arguments already on the device."""
    longest, compiled, calls = bench.settings.max_new_tokens, dict[Any, Any](), list[Callable[[], Any]]()
    engine, params = bench.engine(method)
    controls, seed, ids = jax.device_put((make_controls(1), np.uint32(0), np.zeros(1, np.int32)))
    for text in texts:
        prompt = jax.device_put(make_prompt(bench.pair, text, max_new_tokens=longest))
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(prompt))
        if shapes not in compiled:
            compiled[shapes] = compiled_for(engine, params, prompt, controls, max_new_tokens=longest)
        calls.append(partial(compiled[shapes], params, prompt, seed, controls, ids))
    return calls


def _check_same(example: int, call: Any, generation: Any) -> None:
    if not np.array_equal(call.tokens, generation.tokens):
        raise RuntimeError(
            f"decode and its program gave different tokens for example {example}: their times cannot be compared"
        )
