"""Tests of `calibrate`, from its arguments to the files that it writes, with fake and with tabular models."""

import json
from dataclasses import asdict, replace

import gin
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.evaluation import experiment, session
from speccascade_jax.evaluation.points import Settings
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.calibration.thresholds import AppendixD
from speccascade_jax.results.store import result_store
from speccascade_jax.storage.files import plain
from tests.support import text_pair
from tests.support.calibration_fakes import SOURCE, TASK, FakeSession, examples_of
from tests.support.recipes import resolve, stop_before_loading  # noqa: F401 (a fixture)

HELD_OUT = set(range(180, 280))


def law(settings):
    """Returns fake results: `opt` loses 1% of quality, and 1% more per tenth of α, which saves 5% of time."""
    if settings.method == "autoregressive_draft":
        return 0.8, 0.1, 1.0
    if settings.alpha is None:
        return 1.0, 0.95, 0.5
    if settings.rule:  # a fuzzy method
        return 1.035 - 0.1 * settings.alpha, 0.8 - 0.3 * settings.alpha, settings.alpha
    return 0.99 - 0.1 * settings.alpha, 0.9 - 0.5 * settings.alpha, 0.5


@pytest.fixture
def calibrate(tmp_path, monkeypatch):
    """Returns `calibrate(max_loss=…)`; `calibrate.loaded` is the session of the last call."""

    def call(loaded=None, **given):
        call.loaded = loaded or FakeSession(law, noise=0.5)
        monkeypatch.setattr(calibrating, "Session", lambda *_: call.loaded)
        shared = {"pair": SOURCE, "evaluation": TASK, "settings": Settings()}
        shared |= {"methods": ("spec_decode", "opt"), "alphas": {"opt": (0.0, 0.1, 0.2, 0.3, 0.4)}}
        shared |= {"block_sizes": (3, 5), "output": str(call.folder / "found.jsonl")}
        shared |= {"search_examples": 120, "test_examples": 60, "held_out_examples": 100}
        return calibrating.calibrate(**shared | given)

    call.folder = tmp_path / "new"
    return call


def test_the_chosen_setting_is_measured_on_held_out_examples_with_intervals(calibrate, capsys):
    report = calibrate(max_loss=0.035)
    chosen, *further = report["settings"]
    assert (chosen["name"], chosen["settings"]["method"], chosen["settings"]["alpha"]) == ("chosen", "opt", 0.2)
    assert [entry["name"] for entry in further] == ["runner-up 1", "runner-up 2", "runner-up 3", "target"]
    on_held_out = [p for p in calibrate.loaded.asked if HELD_OUT & {*examples_of(p)}]
    assert {*examples_of(on_held_out[0])} == HELD_OUT
    assert len(on_held_out) == 5 and on_held_out == calibrate.loaded.asked[-5:]
    searched = set().union(*(examples_of(p) for p in calibrate.loaded.asked[:-5]))
    assert searched == set(range(180))
    tested = [p for p in calibrate.loaded.asked[:-5] if set(range(120, 180)) & {*examples_of(p)}]
    assert {*examples_of(tested[0])} == set(range(120, 180)) and len(tested) <= 1 + 4
    for name, about in (("difference_percent", -3.0), ("latency", 0.8)):
        value, low, high = chosen[name]
        assert low < value < high and value == pytest.approx(about, abs=0.3)
    assert chosen["kept"] is True and chosen["share"] > 0.9
    assert further[-1]["difference_percent"] == [0, 0, 0] and further[-1]["latency"] is None
    assert json.loads((calibrate.folder / "found.json").read_text()) == report
    said = capsys.readouterr().out
    assert "on 100 held-out examples" in said and "yes, 100%" in said and "runner-up 3" in said
    assert (calibrate.folder / "found.gin").read_text() in said


def test_held_out_numbers_do_not_come_from_the_search(calibrate):
    """Checks that a tolerance that only the searched examples keep is reported as not kept."""
    optimist = FakeSession(law, noise=0.5)
    optimist.law_on_held_out = lambda settings: (0.9, 0.5, 0.5) if settings.alpha else law(settings)
    record = optimist._record

    def record_of(point):
        optimist.law = optimist.law_on_held_out if point.evaluation.first_example == min(HELD_OUT) else law
        return record(point)

    optimist._record = record_of
    chosen = calibrate(optimist, max_loss=0.035)["settings"][0]
    assert chosen["kept"] is False and chosen["share"] == 0.0 and chosen["difference_percent"][0] < -9


def test_a_missing_head_is_refused_before_anything_is_measured(calibrate):
    gone = Settings(method="specdecpp", stop_threshold=0.5, head="gone.msgpack")
    with pytest.raises(FileNotFoundError, match="no acceptance head at gone.msgpack"):
        calibrate(max_loss=0.035, methods=["opt", gone])
    assert calibrate.loaded.asked == []


