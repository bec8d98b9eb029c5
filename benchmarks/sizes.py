"""Section `sizes`: time of steps and blocks of larger models with random weights, by the dtype of their matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from benchmarks import measure, traffic
from benchmarks.loops import extend_loop, prefill
from benchmarks.random_models import PLAIN, SIZES, held_as, random
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.runtime.products import KINDS, available

INPUT = 32
"""The number of tokens that the encoder of a T5 reads."""


def run(bench: Bench) -> Rows:
    """Measures one row per model and dtype of its weights; all dtypes of a model are timed in the same turns."""
    kinds = (PLAIN, *KINDS) if available() else (PLAIN, "int8")
    return {"sizes": [row for name in bench.track(bench.settings.sizes) for row in _rows(bench, name, kinds)]}


def _rows(bench: Bench, name: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    widths, bound = bench.settings.size_widths, random(SIZES[name])
    models = {kind: held_as(bound, kind) for kind in kinds}
    loops = {
        (kind, width): measure.long_enough(_loop(bench, model, width), bench.settings.loop_seconds)
        for kind, model in models.items()
        for width in widths
    }
    stream = bench.stream(bench.settings.working_set)
    calls: dict[str, measure.Call] = {f"{kind} {width}": loop for (kind, width), loop in loops.items()}
    seconds = measure.interleave(calls | {"memory": stream.loop}, 2 * bench.settings.repeats)
    bandwidth = stream.bandwidth(seconds["memory"])
    times = {(kind, width): seconds[f"{kind} {width}"] / loop.count for (kind, width), loop in loops.items()}
    rows = []
    for kind, model in models.items():
        size = _bytes(bench, model)
        floor = measure.floor_seconds(size, bandwidth)
        row: dict[str, Any] = {"model": name, "weights": kind, "megabytes_read": size / 1e6}
        row |= {"step_ms": measure.spread(times[kind, 1] * 1e3), "memory_floor_ms": measure.spread(floor * 1e3)}
        row |= {"memory_ratio": measure.spread(times[kind, 1] / floor)}
        row |= {f"block_{width}": measure.spread(times[kind, width] / times[kind, 1]) for width in widths[1:]}
        rows.append(row | {f"block_{width}_ms": measure.spread(times[kind, width] * 1e3) for width in widths[1:]})
    return rows


def _prompt(model: BoundModel) -> Prompt:
    encoder = jnp.ones((1, INPUT), jnp.int32) if model.model.is_encoder_decoder else None
    return Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), encoder)


def _slots(bench: Bench) -> int:
    return bench.settings.max_new_tokens + max(bench.settings.size_widths)


def _loop(bench: Bench, model: BoundModel, width: int) -> Any:
    return extend_loop(model, _prompt(model), width, _slots(bench))


def _bytes(bench: Bench, model: BoundModel) -> int:
    """Returns the bytes of stored weights and of caches that a step reads."""
    prompt = _prompt(model)
    cache = prefill(model.model, model.params, prompt, _slots(bench))
    return traffic.bytes_read(model.model.extend, model.params, cache, prompt.tokens)
