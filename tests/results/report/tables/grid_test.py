"""Tests of the forms of a table: the characters that each escapes, and that LaTeX compiles it."""

import shutil
import subprocess

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from speccascade_jax.results.report.tables.grid import Grid


def test_markdown_marks_winners_and_keeps_brackets():
    grid = Grid(title="T", header=["a", "b"], rows=[["x [y]", "1|2"]], notes=["n"], bold={(0, 1)})
    assert grid.markdown() == "**T**\n\n| a | b |\n| --- | ---: |\n| x [y] | **1\\|2** |\n\n- n\n"


def test_markdown_escapes_stars():
    grid = Grid(title="T", header=["a*", "b"], rows=[["x [y*]", "1.5 *"]], notes=["*: best"], bold={(0, 1)})
    html = MarkdownIt().enable("table").render(grid.markdown())
    assert "<strong>1.5 *</strong>" in html and "x [y*]" in html and "<li>*: best</li>" in html and "a*" in html


def test_the_terminal_shows_brackets_unchanged(capsys):
    grid = Grid(title="[t]", header=["[h]", "b"], rows=[["x [y]", "1 [low, high]"]], notes=["[low, high]: n"])
    Console(width=80).print(grid.rich())
    said = capsys.readouterr().out
    assert all(text in said for text in ("[t]", "[h]", "x [y]", "1 [low, high]", "[low, high]: n"))


def test_a_long_header_does_not_widen_its_column(capsys):
    Console(width=80).print(Grid(title="", header=["a", "many short words"], rows=[["x", "1.5"]], notes=[]).rich())
    assert max(map(len, capsys.readouterr().out.splitlines())) < 16


def test_title_and_notes_of_a_narrow_table_are_not_wrapped_to_its_width(capsys):
    title, note = "Training step of t5_1_1_small", "Compiled for v5e:4x4; nothing ran. A device has 16.9 GB."
    Console(width=80).print(Grid(title=title, header=["", ""], rows=[["fits", "no"]], notes=[note]).rich())
    assert {title, note} <= set(capsys.readouterr().out.splitlines())


def test_latex_is_a_booktabs_table():
    grid = Grid(
        title="T = 1", header=["Method", "Speed-up at target's quality: task_a"], rows=[["a", "1.2×"], ["b", "-0.1 *"]],
        notes=["50% & more"], bold={(1, 1)},
    )  # fmt: skip
    assert grid.latex().splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\footnotesize",
        r"\caption{T = 1}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"Method & \shortstack[r]{Speed-up at target's \\ quality: task\_a} \\",
        r"\midrule",
        r"a & 1.2$\times$ \\",
        r"b & \textbf{$-$0.1 {*}} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\medskip",
        r"\begin{minipage}{\linewidth}\raggedright",
        r"50\% \& more\par",
        r"\end{minipage}",
        r"\end{table}",
    ]


HARD = r"[a]*_#$%&{}~^\|<>"


@pytest.mark.parametrize(("text", "written"), [
    (HARD, r"{[}a{]}{*}\_\#\$\%\&\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}$<$$>$"),
    ("1.04× (α 0.3) [-0.2, +0.6] ≈", r"1.04$\times$ ($\alpha$ 0.3) {[}$-$0.2, +0.6{]} $\approx$"),
    ("γ = 5, ≤ 1 –, − …", r"$\gamma$ = 5, $\leq$ 1 --, $-$ \dots{}"),
    ("t5-small, 2026-01", "t5-small, 2026-01"),
])  # fmt: skip
def test_latex_escapes(text, written):
    assert f"{written} & " in Grid(title="", header=["a", "b"], rows=[[text, ""]], notes=[]).latex()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tmp_path):
    cells = [HARD, "1.04× (α 0.3) [-0.2, +0.6] ≈"]
    grid = Grid(title=HARD, header=cells, rows=[cells, cells], notes=["*: γ ≤ 1 – …", HARD], bold={(0, 1), (1, 0)})
    page = r"\documentclass{article}\usepackage{booktabs}\begin{document}" + grid.latex() + r"\end{document}"
    (tmp_path / "page.tex").write_text(page, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "Missing character" not in done.stdout