@pytest.mark.usefixtures("stop_before_loading")
def test_the_gin_file_and_the_files_of_a_run_give_a_run(calibrate):
    report, seen = calibrate(max_loss=0.035), []
    files = ["gin/run.gin", "gin/models/tatoeba_en_de.gin", "gin/tasks/tiny_translation.gin"]
    text = (calibrate.folder / "found.gin").read_text()
    for block in [text, _uncommented(text)]:
        (calibrate.folder / "some.gin").write_text(block)
        gin.clear_config()
        seen.append(resolve(experiment.run, [*files, calibrate.folder / "some.gin"]))
    wanted = [entry["settings"] for entry in report["settings"][:2]]
    assert [plain(asdict(point.settings)) for point in seen] == wanted


def _uncommented(text: str) -> str:
    """Returns the file with the first runner-up active instead of the chosen setting."""
    head, _, rest = text.partition("# chosen:")
    block = rest.partition("# runner-up 1:")[2].partition("\n")[2].partition("\n\n")[0]
    return head + block.replace("# ", "")


def test_a_second_call_measures_nothing_twice(calibrate):
    first = calibrate(max_loss=0.035)
    assert len(calibrate.loaded.asked) > 12
    assert calibrate(max_loss=0.035) == first and not calibrate.loaded.asked
    calibrate(max_loss=0.025)
    assert calibrate.loaded.asked
    # this search shares only the first rung with the stored one
    assert all(p.evaluation.quality_examples > 32 for p in calibrate.loaded.asked)


def test_the_report_comes_before_the_error_if_no_setting_keeps_the_tolerance(calibrate, capsys):
    refusal = r"no setting keeps the tolerance \(latency at most 0\.05 of .*\) in 90% .* 0%"
    with pytest.raises(ValueError, match=refusal):
        calibrate(max_latency=0.05)
    said = capsys.readouterr().out
    assert "safest" in said and "on 60 test examples" in said
    pasted = (calibrate.folder / "found.gin").read_text()
    assert "No setting keeps the tolerance" in pasted and "\npoints." not in pasted and "# points.Settings:" in pasted
    assert not HELD_OUT & calibrate.loaded.seen


def test_the_draft_alone_is_a_candidate(calibrate):
    chosen, *_ = calibrate(max_loss=0.3)["settings"]
    assert chosen["settings"]["method"] == "autoregressive_draft"
    assert chosen["latency"][0] == pytest.approx(0.1, abs=0.02)


def test_appendix_d_is_a_mode(calibrate, capsys):
    arguments = {"settings": Settings(temperature=0.6, top_p=0.9), "seeds": (0, 1)}
    report = calibrate(mode="appendix_d", appendix_d=AppendixD(lengths=(5, 10)), **arguments)
    assert [entry["name"] for entry in report["settings"]] == ["Low", "Med", "High", "target"]
    alphas = [entry["settings"]["alpha"] for entry in report["settings"][:3]]
    assert alphas == sorted(alphas) and report["trail"]["threshold"] == 0.5
    assert [step["held"] for step in report["trail"]["steps"]][-1] is False
    pasted = (calibrate.folder / "found.gin").read_text()
    live = [line for line in pasted.splitlines() if line.startswith("  alpha")]
    assert live == [f"  alpha = {alphas[2]}"] and "  draft_temperature = 0.0" in pasted
    on_held_out = [p for p in calibrate.loaded.asked if HELD_OUT & {*examples_of(p)}]
    assert len(on_held_out) == 2 * 4 and on_held_out == calibrate.loaded.asked[-8:]
    assert "Appendix D with fuzzy_js_reference" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "message"), [
    ({}, "max_loss and max_latency are both None"),
    ({"max_loss": 2}, "max_loss=2 is not in"),
    ({"mode": "halfing"}, "mode='halfing' is not one of halving, appendix_d"),
    ({"mode": "appendix_d", "max_loss": 0.1}, "leave max_loss and max_latency out"),
    ({"mode": "appendix_d", "appendix_d": AppendixD(rule="diff")}, "rule='diff' has no divergence"),
    ({"mode": "appendix_d", "settings": Settings(temperature=-1.0)}, "is negative"),
    ({"max_loss": 0.1, "methods": ("optt",)}, "unknown method 'optt': did you mean opt"),
    ({"max_loss": 0.1, "alphas": {"opt": (float("inf"),)}}, r"alphas\['opt'\]\[0\]=inf is not a finite number"),
    ({"max_loss": 0.1, "alphas": {"diff": 0.1}}, r"alphas\['diff'\]=0.1 is one value where a tuple is meant"),
    ({"max_loss": 0.1, "block_sizes": ()}, "block_sizes=.. is empty"),
    ({"max_loss": 0.1, "search_examples": 40.5}, "search_examples=40.5 is not a whole number"),
    ({"max_loss": 0.1, "methods": "opt"}, "methods='opt' is one value where a tuple is meant"),
    ({"max_loss": 0.1, "seeds": ()}, "seeds=.. is empty"),
    ({"max_loss": 0.1, "seeds": (1, 1)}, "names a point twice"),
    ({"max_loss": 0.1, "search_examples": 5}, "search_examples=5 is too few for an interval: give at least 8"),
    ({"max_loss": 0.1, "test_examples": 3}, "test_examples=3 is too few"),
    ({"max_loss": 0.1, "held_out_examples": 7}, "held_out_examples=7 is too few"),
    ({"max_loss": 0.1, "runners_up": -1}, "runners_up=-1 is not a whole number >= 0"),
    ({"max_loss": 0.1, "output": "found.json"}, "output='found.json' must end in .jsonl"),
    ({"max_loss": 0.1, "evaluation": replace(TASK, latency_examples=0)}, "latency_examples=0 is too few"),
    ({"max_loss": 0.1, "evaluation": replace(TASK, first_example=-1)}, "first_example=-1 is not a whole number"),
])  # fmt: skip
def test_invalid_values_are_refused_before_anything_is_loaded(calibrate, monkeypatch, changes, message):
    with pytest.raises(ValueError, match=message):
        calibrate(**changes)
    assert not calibrate.loaded.asked and not calibrate.folder.exists()


