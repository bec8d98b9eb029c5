"""The report: what stands in it, that every text is escaped, and how large it gets."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from speccascade_jax.evaluation.measuring import judge
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.results.analysis.panels import panels
from speccascade_jax.results.analysis.relative_to_target import places
from speccascade_jax.results.report import charts, page, rejections
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import ResultStore, read_records
from tests.support import fake_records, text_pair

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> {{ 7*7 }} </script>"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of a real generation."""
    pair = text_pair.make(tmp_path_factory.mktemp("pair"))
    asked = Evaluation(task="tiny_translation", quality_examples=2, latency_examples=0, max_new_tokens=30)
    session = Session(ModelPair(name="tables"), asked, pair=pair)
    settings = Settings(method="token_v3", alpha=0.4, temperature=1.0)
    point = Point(pair=session.source, evaluation=session.evaluation, settings=settings)
    return judge(session, [point])[0][outputs.ENTRY][0].trace


def kept(trace, count, text="Guten Tag", traced=4):
    pieces = tuple(f" {word}" for word in text.split()) * 5
    return [
        Output(
            id=n,
            prompt=f"{text} {n}",
            reference=text,
            output="".join(pieces),
            tokens=tuple(range(len(pieces))),
            pieces=pieces,
            sources=("ddrdb" * len(pieces))[: len(pieces)],
            rounds=(3,) * (len(pieces) // 3) + ((len(pieces) % 3,) if len(pieces) % 3 else ()),
            trace=trace if n < traced else None,
        )  # fmt: skip
        for n in range(count)
    ]


def stored(folder, records, trace, count=8, text="Guten Tag"):
    path = folder / "mine.jsonl"
    with ResultStore(path) as store:
        for record in records:
            store.append(record | {outputs.ENTRY: kept(trace, count, text)})
    return path


def sweep(**more):
    return [fake_records.run(point) for point in fake_records.coordinates(**more)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, trace):
    """A sweep's store and its page's text."""
    path = stored(tmp_path_factory.mktemp("plain"), sweep(), trace)
    return path, page.write(panels(read_records(path)), path).read_text()


class Reader(HTMLParser):
    """Tags, ids, scripts and shown text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.shown, self._inside = [], set(), [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self._inside = tag
        self.ids |= {given["id"]} if "id" in given else set()
        self.links += [given[name] for name in ("src", "href") if name in given]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.shown.append(data)


def test_it_holds_every_point_with_its_command_and_outputs(plain):
    path, text = plain
    assert path.with_suffix(".html").read_text() == text
    read = Reader(text)
    records = read_records(path)
    assert {f"point-{n}" for n in range(len(records))} <= read.ids
    for record in records:
        assert f"--from_record={record['key'][:12]} --store={path}" in text
    shown = " ".join(read.shown)
    assert "times as fast as the target alone" in shown or "No point is faster" in shown
    assert shown.count("drafted and kept") > 4 and "Configuration and machine" in shown
    anchors = set(re.findall(r'"(point-\d+)"', text))  # what the chart's places lead to
    assert anchors == {each for each in read.ids if re.fullmatch(r"point-\d+", each)}


def test_nothing_is_asked_of_a_network(plain):
    read = Reader(plain[1])
    assert [link for link in read.links if not link.startswith(("data:", "#"))] == []
    assert not {"iframe", "link rel", "object", "embed"} & set(read.tags)


def test_every_text_of_users_and_models_is_escaped(tmp_path, trace, plain):
    path = stored(tmp_path, sweep()[:8], trace, text=HOSTILE)
    text = page.write(panels(read_records(path)), path).read_text()
    assert "<script>alert" not in text and "onerror=alert(1)>" not in text and " 49 " not in text
    read = Reader(text)
    assert read.tags.count("script") == Reader(plain[1]).tags.count("script") and "img" not in read.tags
    assert any("<script>alert('x')</script><img" in shown for shown in read.shown)


def test_titles_and_configurations_are_escaped_too(tmp_path, trace):
    records = sweep()[:8]
    for record in records:
        record["point"]["pair"] = record["configuration"] = "<b onclick=1>pair</b>"
    path = stored(tmp_path, records, trace)
    assert "onclick=1>" not in page.write(panels(read_records(path)), path).read_text()


@pytest.mark.laws
def test_forty_points_of_64_outputs_stay_under_5_mb(tmp_path, trace):
    words = "Es regnete als ich das Haus verließ"  # 35 tokens each, as the shipped sentences have
    path = stored(tmp_path, [*sweep(), *sweep(temperature=0.0)][:40], trace, count=64, text=words)
    records = read_records(path)
    assert page.write(panels(records), path).stat().st_size < 5_000_000


def test_without_outputs_or_times_it_is_still_one(tmp_path):
    records = [{k: v for k, v in each.items() if "latency" not in k} for each in sweep()]
    with ResultStore(tmp_path / "a.jsonl") as store:
        for record in records:
            store.append(record)
    text = page.write(panels(records), tmp_path / "a.jsonl").read_text()
    assert "Outputs were not kept" in text and "Nothing was timed." in text and "No point is faster" not in text


def test_every_panel_has_its_own_verdict(tmp_path):
    records = [*sweep(), *sweep(temperature=0.0)]
    with ResultStore(tmp_path / "a.jsonl") as store:
        for record in records:
            store.append(record)
    text = page.write(panels(records), tmp_path / "a.jsonl").read_text()
    assert text.count("times as fast as the target alone") + text.count("No point is faster than the target") == 2


def test_damaged_outputs_are_said_and_the_rest_is_shown(tmp_path, trace):
    path = stored(tmp_path, sweep()[:8], trace)
    own = outputs.folder(path) / f"{read_records(path)[3]['key']}.jsonl"
    own.write_text(own.read_text()[:-9])
    with pytest.warns(UserWarning, match="is damaged"):
        text = page.write(panels(read_records(path)), path).read_text()
    assert text.count("Outputs were not kept") == 1


def test_a_store_without_the_target_is_refused(tmp_path):
    records = [each for each in sweep() if each["point"]["method"] != "autoregressive"]
    with pytest.raises(ValueError, match="no record of the target alone"):
        page.write(panels(records), tmp_path / "a.jsonl")


def test_places_are_paired_differences_to_the_target():
    (panel, *_) = panels(sweep())
    found = places(panel)
    target = next(each for each in found.ends if each.spot is panel.target)
    assert target.difference == (0.0, 0.0, 0.0)
    for name, curve in found.curves.items():
        for place, spot in zip(curve, panel.curves[name], strict=True):
            assert place.difference.value == pytest.approx(spot.quality.value - panel.target.quality.value)
            assert place.difference.low <= place.difference.value <= place.difference.high
    if found.chosen:
        assert found.chosen.difference.value >= -found.margin and found.chosen.latency.value < 1


def test_rejections_by_position_are_the_counters(trace):
    told = [{"examined": [10, 8, 0], "kept": [9, 2, 0]}, {"examined": [10, 2], "kept": [6, 1]}]
    spot = SimpleNamespace(records=[{"by_position": each} for each in told])
    assert rejections.by_position(spot) == [(1, pytest.approx(0.25)), (2, pytest.approx(0.7))]
    shares = rejections.by_divergence([trace])
    counts = trace.counts()
    assert counts["rejected"] > 0 and all(0 <= share <= 1 for _, share in shares)
    alone = dataclasses.replace(trace, rounds=tuple(each for each in trace.rounds if not each.rejected))
    assert all(share == 0 for _, share in rejections.by_divergence([alone]))


def test_spans_are_written_short():
    assert charts.spanned(charts.Interval(1.0, 1.0, 1.0), ".2f") == "1.00"
    assert charts.spanned(charts.Interval(-0.5, -1.0, 0.25), "+.1f") == "-0.5 [-1.0, +0.2]"
