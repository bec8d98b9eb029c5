"""Section `growth`: time of a model's call as its cache, batch, vocabulary or block grows, and of stacks of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from benchmarks import measure, traffic
from benchmarks.loops import extend_loop, prefill
from benchmarks.random_models import held_as, random
from benchmarks.setting import Bench, Rows
from speccascade_jax.api import decode
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.engine.counters import level_counters
from speccascade_jax.engine.generate import Generation
from speccascade_jax.methods.settings import DRAFT_MODEL, Level
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.results.report.figures.drawing import save

SMALL = DecoderConfig(
    vocab_size=8192, num_embeddings=8192, d_model=256, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64,
    d_ff=1024, max_length=8192, tied=False, activation="silu",
)  # fmt: skip
"""A decoder whose step reads 25 MB of weights; one row's cache with 4,096 positions takes 34 MB."""
SLOTS = 256
TITLES = {
    "positions": "positions in the cache, all filled",
    "capacity": "slots of the cache, 32 of them filled",
    "batch": "rows of the batch",
    "vocabulary": "entries of the vocabulary",
    "tokens": "tokens of a call (γ + 1)",
    "models": "models of a stack",
}
LONGER = 20
"""Factor by which the timed loops of this section run longer than others, because each begins with a copy of the cache.

The copy of a large cache is slow, because it is written into new memory pages.
"""
STACKED_TOKENS = 120
"""Number of tokens that a stack writes."""


def run(bench: Bench) -> Rows:
    """Measures one row per growing size (axis) and value; all values of an axis are timed in the same turns."""
    axes = bench.settings.growth
    ways = {axis: _stacks if axis == "models" else partial(_calls, axis=axis) for axis in axes}
    return {"growth": [row for axis in bench.track(list(axes)) for row in ways[axis](bench, values=axes[axis])]}


def _calls(bench: Bench, axis: str, values: Sequence[int]) -> list[dict[str, Any]]:
    loops, sizes = {}, {}
    for value in values:
        slots = value if axis in ("positions", "capacity") else SLOTS
        filled = {"positions": slots - 1, "capacity": min(32, slots - 1)}.get(axis, slots // 2)
        rows, width = (value if axis == name else 1 for name in ("batch", "tokens"))
        model = _model(value if axis == "vocabulary" else SMALL.vocab_size)
        prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32))
        loop = extend_loop(model, prompt, width, slots, filled)
        loops[str(value)] = measure.long_enough(loop, LONGER * bench.settings.loop_seconds)
        cache = prefill(model.model, model.params, prompt, slots)
        sizes[value] = traffic.bytes_read(model.model.extend, model.params, cache, jnp.zeros((rows, width), jnp.int32))
    counts = {value: loops[str(value)].count for value in values}
    return _beside_memory(bench, axis, loops, sizes, counts)


def _stacks(bench: Bench, values: Sequence[int]) -> list[dict[str, Any]]:
    """Times stacks of `values` models with shared weights: every draft is accepted, so the number of calls is fixed."""
    model = _model(SMALL.vocab_size)
    pair = Pair(model, model, None, name="one model")
    cache = prefill(model.model, model.params, Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)), SLOTS)
    size = traffic.bytes_read(model.model.extend, model.params, cache, jnp.zeros((1, 1), jnp.int32))
    loops, sizes, counts = {}, {}, {}
    for depth in values:
        call = partial(decode, pair, [[5, 6, 7, 8]], max_new_tokens=STACKED_TOKENS, **_stack(depth))
        done = call().generation
        loops[str(depth)], counts[depth] = call, int(done.lengths.sum())
        sizes[depth] = size * _model_calls(done) / counts[depth]
    return _beside_memory(bench, "models", loops, sizes, counts)


def _stack(depth: int) -> dict[str, Any]:
    """Returns the settings of `decode` for a stack of `depth` models.

    The lowest model drafts two tokens, and each level passes on one token more than the level below.
    """
    if depth == 1:
        return {"method": "autoregressive"}
    if depth == 2:
        return {"method": "spec_decode", "block_size": 2}
    below = Level(model=DRAFT_MODEL, budget=3, block_size=2)
    for budget in range(4, depth + 1):
        below = Level(model=DRAFT_MODEL, budget=budget, drafters=(below,))
    return {"method": "spec_decode", "drafters": (below,)}


def _model_calls(done: Generation) -> int:
    """Returns the number of model calls in a generation: those of the target and the levels, and the draft's steps."""
    levels = [done.stats, *level_counters(done.inner)]
    drafted = int(levels[-1].draft_steps.sum())
    return sum(int(level.target_calls.sum()) for level in levels) + drafted


def _beside_memory(bench: Bench, axis: str, loops: Any, sizes: Any, counts: Any) -> list[dict[str, Any]]:
    """Times the loops in turns with a measurement of the memory's bandwidth.

    Args:
        sizes: bytes that one call (or token) reads, by value of the axis; counts: number of calls (or tokens) of one
            loop, by value.
    """
    stream = bench.stream(bench.settings.working_set)
    seconds = measure.interleave({**loops, "memory": stream.loop}, 2 * bench.settings.repeats)
    bandwidth = stream.bandwidth(seconds["memory"])
    return [_row(axis, value, seconds[str(value)] / counts[value], sizes[value], bandwidth) for value in counts]


def _row(axis: str, value: int, seconds: np.ndarray, size: float, bandwidth: np.ndarray) -> dict[str, Any]:
    floor = measure.floor_seconds(size, bandwidth)
    return {
        "axis": axis,
        "value": value,
        "megabytes_read": size / 1e6,
        "call_ms": measure.spread(seconds * 1e3),
        "floor_ms": measure.spread(floor * 1e3),
        "floor_ratio": measure.spread(seconds / floor),
    }


def _model(entries: int) -> BoundModel:
    return held_as(random(replace(SMALL, vocab_size=entries, num_embeddings=entries)), "float32")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws one plot per axis: the measured time (median, lowest and highest) and the floor of memory bandwidth."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    lines = -(-len(axes) // 3)
    figure, places = plt.subplots(lines, 3, figsize=(9, 2.7 * lines), layout="constrained", squeeze=False)
    for place in places.flat[len(axes) :]:
        place.remove()
    for place, axis in zip(places.flat, axes, strict=False):
        _panel(place, axis, [row for row in rows if row["axis"] == axis])
    places[0, 0].legend()
    save(figure, path)


def _panel(place: Any, axis: str, rows: Sequence[dict[str, Any]]) -> None:
    values = [row["value"] for row in rows]
    low, middle, high = ([row["call_ms"][name] for row in rows] for name in ("low", "value", "high"))
    place.fill_between(values, low, high, alpha=0.25)
    place.plot(values, middle, marker="o", label="measured")
    place.plot(values, [row["floor_ms"]["value"] for row in rows], "k--", label="memory floor")
    unit = "token" if axis == "models" else "call"
    place.set(xscale="log", yscale="log", xlabel=TITLES[axis], ylabel=f"ms per {unit}")
    place.set_xticks(values, [f"{value}" if value < 8192 else f"{value // 1024}k" for value in values])
    place.set_xticks([], minor=True)
    place.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    place.yaxis.set_major_formatter("{x:g}")
    place.yaxis.set_minor_formatter("")
