"""Tests of the report: its contents, the escaping of every text, and its size; progress with the time left."""

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from speccascade_jax.results.analysis import headline, significance
from speccascade_jax.results.analysis.panels import TARGET, panels
from speccascade_jax.results.report import charts, page, printing, templates
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import read_records
from speccascade_jax.results.store.trace import Candidate, Round, Step, Trace
from speccascade_jax.runtime import progress
from tests.support import fake_records, made_records
from tests.support.stores import written

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> {{ 7*7 }} </script>"


@pytest.fixture(scope="module")
def trace():
    """Returns a trace of ten rounds: in even ones the second draft is replaced, the others have a bonus."""

    def token(number, text):
        return Candidate(number, text, q=0.25, p=0.5, q_tilde=0.2, p_tilde=0.6, pi=0.4, rank_q=1, rank_p=2)

    def step(slot, source, fate):
        committed = token(slot, f" word{slot}") if source else None
        proposed = token(slot, f" draft{slot}") if fate else None
        return Step(slot, committed, source, proposed, fate, 0.7, 0.8, 0.5, 0.25, 0.1 + 0.3 * slot, 0.0, 0.4)

    replaced = (step(0, "draft", "kept"), step(1, "replaced", "rejected"), step(2, "", "unread"))
    whole = (step(0, "draft", "kept"), step(1, "draft", "kept"), step(2, "bonus", ""))
    rounds = Round(replaced, 3, 1, 2, True, False), Round(whole, 2, 2, 3, False, False)
    return Trace(rounds * 5, "Guten Tag", "h = 0.4")


