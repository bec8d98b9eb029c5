"""Tests of a first session with the package: an installed wheel, a user's data file, a user's rule, six commands.

The repository is not on Python's path, so only the wheel's code runs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import speccascade_jax as sc
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import read_records
from speccascade_jax.runtime.paths import repository_root

pytestmark = pytest.mark.laws
RULE = '''
import jax.numpy as jnp
import speccascade_jax as sc


def favourite(pair, alpha):
    """Defer where the target's p of the draft's argmax is below (1 - alpha) max p."""
    top = pair.q == pair.q.max(-1, keepdims=True)
    return jnp.where(top, pair.p, 0.0).max(-1, keepdims=True) < (1.0 - alpha) * pair.p.max(-1, keepdims=True)


FAVOURITE = sc.Rule(name="favourite", deferral=favourite)
'''
README = (repository_root() / "README.md").read_text(encoding="utf-8")
COMMAND = re.search(r"^speccascade sweep [^`]*?my_rules\.[^`]*?(?=```)", README, re.MULTILINE)[0]
"""The README's command for a user's own data, with ten rows and two α's."""
FEW = """--gin.sweep.alphas={'my_rules.FAVOURITE':(0.2,0.6)}
 --gin.Evaluation.quality_examples=8 --gin.Evaluation.latency_examples=2"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Returns `typed(words) -> process` in a folder with two files; the wheel is installed and the clone is hidden."""
    folder, installed = tmp_path_factory.mktemp("desk"), tmp_path_factory.mktemp("installed")
    wheels = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    clone = tmp_path_factory.mktemp("clone") / "repository"
    subprocess.run(["git", "clone", "-q", str(repository_root()), str(clone)], check=True)
    build = [*pip, "wheel", "--no-deps", "-w", str(wheels), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = wheels.glob("*.whl")
    index = _index(tmp_path_factory.mktemp("index"), wheel)
    source = ["--no-deps", "--no-cache-dir", "--index-url", index.as_uri(), "--target", str(installed)]
    subprocess.run([*pip, "install", *source, "speccascade_jax"], check=True, timeout=600)
    rows = [("The weather was cold.", "Das Wetter war kalt."), ("I stayed at home.", "Ich blieb zu Hause.")]
    lines = "".join(f'"{source}","{reference}"\n' for source, reference in rows * 5)
    (folder / "mine.csv").write_text("source,reference\n" + lines)
    (folder / "my_rules.py").write_text(RULE)
    environment = os.environ | {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu", "COLUMNS": "160"}

    def typed(*words):
        command = [sys.executable, str(installed / "bin" / "speccascade"), *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)

    typed.folder, typed.installed, typed.wheel = folder, installed, wheel
    return typed


def _index(folder: Path, wheel: Path) -> Path:
    """Returns the folder of a package index with one wheel, in the form that PyPI has (PEP 503)."""
    (folder / "speccascade-jax").mkdir()
    (folder / "speccascade-jax" / "index.html").write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>')
    return folder


def test_an_index_gives_a_small_wheel_that_knows_its_version(desk):
    """PyPI refuses files above 100 MB; the shipped pairs are the largest part."""
    version = sc.__version__
    assert desk.wheel.name == f"speccascade_jax-{version}-py3-none-any.whl" and desk.wheel.stat().st_size < 60e6
    assert desk("--version").stdout == f"speccascade_jax {version}\n"
    program = "import speccascade_jax as sc; print(sc.__file__, sc.shipped_pairs())"
    environment = os.environ | {"PYTHONPATH": str(desk.installed), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=desk.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith(f"{desk.installed / 'speccascade_jax' / '__init__.py'} ") and "tatoeba" in done.stdout


def test_one_command_writes_table_plot_report_outputs_and_traces(desk):
    before = {path: path.stat().st_mtime_ns for path in desk.installed.rglob("*") if path.suffix in (".py", ".gin")}
    begin = time.monotonic()
    done = desk("sweep", *shlex.split(COMMAND.replace("\\\n", " "))[2:], *FEW.split())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert time.monotonic() - begin < 600 and len(COMMAND.splitlines()) + len(FEW.splitlines()) <= 6
    out = desk.folder / "results"
    assert {"mine.jsonl", "mine.png", "mine.html", "mine.settings.gin", "mine.outputs"} <= {
        path.name for path in out.iterdir()
    }
    assert "Speed-up" in done.stdout and "report: results/mine.html" in done.stdout
    assert "speccascade compare" in done.stdout and "python -m experiments" not in done.stdout
    records = read_records(out / "mine.jsonl")
    rule_records = [record for record in records if record["point"]["method"] == "my_rules.FAVOURITE"]
    assert len(records) == 5 and len(rule_records) == 2
    assert rule_records[0]["imports"] == {"my_rules": str(desk.folder / "my_rules.py")}
    assert rule_records[0]["package"]["revision"] is None and rule_records[0]["package"]["version"]
    for record in records:
        kept = outputs.read(out / "mine.jsonl", record)
        assert len(kept) == 8 and sum(output.trace is not None for output in kept) == 4
    page = (out / "mine.html").read_text()
    assert "favourite" in page and "speccascade run --from_record=" in page
    after = {path: path.stat().st_mtime_ns for path in desk.installed.rglob("*") if path.suffix in (".py", ".gin")}
    assert after == before


def test_rerunning_a_record_gives_the_same_tokens_with_a_users_rule_too(desk):
    records = read_records(desk.folder / "results" / "mine.jsonl")
    rule_record = next(record for record in records if record["point"]["method"] == "my_rules.FAVOURITE")
    done = desk("run", f"--from_record={rule_record['key'][:10]}", "--store=results/mine.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same key; the same tokens in 8 of 8 outputs" in done.stdout


def test_the_wheel_has_the_other_commands(desk):
    done = desk("--help")
    assert done.returncode == 0
    for name in ("sweep", "run", "report", "compare", "score", "tables", "plots", "show", "convert", "launch"):
        assert f"\n  {name} " in done.stdout
    slip = desk("swep")
    assert slip.returncode == 1 and "unknown command 'swep': did you mean sweep" in slip.stderr
    done = desk("compare", "results/mine.jsonl", "autoregressive", "my_rules.FAVOURITE@0.6")
    assert done.returncode == 0 and "8 examples" in done.stdout


def test_the_wheel_has_the_marker_of_type_annotations(desk):
    assert (desk.installed / "speccascade_jax" / "py.typed").is_file()
    assert not (desk.installed / "tests").exists() and not (Path(desk.installed) / "experiments").exists()
