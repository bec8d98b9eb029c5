"""Writer of the README's picture and table, both made from a committed file of the quickstart's records.

python -m benchmarks.front_page            measures again (two minutes on 2 cores), into docs/results/quickstart.jsonl
python -m benchmarks.front_page --draw     writes picture and table from that file, without measuring
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.analysis import headline, panels, significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.report.figures import tradeoff
from speccascade_jax.runtime import arguments
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.files import write_atomically

ROOT = repository_root()
STORE, PICTURE, PAGE = ROOT / "docs/results/quickstart.jsonl", ROOT / "docs/quickstart.png", ROOT / "README.md"
SHOWN = (
    (TARGET, None), (DRAFT, None), ("spec_decode", None), ("diff", 0.0), ("diff", 0.1), ("token_v3", 0.5),
    ("token_v3", 0.95),
)  # fmt: skip
"""Method and α of each row of the table."""
_NAMES = {TARGET: "target alone", DRAFT: "draft alone"}


def measure() -> None:
    """Runs the quickstart's sweep in an empty folder and copies its records to `STORE`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / STORE.name
        settings = [f"--gin.sweep.output='{output}'", "--gin.Evaluation.keep_outputs=False"]
        command = [sys.executable, "-m", "experiments.sweep", "--gin_file=configs/quickstart.gin", *settings]
        subprocess.run(command, cwd=ROOT, check=True)
        write_atomically(STORE, output.read_bytes())


def parts(panel: Panel) -> dict[str, str]:
    """Returns the README's texts that contain measurements, by the marker in the page below which each stands."""
    return {"claim": _claim(panel), "caption": _caption(panel), "table": _table(panel)}


def _claim(panel: Panel) -> str:
    """Returns the quickstart's result: in plain words if it is certain, otherwise as the report words it."""
    result, place = headline.headline(panel), significance.places(panel).chosen
    if result.speed is None or place is None or place.latency is None:
        return f"**{result.text}.**"
    cores, speed = place.spot.records[0]["device"]["cpus"], place.latency.inverse()
    loss, _ = headline.quality(panel, place.spot)
    return (
        f"**On {cores} CPU cores, the pair of `make quickstart` translates from English to German "
        f"{speed.value:.2f} times as fast as the target alone{headline.brackets(speed, '.2f')}{loss}.**\n"
        f"(The rule is {headline.name(place.spot)}{headline.beside_lossless(panel, place)}, which is lossless.)"
    )


def _caption(panel: Panel) -> str:
    places = significance.places(panel)
    meaning = "whose measured quality is at least the target's"
    if places.chosen and places.chosen.difference.value < 0:
        meaning = f"whose measured quality is at most {places.margin:g} below the target's"
    ring = f" A ring marks the fastest point {meaning}." if places.chosen else ""
    examples = panel.setting["quality_examples"]
    return (
        f"({_source(panel)} Points further right are faster. On the grey line, a coin sends each whole\n"
        f"request to the draft or to the target.{ring} Intervals are paired, 95%, over {examples} examples.)"
    )


def _source(panel: Panel) -> str:
    """Returns a sentence that names the command, the machine and the date of the measurement."""
    record = panel.required_target().records[0]
    device = record["device"]
    return f"Measured by `make quickstart` on {device['cpus']} cores ({device['processor']}), {record['started'][:10]}."


def _table(panel: Panel) -> str:
    head = ["method", panels.metric_name(panel.metric), "minus the target's [95%]", "speed-up [95%]"]
    head += ["rejected draft tokens"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    bootstrap, floor = Bootstrap(), significance.noise(panel)
    lines += ["| " + " | ".join(_row(panel, spot, bootstrap, floor)) + " |" for spot in _shown(panel)]
    return "\n".join(lines)


def _shown(panel: Panel) -> list[Spot]:
    spots = {(spot.records[0]["point"]["method"], spot.alpha): spot for spot in (*panel.ends, *panel.spots)}
    return [spots[point] for point in SHOWN]


def _row(panel: Panel, spot: Spot, bootstrap: Bootstrap, floor: float) -> list[str]:
    method = spot.records[0]["point"]["method"]
    name = _NAMES.get(method) or f"`{method}`" + ("" if spot.alpha is None else f", α {spot.alpha:g}")
    gain = significance.quality_gain(panel, spot, bootstrap)
    ratio = None if spot is panel.target else significance.latency(spot, bootstrap, floor)
    rejected = spot.measures.get("rejection_rate")
    return [
        name,
        f"{spot.quality.value:.2f}",
        gain.text("+.2f") if gain else "",
        ratio.inverse().text(".2f") if ratio else "1",
        f"{rejected.value:.0%}" if rejected else "",
    ]


def written(page: str, texts: dict[str, str]) -> str:
    """Returns the page with `texts` inserted between its markers `<!-- measured: NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: the page lacks the marker of a text.
    """
    for name, text in texts.items():
        marker = re.compile(rf"(<!-- measured: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not marker.search(page):
            raise ValueError(f"the page has no marker '<!-- measured: {name} -->' with '<!-- end -->': add both")
        page = marker.sub(rf"\g<1>{text}\g<2>", page)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless `--draw` is given, and writes picture and table; returns the exit status."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    if not parser.parse_args(argv).draw:
        measure()
    (panel,) = panels.panels(panels.read_points(STORE))
    tradeoff.draw(panel, PICTURE, share=None)
    write_atomically(PAGE, written(PAGE.read_text(encoding="utf-8"), parts(panel)))
    print(f"written: {PICTURE}, {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
