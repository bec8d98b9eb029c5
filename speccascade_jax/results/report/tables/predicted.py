"""Table of predicted latencies with the resource that limits each, and notes on predicted latencies. Needs no JAX."""

from collections.abc import Iterator, Mapping, Sequence

from speccascade_jax.results.analysis import significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.analysis.prediction import ends
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.program_costs import PARTS
from speccascade_jax.results.store.record import Record


def bound_grid(panel: Panel) -> Grid:
    """Returns the table of a panel's points: the predicted time of an example, the speed-up, the limiting resource.

    The time is a band from its low to its high end, because the time to start an op is unknown.
    """
    bootstrap = Bootstrap()
    header = ["Method", "α", "ms per example", "speed-up", "[low, high]", "bound by", *(f"{part} ms" for part in PARTS)]
    rows = [_row(spot, bootstrap) for spot in (*panel.ends, *panel.spots)]
    reading = (
        "Parts of the time of an example: memory and compute overlap, and the larger one counts; ops is the largest "
        "time of starting ops. Bound by: the largest part at the low end, where starting an op is free, or at the high "
        "end."
    )
    return Grid(title=panel.title(), header=header, rows=rows, notes=[panel.sizes(), reading, *notes(panel)])


def _row(spot: Spot, bootstrap: Bootstrap) -> list[str]:
    alpha = NONE if spot.alpha is None else f"{spot.alpha:g}"
    if spot.latency is None:
        return [spot.label, alpha, *[NONE] * (4 + len(PARTS))]
    record = spot.records[0]
    low, high = (end["latency"]["ms_per_example"]["value"] for ((end, *_),) in ends(spot.records))
    ratio = significance.latency(spot, bootstrap) or spot.latency
    parts: Mapping[str, float] = record["predicted"]["parts"]
    bounds = [max(names, key=lambda part: parts[part]) for names in (PARTS[:-1], PARTS)]
    cells = [f"{low:.2f}–{high:.2f}", f"{1 / spot.latency.value:.2f}×", ratio.inverse().brackets(".2f")]
    cells.append(" or ".join(dict.fromkeys(bounds)))
    return [spot.label, alpha, *cells, *(f"{1e3 * parts[part]:.2f}" for part in PARTS)]


def notes(panel: Panel) -> list[str]:
    """Returns notes on a panel's predicted latencies; none for a measured panel."""
    records = [record for record in panel.records if "predicted" in record]
    if not records:
        return []
    sentences = [_source(records)]
    if launch := next((r["predicted"]["launch"] for r in records if "launch" in r["predicted"]), None):
        sentences.append(
            f"[low, high] of a latency or speed-up: the band of the cost of starting an op, 0 to {1e6 * launch:g} µs, "
            "and the 95% bootstrap over examples; the number itself assumes half of the largest cost. Method and "
            "target pay the same cost."
        )
    if any(record["point"]["stop"] not in (None, "fixed") for record in records):
        sentences.append(
            "If a stop policy ends a block early, the block is still scored at the program's largest width."
        )
    return sentences + list(_refusals(records))


def _source(records: Sequence[Record]) -> str:
    """Returns the sentences on the programs, the compilers and the counts of a prediction."""
    facts = [record["predicted"] for record in records]
    first = facts[0]
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in fact["versions"].items())
        for fact in facts
        if "versions" in fact
    )
    sentence = (
        f"Latencies are predicted from the compiled program for {first['topology']}"
        f"{' (' * bool(versions)}{'; '.join(versions)}{')' * bool(versions)}, not measured: batch 1, {first['dtype']}, "
        f"mesh {first['mesh'][0]} × {first['mesh'][1]}, prompts of {first['prompt_length']} tokens"
    )
    if first["models"]:
        sentence += f", with the shapes of {' and '.join(first['models'])} instead of those of the measured models"
    counted = ", ".join(sorted({fact["counted_in"] for fact in facts}))
    measured = f"The counts of calls are measured on other hardware, in {counted}"
    return f"{sentence}. {measured}. The host's time is not included."


def _refusals(records: Sequence[Record]) -> Iterator[str]:
    """Yields a note for each reason why points have no prediction."""
    by_reason = dict[str, list[str]]()
    for record in records:
        if reason := record["predicted"].get("refused"):
            by_reason.setdefault(reason, []).append(record["point"]["title"])
    for reason, titles in by_reason.items():
        yield f"No prediction for {', '.join(dict.fromkeys(titles))}: {reason}."
