"""Elements that all figures share: axes, error bars, labels of points, and the formats in which figures are saved."""

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.report.figures import FIGURE, MAKER
from speccascade_jax.results.report.figures.styles import FAINT, INK, LINE, PAPER, RING
from speccascade_jax.storage.files import rewrite

# Dollar signs in names of records must not begin a formula. Text in SVG files stays text instead of becoming outlines.
plt.rcParams.update({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": MAKER})
plt.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
plt.rcParams.update({"axes.edgecolor": FAINT, "grid.color": LINE})

DPI = 150


def subplots(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, Any]:
    """Returns a figure and its axes `[rows, columns]`, in a layout without overlaps."""
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **more)


def plain(axes: Axes, **grid: Any) -> None:
    """Gives axes a faint grid, and removes the frame at the top and on the right."""
    axes.grid(**grid, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def bars(values: Sequence[Interval]) -> list[list[float]]:
    """Returns the lengths of error bars below and above; 0 where a resampled interval excludes the value itself."""
    return [[max(v.value - v.low, 0.0) for v in values], [max(v.high - v.value, 0.0) for v in values]]


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to a file and closes it; an older figure of this package is replaced atomically."""
    form, content = path.suffix.removeprefix("."), io.BytesIO()
    author = {("Software" if form == "png" else "Creator"): MAKER}
    figure.savefig(content, dpi=DPI, format=form, metadata=author)
    plt.close(figure)
    rewrite(path, content.getvalue(), start=FIGURE)


THEME = {INK: "--ink", FAINT: "--faint", LINE: "--line", PAPER: "--card", RING: "--draft"}
"""Variables of the report's style sheet that replace colours, so that figures follow its light or dark theme."""


def as_svg(figure: Figure) -> str:
    """Returns a figure as an SVG element for an HTML page, in the colours of the page's theme, and closes it.

    The page's style sheet sets the width, the font and the shape of lines' ends.
    """
    content = io.StringIO()
    figure.savefig(content, format="svg", transparent=True)
    plt.close(figure)
    text = content.getvalue()
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] * (match[1] in used), text)
    text = re.sub(r'style="[^"]*"', lambda match: _themed(match[0]), text)
    text = re.sub(r'<a xlink:href="(#[^"]+)"[^>]*>', r'<a href="\1">', text)
    return re.sub(r"<svg\b[^>]*>", lambda match: re.sub(r' (width|height)="[^"]*"', "", match[0]), text, count=1)


def _themed(style: str) -> str:
    """Returns a style attribute with the page's variables in place of colours, and without a font."""
    for colour, variable in THEME.items():
        style = style.replace(colour, f"var({variable})")
    return re.sub(r" font-family: [^;\"]*;?", "", style)


DOT = 5.5
"""Radius of a marker in typographic points."""


class Label(NamedTuple):
    """A short text, or none, beside a point.

    Attributes:
        x, y: the point, in data coordinates.
        text: the text; empty for none.
        rank: labels of a higher rank are placed first.
        radius: radius of the point's marker, in typographic points.
    """

    x: float
    y: float
    text: str
    rank: int = 0
    radius: float = DOT


_SIDES = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
_SIZE = 9.0
"""Size of a label in typographic points."""


def label_points(axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = ()) -> None:
    """Writes labels beside their points; leaves out labels that would cover a point, another label or the frame.

    Args:
        axes: the axes, with their final limits.
        labels: the labels; every labelled point also keeps other labels away.
        lines: the points of each curve; a label avoids the lines between them where it can.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes were removed from their figure"
    figure.draw_without_rendering()  # computes the layout, from which the distances on paper follow
    scale = 72 / figure.dpi  # from pixels to typographic points
    paper = lambda points: axes.transData.transform(points) * scale  # noqa: E731
    points = paper([(label.x, label.y) for label in labels]) if labels else np.empty((0, 2))
    taken = [_box(point, label.radius, label.radius) for point, label in zip(points, labels, strict=True)]
    taken += [text.get_window_extent().get_points() * scale for text in axes.texts]
    segments = [pair for line in lines if len(line) > 1 for pair in itertools.pairwise(paper(list(line)))]
    frame = np.asarray(axes.get_window_extent().get_points()) * scale
    for index in sorted(range(len(labels)), key=lambda index: -labels[index].rank):
        width, height = 0.31 * _SIZE * len(labels[index].text), 0.5 * _SIZE
        options = list[tuple[int, int, np.ndarray, np.ndarray]]()
        for side in _SIDES if labels[index].text else ():
            gap = labels[index].radius + 1.5
            offset = np.multiply(side, (gap + width, gap + height))
            box = _box(points[index] + offset, width, height)
            inside = (box[0] >= frame[0]).all() and (box[1] <= frame[1]).all()
            if inside and not any(_overlap(box, other) for other in taken):
                options.append((sum(_crosses(box, *segment) for segment in segments), len(options), box, offset))
        if options:
            _, _, box, offset = min(options, key=lambda option: option[:2])
            taken.append(box)
            axes.annotate(labels[index].text, labels[index][:2], xytext=tuple(offset), textcoords="offset points",
                          fontsize=_SIZE, ha="center", va="center", zorder=5).set_in_layout(False)  # fmt: skip


def _box(middle: Any, width: float, height: float) -> np.ndarray:
    """Returns a box `[corner, axis]` from its middle and half of its width and height."""
    return np.asarray([np.subtract(middle, (width, height)), np.add(middle, (width, height))])


def _overlap(box: np.ndarray, other: np.ndarray) -> bool:
    return bool((box[0] < other[1]).all() and (other[0] < box[1]).all())


def _crosses(box: np.ndarray, start: np.ndarray, end: np.ndarray) -> bool:
    """Returns whether a line crosses a box, tested at points along the line."""
    along = start + np.linspace(0, 1, 60)[:, None] * (end - start)
    return bool(((along > box[0]) & (along < box[1])).all(1).any())
