"""The baselines a sceptic draws, from records that a sweep holds anyway.

Whole requests sent at random to draft or target (paper 2's grey line) cost nothing to build: a method whose points lie
below that line loses to a coin. And at T > 0 a part of what rules gain is that they sharpen, which the target alone
does at a lower temperature (`Panel.cooler`). Needs no JAX.
"""

from typing import NamedTuple

import numpy as np

from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval, has_latency, judged_alike
from speccascade_jax.results.analysis.panels import Panel, Spot, latency_of


class Line(NamedTuple):
    """Relative latency and quality, `[N]`, from the target alone to the draft alone."""

    latency: np.ndarray
    quality: np.ndarray


def line(panel: Panel, points: int = 41) -> Line | None:
    """Whole requests sent at random, the share of the draft's rising; `None` without both ends, one timed.

    Scores of a corpus (BLEU) are not linear in the share; where records hold no single examples a straight line stands
    for them.
    """
    target, draft = panel.target, panel.draft
    if target is None or draft is None or not draft.latency:
        return None
    share = np.linspace(0, 1, points)
    quality = (1 - share) * target.quality.value + share * draft.quality.value
    if judged_alike((*target.records, *draft.records)):
        all_examples = Bootstrap(samples=1)
        quality = np.asarray([all_examples.mixed(target.records, draft.records, each)[0] for each in share])
    return Line(1 - share + share * latency_of(draft), quality)


def gain(panel: Panel, spot: Spot, bootstrap: Bootstrap) -> Interval | None:
    """The spot's quality less that of requests sent at random at the same latency; `None` where there is no line.

    Slower than the target counts as the target alone, faster than the draft as the draft alone.
    """
    target, draft = panel.target, panel.draft
    if target is None or draft is None or not (draft.latency and spot.latency) or latency_of(draft) >= 1:
        return None
    judged = (*spot.records, *target.records, *draft.records)
    if not judged_alike(judged) or not all(map(has_latency, (*spot.records, *draft.records))):
        return None
    saved = 1 - bootstrap.latencies(spot.records), 1 - bootstrap.latencies(draft.records)
    share = np.clip(saved[0] / np.maximum(saved[1], 1e-9), 0, 1)
    own, _ = bootstrap.qualities(spot.records, target.records)
    return bootstrap.interval(own - bootstrap.mixed(target.records, draft.records, share))


def notes(panel: Panel, bootstrap: Bootstrap) -> list[str]:
    """Which points lie below the line, and which of them beyond their interval."""
    shown = [spot for spot in panel.spots if not spot.inconclusive]
    gains = {spot.name(): each for spot in shown if (each := gain(panel, spot, bootstrap))}
    if not gains:
        return []
    below = {name: each for name, each in gains.items() if each.value < 0}
    sure = [name for name, each in below.items() if each.high < 0]
    said = "Whole requests sent at random to draft or target (grey line) are better at equal latency than "
    if not below:
        return [f"{said}none of the points."]
    listed = f"{said}{len(below)} of {len(gains)} points: {', '.join(below)}."
    return [listed, f"Beyond the interval: {', '.join(sure)}." if sure else "None of these beyond the interval."]
