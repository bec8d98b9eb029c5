"""Paper 3's Figure 4: verification rate over discard rate, a curve per family, one file per panel."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from speccascade_jax.results.analysis import forward_times, pareto
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.families import GAMMA, Families, Family
from speccascade_jax.results.analysis.panels import Spot, Value
from speccascade_jax.results.report.figures import tradeoff

FIXED = ("#000000", "D")
STYLES = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
LINES = 7


def draw_all(every: Sequence[Families], folder: Path, stem: str, form: str = "png") -> tuple[list[Path], list[str]]:
    """One file per panel, `<stem>-pareto.png` or `<stem>-pareto-<setting>.png`.

    Returns:
        The paths, and why panels have none: records without counts of single examples, or of too few.
    """
    bootstrap, paths, missing = Bootstrap(), list[Path](), list[str]()
    for families in every:
        name = f"{stem}-pareto" + ("" if len(every) == 1 else f"-{tradeoff.slug(families.panel.title())}")
        path = tradeoff.unused(folder, name, form, paths)
        try:
            draw(families, path, bootstrap)
        except ValueError as error:
            missing.append(f"{families.panel.title()}: {error}")
        else:
            paths.append(path)
    return paths, missing


def draw(families: Families, path: Path, bootstrap: Bootstrap) -> None:
    """Write one panel's figure, replacing an old one in a single step.

    Raises:
        ValueError: records without counts of single examples, or of too few.
    """
    every = (*families.fixed, *families.adaptive)
    # refused before a figure is begun; the bootstrap keeps what it has computed
    _values([*families.oracles.values(), *(spot for family in every for spot in family.spots.values())], bootstrap)
    figure, axes = plt.subplots(figsize=(7.5, 5.6), layout="constrained")
    spare, fixed = itertools.cycle(STYLES), itertools.cycle(("-", "--", ":"))
    for family in every:
        colour, marker = FIXED if family.symbol == GAMMA else next(spare)
        _curve(axes, family, bootstrap, colour, marker, next(fixed) if family.symbol == GAMMA else "-")
    for name, spot in families.oracles.items():
        (x,), (y,) = _values([spot], bootstrap)
        axes.plot(x.value, y.value, "*", ms=15, color="#999999", mec="black", label=name, clip_on=False, zorder=4)
    drawn = _iso_latency(axes, families)
    axes.set_xlabel("discard rate: discarded tokens per generated token   (← fewer)")
    axes.set_ylabel("verification rate: target calls per generated token   (↓ fewer)")
    axes.grid(alpha=0.2, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    sizes = f"{families.panel.setting['quality_examples']} examples; bars: 95% bootstrap over examples{drawn}"
    axes.set_title(f"{families.panel.title()}\n", fontsize=11)
    axes.text(0.5, 1.02, sizes, transform=axes.transAxes, ha="center", fontsize=8, color="0.35")
    tradeoff.save(figure, path)


def _values(spots: Sequence[Spot], bootstrap: Bootstrap) -> tuple[list[Value], list[Value]]:
    """Discard and verification rates with their intervals."""
    found = [pareto.rates(spot, bootstrap) for spot in spots]
    return tuple([Value(*bootstrap.interval(rates[n])) for rates in found] for n in (0, 1))  # type: ignore[return-value]


def _curve(axes: Axes, family: Family, bootstrap: Bootstrap, colour: str, marker: str, line: str) -> None:
    """A family's points in the order of γ or h, its numbers beside them."""
    xs, ys = _values(list(family.spots.values()), bootstrap)
    places = [x.value for x in xs], [y.value for y in ys]
    axes.errorbar(*places, xerr=tradeoff.bars(xs), yerr=tradeoff.bars(ys), fmt="none", ecolor=colour, elinewidth=0.8,
                  alpha=0.4, zorder=1)  # fmt: skip
    name = f"{family.name}, {family.symbol} {min(family.spots):g} … {max(family.spots):g}"
    axes.plot(*places, color=colour, marker=marker, ls=line, lw=1.4, ms=5.5, label=name, zorder=3)
    side = (6, 5) if family.symbol == GAMMA else (-6, -11)
    for at, x, y in zip(family.spots, *places, strict=True):
        axes.annotate(f"{at:g}", (x, y), xytext=side, textcoords="offset points", fontsize=7.5, color=colour,
                      ha="left" if side[0] > 0 else "right")  # fmt: skip


def _iso_latency(axes: Axes, families: Families) -> str:
    """Lines of equal time per token by equation 2.3, slope −c_1/c_2; says so, or why there are none."""
    try:
        times = forward_times.speculative(families.records)
        forward_times.suggested_threshold(times.draft, times.target)  # refuses times that make no line
    except ValueError:
        return ""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    slope = -times.draft / (times.target - times.draft)
    for start in np.linspace(low, high - slope * (right - left), LINES + 2)[1:-1]:
        axes.plot([left, right], [start, start + slope * (right - left)], color="0.85", lw=0.8, zorder=0)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    return f"; grey: equal time, slope −{-slope:.2f}"
