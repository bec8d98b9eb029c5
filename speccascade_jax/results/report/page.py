"""The HTML page of a report, assembled from records, their outputs and charts."""

import itertools
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.results.analysis import provenance, significance
from speccascade_jax.results.analysis.panels import Panel, Spot, metric_name, short_name
from speccascade_jax.results.analysis.significance import Places
from speccascade_jax.results.report import charts, templates
from speccascade_jax.results.report.tables import table2
from speccascade_jax.results.store import outputs, shards
from speccascade_jax.results.store.outputs import LETTERS, Output
from speccascade_jax.results.store.record import Record, hardware_text, speed_text
from speccascade_jax.runtime import paths
from speccascade_jax.storage.files import check_replaceable, expanded, rewrite

MOST = 64
"""Number of outputs that the page shows for each point; the store's folder of outputs holds all of them."""
_LONGEST = 600
_MARK = '<body class="sc">'
"""Text that every report contains, and by which a report is recognized."""
_CLASSES = {letter: templates.CLASSES[name] for letter, name in LETTERS.items()}


def write(panels: Sequence[Panel], store: str | Path, path: Path | None = None, *, most: int = MOST) -> Path:
    """Writes the report of a store's panels, by default beside the store as `.html`; returns its path.

    Args:
        panels: the panels of the store's records (`panels.panels`).
        store: the store, with its outputs and the sweep's settings beside it.
        path: the file to write; `None` for a file beside the store.
        most: number of outputs that are shown for each point.

    Raises:
        ValueError: no panel contains the target alone.
    """
    shown = [panel for panel in panels if panel.target]
    if not shown:
        panels[0].required_target()
    path = path or default_path(store)
    rewrite(path, _page(shown, expanded(store), most), _MARK)
    return path


def default_path(store: str | Path) -> Path:
    """Returns the path of a store's report; raises ValueError if a file that is not a report has this path."""
    path = expanded(store).with_suffix(".html")
    check_replaceable(path, _MARK)
    return path


def _page(panels: Sequence[Panel], store: Path, most: int) -> str:
    examples: dict[str, list[str]] = {}
    numbers, names = itertools.count(), dict[str, str]()
    panel_entries, figures = [], list[Any]()
    for panel in panels:
        panel_places = significance.places(panel)
        spots = [*panel.ends, *panel.spots]
        # a predicted point leads to the outputs of the measured point, whose record it is a copy of
        listed = [] if panel.predicted else spots
        names |= {spot.records[0]["key"]: f"point-{next(numbers)}" for spot in listed}
        anchors = {id(spot): names.get(spot.records[0]["key"], "") for spot in spots}
        kept = {id(spot): _kept(store, spot.records[0]) for spot in listed}
        points = [_point(spot, store, anchors[id(spot)], kept[id(spot)], examples, most) for spot in listed]
        traced = max(
            (sum(o.trace is not None for o in point_outputs or ()) for point_outputs in kept.values()), default=0
        )
        panel_figures = _figures(panel, panel_places, store, anchors, kept) if panel.curves else []
        panel_entries.append((_panel(panel, panel_places) | {"points": points, "traced": traced}, len(panel_figures)))
        figures += panel_figures
    code, stands = charts.embedded(figures) if figures else ("", [])
    standing = iter(stands)
    for entry, number in panel_entries:
        first, *more = itertools.islice(standing, number) if number else ("",)
        entry |= {"plot": first, "rejections": more}
    settings = [path.with_suffix(".settings.gin") for path in (store, shards.file_of(store))]
    settings_path = next((path for path in settings if path.is_file()), settings[0])
    page = templates.environment().get_template("page.html")
    html: str = page.render(
        title=f"{panels[0].setting['task']}, {short_name(panels[0].setting['pair'])}",
        counted=f"{sum(len(p.spots) + len(p.ends) for p in panels if not p.predicted)} points of {store}",
        panels=[entry for entry, _ in panel_entries],
        environment=[*_environment(panels)],
        operative=settings_path.read_text("utf-8") if settings_path.is_file() else "",
        examples=examples,
        style=templates.style(),
        script=charts.script() if figures else "",
        charts=code,
    )
    return html


def _figures(
    panel: Panel, places: Places, store: Path, anchors: dict[int, str], kept: dict[int, list[Output] | None]
) -> list[Any]:
    """Returns a panel's trade-off and, of measured panels, the positions of rejections."""
    commands = {id(spot): command(spot.records[0], store) for spot in (*panel.ends, *panel.spots)}
    plot = charts.trade_off(places, metric_name(panel.metric), anchors, commands)
    return [plot] if panel.predicted else [plot, *charts.rejections(places, kept)]


