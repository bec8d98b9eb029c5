"""The HTML page of a report, assembled from records, their outputs and charts."""

import itertools
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.results.analysis import headline, provenance, significance
from speccascade_jax.results.analysis.headline import Headline
from speccascade_jax.results.analysis.panels import Panel, Spot, short_name
from speccascade_jax.results.analysis.significance import Places
from speccascade_jax.results.report import charts, templates
from speccascade_jax.results.report.figures.styles import bar_note
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
    groups = _groups(panels)
    names = _anchors(main for main, _ in groups)
    results = [_result(main, others, store, names, examples, most) for main, others in groups]
    settings = [path.with_suffix(".settings.gin") for path in (store, shards.file_of(store))]
    settings_path = next((path for path in settings if path.is_file()), settings[0])
    page = templates.environment().get_template("page.html")
    html: str = page.render(
        title=headline.summary([main for main, _ in groups], [result["headline"] for result in results]),
        subject="; ".join(dict.fromkeys(f"{p.setting['task']}, {short_name(p.setting['pair'])}" for p in panels)),
        counted=f"{sum(len(p.spots) + len(p.ends) for p in panels if not p.predicted)} points of {store}",
        panels=results,
        environment=[*_environment(panels)],
        operative=settings_path.read_text("utf-8") if settings_path.is_file() else "",
        examples=examples,
        style=templates.style(),
    )
    return html


def _groups(panels: Sequence[Panel]) -> list[tuple[Panel, list[Panel]]]:
    """Returns each measured panel, with the panels that predict its points on other hardware (often none).

    A predicted panel without a measured one is a group of its own.
    """
    groups: list[tuple[Panel, list[Panel]]] = []
    for panel in sorted(panels, key=lambda panel: bool(panel.predicted)):
        key = panel.records[0]["key"]  # a predicted record is a copy of a measured one, with the same key
        partner = next((others for main, others in groups if key == main.records[0]["key"]), None)
        if panel.predicted and partner is not None:
            partner.append(panel)
        else:
            groups.append((panel, []))
    return groups


def _anchors(panels: Iterable[Panel]) -> dict[str, str]:
    """Returns the id of the page's element with the outputs of each point, by the key of the point's first record."""
    spots = [spot for panel in panels if not panel.predicted for spot in (*panel.ends, *panel.spots)]
    return {spot.records[0]["key"]: f"point-{number}" for number, spot in enumerate(spots)}


def _result(
    panel: Panel, others: Sequence[Panel], store: Path, names: dict[str, str], examples: dict[str, list[str]], most: int
) -> dict[str, Any]:
    """Returns a panel's part of the page: its results, measured and predicted, and the outputs of its points."""
    places = [significance.places(shown) for shown in (panel, *others)]
    headlines = [headline.headline(*pair) for pair in zip((panel, *others), places, strict=True)]
    views = [_view(*parts, store, names) for parts in zip((panel, *others), places, headlines, strict=True)]
    listed = [] if panel.predicted else [*panel.ends, *panel.spots]
    kept = {id(spot): _kept(store, spot.records[0]) for spot in listed}
    traced = [sum(output.trace is not None for output in entry or ()) for entry in kept.values()]
    return {
        "title": panel.title(),
        "headline": headlines[0],
        "views": views,
        "rejections": charts.rejections(places[0], kept) if panel.curves and listed else [],
        "points": [
            _point(spot, store, names[spot.records[0]["key"]], kept[id(spot)], examples, most) for spot in listed
        ],
        "traced": max(traced, default=0),
    }


def _kept(store: Path, record: Record) -> list[Output] | None:
    """Returns a record's outputs; for a damaged file, warns and returns `None`, so that the page shows the rest."""
    try:
        return outputs.read(store, record)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def _view(panel: Panel, places: Places, said: Headline, store: Path, names: dict[str, str]) -> dict[str, Any]:
    """Returns what depends on latencies: the result in words, the plot and the tables, measured or predicted."""
    spots = [*panel.ends, *panel.spots]
    anchors = {id(spot): names.get(spot.records[0]["key"], "") for spot in spots}
    commands = {id(spot): command(spot.records[0], store) for spot in spots}
    timed = any(spot.latency for spot in panel.spots)
    seeds = max(spot.seeds for spot in spots)
    caption = f"{panel.sizes()}; {bar_note(panel, places)}. Numbers at points: α or the stop threshold h."
    several = f" Qualities are means over {seeds} seeds; outputs and commands are those of the first seed."
    return {
        "name": f"predicted for {panel.predicted}" if panel.predicted else f"measured on {panel.setting['device']}",
        "said": said.text,
        "doubt": " ".join(filter(None, [*significance.busy_notes(panel), _doubt(panel, places)])),
        "plot": charts.trade_off(panel, places, anchors, commands) if panel.curves else None,
        "caption": caption + several * (seeds > 1),
        "grids": table2.grids([panel], points=not timed),
    }


def _doubt(panel: Panel, places: Places) -> str:
    """Returns sentences on how the point of the headline was chosen, and on what is not certain about it."""
    if places.chosen is None or places.chosen.latency is None:
        return ""
    near = f"within {places.margin:g} of the target's quality"
    least = "at least the target's" if places.chosen.difference.value >= 0 else near
    doubts = [f"that its quality is {near}"] * (not places.certain)
    timed = panel.predicted or significance.tried(places.chosen.spot)
    doubts += ["that it is faster"] * (places.chosen.latency.high >= 1 or not timed)
    sentences = [
        f"This is the fastest of {len(panel.spots)} points whose measured quality is {least}. It was chosen on the "
        "same examples that it is judged on, which the intervals ignore."
    ] * (len(panel.spots) > 1)
    return " ".join(sentences + [f"It is not certain {' and '.join(doubts)}."] * bool(doubts))


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
    """Yields the CSS class and the text of each run of adjacent tokens that have the same source and round.

    If every round wrote one token, as with the target alone or the draft alone, the ends of rounds separate no runs.
    """
    begins = set(itertools.accumulate(output.rounds)) if max(output.rounds, default=0) > 1 else set()
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


def _environment(panels: Iterable[Panel]) -> Iterator[tuple[str, str]]:
    records = [record for panel in panels for record in panel.records]
    yield "device", hardware_text(records[0]["device"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items())
    yield "package", ", ".join(sorted({provenance.package(record) or "–" for record in records}))
    yield "measured", " to ".join(f(r.get("started", "–")[:16].replace("T", " ") for r in records) for f in (min, max))
    for panel in (panel for panel in panels if not panel.predicted):
        for note in significance.noise_notes(panel):
            yield "noise", note
