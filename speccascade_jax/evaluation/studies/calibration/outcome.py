"""What a calibration tells: settings on examples that the search never saw, as a table, as JSON and as gin to paste."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.configurations import gin_blocks
from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.studies.calibration.bench import Bench, Records, Window
from speccascade_jax.evaluation.studies.calibration.tolerance import Tolerance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.report.tables.grid import NONE, Grid

NOTE = "[low, high]: 95% of paired resamples of the examples. Latency: batch 1, beside the target."
Entry = dict[str, Any]
"""One setting with its numbers, as JSON knows them; `_entry` says what is in it."""


def measure(
    bench: Bench, named: Mapping[str, Point], target: Point, window: Window, tolerance: Tolerance | None = None
) -> list[Entry]:
    """The settings and the target, measured on a window.

    Args:
        bench: what measures; named: what a setting is called, for instance "chosen" -> setting.
        target: the target alone; it comes last.
    """
    measured, bootstrap = bench.measure([*named.values(), target], window), Bootstrap()
    entries = [
        _entry(name, point, measured[point], measured[target], bootstrap, tolerance) for name, point in named.items()
    ]
    return [*entries, _entry("target", target, measured[target], measured[target], bootstrap, None)]


def _entry(
    name: str, point: Point, records: Records, target: Records, bootstrap: Bootstrap, tolerance: Tolerance | None
) -> Entry:
    """A setting's numbers with 95% intervals over examples, paired with the target's: `[value, low, high]`.

    `quality`; `difference_percent` to the target's quality; `latency` over the target's, and `None` for the target
    itself; `kept`: whether the tolerance is kept on all examples; `share`: in how many resamples of them.
    """
    quality, reference = bootstrap.qualities(records, target)
    timed = point.settings.method != TARGET
    told: Entry = {
        "name": name,
        "setting": point.label().rpartition(" seed=")[0],  # seeds are told once for all
        "settings": dataclasses.asdict(point.settings),
        "metric": records[0]["quality"]["metric"],
        "quality": bootstrap.interval(quality),
        "difference_percent": bootstrap.interval(100 * (quality / reference - 1)) if reference.min() > 0 else None,
        "latency": bootstrap.interval(bootstrap.latencies(records)) if timed else None,
    }
    if tolerance is not None:
        kept = tolerance.kept(records, target, bootstrap)
        told |= {"kept": bool(kept[0]), "share": float(kept[1:].mean())}
    return told


def show(title: str, entries: Sequence[Entry]) -> None:
    """Print the entries as a table."""
    rows = [
        [
            each["name"],
            each["setting"],
            _cell(each["quality"], "{:.2f}"),
            _cell(each["difference_percent"], "{:+.1f}%"),
            _cell(each["latency"], "{:.2f}"),
            *((f"{'yes' if each['kept'] else 'no'}, {each['share']:.0%}",) if "kept" in each else (NONE,)),
        ]
        for each in entries
    ]
    header = ["", "setting", entries[0]["metric"], "to the target", "latency / target's", "kept, in resamples"]
    Console(width=140).print(Grid(title=title, header=header, rows=rows, notes=[NOTE]).rich())


def paste(settings: Sequence[tuple[Point, str]], head: Sequence[str], live: bool = True) -> str:
    """A gin file for `experiments/run.py`, beside gin/run.gin, a pair's file and a task's.

    The first setting takes effect (none, if not `live`), the others stand below as comments to be uncommented.

    Args:
        settings: with what is to be said of each; head: the file's first lines.
    """
    lines = [*(f"# {line}" for line in head), "from __gin__ import dynamic_registration", ""]
    lines += ["from speccascade_jax.evaluation import points"]
    for number, (point, comment) in enumerate(settings):
        block = gin_blocks(point.settings)
        lines += ["", f"# {comment}", *(line if live and number == 0 else f"# {line}" for line in block)]
    return "\n".join(lines) + "\n"


def said(each: Entry) -> str:
    """An entry in one line."""
    words = [f"{each['name']}: {each['setting']}", f"{each['metric']} {_cell(each['quality'], '{:.2f}')}"]
    if each["difference_percent"]:
        words.append(f"{_cell(each['difference_percent'], '{:+.1f}%')} to the target")
    if each["latency"]:
        words.append(f"latency {_cell(each['latency'], '{:.2f}')} of the target's")
    if "kept" in each:
        words.append(f"tolerance {'kept' if each['kept'] else 'not kept'} (kept in {each['share']:.0%} of resamples)")
    return ", ".join(words)


def _cell(interval: Interval | None, form: str) -> str:
    if interval is None:
        return NONE
    value, low, high = (form.format(number) for number in interval)
    return f"{value} [{low}, {high}]"
