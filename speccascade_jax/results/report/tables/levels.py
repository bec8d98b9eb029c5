"""Table of a stack's levels: each model's calls, and the share of drafts that it accepted.

In a stack, each model drafts for the next larger one (Globerson et al., 2025). Needs no JAX.
"""

from speccascade_jax.results.analysis.panels import Panel, label
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import Record

HEADER = ["Method", "α", "model", "calls per token", "tokens per call", "accepted", "drafts kept"]


def level_grids(panel: Panel) -> list[Grid]:
    """Returns a table of every stack in a panel, with a row for the target and for each level below the target.

    Raises:
        ValueError: no record has levels.
    """
    records = [record for spot in panel.spots for record in spot.records if record.get("levels")]
    if not records:
        raise ValueError("no record holds counts of levels: only stacks have levels (drafters=(Level(…),))")
    rows = [row for record in records for row in _rows(record)]
    notes = [
        "Calls per token: a model's calls over the tokens of the output; a level's calls include those that only read "
        "tokens of other models. Tokens per call: the tokens that a level passed to the level above, over the calls of "
        "its own rounds; tokens that the level above rejected count. The target's tokens are the output's.",
        "Accepted: share of the examined tokens that were drafted for this level. Drafts kept: the same share of all "
        "drafted tokens. The draft steps of the lowest model are in the row 'lowest draft'.",
        f"{panel.sizes()}.",
    ]
    return [Grid(title=f"Levels: {panel.title()}", header=HEADER, rows=rows, notes=notes)]


def _rows(record: Record) -> list[list[str]]:
    alpha, tokens = record["point"]["alpha"], record["counts"]["committed"]
    first = [label(record), NONE if alpha is None else f"{alpha:g}"]
    engines = [{"model": "target", **record["counts"], **record["measures"]}, *record["levels"]]
    # an engine's draft steps, minus the steps of its tail, are the calls of the model below it
    below = [engine["draft_steps"] - engine.get("tail_steps", 0) for engine in engines]
    calls = [engines[0]["target_calls"], *below]
    forms = {"block_efficiency": ".2f", "acceptance_rate": ".1%", "draft_utilisation": ".1%"}
    rows = []
    for engine, call_count in zip(engines, calls, strict=False):
        shown = [NONE if engine[name] is None else f"{engine[name]:{form}}" for name, form in forms.items()]
        rows.append([engine["model"], f"{call_count / tokens:.3f}", *shown])
    rows.append(["lowest draft", f"{calls[-1] / tokens:.3f}", NONE, NONE, NONE])
    if tails := sum(engine.get("tail_steps", 0) for engine in engines):
        rows.append(["tails", f"{tails / tokens:.3f}", NONE, NONE, NONE])
    return [[*(first if n == 0 else ["", ""]), *row] for n, row in enumerate(rows)]
