"""Section `bandwidth`: memory bandwidth far beyond the CPU's caches, and for working sets as large as the models."""

from __future__ import annotations

from benchmarks import measure, traffic
from benchmarks.loops import prefill
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.types import BoundModel


def run(bench: Bench) -> Rows:
    """Measures one row per working set: its size in MB, the bandwidth in GB/s, and what it is a floor for."""
    wanted = [
        ("far beyond the caches", bench.settings.working_set, "verification"),
        ("bytes that a step of the target reads", step_bytes(bench, bench.pair.target), "the target's steps"),
        ("bytes that a step of the draft reads", step_bytes(bench, bench.pair.draft), "the draft's steps"),
    ]
    streams = {name: bench.stream(size) for name, size, _ in bench.track(wanted)}
    seconds = measure.interleave({name: stream.loop for name, stream in streams.items()}, 3 * bench.settings.repeats)
    rows = []
    for name, size, purpose in wanted:
        speed = measure.spread(streams[name].bandwidth(seconds[name]) / 1e9)
        rows.append({"working_set": name, "megabytes": size / 1e6, "gigabytes_per_second": speed, "floor_of": purpose})
    return {"bandwidth": rows}


def step_bytes(bench: Bench, bound: BoundModel) -> int:
    """Returns the bytes of weights and caches that one step at batch 1 reads."""
    prompt = bench.prompt([0])
    cache = prefill(bound.model, bound.params, prompt, bench.slots(0))
    return traffic.bytes_read(bound.model.extend, bound.params, cache, prompt.tokens[:, :1])
