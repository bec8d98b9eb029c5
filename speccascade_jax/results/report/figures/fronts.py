"""Figure 4 of Huang et al., 2024 (SpecDec++): verification rate against discard rate.

A curve connects the points of a family, which differ in the block size or in the stop threshold only.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from speccascade_jax.results.analysis import forward_times
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import GAMMA, Families, Family, rates
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.report.figures.drawing import bars, plain, save
from speccascade_jax.results.report.figures.styles import INK
from speccascade_jax.results.report.figures.tradeoff import unused_path

FIXED = (INK, "D")
SYMBOLS = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
LINES = 7


def draw_fronts(every: Sequence[Families], folder: Path, stem: str, form: str = "png") -> tuple[list[Path], list[str]]:
    """Draws Figure 4 of Huang et al., 2024 (SpecDec++): a file per panel, `<stem>-pareto[-<setting>].png`.

    Returns:
        The paths, and the reasons why some panels have no figure: their records lack the counts of single examples, or
        contain too few of them.
    """
    bootstrap, paths, missing = Bootstrap(), list[Path](), list[str]()
    for families in every:
        path = unused_path(families.panel, folder, f"{stem}-pareto", form, paths, alone=len(every) == 1)
        try:
            _draw_front(families, path, bootstrap)
        except ValueError as error:
            missing.append(f"{families.panel.title()}: {error}")
        else:
            paths.append(path)
    return paths, missing


def _draw_front(families: Families, path: Path, bootstrap: Bootstrap) -> None:
    """Writes the figure of one panel's fronts; replaces an older file atomically.

    Raises:
        ValueError: records lack the counts of single examples, or have too few of them.
    """
    every = (*families.fixed, *families.adaptive)
    # computed here so that errors are raised before the figure is created; the bootstrap caches these rates
    _rates([*families.oracles.values(), *(spot for family in every for spot in family.spots.values())], bootstrap)
    figure, axes = plt.subplots(figsize=(7.5, 5.6), layout="constrained")
    spare, fixed = itertools.cycle(SYMBOLS), itertools.cycle(("-", "--", ":"))
    for family in every:
        colour, marker = FIXED if family.symbol == GAMMA else next(spare)
        _family(axes, family, bootstrap, colour, marker, next(fixed) if family.symbol == GAMMA else "-")
    for name, spot in families.oracles.items():
        (x,), (y,) = _rates([spot], bootstrap)
        axes.plot(x.value, y.value, "*", ms=15, color="#999999", mec="black", label=name, clip_on=False, zorder=4)
    drawn = _iso_latency(axes, families)
    axes.set_xlabel("discard rate: discarded tokens per generated token   (← fewer)")
    axes.set_ylabel("verification rate: target calls per generated token   (↓ fewer)")
    plain(axes, alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
    sizes = f"{families.panel.setting['quality_examples']} examples; bars: 95% bootstrap over examples{drawn}"
    axes.set_title(f"{families.panel.title()}\n", fontsize=11)
    axes.text(0.5, 1.02, sizes, transform=axes.transAxes, ha="center", fontsize=8, color="0.35")
    save(figure, path)


def _rates(spots: Sequence[Spot], bootstrap: Bootstrap) -> list[list[Interval]]:
    """Returns discard and verification rates with their intervals."""
    pairs = [rates(spot, bootstrap) for spot in spots]
    return [[bootstrap.interval(pair[n]) for pair in pairs] for n in (0, 1)]


def _family(axes: Axes, family: Family, bootstrap: Bootstrap, colour: str, marker: str, line: str) -> None:
    """Draws a family's points in the order of γ or h, each labelled with its number."""
    xs, ys = _rates(list(family.spots.values()), bootstrap)
    places = [x.value for x in xs], [y.value for y in ys]
    axes.errorbar(*places, xerr=bars(xs), yerr=bars(ys), fmt="none", ecolor=colour, elinewidth=0.8,
                  alpha=0.4, zorder=1)  # fmt: skip
    name = f"{family.name}, {family.symbol} {min(family.spots):g} … {max(family.spots):g}"
    axes.plot(*places, color=colour, marker=marker, ls=line, lw=1.4, ms=5.5, label=name, zorder=3)
    side = (6, 5) if family.symbol == GAMMA else (-6, -11)
    for value, x, y in zip(family.spots, *places, strict=True):
        axes.annotate(f"{value:g}", (x, y), xytext=side, textcoords="offset points", fontsize=7.5, color=colour,
                      ha="left" if side[0] > 0 else "right")  # fmt: skip


def _iso_latency(axes: Axes, families: Families) -> str:
    """Draws lines of equal time per token (equation 2.3, slope −c_1/c_2); returns a note, or "" without lines."""
    try:
        times = forward_times.speculative(families.records)
        forward_times.suggested_threshold(times.draft, times.target)  # raises ValueError if the times define no lines
    except ValueError:
        return ""
    (x_low, x_high), (low, high) = axes.get_xlim(), axes.get_ylim()
    slope = -times.draft / (times.target - times.draft)
    for start in np.linspace(low, high - slope * (x_high - x_low), LINES + 2)[1:-1]:
        axes.plot([x_low, x_high], [start, start + slope * (x_high - x_low)], color="0.85", lw=0.8, zorder=0)
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(low, high)
    return f"; grey lines: equal time per token, slope −{-slope:.2f}"
