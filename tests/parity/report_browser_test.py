"""Test of the report in a headless browser: it loads no other file, and points show their settings and outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, ModelPair

pytestmark = pytest.mark.parity
PROGRAM = Path(__file__).parents[1] / "support" / "browser.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Returns the report of a sweep with the smaller shipped pair."""
    store = tmp_path_factory.mktemp("sweep") / "mine.jsonl"
    evaluation = Evaluation(task="tiny_translation", quality_examples=8, latency_examples=1, latency_trials=1)
    experiment.sweep(
        pair=ModelPair(name="tatoeba_en_de"), evaluation=evaluation, methods=["chow"],
        alphas={"chow": (0.3, 0.6)}, output=str(store),
    )  # fmt: skip
    return store.with_suffix(".html")


@pytest.fixture(scope="module")
def browse(report, tmp_path_factory):
    """Returns a function (size, scheme) -> the browser's log; skips if there is no browser."""
    can = [sys.executable, "-c", "import PySide6.QtWebEngineWidgets"]
    if (tried := subprocess.run(can, capture_output=True, text=True)).returncode:
        pytest.skip(f"no browser is installed: {tried.stderr.strip().splitlines()[-1]}")

    def call(size, scheme):
        picture = tmp_path_factory.mktemp("picture") / "seen.png"
        words = [sys.executable, str(PROGRAM), str(report), size, scheme, str(picture)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip(), done.stderr[-2000:]
        return json.loads(done.stdout.strip().splitlines()[-1]) | {"picture": picture.stat().st_size}

    return call


@pytest.mark.parametrize(("size", "scheme"), [("1200x1000", "light"), ("390x800", "light"), ("1000x900", "dark")])
def test_the_report_loads_shows_tooltips_and_opens_outputs(browse, report, size, scheme):
    did = browse(size, scheme)
    assert did["loaded"] == [True] and did["errors"] == []
    assert did["asked"] == [report.resolve().as_uri()]
    assert did["place"]["name"] in did["hovered"] and "--from_record=" in did["hovered"]
    assert did["seen"]["open"] == [did["place"]["anchor"]] and did["seen"]["hash"] == f"#{did['place']['anchor']}"
    assert did["seen"]["prompts"] == 16  # prompt and reference of each of eight outputs
    assert did["seen"]["width"] <= int(size.partition("x")[0])  # Nothing overflows to the right.
    assert did["tip"]["shown"] == "block" and did["tip"]["inside"] and "drafted and kept" in did["tip"]["text"]
    assert did["picture"] > 10_000
    red, *_ = did["seen"]["background"].removeprefix("rgb(").split(",")
    assert (int(red) < 60) == (scheme == "dark")