def kept(trace, count, text="Guten Tag", traced=4):
    pieces = tuple(f" {word}" for word in text.split()) * 5
    sources = ("ddrdb" * len(pieces))[: len(pieces)]
    rounds = (3,) * (len(pieces) // 3) + ((len(pieces) % 3,) if len(pieces) % 3 else ())
    written = {"output": "".join(pieces), "tokens": tuple(range(len(pieces))), "pieces": pieces}
    return [
        Output(id=n, prompt=f"{text} {n}", reference=text, sources=sources, rounds=rounds, **written,
               trace=trace if n < traced else None)
        for n in range(count)
    ]  # fmt: skip


def stored(folder, records, trace=None, count=8, text="Guten Tag"):
    """Returns a store; with a trace, the first point has outputs."""
    path = folder / "mine.jsonl"
    entry = {outputs.ENTRY: kept(trace, count, text)} if trace else {}
    return written(path, *(record | entry for record in records))


def sweep(**more):
    return [fake_records.run(point) for point in fake_records.coordinates(**more)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, trace):
    """Returns a sweep's store and its page's text."""
    path = stored(tmp_path_factory.mktemp("plain"), sweep(), trace)
    return path, page.write(panels(read_records(path)), path).read_text()


class Reader(HTMLParser):
    """Parser that collects tags, ids, scripts and shown text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.shown, self._inside = [], set(), [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self._inside = tag
        self.ids |= {values["id"]} if "id" in values else set()
        self.links += [values[name] for name in ("src", "href") if name in values]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.shown.append(data)


def test_the_page_holds_every_point_with_its_command_and_outputs(plain):
    path, text = plain
    assert path.with_suffix(".html").read_text() == text
    read = Reader(text)
    records = read_records(path)
    assert {f"point-{n}" for n in range(len(records))} <= read.ids
    for record in records:
        assert f"--from_record={record['key'][:12]} --store={path}" in text
    shown = " ".join(read.shown)
    (title,) = re.findall("<title>(.*)</title>", text)
    assert html.unescape(title) == headline.headline(panels(records)[0]).text and title in text.partition("<h1>")[2]
    assert shown.count("drafted and kept") > 4 and "Configuration and machine" in shown
    anchors = set(re.findall(r'<a href="#(point-\d+)"', text))  # targets of the links from the chart's points
    assert anchors == {name for name in read.ids if re.fullmatch(r"point-\d+", name)}


def test_the_page_needs_no_network(plain):
    read = Reader(plain[1])
    assert [link for link in read.links if not link.startswith(("data:", "#"))] == []
    assert not {"iframe", "link rel", "object", "embed"} & set(read.tags)


def test_every_text_of_users_and_models_is_escaped(tmp_path, trace, plain):
    """Checks outputs, titles and configurations."""
    records = sweep()[:8]
    for record in records:
        record["point"]["pair"] = record["configuration"] = "<b onclick=1>pair</b>"
    path = stored(tmp_path, records, trace, text=HOSTILE)
    text = page.write(panels(read_records(path)), path).read_text()
    for raw in ("<script>alert", "onerror=alert(1)>", " 49 ", "onclick=1>"):
        assert raw not in text
    read = Reader(text)
    assert read.tags.count("script") == Reader(plain[1]).tags.count("script") and "img" not in read.tags
    assert any("<script>alert('x')</script><img" in shown for shown in read.shown)


@pytest.mark.laws
def test_forty_points_of_64_outputs_stay_under_5_mb(tmp_path, trace):
    words = "Es regnete als ich das Haus verließ"  # each output has 35 tokens, like the sentences of tiny_translation
    path = stored(tmp_path, [*sweep(), *sweep(temperature=0.0)][:40], trace, count=64, text=words)
    records = read_records(path)
    assert page.write(panels(records), path).stat().st_size < 5_000_000


def test_every_panel_has_a_verdict_even_without_outputs_or_times(tmp_path):
    untimed = [{k: v for k, v in record.items() if "latency" not in k} for record in sweep(temperature=0.0)]
    path = stored(tmp_path, [*sweep(), *untimed])
    text = page.write(panels(read_records(path)), path).read_text()
    assert "Outputs were not kept" in text and text.count("; no latency was measured.") == 1
    assert "<h1>In 0 of 2" not in text and "of 2 settings, a method is measurably faster" in text.partition("</h1>")[0]


@pytest.mark.parametrize(("noise", "certain"), [(0.1, True), (9.0, False)])
def test_the_headline_says_whether_the_loss_is_certain(tmp_path, noise, certain):
    """Checks a point 0.5 below the target whose interval is within 1, and one whose interval reaches beyond."""
    records = [made_records.TARGET, made_records.point("diff", gain=-0.5, ratio=0.7, noise=noise, own=4)]
    (panel,) = panels(records)
    places = significance.places(panel)
    assert (places.chosen.difference.low > -1) == certain and places.chosen.difference.value > -1
    text = html.unescape(page.write([panel], tmp_path / "a.jsonl").read_text())
    doubt = "It is not certain that its quality is within 1 of the target's quality."
    assert (doubt in text) == (not certain)
    assert places.ring.endswith("(uncertain)") == (not certain)
    assert "This is the fastest of" not in text, "there is no choice among one point"
    assert "certain that it is faster" not in text
    for entry in ("latency", "target_latency"):  # with a single trial there is no interval over trials
        records[1][entry]["per_example_ms"] = records[1][entry]["per_example_ms"][:1]
    once = html.unescape(page.write(panels(records), tmp_path / "b.jsonl").read_text())
    assert re.search("It is not certain (that its quality .* and )?that it is faster", once)


@pytest.mark.parametrize(("ratio", "busy"), [(1.0, False), (1.25, True)])
def test_a_busy_machine_is_named_below_the_headline(tmp_path, ratio, busy):
    """The target, timed twice, differs from itself by a quarter; notes below tables are folded."""
    target = made_records.point(TARGET, ratio=ratio, noise=1)
    text = page.write(panels([target, made_records.point("diff", ratio=0.7)]), tmp_path / "a.jsonl").read_text()
    before_the_plot = html.unescape(text).partition("<figure")[0]
    assert ("The machine was busy, and the latencies are unreliable" in before_the_plot) == busy


def test_token_marks_are_explained_once_and_bars_only_where_rounds_write_blocks(tmp_path, trace):
    path = stored(tmp_path, [*sweep()[:8], *sweep(temperature=0.0)[:8]], trace)
    text = page.write(panels(read_records(path)), path).read_text()
    assert text.count("<h2>Outputs</h2>") == 2 and text.count('class="legend"') == 1
    block = kept(trace, 1, traced=0)[0]
    single = dataclasses.replace(block, rounds=(1,) * len(block.pieces))
    barred = [[name.endswith(" e") for name, _ in page._runs(output)] for output in (block, single)]
    assert any(barred[0]) and not any(barred[1]) and not barred[0][0]
    alone = dataclasses.replace(
        trace, rounds=tuple(Round(entry.steps[:1], 0, 0, 1, False, False) for entry in trace.rounds)
    )
    shown = [templates.traces([entry]).partition("</p>")[2] for entry in (trace, alone)]
    assert [len(re.findall(r'class="k \w e"', entry)) for entry in shown] == [len(trace.rounds) - 1, 0]


def test_every_command_and_configuration_has_a_button_that_copies_it(plain):
    text = plain[1]
    assert text.count("<pre>") == text.count('class="copy"') > 2 * len(read_records(plain[0])) - 1
    assert len(re.findall(r'<button [^>]*class="copy"[^>]*>copy</button><pre>', text)) == text.count("<pre>")


def test_tables_scroll_beside_their_notes_and_say_so(plain):
    tables = plain[1].count('class="wide"')
    assert (
        tables == len(re.findall(r'class="wide"[^>]*><table.*?</table></div>\s*<p class="cue', plain[1], re.DOTALL)) > 0
    )


def test_no_line_of_a_table_ends_inside_an_interval_or_before_a_mark(plain):
    commas = re.findall(r"<td>[^<]*\[[-+\d.]+,(.)[-+\d.]+\][^<]*</td>", plain[1])
    marks = re.findall(r"(.)[*≈](?:</b>)?</td>", plain[1])
    assert len(commas) > 3 and marks and {*commas, *marks} == {"\N{NO-BREAK SPACE}"}


def test_every_linked_point_shows_its_numbers_and_command(plain):
    tips = [json.loads(html.unescape(entry)) for entry in re.findall(r"data-tips='(.*?)'", plain[1])]
    records = read_records(plain[0])
    assert len(tips[0]) == len(records) and set(tips[0]) == set(re.findall(r'<a href="#(point-\d+)"', plain[1]))
    for record in records:
        (tip,) = [tip for tip in tips[0].values() if record["key"][:12] in tip]
        assert f"quality {record['quality']['value']:.2f}" in tip and "speed-up" in tip


def test_damaged_outputs_raise_a_warning_and_the_rest_is_shown(tmp_path, trace):
    path = stored(tmp_path, sweep()[:8], trace)
    outputs_file = outputs.folder(path) / f"{read_records(path)[3]['key']}.jsonl"
    outputs_file.write_text(outputs_file.read_text()[:-9])
    with pytest.warns(UserWarning, match="is damaged"):
        text = page.write(panels(read_records(path)), path).read_text()
    assert text.count("Outputs were not kept") == 1


def test_a_store_without_the_target_is_refused(tmp_path):
    records = [record for record in sweep() if record["point"]["method"] != "autoregressive"]
    with pytest.raises(ValueError, match="no record of the target alone"):
        page.write(panels(records), tmp_path / "a.jsonl")


def test_rejections_by_position_equal_the_counters(trace):
    positions = [{"examined": [10, 8, 0], "kept": [9, 2, 0]}, {"examined": [10, 2], "kept": [6, 1]}]
    spot = SimpleNamespace(records=[{"by_position": entry} for entry in positions])
    assert charts.by_position(spot) == [(1, pytest.approx(0.25)), (2, pytest.approx(0.7))]
    shares = charts.by_divergence([trace])
    counts = trace.counts()
    assert counts["rejected"] > 0 and all(0 <= share <= 1 for _, share in shares)
    alone = dataclasses.replace(trace, rounds=tuple(entry for entry in trace.rounds if not entry.rejected))
    assert all(share == 0 for _, share in charts.by_divergence([alone]))


def test_intervals_with_equal_ends_are_written_as_one_number():
    assert charts.spanned(charts.Interval(1.0, 1.0, 1.0), ".2f") == "1.00"
    assert charts.spanned(charts.Interval(-0.5, -1.0, 0.25), "+.1f") == "-0.5 [-1.0, +0.2]"


@pytest.mark.parametrize(("changes", "said"), [
    ({}, True), ({"imports": {"my_rules": "my_rules.py"}}, False),
    ({"configuration": "points.Evaluation:\n  task = 'mine.csv'\n"}, False),
    ({"configuration": "points.Evaluation:\n  task = 'gsm8k:4'\npoints.Settings:\n  stop = 'fixed'\n"}, True),
    ({"configuration": "points.Settings:\n  method = 'my_rules.FAVOURITE'\n"}, False),
])  # fmt: skip
def test_the_next_steps_name_your_own_data_unless_they_are_in_use(tmp_path, capsys, changes, said):
    path = stored(tmp_path, [record | changes for record in sweep()])
    printing.print_next(panels(read_records(path)), path, tmp_path)
    assert ("use your own data and rule" in capsys.readouterr().out) == said


def test_progress_estimates_the_time_left_from_points_of_this_process(capsys):
    now = iter([0.0, 10.0, 20.0, 20.0])
    with printing.Progress(10, present=4, store="store.jsonl", clock=lambda: next(now)) as progress:
        for point in fake_records.coordinates()[2:4]:
            progress.advance(fake_records.run(point))
    said = capsys.readouterr().out
    assert "10 points, 4 of them already in store.jsonl" in said
    assert "[ 5/10] SpecDecode T=1 γ=5  " in said and "(0:10 elapsed)" in said, "one point is no evidence"
    assert "[ 6/10] SpecDecode [Lossy] α=0" in said and "(0:20 elapsed, about 0:40 left)" in said
    assert "2 points measured in 0:20" in said


def test_the_remaining_time_leaves_compilations_out(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PREPARED", [])
    now = iter([1000.0, 1062.0, 1064.0, 1064.0])
    with printing.Progress(10, clock=lambda: next(now)) as shown:
        progress.prepared(60.0, 1060.0)
        for point in fake_records.coordinates()[:2]:
            shown.advance(fake_records.run(point))
    assert "(1:04 elapsed, about 0:16 left without compiling)" in capsys.readouterr().out


def test_progress_lines_name_the_numbers_that_a_sweep_varies():
    """Checks the target alone at two temperatures and seeds, whose lines were equal."""
    record = fake_records.run(fake_records.coordinates(temperature=0.0)[0])
    hot = record | {"point": record["point"] | {"temperature": 0.5, "seed": 3, "top_p": 0.9}}
    assert printing.one_line(record).startswith("Target alone T=0  ")
    assert printing.one_line(hot).startswith("Target alone T=0.5 top-p=0.9 seed=3  ")
    (chow, *_) = (r for r in map(fake_records.run, fake_records.coordinates()) if r["point"]["method"] == "chow")
    assert printing.one_line(chow).startswith("SpecCascade [Chow] α=0.1 T=1 γ=5  ")
    assert f"  speed-up {1 / chow['relative_latency']['value']:5.2f}  " in printing.one_line(chow)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_clock_times(seconds, shown):
    assert progress.clock_time(seconds) == shown


def test_the_page_of_several_tasks_names_all_of_them(tmp_path):
    path = stored(tmp_path, [*sweep(task="gsm8k")[:3], *sweep()[:3], *sweep(temperature=0.0)[:3]])
    text = page.write(panels(read_records(path)), path).read_text()
    assert "gsm8k, tatoeba_en_de; tiny_translation, tatoeba_en_de" in " ".join(Reader(text).shown)
