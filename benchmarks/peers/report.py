"""Tables of a run: all settings of a pair by batch size, and the fastest setting of each library and kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.columns import number, optional, percent
from benchmarks.peers.contenders import KEPT_QUALITY, LIBRARIES, LOOKUP, LOSSLESS, LOSSY, PLAIN
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import Row

KINDS = {PLAIN: "the target alone", LOSSLESS: "lossless speculation", LOSSY: "lossy", LOOKUP: LOOKUP}


def grids(record: Row) -> list[Grid]:
    """Returns the summary, then a table per pair, then tables with the quality of this package's lossy settings."""
    pairs = record["pairs"]
    tables = [summary(pairs)] if pairs else []
    tables += [settings(name, pair) for name, pair in pairs.items()]
    return tables + [quality(name, pair) for name, pair in pairs.items() if pair["quality"]]


def summary(pairs: Mapping[str, Row]) -> Grid:
    """Returns the fastest setting of each library, type of weights and kind, in ms per token at batch 1."""
    best: dict[tuple[str, str, str], dict[str, Row]] = {}
    for name, pair in pairs.items():
        for row in pair["rows"]:
            if row["batch"] != 1:
                continue
            group = best.setdefault((row["library"], row["weights"], row["kind"]), {})
            if name not in group or _median(row) < _median(group[name]):
                group[name] = row
    order = [(library, kind) for library in LIBRARIES for kind in KINDS]
    best = dict(sorted(best.items(), key=lambda item: order.index((item[0][0], item[0][2]))))
    rows = [
        [f"{library}, {weights}, {KINDS[kind]}", *(_best_cell(results.get(name)) for name in pairs)]
        for (library, weights, kind), results in best.items()
    ]
    sizes = [f"{name} ({pair['parameters'][0] / 1e6:.3g} M, draft {pair['parameters'][1] / 1e6:.3g} M)"
             for name, pair in pairs.items()]  # fmt: skip
    return Grid(
        title="The fastest setting of each kind, ms per token, batch 1, T = 0",
        header=["library, weights, kind", *sizes],
        rows=rows,
        notes=["Time of the whole call, from ids to ids, per token; in brackets the setting."],
        bold={
            (r, c + 1)
            for c, name in enumerate(pairs)
            if (r := _least([results.get(name) for results in best.values()])) is not None
        },  # fmt: skip
    )


def settings(name: str, pair: Row) -> Grid:
    """Returns the table of a pair: a line per setting, and columns per batch size."""
    sizes = sorted({row["batch"] for row in pair["rows"]})
    lines: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in pair["rows"]:
        lines.setdefault((row["library"], row["weights"], row["label"]), {})[row["batch"]] = row
    header = ["library", "weights", "setting"]
    for size in sizes:
        header += [f"batch {size}: ms / token", "/ ours, plain", "tokens equal to ours"]
    cells = []
    for key, by_size in lines.items():
        cells.append([*key, *(cell for size in sizes for cell in _cells(by_size.get(size)))])
    notes = _left_out(pair["left_out"]) + _near_ties(pair["rows"])
    target, draft = pair["parameters"]
    return Grid(
        title=f"{name}: {target:,} parameters, draft {draft:,}",
        header=header,
        rows=cells,
        notes=notes,
        bold={
            (r, 3 + 3 * n)
            for n, size in enumerate(sizes)
            if (r := _least([by_size.get(size) for by_size in lines.values()])) is not None
        },
    )


def quality(name: str, pair: Row) -> Grid:
    """Returns the table of a pair's lossy rules and α's, with quality and tokens per target call."""
    lines, chosen = pair["quality"], {(row["options"].get("rule"), row["options"].get("alpha")) for row in pair["rows"]}
    metric = lines[0]["metric"]
    rows = [
        [row["rule"] or "the target alone", optional(row["alpha"]), f"{row['quality']:.2f}",
         f"{row['tokens_per_call']:.2f}"] for row in lines
    ]  # fmt: skip
    return Grid(
        title=f"{name}: quality and target calls of lossy settings (γ = 5)",
        header=["rule", "α", metric, "tokens / target call"],
        rows=rows,
        notes=[
            f"Timed (bold): for each rule, the setting with the fewest target calls that loses at most {KEPT_QUALITY}."
        ],
        bold={(n, 0) for n, row in enumerate(lines) if row["rule"] and (row["rule"], row["alpha"]) in chosen},
    )


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return [NONE] * 3
    spread = row["ms_per_token"]
    three = _digits(spread["value"])
    times = f"{three(spread['value'])} ({three(spread['low'])} to {three(spread['high'])})"
    return [times, number(2)(row.get("ratio")), percent(row.get("equal_tokens"))]


def _best_cell(row: Row | None) -> str:
    if row is None:
        return NONE
    value = _digits(_median(row))(_median(row))
    return value if row["label"] == PLAIN else f"{value} ({row['label'].removeprefix(f'{PLAIN}, ')})"


def _digits(value: float) -> Callable[[float], str]:
    return number(3 if value < 1 else 2 if value < 10 else 1)


def _median(row: Row) -> float:
    return float(row["ms_per_token"]["value"])


def _least(rows: Sequence[Row | None]) -> int | None:
    """Returns the index of the fastest row, or `None`."""
    times = [(_median(row), n) for n, row in enumerate(rows) if row is not None]
    return min(times)[1] if times else None


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Returns notes on the settings that failed, one note per library and reason."""
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        labels.setdefault((row["library"], row["reason"]), {})[row["label"]] = None
    return [f"{library} fails ({reason}): {'; '.join(failed)}" for (library, reason), failed in labels.items()]


def _near_ties(rows: Sequence[Row]) -> list[str]:
    """Returns notes, per library and dtype, on how close our logits of the two tokens at first differences are."""
    worst: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row.get("equal_outputs", 1) < 1:
            name = f"{row['library']}, {row['weights']}"
            gap, share = worst.get(name, (-1.0, 1.0))
            worst[name] = (max(gap, -1.0 if row["gap"] is None else row["gap"]), min(share, row["equal_outputs"]))
    return [
        f"{name}: at least {share:.0%} of outputs equal ours; "
        + (
            f"at the first difference our logits of the two tokens differ by at most {gap:.2g}"
            if gap >= 0
            else "the others end early"
        )
        for name, (gap, share) in worst.items()
    ]


def header(record: Row) -> str:
    """Returns one paragraph: the date, the machine, the versions and the turns."""
    machine = record["device"]
    counts = [row["turns"] for pair in record["pairs"].values() for row in pair["rows"]]
    turns = " to ".join(map(str, sorted({min(counts, default=0), max(counts, default=0)})))
    # the keys are ordered sets, because two libraries may use different releases of one package
    packages: dict[str, dict[str, None]] = {}
    for releases in record["versions"].values():
        for package, version in releases.items():
            packages.setdefault(package, {})[version] = None
    versions = ", ".join(f"{package} {' and '.join(releases)}" for package, releases in packages.items())
    return (
        f"{record['date']}; {machine['processor']}, {machine['cpus']} CPUs, {machine['system']}; {versions}. Every "
        f"number is the median of {turns} turns, in brackets the lowest and the highest; load at the start: "
        f"{record['load_at_start']:.2f}."
    )


def markdown(record: Row) -> str:
    """Returns all tables of a run as Markdown, after a paragraph on the machine and the versions."""
    missing = [f"Left out: {name} ({reason}).\n" for name, reason in record["left_out"].items()]
    return "\n".join([header(record) + "\n", *missing, *(table.markdown() for table in grids(record))])