def _kept(store: Path, record: Record) -> list[Output] | None:
    """Returns a record's outputs; for a damaged file, warns and returns `None`, so that the page shows the rest."""
    try:
        return outputs.read(store, record)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def _panel(panel: Panel, places: Places) -> dict[str, Any]:
    caption = (
        f"{panel.sizes()}. The green band is a loss of at most {places.margin:g}. Each interval is that of one point's "
        f"difference to the target on the same examples; it does not account for the choice of α on them."
    )
    timed = any(spot.latency for spot in panel.spots)
    grids = table2.grids([panel], points=not timed)
    seeds = max(spot.seeds for spot in (*panel.ends, *panel.spots))
    several = f" Qualities are means over {seeds} seeds; outputs and commands are those of the first seed." * (
        seeds > 1
    )
    entry = {"title": panel.title(), "caption": caption + several, "grids": grids, "verdict": _verdict(panel, places)}
    return entry | {"curves": charts.curves_key(places), "beside": charts.ends_key(places, timed)}


def _point(
    spot: Spot, store: Path, anchor: str, kept: list[Output] | None, examples: dict[str, list[str]], most: int
) -> dict[str, Any]:
    record = spot.records[0]
    facts = [f"quality {spot.quality.value:.2f}"]
    facts += [f"latency {spot.latency.value:.2f}"] if spot.latency else []
    timed = record.get("latency")
    facts += [f"{speed_text(timed)} tokens per second"] if timed and "tokens_per_second" in timed else []
    rejected = spot.measures.get("rejection_rate")
    facts += [f"rejected {rejected.value:.0%}"] if rejected else []
    return {
        "anchor": anchor,
        "name": spot.name(),
        "said": ", ".join(facts),
        "command": command(record, store),
        "configuration": record.get("configuration", ""),
        "outputs": None if kept is None else [_output(output, record, examples) for output in kept[:most]],
        "more": max(len(kept or ()) - most, 0),
        "file": str(outputs.folder(store)),
    }


def _output(output: Output, record: Record, examples: dict[str, list[str]]) -> dict[str, Any]:
    name = f"{record['fingerprints']['examples'][:8]}-{output.id}"
    if name not in examples:
        references = (output.reference,) if isinstance(output.reference, str) else output.reference
        examples[name] = [_cut(text) for text in (output.prompt, *references[:1])]
    return {"id": output.id, "example": name, "trace": output.trace, "runs": [*_runs(output)]}


def _cut(text: str) -> str:
    """Shortens a long text to its two ends, because the question of a prompt is often at the end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def _runs(output: Output) -> Iterator[tuple[str, str]]:
    """Yields the CSS class and the text of each run of adjacent tokens that have the same source and round."""
    begins = set(itertools.accumulate(output.rounds))
    sources = output.sources or " " * len(output.pieces)
    shown, run, number = "", "", 0
    for place, (piece, source) in enumerate(zip(output.pieces, sources, strict=True)):
        if place and (place in begins or source != run):
            yield _CLASSES.get(run, "") + " e" * bool(number), shown
            shown, number = "", place if place in begins else 0
        run, shown = source, shown + piece
    yield _CLASSES.get(run, "") + " e" * bool(number), shown


def command(record: Record, store: Path) -> str:
    """Returns the command that runs a record's point again."""
    return f"{paths.command('run')} --from_record={record['key'][:12]} --store={shlex.quote(str(store))}"


def _verdict(panel: Panel, places: Places) -> str:
    """Returns sentences about a panel's fastest point whose loss of quality is within the margin."""
    if not any(spot.latency for spot in panel.spots):
        return "No latency was predicted." if panel.predicted else "No latency was measured."
    if places.chosen is None or places.chosen.latency is None:
        return f"No point is faster than the target and within {places.margin:g} of its {metric_name(panel.metric)}."
    quick, loss = places.chosen.latency, places.chosen.difference
    speed = charts.spanned(quick.inverse(), ".2f")
    near = f"within {places.margin:g} of the target's quality"
    slow = quick.high >= 1 or not significance.tried(places.chosen.spot)
    doubts = [f"that its quality is {near}"] * (not places.certain) + ["that it is faster"] * slow
    source = f"Predicted from the compiled program for {panel.predicted}, not measured: " if panel.predicted else ""
    return (
        f"{source}{places.chosen.spot.name()} is {speed} times as fast as the target alone, at "
        f"{charts.spanned(loss, '+.2f')} "
        f"{metric_name(panel.metric)}: the fastest of the points whose measured quality is {near}. "
        + (f"It is not certain {' and '.join(doubts)}. " if doubts else "")
        + "It was chosen on the same examples that it is judged on."
    )


def _environment(panels: Iterable[Panel]) -> Iterator[tuple[str, str]]:
    records = [record for panel in panels for record in panel.records]
    yield "device", hardware_text(records[0]["device"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items())
    yield "package", ", ".join(sorted({provenance.package(record) or "–" for record in records}))
    yield "measured", " to ".join(f(r.get("started", "–")[:16].replace("T", " ") for r in records) for f in (min, max))
    for panel in (panel for panel in panels if not panel.predicted):
        for note in significance.noise_notes(panel):
            yield "noise", note
