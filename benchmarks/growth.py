"""Section `growth`: how a call grows with cache, batch, vocabulary and block, beside its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from benchmarks import measure, traffic
from benchmarks.loops import extend_loop, prefill
from benchmarks.random_models import held_as, random
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.results.figures.tradeoff import save

SMALL = DecoderConfig(
    vocab_size=8192, num_embeddings=8192, d_model=256, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64,
    d_ff=1024, max_length=8192, tied=False, activation="silu",
)  # fmt: skip
"""25 MB of weights: at 4,096 positions a row's cache is as large again."""
SLOTS = 256
TITLES = {
    "positions": "positions in the cache, all filled",
    "capacity": "slots of the cache, 32 of them filled",
    "batch": "rows of the batch",
    "vocabulary": "entries of the vocabulary",
    "tokens": "tokens of a call (γ + 1)",
}


def run(bench: Bench) -> Rows:
    """One row per axis and value, see `_row`; all values of an axis in the same turns."""
    axes = bench.settings.growth
    return {"growth": [row for axis in bench.track(list(axes)) for row in _rows(bench, axis, axes[axis])]}


def _rows(bench: Bench, axis: str, values: Sequence[int]) -> list[dict[str, Any]]:
    loops, sizes = {}, {}
    for value in values:
        slots = value if axis in ("positions", "capacity") else SLOTS
        filled = {"positions": slots - 1, "capacity": min(32, slots - 1)}.get(axis, slots // 2)
        rows, width = (value if axis == name else 1 for name in ("batch", "tokens"))
        model = _model(value if axis == "vocabulary" else SMALL.vocab_size)
        prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32))
        loop = extend_loop(model, prompt, width, slots, filled)
        loops[str(value)] = measure.long_enough(loop, bench.settings.loop_seconds)
        cache = prefill(model.model, model.params, prompt, slots)
        sizes[value] = traffic.bytes_read(model.model.extend, model.params, cache, jnp.zeros((rows, width), jnp.int32))
    stream = bench.stream(bench.settings.working_set)
    seconds = measure.interleave({**loops, "memory": stream.loop}, 2 * bench.settings.repeats)
    bandwidth = stream.bandwidth(seconds["memory"])
    each = {value: seconds[str(value)] / loops[str(value)].count for value in values}
    return [_row(axis, value, each[value], sizes[value], bandwidth) for value in values]


def _row(axis: str, value: int, each: np.ndarray, size: int, bandwidth: np.ndarray) -> dict[str, Any]:
    floor = measure.floor_seconds(size, bandwidth)
    return {
        "axis": axis,
        "value": value,
        "megabytes_read": size / 1e6,
        "call_ms": measure.spread(each * 1e3),
        "floor_ms": measure.spread(floor * 1e3),
        "floor_ratio": measure.spread(each / floor),
    }


def _model(entries: int) -> BoundModel:
    return held_as(random(replace(SMALL, vocab_size=entries, num_embeddings=entries)), "float32")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per axis: measured time, with its lowest and highest, and the floor."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure, places = plt.subplots(1, len(axes), figsize=(3.2 * len(axes), 3), layout="constrained", squeeze=False)
    for place, axis in zip(places[0], axes, strict=True):
        own = [row for row in rows if row["axis"] == axis]
        values = [row["value"] for row in own]
        low, middle, high = ([row["call_ms"][name] for row in own] for name in ("low", "value", "high"))
        place.fill_between(values, low, high, alpha=0.25)
        place.plot(values, middle, marker="o", label="measured")
        place.plot(values, [row["floor_ms"]["value"] for row in own], "k--", label="memory floor")
        place.set(xscale="log", yscale="log", xlabel=TITLES[axis], ylabel="ms a call")
    places[0][0].legend()
    save(figure, path)
