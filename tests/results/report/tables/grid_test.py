"""Tests of the forms of a table: the characters that each escapes, and that LaTeX compiles it."""

import ast
import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from speccascade_jax.results import report
from speccascade_jax.results.analysis import significance
from speccascade_jax.results.report.tables.grid import Grid, _latex


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


def printed(grid, capsys, width, more=None):
    Console(width=width).print(grid.rich(more))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


WIDE = Grid(
    title="T", header=["Method", "a", "b", "few"], notes=["A long note.", "Another."], brief=["Short."], spare=("few",),
    rows=[["Cascade [Chow]", "1.50× [1.2, 1.8]; -1.0 [-2.0, 0.0]", "50 [49, 51] ≈", "7"], ["Target", "–", "50", "7"]],
)  # fmt: skip


def test_a_table_takes_the_widest_form_that_fits(capsys):
    """Checks the order: whole lines, parts of a cell, fewer columns, no spaces, intervals and names on two lines."""
    forms = [WIDE.fitted(width) for width in (100, WIDE.width, WIDE.width - 1, 50, 46, 44, 37)]
    widths = [form.width for form in forms]
    assert forms[0] == forms[1] == WIDE and widths == sorted(widths, reverse=True)
    assert forms[2].header == WIDE.header and forms[2].rows[0][1] == "1.50× [1.2, 1.8]\n-1.0 [-2.0, 0.0]"
    assert forms[3].header == WIDE.header[:3] and forms[3].rows[0][2] == "50 [49, 51] ≈"
    assert forms[4].rows[0] == ["Cascade [Chow]", "1.50× [1.2,1.8]\n-1.0 [-2.0,0.0]", "50 [49,51] ≈"]
    assert forms[5].rows[0][::2] == ["Cascade [Chow]", "50\n[49, 51] ≈"]
    assert forms[6].rows[0][0] == "Cascade\n[Chow]"
    for form in forms:
        lines = printed(WIDE, capsys, form.width)
        assert max(map(len, lines[1:3])) == form.width
        assert ("A wider terminal shows 1 more column." in " ".join(lines)) == ("few" not in form.header)


def test_a_narrow_terminal_shows_fewer_columns_not_broken_words(capsys):
    """Columns without entries go first, then those on the right; the name and one column stay."""
    rows = [["SpecCascade [Diff]", "–", "1.50× [1.2, 1.8]", "50.25"], ["Target", "–", "1.00×", "50.00"]]
    grid = Grid(title="", header=["Method", "none", "speed-up", "quality"], rows=rows, notes=[])
    assert [grid.fitted(width).header[1:] for width in (38, 37, 32, 31, 3)] == [
        ["none", "speed-up", "quality"], ["speed-up", "quality"], ["speed-up", "quality"], ["speed-up"], ["speed-up"],
    ]  # fmt: skip
    shown = printed(grid, capsys, 34)
    assert shown[-2:] == ["A wider terminal shows 1 more", "column."]
    assert {"Method", "SpecCascade", "[Diff]"} <= {line.split(" ")[0] for line in shown}


def test_bold_cells_keep_their_place_when_columns_change():
    grid = Grid(title="", header=["a", "b", "c"], rows=[["1", "2", "3"]], notes=[], bold={(0, 2)}, spare=("b",))
    assert grid.fitted(4).bold == {(0, 1)} and grid.fitted(4).rows == [["1", "3"]]


def test_notes_are_cut_to_four_lines_of_which_the_last_says_how_to_see_all(capsys):
    long = " ".join(["two"] * 30)
    many = replace(WIDE, notes=["x"] * 9, brief=["One.", long, "Three."])
    assert printed(many, capsys, 160, "--all")[-4:] == ["One.", long, "Three.", "All 9 notes: --all"]
    cut = printed(many, capsys, 70, "--all")
    assert cut[-4] == "One." and cut[-2].startswith("two two") and cut[-1] == "All 9 notes: --all"
    narrow = printed(replace(many, brief=[f"{long} {long}", "One."]), capsys, 70, "--all")
    assert narrow[-2].endswith(" tw…") and narrow[-5].startswith("Target")
    assert printed(many, capsys, 70)[-9:] == ["x"] * 9
    assert printed(replace(many, brief=None, notes=["a", "b", "c", "d"]), capsys, 70, "--all")[-4:] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_latex_is_a_booktabs_table():
    grid = Grid(
        title="T = 1", header=["Method", "Speed-up at target's quality: task_a"], rows=[["a", "1.2×"], ["b", "-0.1 *"]],
        notes=["50% & more", "Why?", "No."], bold={(1, 1)},
    )  # fmt: skip
    assert grid.latex().splitlines() == [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\footnotesize",
        r"\caption[T = 1]{T = 1. 50\% \& more. Why? No.}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"Method & \shortstack[r]{Speed-up at target's \\ quality: task\_a} \\",
        r"\midrule",
        r"a & 1.2$\times$ \\",
        r"b & \textbf{$-$0.1 {*}} \\",
        r"\bottomrule",
        r"\end{tabular}",
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


def test_latex_has_every_character_of_the_tables():
    """Checks the texts of the package's tables; a user's own texts may have characters of their own."""
    files = [*(Path(report.__file__).parent / "tables").glob("*.py"), Path(significance.__file__)]
    texts = {node.value for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    shown = [text for text in texts if "\n" not in text]
    unknown = {letter for text in shown for letter in _latex(text) if not letter.isascii()}
    assert len(shown) > 100 and unknown <= {"̃", "é"}


def test_braces_of_a_caption_are_balanced():
    grid = Grid(title=HARD, header=["a"], rows=[["b"]], notes=[HARD, "{", "a]"])
    (caption,) = (line for line in grid.latex().splitlines() if line.startswith(r"\caption"))
    bare = re.sub(r"\\[{}]", "", caption)
    depth = list(itertools.accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in bare))
    assert depth[-1] == 0 and min(depth) == 0
    # a "]" outside braces would end the short caption too early
    ends = [n for n, letter in enumerate(bare) if letter == "]" and depth[n] == 0]
    assert len(ends) == 1 and bare[ends[0] + 1] == "{"


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
