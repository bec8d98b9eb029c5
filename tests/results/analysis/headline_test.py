"""Tests of the result as a sentence: each certainty of speed and quality, ties, and panels without latency."""

import copy
import re

import pytest

from speccascade_jax.results.analysis import headline
from speccascade_jax.results.analysis.panels import panels
from tests.support.made_records import TARGET, point

DRAFT = point("autoregressive_draft", gain=-9, ratio=0.5)
LOSSLESS = {"noise": 0, "own": 11}


def said(*records):
    """Returns the headline of the only panel of the target alone and these records."""
    (panel,) = panels([TARGET, *records])
    return headline.headline(panel)


def sure(gain, ratio=0.7, **more):
    return point("diff", gain=gain, ratio=ratio, own=4, **more)


@pytest.mark.parametrize(("record", "quality"), [
    (sure(0.5, noise=3), "and no loss of ROUGE-L is measurable (+0."),
    (sure(2.5), "and its ROUGE-L is higher (+2."),
    (sure(-0.8, noise=0.5), "but it loses ROUGE-L (-0."),
    (sure(0, noise=0), "at exactly the target's ROUGE-L"),
])  # fmt: skip
def test_a_faster_point_is_said_with_the_certainty_of_its_quality(record, quality):
    entry = said(record)
    assert re.match(r"SpecCascade \[Diff\] is 1\.4\d times as fast as the target( \[1\.\d\d, 1\.\d\d\])?, ", entry.text)
    assert f", {quality}" in entry.text and entry.text.count(", and") + entry.text.count(", but") <= 1
    assert (entry.speed is None) == ("loses" in quality), "a measurable loss is no success"


def test_the_intervals_in_the_sentence_are_the_paired_ones():
    (panel,) = panels([TARGET, sure(0.5, noise=3)])
    places = headline.significance.places(panel)
    text = headline.headline(panel, places).text
    assert places.chosen.latency.inverse().text(".2f").replace(" ", " times as fast as the target ", 1) in text
    assert f"({places.chosen.difference.text('+.1f')})" in text


def test_a_speed_up_within_the_noise_or_of_few_trials_is_not_called_faster():
    tie = said(sure(0.5, ratio=0.995))
    assert tie.text.startswith("SpecCascade [Diff] is not measurably faster than the target (1.0") and not tie.speed
    once = sure(0.5)
    for entry in ("latency", "target_latency"):
        once[entry]["per_example_ms"] = once[entry]["per_example_ms"][:1]
    few = said(once)
    assert (
        few.text.startswith("SpecCascade [Diff] seems 1.4") and "too few trials or examples to be certain" in few.text
    )
    assert few.speed is None


@pytest.mark.parametrize(("ratio", "relation"), [
    (0.705, "tied with SpecDecode (1.4"), (0.9, "ahead of SpecDecode (1.1"), (0.5, "behind SpecDecode ("),
])  # fmt: skip
def test_the_lossless_method_is_named_and_ties_are_called_ties(ratio, relation):
    lossless = point("spec_decode", gain=-0.2 if ratio < 0.7 else 0, ratio=ratio, **LOSSLESS)
    assert f"], {relation}" in said(sure(0.5), lossless).text


def test_the_lossless_method_itself_is_compared_with_the_target_only():
    text = said(point("spec_decode", ratio=0.7, **LOSSLESS), sure(0.5, ratio=0.9)).text
    assert text.startswith("SpecDecode is 1.4") and "tied" not in text and "at exactly the target's" in text


def test_nothing_better_is_said_with_the_fastest_point():
    slow = said(sure(0.5, ratio=1.3))
    assert slow.text.startswith("Nothing is faster than the target: the fastest point, SpecCascade [Diff], is 0.7")
    poor = said(sure(-5), sure(0.5, ratio=1.3) | {"key": "slow"} | {"point": point("opt", own=5)["point"]})
    assert poor.text.startswith("No method is faster than the target with a loss of at most 1 ROUGE-L: ")
    assert "SpecCascade [Diff] is 1.4" in poor.text and "but it loses ROUGE-L (-5" in poor.text
    assert slow.speed is poor.speed is None


def test_target_and_draft_alone_are_no_result():
    assert said().text == f"Only the target alone was measured: {TARGET['quality']['value']:.1f} ROUGE-L"
    text = said(DRAFT).text
    assert text.startswith("Only target and draft alone were measured: the draft is 2.") and "-9." in text


def test_without_latencies_rejections_are_the_result():
    records = copy.deepcopy([TARGET, sure(0.5, noise=3), point("opt", gain=-9, own=6), point("chow", gain=2, own=7)])
    for record, rate in zip(records, (0, 0.25, 0.1, 0.4), strict=True):
        for name in ("latency", "target_latency", "relative_latency"):
            del record[name]
        record["measures"]["rejection_rate"] = rate
    (panel,) = panels(records)
    text = headline.headline(panel).text
    assert text.startswith("SpecCascade [Diff] rejects 25% of draft tokens, and no loss of ROUGE-L is measurable (")
    assert text.endswith("; no latency was measured")
    assert headline.headline(panels([records[0], records[2]])[0]).text == "No latency was measured"


def test_records_without_single_examples_have_no_certainty():
    record = sure(0.5)
    del record["quality"]["per_example"]
    entry = said(record)
    assert "(no interval: fewer than 8 common examples)" in entry.text and entry.speed is None


def test_several_panels_are_counted_instead_of_naming_the_best():
    good, bad = (panels([TARGET, record])[0] for record in (sure(0.5), sure(0.5, ratio=1.3)))
    entries = [headline.headline(panel) for panel in (good, bad, good)]
    claim = "a method is measurably faster than the target with no measurable loss of ROUGE-L"
    assert (
        headline.summary([good] * 3, entries) == f"In 2 of 3 settings, {claim} ({entries[0].speed:.2f} times as fast)"
    )
    assert headline.summary([bad] * 2, entries[1:2] * 2) == f"In none of 2 settings, {claim}"
    assert headline.summary([good], entries[:1]) == entries[0].text
