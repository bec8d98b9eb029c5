"""Tables of text cells, with output for a terminal, Markdown, LaTeX and CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table

NONE = "–"
_NARROW = 60
"""Below this width in characters, a table's title and notes are not wrapped to the table, but to the terminal."""

_LATEX = str.maketrans(
    {character: "\\" + character for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}",
        "<": "$<$", ">": "$>$",
        # without braces, LaTeX reads a [ or * at the beginning of a row as an argument of the \\ before it
        "[": "{[}", "]": "{]}", "*": "{*}",
        "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "π": r"$\pi$", "η": r"$\eta$", "×": r"$\times$",
        "≈": r"$\approx$", "≤": r"$\leq$", "≥": r"$\geq$", "−": "$-$", "–": "--", "…": r"\dots{}",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table as plain text: its cells, the positions of bold cells, and the notes below it.

    Attributes:
        title: the text above the table; notes: sentences below the table.
        header, rows: one string per cell; the first column names the row.
        bold: (row, column) of the bold cells.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    bold: set[tuple[int, int]] = field(default_factory=set)

    def rich(self) -> RenderableType:
        """Returns the table with its title and notes, for a terminal."""
        # A long header wraps, so that its column is no wider than the cells.
        words = [name.split() for name in self.header]
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(words)
        widths = [max(map(len, [*cells, *name]), default=1) for cells, name in zip(columns, words, strict=True)]
        title, notes = escape(self.title), escape("\n".join(self.notes))
        if sum(width + 3 for width in widths) < _NARROW:
            above, below = f"[table.title]{title}[/]", f"[table.caption]{notes}[/]"
            return Group(*[above] * bool(title), self._table(widths), *[below] * bool(notes))
        table = self._table(widths)
        table.title, table.caption, table.title_justify, table.caption_justify = title, notes, "left", "left"
        return table

    def _table(self, widths: list[int]) -> Table:
        """Returns the header and the rows as a `rich` table; `widths` are the columns' widths in characters."""
        table = Table()
        for n, (name, width) in enumerate(zip(self.header, widths, strict=True)):
            justify: JustifyMethod = "left" if n == 0 else "right"
            table.add_column(escape(name), justify=justify, overflow="fold", max_width=width)
        for row in self._cells(escape, "[bold]{}[/bold]"):
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Returns the table in Markdown, followed by the notes as a list."""
        aligned = ["---"] + ["---:"] * (len(self.header) - 1)
        rows = self._cells(_markdown, "**{}**")
        lines = [f"| {' | '.join(cells)} |" for cells in ([_markdown(name) for name in self.header], aligned, *rows)]
        notes = [f"- {_markdown(note)}" for note in self.notes]
        return "\n".join([f"**{_markdown(self.title)}**", "", *lines, "", *notes]) + "\n"

    def csv(self) -> str:
        """Returns the header and the unformatted cells as CSV, without title and notes."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *self.rows])
        return out.getvalue()

    def latex(self) -> str:
        r"""Returns a LaTeX `table` with the rules of booktabs, the title as its caption and the notes below.

        The only package that it needs is booktabs (`\usepackage{booktabs}`). Long headers are stacked; wide tables need
        a wide page.
        """
        rows = [" & ".join(cells) + r" \\" for cells in self._cells(_latex, r"\textbf{{{}}}")]
        notes = [rf"{_latex(note)}\par" for note in self.notes]
        lines = [
            r"\begin{table}", r"\centering\footnotesize", rf"\caption{{{_latex(self.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}", r"\toprule",
            " & ".join(map(_latex_header, self.header)) + r" \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}",
            r"\par\medskip", r"\begin{minipage}{\linewidth}\raggedright", *notes, r"\end{minipage}",
            r"\end{table}",
        ]  # fmt: skip
        return "\n".join(["% \\usepackage{booktabs}", *lines]) + "\n"

    def _cells(self, write: Callable[[str], str], bold: str) -> list[list[str]]:
        """Returns the rows with cells escaped by `write`; bold cells are inserted into the pattern `bold`."""
        return [
            [bold.format(write(x)) if (r, c) in self.bold else write(x) for c, x in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]


def _markdown(text: str) -> str:
    return text.replace("*", r"\*").replace("|", r"\|")


def _latex(text: str) -> str:
    minus = re.sub(r"(?<![\w.])-(?=\d)", "−", text)  # LaTeX prints a hyphen shorter than a minus sign
    return minus.translate(_LATEX)


def _latex_header(text: str) -> str:
    lines = [_latex(line) for line in textwrap.wrap(text, 22, break_long_words=False, break_on_hyphens=False)]
    stacked = r" \\ ".join(lines)
    return rf"\shortstack[r]{{{stacked}}}" if len(lines) > 1 else stacked