@pytest.mark.parametrize("suffix", [".json", ".gin"])
def test_a_calibration_does_not_overwrite_its_own_input_file(calibrate, suffix):
    calibrate.folder.mkdir()
    config_file = calibrate.folder / f"found{suffix}"
    config_file.write_text("# a configuration\ncalibrating.calibrate.mode = 'halving'\n")
    with pytest.raises(ValueError, match=rf"found\{suffix} was not made by this command"):
        calibrate(max_loss=0.1)
    assert config_file.read_text().startswith("# a configuration") and list(calibrate.folder.iterdir()) == [config_file]


def test_a_task_with_too_few_examples_is_refused(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    arguments = {"pair": SOURCE, "evaluation": TASK, "settings": Settings(), "max_loss": 0.1}
    arguments |= {"search_examples": 200, "test_examples": 8, "held_out_examples": 100}
    with pytest.raises(ValueError, match="200 examples in split 'test', fewer than the 308 requested"):
        calibrating.calibrate(**arguments, output=str(tmp_path / "out.jsonl"))


def _some_german(pair) -> sc.Pair:
    """Returns the tabular pair with a target shifted towards the references; the draft shares no word with them."""
    counts, end = np.zeros((text_pair.PIECES, text_pair.PIECES)), pair.vocabulary.eos_id
    for example in TASKS["tiny_translation"].load():
        ids = [end, *pair.vocabulary.encode(example.reference)]  # the last token of a prompt is also the end token
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    return replace(pair, target=sc.TableLM(np.asarray(pair.target.params) / 8 + 3 * np.log1p(counts)))


@pytest.mark.laws
def test_a_tabular_pair_is_calibrated_from_end_to_end(pair, tmp_path, monkeypatch):
    german = _some_german(pair)
    monkeypatch.setattr(session, "load_pair", lambda name, **_: german)
    monkeypatch.setitem(TASKS, "words", replace(TASKS["tiny_translation"], name="words", metrics=("rougeL",)))
    small = text_pair.evaluation(task="words", quality_examples=64, quality_batch=16, latency_examples=8)
    arguments = {
        "pair": SOURCE, "evaluation": small, "settings": Settings(), "methods": ("spec_decode",),
        "block_sizes": (2,), "max_loss": 0.0, "search_examples": 64, "test_examples": 16,
        "held_out_examples": 24, "output": str(tmp_path / "out.jsonl"),
    }  # fmt: skip
    report = calibrating.calibrate(**arguments)
    chosen, *_, target = report["settings"]
    assert chosen["setting"] == "spec_decode block=2 T=0" and chosen["kept"] and chosen["share"] == 1
    assert chosen["quality"] == target["quality"] and target["quality"][0] > 0
    records = result_store.read_records(tmp_path / "out.jsonl")
    judged = {0: set(), 64: set(), 80: set()}
    for record in records:
        judged[record["point"]["first_example"]].add(tuple(sorted(record["quality"]["per_example"]["ids"])))
    (tested,), (held_out,) = judged[64], judged[80]
    assert (len(tested), len(held_out)) == (16, 24) and {len(examples) for examples in judged[0]} == {32, 64}
    assert not set(held_out) & set(tested) and not {*held_out, *tested} & set().union(*judged[0])
    assert calibrating.calibrate(**arguments) == report
    assert len(result_store.read_records(tmp_path / "out.jsonl")) == len(records)
