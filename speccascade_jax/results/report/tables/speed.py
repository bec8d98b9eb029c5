"""Table of speeds: tokens per second, model FLOPs utilisation (MFU) and peak memory of every timed point.

Needs no JAX.
"""

from speccascade_jax.results.analysis.panels import Panel
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import TIMES, Record

HEADER = ["Point", "tokens/s", "the target's", "MFU", "the target's MFU", "peak memory (GB)"]


def speed_grids(panel: Panel) -> list[Grid]:
    """Returns a table with a row for each timed record of a panel.

    Raises:
        ValueError: no record holds speeds, because nothing was timed, or an older version measured it.
    """
    spots = [*panel.ends, *panel.spots]
    rows = [[spot.name(), *_cells(record)] for spot in spots for record in spot.records if _has_speed(record)]
    if not rows:
        raise ValueError(
            "no record holds tokens per second: time points (Evaluation.latency_examples) with this version"
        )
    notes = [
        "Tokens/s: output tokens over the time of whole generations at batch size 1; the target's runs alternated with "
        "the method's. MFU: operations of the models' matrix products, rejected drafts included, over the "
        "bfloat16 peak of the devices; – where the peak or the operations are not known.",
        f"{panel.sizes()}. Device: {panel.setting['device']}.",
    ]
    return [Grid(title=f"Speed: {panel.title()}", header=HEADER, rows=rows, notes=notes)]


def _has_speed(record: Record) -> bool:
    return "tokens_per_second" in record.get("latency", {})


def _cells(record: Record) -> list[str]:
    timed = [record[name] for name in TIMES]
    peak = record.get("peak_memory", {}).get("bytes")
    return [
        *(f"{entry['tokens_per_second']:.1f}" for entry in timed),
        *(f"{entry['mfu']:.2%}" if "mfu" in entry else NONE for entry in timed),
        NONE if peak is None else f"{peak / 1e9:.2f}",
    ]
