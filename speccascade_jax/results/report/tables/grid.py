"""Tables of text cells, with output for a terminal, Markdown, LaTeX and CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

NONE = "–"
MOST_LINES = 4
"""Largest number of lines below a table in a terminal, unless all notes are asked for."""
_GAP = "  "
"""Space between two columns in a terminal."""

_LATEX = str.maketrans(
    {character: "\\" + character for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}",
        "<": "$<$", ">": "$>$",
        # without braces, LaTeX reads a [ or * at the beginning of a row as an argument of the \\ before it
        "[": "{[}", "]": "{]}", "*": "{*}",
        "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "π": r"$\pi$", "η": r"$\eta$", "×": r"$\times$",
        "≈": r"$\approx$", "≤": r"$\leq$", "≥": r"$\geq$", "−": "$-$", "–": "--", "…": r"\dots{}", "Δ": r"$\Delta$",
        "λ": r"$\lambda$", "σ": r"$\sigma$", "τ": r"$\tau$", "Σ": r"$\sum$", "±": r"$\pm$", "µ": r"$\mu$", "²": "$^2$",
        "·": r"$\cdot$", "→": r"$\to$", "√": r"$\surd$",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table as plain text: its cells, the positions of bold cells, and the notes below it.

    Attributes:
        title: the text above the table; notes: sentences below the table.
        header, rows: one string per cell; the first column names the row.
        bold: (row, column) of the bold cells.
        brief: short sentences that a terminal shows in place of the notes; `None`: the notes themselves.
        spare: the columns that a terminal leaves out if it is too narrow, in this order.

    Example:
        >>> from rich.console import Console
        >>> from speccascade_jax.results.report.tables.grid import Grid
        >>> notes = ["A note.", "Another note."]
        >>> grid = Grid(title="Speed", header=["Method", "ms"], rows=[["a", "1.5"]], notes=notes, brief=["Short."])
        >>> Console(width=40).print(grid.rich(more="add --notes"))
        Speed
        Method   ms
        ───────────
        a       1.5
        Short.
        All 2 notes: add --notes
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    bold: set[tuple[int, int]] = field(default_factory=set)
    brief: list[str] | None = None
    spare: tuple[str, ...] = ()

    def rich(self, more: str | None = None) -> RenderableType:
        """Returns the table with its title and notes for a terminal, in the form that fits the terminal's width.

        Args:
            more: the flag or command that shows all notes, such as "--notes". If it is given, at most `MOST_LINES`
                lines follow the table, and the last line names it if notes are left out. `None`: all notes follow.
        """
        return _Fitted(self, more)

    def fitted(self, width: int) -> "Grid":
        """Returns the first form of the table that fits into `width` characters, or the narrowest form.

        If no form with all columns but the spare ones fits, further columns are left out, because a broken word or
        number cannot be read.
        """
        forms = list(self._forms())
        forms += forms[-1]._cut()
        return next((form for form in forms if form.width <= width), forms[-1])

    def fits(self, width: int) -> bool:
        """Returns whether all columns but the spare ones fit into `width` characters."""
        return any(form.width <= width for form in self._forms())

    def _forms(self) -> Iterator["Grid"]:
        """Yields ever narrower forms of the table: without spare columns, and with cells broken into several lines."""
        yield self
        parts = self._with_cells("; ", "\n")
        yield from parts._narrower()
        *_, narrow = parts._narrower()
        yield narrow._with_cells(", ", ",", first=1)
        yield from parts._with_cells(" [", "\n[", first=1)._narrower()
        yield from parts._with_cells(" [", "\n[")._narrower()

    def _with_cells(self, old: str, new: str, first: int = 0) -> "Grid":
        """Returns the table with `new` in place of `old` in the cells of the columns from `first` on.

        Cells of several lines stay as they are if `new` ends a line.
        """

        def written(cell: str) -> str:
            return cell if "\n" in new and "\n" in cell else cell.replace(old, new)

        return replace(self, rows=[[*row[:first], *map(written, row[first:])] for row in self.rows])

    def _narrower(self) -> Iterator["Grid"]:
        """Yields the table, then the table without one spare column after another."""
        grid = self
        yield grid
        for name in self.spare:
            grid = grid._without(name)
            yield grid

    def _cut(self) -> Iterator["Grid"]:
        """Yields the table without one column after another: those without entries first, then from the right."""
        grid, cells = self, list(zip(*self.rows, strict=True))
        empty = [name for name, column in zip(self.header, cells, strict=False) if set(column) == {NONE}]
        for name in (*empty, *reversed(self.header[1:])):
            if name in grid.header and len(grid.header) > 2:
                grid = grid._without(name)
                yield grid

    def _without(self, name: str) -> "Grid":
        """Returns the table without the column `name`."""
        place = self.header.index(name)
        header, *rows = ([*row[:place], *row[place + 1 :]] for row in (self.header, *self.rows))
        bold = {(r, c - (c > place)) for r, c in self.bold if c != place}
        return replace(self, header=header, rows=rows, bold=bold)

    @property
    def width(self) -> int:
        """The number of characters of a line of the table in a terminal, with whole cells and wrapped headers."""
        widths = self._widths()
        return sum(widths) + len(_GAP) * (len(widths) - 1)

    def _widths(self) -> list[int]:
        """Returns the columns' widths in characters; a header wraps, so that it does not widen its column."""
        words = [name.split() for name in self.header]
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(words)
        lines = [[*name, *"\n".join(cells).split("\n")] for cells, name in zip(columns, words, strict=True)]
        return [max(map(cell_len, texts), default=1) for texts in lines]

    def table(self) -> Table:
        """Returns the header and the rows as a `rich` table, without title and notes."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, len(_GAP) - 1, 0, 0))
        for n, (name, width) in enumerate(zip(self.header, self._widths(), strict=True)):
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
        r"""Returns a LaTeX `table` with the rules of booktabs, and the title and the notes as its caption.

        A list of tables shows the title only. The only package that the table needs is booktabs
        (`\usepackage{booktabs}`). Long headers are stacked; wide tables need a wide page.
        """
        rows = [" & ".join(cells) + r" \\" for cells in self._cells(_latex, r"\textbf{{{}}}")]
        sentences = [text if text.endswith((".", "!", "?", ":")) else f"{text}." for text in (self.title, *self.notes)]
        lines = [
            r"\begin{table}", r"\centering\footnotesize",
            rf"\caption[{_latex(self.title)}]{{{_latex(' '.join(sentences))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}", r"\toprule",
            " & ".join(map(_latex_header, self.header)) + r" \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}",
            r"\end{table}",
        ]  # fmt: skip
        return "\n".join(["% \\usepackage{booktabs}", *lines]) + "\n"

    def _cells(self, write: Callable[[str], str], bold: str) -> list[list[str]]:
        """Returns the rows with cells escaped by `write`; bold cells are inserted into the pattern `bold`."""
        return [
            [bold.format(write(x)) if (r, c) in self.bold else write(x) for c, x in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]


@dataclass(frozen=True)
class _Fitted:
    """A table that `rich` prints in the form that fits the terminal; `more` as in `Grid.rich`."""

    grid: Grid
    more: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the title, the table and the notes."""
        fitted = self.grid.fitted(options.max_width)
        if self.grid.title:
            yield Text(self.grid.title, "table.title")
        yield fitted.table()

        def lines(text: str) -> list[Text]:
            return list(Text(text, "table.caption").wrap(console, options.max_width))

        yield from self._notes(lines, len(self.grid.header) - len(fitted.header))

    def _notes(self, lines: Callable[[str], list[Text]], hidden: int) -> Iterator[Text]:
        """Yields the lines below the table; the last says how to see `hidden` columns and notes that are left out."""
        grid = self.grid
        brief = grid.notes if grid.brief is None or self.more is None else grid.brief
        wider = [f"A wider terminal shows {hidden} more {'column' if hidden == 1 else 'columns'}."] * bool(hidden)
        whole = [line for text in (*brief, *wider) for line in lines(text)]
        if self.more is None or brief == grid.notes and len(whole) <= MOST_LINES:
            yield from whole
            return
        last = lines(" ".join([*wider, f"All {len(grid.notes)} notes: {self.more}"]))
        yield from _first([lines(text) for text in brief], MOST_LINES - len(last))
        yield from last


def _first(sentences: Iterable[list[Text]], room: int) -> Iterator[Text]:
    """Yields the lines of the first sentences that fit into `room` lines; a first sentence that is too long is cut."""
    for number, lines in enumerate(sentences):
        if len(lines) > room:
            if number == 0 and room > 0:
                yield from lines[: room - 1]
                last = lines[room - 1]
                last.rstrip()
                last.right_crop(1)  # so that the line is no longer than before
                yield last.append("…")
            return
        yield from lines
        room -= len(lines)


def _markdown(text: str) -> str:
    return text.replace("*", r"\*").replace("|", r"\|")


def _latex(text: str) -> str:
    minus = re.sub(r"(?<![\w.])-(?=\d)", "−", text)  # LaTeX prints a hyphen shorter than a minus sign
    return minus.translate(_LATEX)


def _latex_header(text: str) -> str:
    lines = [_latex(line) for line in textwrap.wrap(text, 22, break_long_words=False, break_on_hyphens=False)]
    stacked = r" \\ ".join(lines)
    return rf"\shortstack[r]{{{stacked}}}" if len(lines) > 1 else stacked
