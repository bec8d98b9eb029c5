"""Section `scoring`: time of a call on T tokens, as needed to score a block, divided by that of a call on one token."""

from __future__ import annotations

from benchmarks import measure
from benchmarks.loops import extend_loop
from benchmarks.setting import Bench, Rows


def run(bench: Bench) -> Rows:
    """Measures one row per model and T: ms per call, and the ratio to a call over one token in the same turns."""
    widths = bench.settings.widths
    rows = []
    for name in bench.track(("target", "draft")):
        bound = getattr(bench.pair, name)
        calls = {
            width: measure.long_enough(
                extend_loop(bound, bench.prompt([0]), width, bench.slots(max(widths))), bench.settings.loop_seconds
            )
            for width in ((1, *widths) if name == "target" else (1, 2))
        }
        seconds = measure.interleave({str(width): loop for width, loop in calls.items()}, 3 * bench.settings.repeats)
        call_seconds = {width: seconds[str(width)] / loop.count for width, loop in calls.items()}
        for width, times in call_seconds.items():
            row = {"model": name, "width": width, "ms": measure.spread(times * 1e3)}
            rows.append(row | {"ratio": measure.spread(times / call_seconds[1])})
    return {"scoring": rows}
