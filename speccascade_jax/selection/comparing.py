"""Policies held against each other: by number of queries and objective (paper 5, Figure 3), by `alignment_weight` (2).

What is compared is the reward of held-out queries, which is known for every arm: one pass of the models, made once,
judges as many policies as one likes. What a policy's choices are worth in time, `selection.report` measures.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from speccascade_jax.core.checks import several, whole
from speccascade_jax.selection import data as selection_data
from speccascade_jax.selection.train import PolicyTrainer, split
from speccascade_jax.storage.files import expanded, plain, write_atomically

Row = dict[str, Any]
LINEAR = "linear"
"""Among objectives: a linear policy by the trainer's own objective."""


def curves(
    trainer: PolicyTrainer,
    *,
    queries: Sequence[int] = (64, 256, 1024),
    objectives: Sequence[str] = ("reinforce", "expected", "best_arm", LINEAR, "linucb"),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Row]:
    """Train a policy for every number of queries, objective and seed; the same held-out queries judge all of a seed.

    Runs lie in `<run_dir>/curves/…`: one that was killed goes on, and those that ended are not run again, but LinUCB's
    single pass.

    Args:
        queries: numbers to learn from; those that the data lack are left out, and what all of them give is added.
        objectives: as of `PolicyTrainer`, or `LINEAR`.

    Returns:
        The rows, one for each run: `queries`, `objective`, `seed`, `best`, `reward`, `choices`.
    """
    several("queries", queries, 1)
    several("objectives", objectives, 1)
    several("seeds", seeds, 1)
    for count in queries:
        whole("queries", count, 1)
    total = len(selection_data.read(trainer.data).features)
    most = len(split(total, trainer.held_out, 0, trainer.seed)[0])
    counts = sorted({count for count in queries if count < most} | {most})
    points = list(itertools.product(objectives, counts, seeds))
    runs = [_curve_trainer(trainer, *point) for point in points]  # all are checked before one is trained
    rows = [
        {"objective": objective, "queries": count, "seed": seed, **run.run()}
        for (objective, count, seed), run in zip(points, runs, strict=True)
    ]
    _keep(trainer, "curves", rows)
    _show_curves(rows)
    return rows


def _curve_trainer(trainer: PolicyTrainer, objective: str, count: int, seed: int) -> PolicyTrainer:
    kind: Row = {"hidden": ()} if objective == LINEAR else {"objective": objective}
    folder = Path(trainer.run_dir, "curves", f"{objective}-{count}-{seed}")
    return replace(trainer, **kind, run_dir=str(folder), queries=count, seed=seed)


def weights(trainer: PolicyTrainer, *, alignment_weights: Sequence[float] = (0.0, 0.5, 1.0)) -> list[Row]:
    """Train a policy for every weight; how often it takes each arm, and what that gives.

    Returns:
        The rows, one for each weight: `alignment_weight`, `best`, `reward`, `choices`.
    """
    several("alignment_weights", alignment_weights, 1)
    folder = Path(trainer.run_dir, "weights")
    runs = [replace(trainer, alignment_weight=w, run_dir=str(folder / f"{w:g}")) for w in alignment_weights]
    rows = [{"alignment_weight": run.alignment_weight, **run.run()} for run in runs]
    _keep(trainer, "weights", rows)
    _show_weights(rows)
    return rows


def _keep(trainer: PolicyTrainer, name: str, rows: list[Row]) -> None:
    from speccascade_jax.results.report.figures import selection as figures

    folder = expanded(trainer.run_dir)
    write_atomically(folder / f"{name}.json", json.dumps(plain(rows), indent=1).encode())
    getattr(figures, f"draw_{name}")(rows, folder / f"{name}.png")
    print(f"rows: {folder / name}.json\nplot: {folder / name}.png")


def _show_curves(rows: list[Row]) -> None:
    console, objectives = Console(), list(dict.fromkeys(row["objective"] for row in rows))
    heads = [f"{name}: best arm, reward" for name in objectives]
    table = Table("queries", *heads, title="held-out queries, mean over seeds")
    for count in sorted({row["queries"] for row in rows}):
        some = [row for row in rows if row["queries"] == count]
        table.add_row(str(count), *(_means([row for row in some if row["objective"] == name]) for name in objectives))
    console.print(table)
    rewards = [f"{name} {value:.4f}" for name, value in rows[-1]["reward"].items() if name not in ("greedy", "dynamic")]
    console.print(", ".join(rewards), "(last seed)")


def _means(rows: list[Row]) -> str:
    best = sum(row["best"] for row in rows) / len(rows)
    reward = sum(row["reward"]["greedy"] for row in rows) / len(rows)
    return f"{best:.1%}, {reward:.4f}"


def _show_weights(rows: list[Row]) -> None:
    domains = rows[0]["choices"]
    table = Table("alignment weight", "reward", "best arm", *(f"{name}: choices" for name in domains))
    for row in rows:
        shares = [", ".join(f"{arm} {share:.0%}" for arm, share in arms.items()) for arms in row["choices"].values()]
        table.add_row(f"{row['alignment_weight']:g}", f"{row['reward']['greedy']:.4f}", f"{row['best']:.1%}", *shares)
    Console().print(table)
