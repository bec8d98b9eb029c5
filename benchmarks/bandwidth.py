"""Section `bandwidth`: how fast bytes arrive here, beyond the caches and for working sets the size of the models'."""

from __future__ import annotations

from benchmarks import measure, traffic
from benchmarks.loops import prefill
from benchmarks.setting import Bench, Rows
from speccascade_jax.models.base import BoundModel
from speccascade_jax.types import Array


def run(bench: Bench) -> Rows:
    """One row per working set: size in MB, GB/s, and what it is the floor of."""
    wanted = [
        ("far beyond the caches", bench.settings.working_set, "verification"),
        ("what a step of the target reads", step_bytes(bench, bench.pair.target), "the target's steps"),
        ("what a step of the draft reads", step_bytes(bench, bench.pair.draft), "the draft's steps"),
    ]
    rows = []
    for name, size, purpose in bench.track(wanted):
        speed = measure.times(1e-9, bench.bandwidth(size))
        rows.append({"working_set": name, "megabytes": size / 1e6, "gigabytes_per_second": speed, "floor_of": purpose})
    return {"bandwidth": rows}


def step_bytes(bench: Bench, bound: BoundModel) -> int:
    """Bytes of weights and caches that one step at batch 1 reads."""
    prompt = bench.prompt([0])
    cache = prefill(bound.model, bound.params, prompt, bench.slots(0))
    return traffic.bytes_read(bound.model.extend, bound.params, cache, prompt.tokens[:, :1])


def weight_bytes(bench: Bench, bound: BoundModel) -> int:
    """The weights' part of `step_bytes`."""
    prompt = bench.prompt([0])
    cache = prefill(bound.model, bound.params, prompt, bench.slots(0))

    def extend(params: Array) -> object:
        return bound.model.extend(params, cache, prompt.tokens[:, :1])

    return traffic.bytes_read(extend, bound.params)
