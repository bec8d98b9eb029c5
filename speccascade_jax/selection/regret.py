"""What learning while serving cost: regret against the best fixed drafter, and against knowing (per phase)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.storage.files import plain, write_atomically

Row = dict[str, Any]


def costs(rows: list[Row]) -> dict[str, np.ndarray]:
    """float64 `[N]` of every way: milliseconds per token, query by query."""
    names = list(rows[0]["runs"])
    return {
        name: np.asarray([1e3 * row["runs"][name]["seconds"] / max(row["runs"][name]["tokens"], 1) for row in rows])
        for name in names
    }


def phases(rows: list[Row]) -> list[tuple[str, np.ndarray]]:
    """The domain and the queries (bool `[N]`) of every phase, in order."""
    number = np.asarray([row["phase"] for row in rows])
    return [(rows[int(np.flatnonzero(number == n)[0])]["domain"], number == n) for n in np.unique(number)]


def summary(rows: list[Row]) -> Row:
    """The best fixed arm of the stream and of every phase, and of every learner its regret per query.

    Returns:
        `best`: the arm with the least time over the stream; `phases`: for each its domain, queries, `best` arm, and
        `ms_per_token` of every way; `learners`: for each its `regret` in ms per token and query, over the stream
        against `best`, over `first` and `last` half of each phase against the phase's own best, and `over_knowing`,
        its time over that of the best arm of every phase, less 1.
    """
    found = costs(rows)
    arms = [name for name in found if name.startswith("always ")]
    best = min(arms, key=lambda name: found[name].sum())
    told, knowing = [], np.zeros(len(rows))
    for domain, chosen in phases(rows):
        own = min(arms, key=lambda name: found[name][chosen].sum())
        knowing[chosen] = found[own][chosen]
        means = {name: float(values[chosen].mean()) for name, values in found.items()}
        told.append({"domain": domain, "queries": int(chosen.sum()), "best": own, "ms_per_token": means})
    return {
        "best": best,
        "phases": told,
        "learners": {name: _learner(rows, found[name], found[best], knowing) for name in found if name not in arms},
    }


def _learner(rows: list[Row], own: np.ndarray, best: np.ndarray, knowing: np.ndarray) -> Row:
    halves: dict[str, list[float]] = {"first": [], "last": []}
    for _, chosen in phases(rows):
        at = np.flatnonzero(chosen)
        for name, some in zip(halves, np.array_split(at, 2), strict=True):
            halves[name].append(float((own - knowing)[some].mean()) if len(some) else math.nan)
    over = float(own.sum() / knowing.sum() - 1)
    return {"regret": float((own - best).mean()), **halves, "over_knowing": over}


def report(rows: list[Row], folder: Path) -> Row:
    """Print what `summary` finds, write it to `regret.json`, and draw `regret.png`."""
    from speccascade_jax.results.report.figures import selection as figures

    found = summary(rows)
    console = Console()
    names = list(found["phases"][0]["ms_per_token"])
    table = Table("phase", "queries", *names, title="ms per token")
    for phase in found["phases"]:
        means = phase["ms_per_token"]
        cells = [f"{means[name]:.3f}" + ("*" if name == phase["best"] else "") for name in names]
        table.add_row(phase["domain"], str(phase["queries"]), *cells)
    console.print(table)
    table = Table(
        "learner", f"regret against {found['best']}", "regret by phase, first half", "last half", "over knowing"
    )
    for name, told in found["learners"].items():
        halves = [", ".join(f"{value:+.4f}" for value in told[half]) for half in ("first", "last")]
        table.add_row(name, f"{told['regret']:+.4f}", *halves, f"{told['over_knowing']:+.1%}")
    console.print(table)
    write_atomically(folder / "regret.json", json.dumps(plain(found), indent=1).encode())
    figures.draw_regret(rows, found, folder / "regret.png")
    print(f"queries: {folder / 'queries.jsonl'}\nplot: {folder / 'regret.png'}")
    return found
