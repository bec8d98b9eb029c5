"""Tests of the figure of quality against speed-up: positions, limits, labels, the one ring, and its form in reports."""

import re
from itertools import combinations

import pytest
from matplotlib import pyplot as plt

from speccascade_jax.results.analysis import significance
from speccascade_jax.results.analysis.panels import panels
from speccascade_jax.results.report.figures import drawing, styles, tradeoff
from speccascade_jax.results.report.figures.drawing import Label
from tests.support import fake_records
from tests.support.made_records import TARGET, point


def drawn(records, anchors=None):
    """Returns the panel, its places and the axes of its figure."""
    (panel,) = panels(records)
    _, plots = drawing.subplots(1, 1, (5.2, 4.8))
    places = significance.places(panel)
    tradeoff.speed_plot(plots[0, 0], panel, places, anchors)
    return panel, places, plots[0, 0]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def sweep():
    return [fake_records.run(entry) for entry in fake_records.coordinates()]


def line(axes, label):
    return next(entry for entry in axes.get_lines() if entry.get_label() == label)


def test_faster_is_to_the_right_and_the_coin_line_begins_at_the_target(sweep):
    _, places, axes = drawn(sweep)
    (curve,) = [places.curves[name] for name in places.curves if name == "token_v3"]
    colour, _ = styles.STYLES["token_v3"]
    xs = next(entry.get_xdata() for entry in axes.get_lines() if entry.get_color() == colour)
    assert list(xs) == pytest.approx([1 / place.latency.value for place in curve]) and max(xs) > 1.4
    coin = line(axes, "Coin: draft or target, per request")
    assert (coin.get_xdata()[0], coin.get_ydata()[0]) == (1.0, 0.0)
    assert coin.get_xdata()[-1] == pytest.approx(1 / places.ends[1].latency.value)


@pytest.mark.parametrize(("ratio", "beyond"), [(0.6, False), (0.1, True)])
def test_a_far_faster_draft_does_not_squeeze_the_axis(ratio, beyond):
    records = [TARGET, point("autoregressive_draft", gain=-9, ratio=ratio), point("diff", gain=0.5, ratio=0.7)]
    _, places, axes = drawn(records)
    draft = places.ends[1]
    texts = [text.get_text() for text in axes.texts]
    assert (f"draft alone: {1 / draft.latency.value:.3g}×, −{-draft.difference.value:.1f} →" in texts) == beyond
    assert ("draft alone" in texts) == (not beyond)
    assert (axes.get_xlim()[1] < 2) and (axes.get_xlim()[1] > 1 / draft.latency.value) == (not beyond)


def test_one_ring_is_around_the_chosen_point_and_has_its_meaning(sweep):
    _, places, axes = drawn(sweep)
    rings = [
        entry for entry in axes.get_lines() if entry.get_markeredgecolor() == styles.RING and len(entry.get_xdata())
    ]
    (ring,) = rings
    assert list(ring.get_xdata()) == [pytest.approx(1 / places.chosen.latency.value)]
    assert places.chosen.difference.value >= 0 and places.ring == "Fastest without a measured loss"
    assert places.ring in axes.get_legend_handles_labels()[1]
    quick = [place for curve in places.curves.values() for place in curve if place.difference.value >= 0]
    assert places.chosen is min(quick, key=lambda place: place.latency.value)


def test_without_a_point_of_the_targets_quality_the_ring_says_what_loss_it_allows():
    _, places, _ = drawn([TARGET, point("diff", gain=-0.5, ratio=0.7, noise=9, own=4)])
    assert places.chosen.difference.value < 0 and places.ring == "Fastest, loss ≤ 1 (uncertain)"


def test_among_many_points_only_the_ringed_one_has_bars(sweep):
    panel, places, axes = drawn(sweep)
    assert len(axes.containers) == 1 and styles.barred(places) == {id(places.chosen)}
    assert "of the ringed point; others about ±0." in styles.bar_note(panel, places)
    panel, places, axes = drawn([TARGET, point("diff", ratio=0.7), point("opt", ratio=0.8)])
    assert len(axes.containers) == 2 and styles.bar_note(panel, places) == "bars: paired 95% intervals"


def test_of_many_curves_those_that_no_other_beats_are_in_colour(sweep):
    _, places, axes = drawn(sweep)
    bright = styles.prominent(places)
    assert {"spec_decode", "token_v3"} <= bright < set(places.curves), bright
    everything = [(place.latency.value, -place.difference.value, name)
                  for name, curve in places.curves.items() for place in curve]  # fmt: skip
    front = {name for cost, loss, name in everything
             if not any(other < cost and less <= loss for other, less, _ in everything)}  # fmt: skip
    assert bright == front | {"spec_decode"}
    assert f"{len(places.curves) - len(bright)} other methods" in axes.get_legend_handles_labels()[1]


def test_alphas_are_labels_at_points_that_cover_nothing(sweep):
    _, places, axes = drawn(sweep)
    labels = [text for text in axes.texts if re.fullmatch(r"(α )?−?[\d.]+", text.get_text())]
    assert f"α {places.chosen.spot.alpha:g}" in [text.get_text() for text in labels] and len(labels) > 5
    boxes = [text.get_window_extent() for text in labels]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].shrunk(0.9, 0.9).overlaps(pair[1].shrunk(0.9, 0.9))]


def test_the_ringed_alpha_has_its_symbol_in_the_middle_of_a_curve_too():
    records = [
        point("diff", gain=gain, ratio=ratio, own=n) for n, (gain, ratio) in enumerate([(1, 0.9), (2, 0.8), (-9, 0.7)])
    ]
    for record, alpha in zip(records, (0.1, 0.2, 0.3), strict=True):
        record["point"]["alpha"] = alpha
    _, places, axes = drawn([TARGET, *records])
    assert places.chosen.spot.alpha == 0.2 and "α 0.2" in [text.get_text() for text in axes.texts]


def test_labels_without_room_are_left_out_by_rank():
    _, plots = drawing.subplots(1, 1, (3, 3))
    axes = plots[0, 0]
    axes.set(xlim=(0, 1), ylim=(0, 1))
    crowd = [Label(0.5, 0.5, f"{n}{n}{n}{n}", rank=-abs(n - 8)) for n in range(1, 16)]
    drawing.label_points(axes, crowd)
    texts = [text.get_text() for text in axes.texts]
    assert "8888" in texts and len(texts) < 15


def test_curves_differ_without_their_colours():
    looks = {(marker, str(styles.dashes(marker))) for _, marker in styles.STYLES.values()}
    assert len(looks) == len(styles.STYLES)
    usual = [styles.dashes(styles.STYLES[name][1]) for name in ("chow", "diff", "opt", "token_v3")]
    assert len(set(usual)) == 4


def test_figures_of_reports_follow_the_theme_and_link_to_outputs(sweep):
    panel, places, _ = drawn(sweep)
    anchors = {id(place.spot): f"point-{n}" for n, curve in enumerate(places.curves.values()) for place in curve[:1]}
    figure, plots = drawing.subplots(1, 1, (5.2, 4.8))
    tradeoff.speed_plot(plots[0, 0], panel, places, anchors)
    plots[0, 0].set_title("costs $5 or $6")
    text = drawing.as_svg(figure)
    assert not [colour for colour in drawing.THEME if colour in text] and "var(--ink)" in text
    assert sorted(re.findall(r'<a href="#(point-\d+)">', text)) == sorted(anchors.values())
    assert "_blank" not in text and "<style" not in text and "font-family" not in text and "metadata" not in text
    assert "costs $5 or $6" in text, "dollar signs of names are no formulas"
    assert re.match(r'<svg [^>]*viewBox="0 0 [\d. ]+"', text) and "width=" not in text.partition(">")[0]
