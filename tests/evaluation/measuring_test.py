"""Tests of the measurement of points: the timed calls and their order, records, and the files beside them."""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.evaluation import experiment, latency, measuring
from speccascade_jax.evaluation.measuring import judge
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.metrics import quality
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import ResultStore, read_records
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.runtime import interrupts
from speccascade_jax.stopping.policies import Fixed
from tests.support import text_pair

LOSSLESS = Speculative(RULES["spec_decode"])
EVALUATION = Evaluation(
    task="tiny_translation", quality_examples=10, quality_batch=4, latency_examples=0, max_new_tokens=12, keep_traces=3
)
TOKEN = Settings(method="token_v3", alpha=0.4, temperature=1.0)


@pytest.fixture(scope="module")
def session(pair):
    return Session(ModelPair(name="tables"), EVALUATION, pair=pair)


def point(session, settings=TOKEN, **changed):
    return Point(pair=session.source, evaluation=replace(session.evaluation, **changed), settings=settings)


def test_every_timed_example_of_every_method_is_warmed_up_before_timing(session, monkeypatch):
    ran, prepare, interleave = [], session.prepare, latency.interleave

    def noted(point, rows):
        call = prepare(point, rows)
        return lambda seed: ran.append((point.settings.method, point.settings.alpha, *rows)) or call(seed)

    monkeypatch.setattr(session, "prepare", noted)
    monkeypatch.setattr(latency, "interleave", lambda *a, **more: ran.append("timed") or interleave(*a, **more))
    settings = [Settings(method="opt", alpha=a, block_size=2, temperature=1.0) for a in (0.1, 0.4)]
    points = [point(session, item, latency_examples=3, latency_trials=2) for item in settings]
    timings = measuring.time_beside_target(session, points)
    warm, timed = ran[: ran.index("timed")], ran[ran.index("timed") + 1 :]
    assert sorted(warm) == [("autoregressive", None, 0), *(("opt", a, n) for a in (0.1, 0.4) for n in range(3))]
    # in two trials, the target is timed once beside each example, and once more as the neighbour of both methods
    assert [timed.count(("opt", a, n)) for a in (0.1, 0.4) for n in range(3)] == [2] * 6
    assert [np.shape(item["latency"]["per_example_ms"]) for item in timings] == [(2, 3)] * 2
    for entry in (item[name] for item in timings for name in ("latency", "target_latency")):
        tokens, ms = np.sum(entry["per_example_tokens"]), np.sum(entry["per_example_ms"])
        assert entry["tokens_per_second"] == pytest.approx(1e3 * tokens / ms) and "mfu" not in entry  # a CPU


@pytest.mark.laws
def test_records_hold_planned_lengths_and_their_costs(pair):
    """Checks the entries about `block_size="auto"`: rounds by length, and costs, of quality's and of latency's batches.

    A gin file with the record's configuration runs it again.
    """
    few = text_pair.evaluation(latency_examples=3, latency_trials=2)
    loaded, point = Session(text_pair.SOURCE, few, pair), text_pair.point("spec_decode", few, block_size="auto")
    (record,) = measuring.evaluate(loaded, [point])
    assert record["point"]["block_size"] == "auto" and not record["point"]["swept_block"]
    assert "block_size = 'auto'" in record["configuration"] and "block=auto" in point.label()
    judged, single = record["planned"]
    assert (judged["rows"], single["rows"]) == (2, 1) and set(judged["round_ms"]) == set(judged["rounds"])
    assert sum(judged["rounds"].values()) + sum(single["rounds"].values()) == record["counts"]["rounds"]
    timed = record["planned_latency"]
    assert timed["rows"] == 6 and timed["prefill_ms"] >= 0 and 0 < timed["acceptance"] < 1
    assert loaded.code(point.settings) != loaded.code(Settings(method="spec_decode", block_size=2))
    assert point.method.details(point.settings) == ("γ auto",)


class OwnStack(NestedDrafter):
    """A drafter whose inner engine decides with the numbers of the engine above."""

    def propose(self, params, state, request):
        controls = replace(request.controls, inner=(request.controls,))
        return super().propose(params, state, replace(request, controls=controls))


def stack_of_ones_own(pair, block):
    """Returns a drafter that is an engine, in which the pair's draft drafts for itself."""
    bound = pair.draft
    inner = Engine(target=bound.model, drafter=ModelDrafter(bound.model, Fixed(block)), verifier=LOSSLESS)
    return OwnStack(inner, 2), {"target": bound.params, "drafter": {"model": bound.params}}


def test_engines_inside_a_custom_drafter_are_in_the_record(session, monkeypatch):
    module = types.ModuleType("ideas_of_ones_own")
    module.stack = stack_of_ones_own
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = Settings(method="spec_decode", drafters=("ideas_of_ones_own.stack",), block_size=2, temperature=1.0)
    (record,) = judge(session, [point(session, settings, quality_examples=2, keep_outputs=False)])
    (level,) = record["levels"]
    assert level["model"] == "own" and level["target_calls"] > 0


class _Bench:
    """Fake runs that advance a fake clock and log their order."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def run(self, name, seconds, tokens=4):
        def call(example, trial):
            self.now += seconds * (1 + example) * (1 + trial)
            self.log.append((trial, example, name))
            stats = SimpleNamespace(draft_steps=np.asarray([10 * trial + example]), target_calls=np.asarray([tokens]))
            return SimpleNamespace(lengths=np.asarray([tokens]), stats=stats)

        return call

    def clock(self):
        return self.now


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(latency.jax, "block_until_ready", lambda result: result)
    return _Bench()


def test_sigterm_ends_timed_runs_between_two_turns(bench, monkeypatch):
    def stop():
        if len(bench.log) == 4:
            raise interrupts.Terminated

    monkeypatch.setattr(latency.hosts, "stop_here", stop)
    with pytest.raises(interrupts.Terminated):
        latency.interleave(bench.run("t", 1.0), [bench.run("a", 1.0)], examples=3, trials=2, clock=bench.clock)
    assert len(bench.log) == 4


@pytest.mark.parametrize(("methods", "examples", "turns"), [
    ("a", 2, ["at", "ta", "ta", "at"]),
    ("ab", 2, ["atb", "bta", "bta", "atb"]),
    ("abc", 8, ["atcb", "bcta", "tbac", "cabt", "bcta", "atcb", "cabt", "tbac"]),  # each run is first in some turns
])  # fmt: skip
def test_every_method_runs_next_to_the_baseline_and_begins_as_many_turns_as_it_ends(bench, methods, examples, turns):
    runs, trials = [bench.run(name, 1.0) for name in methods], len(turns) // examples
    latency.interleave(bench.run("target", 1.0), runs, examples=examples, trials=trials, clock=bench.clock)
    order = "".join(name[0] for _, _, name in bench.log)
    assert order == "".join(turns) and [place[:2] for place in bench.log] == sorted(place[:2] for place in bench.log)
    assert sorted(turn[0] for turn in turns) == sorted(turn[-1] for turn in turns)


@pytest.mark.parametrize("methods", [3, 4, 5, 6])
def test_each_run_directly_follows_every_other_run_equally_often(bench, methods):
    runs, turns = [bench.run(f"m{number}", 1.0) for number in range(methods)], 2 * (methods + 1)
    latency.interleave(bench.run("target", 1.0), runs, examples=turns, trials=1, clock=bench.clock)
    turn_of = [bench.log[n : n + methods + 1] for n in range(0, len(bench.log), methods + 1)]
    pairs = Counter((a, b) for turn in turn_of for (_, _, a), (_, _, b) in itertools.pairwise(turn))
    assert len(pairs) == (methods + 1) * methods and set(pairs.values()) == {2}


@pytest.fixture
def timed(bench):
    """Returns timings of the target, and of a method with half its time and half its tokens."""
    runs = bench.run("target", 1.0, 10), [bench.run("a", 0.5, 5)]
    alone, (method,) = latency.interleave(*runs, examples=3, trials=2, clock=bench.clock)
    return alone, method


def test_seconds_and_ratios(timed):
    alone, method = timed
    np.testing.assert_allclose(alone.seconds, [[1, 2, 3], [2, 4, 6]])
    relative = latency.relative_latency(method, alone)
    assert relative["value"] == pytest.approx(0.5) and relative["trials"] == pytest.approx([0.5, 0.5])
    assert relative["per_token"] == pytest.approx(1.0)
    measured = latency.latency(alone)
    assert measured["ms_per_example"]["value"] == pytest.approx(3000)
    assert (measured["ms_per_example"]["low"], measured["ms_per_example"]["high"]) == pytest.approx((2000, 4000))
    assert measured["ms_per_token"]["trials"] == pytest.approx([200, 400])
    assert (measured["examples"], measured["trials"], measured["tokens_per_example"]) == (3, 2, 10)
    assert np.sum(measured["per_example_ms"], axis=0).tolist() == [3000, 6000, 9000]  # the times have one row per trial
    assert np.sum(latency.latency(method)["per_example_ms"]) / np.sum(measured["per_example_ms"]) == relative["value"]


def test_counts_belong_to_the_timed_runs(timed):
    alone, method = timed
    measured = latency.latency(method)
    assert measured["per_example_tokens"] == measured["per_example_target_calls"] == [[5] * 3] * 2
    assert measured["per_example_draft_steps"] == [[0, 1, 2], [10, 11, 12]]
    assert latency.latency(alone)["per_example_target_calls"] == [[10] * 3] * 2
    as_draft = latency.latency(alone, draft_alone=True)
    assert as_draft["per_example_draft_steps"] == [[10] * 3] * 2 and not np.any(as_draft["per_example_target_calls"])


def test_results_are_not_read_while_the_clock_runs(bench):
    class Late:
        """A result that takes a second to read."""

        def __getattr__(self, name):
            bench.now += 1.0
            return SimpleNamespace(draft_steps=0, target_calls=0) if name == "stats" else np.asarray([1])

    alone, _ = latency.interleave(lambda e, t: Late(), [lambda e, t: Late()], examples=2, trials=1, clock=bench.clock)
    assert not alone.seconds.any()


def test_timing_a_baseline_without_methods_is_refused(bench):
    with pytest.raises(ValueError, match="there are no methods to time"):
        latency.interleave(bench.run("t", 1), [], examples=1, trials=1)


def measured(session, *points):
    """Returns records as a sweep has them before they are stored."""
    results = judge(session, points)
    described = ({"key": f"{n:032d}", "fingerprints": session.loaded} for n in range(len(points)))
    return [{**description, **result} for description, result in zip(described, results, strict=True)]


@pytest.fixture(scope="module")
def records(session):
    """Returns records with their outputs, of two α's."""
    return measured(session, point(session), point(session, replace(TOKEN, alpha=0.9)))


@pytest.fixture
def path(records, tmp_path):
    """Returns the path of a closed store with these records."""
    with ResultStore(tmp_path / "a.jsonl") as store:
        for record in records:
            store.append(record)
    return store.path


def test_stored_outputs_agree_with_scores_and_counts(session, records, path):
    for record, stored in zip(records, read_records(path), strict=True):
        assert outputs.ENTRY not in stored and outputs.ENTRY in record
        kept = outputs.read(path, stored)
        assert [item.id for item in kept] == [example.id for example in session.examples]
        assert [item.prompt for item in kept] == [example.source for example in session.examples]
        scored = quality.score(["bleu"], [item.output for item in kept], [item.reference for item in kept])
        assert scored["bleu"] == pytest.approx(stored["quality"]["value"])
        sources = "".join(item.sources for item in kept)
        counts = stored["counts"]
        assert len(sources) == counts["committed"] == sum(len(item.tokens) for item in kept)
        assert sources.count("d") == counts["kept"] and sources.count("r") <= counts["rejected"]
        assert sum(len(item.rounds) for item in kept) == counts["rounds"]
        assert all(sum(item.rounds) == len(item.tokens) == len(item.sources) for item in kept)
        assert ["".join(item.pieces).strip() for item in kept] == [item.output for item in kept]
        assert [item.trace is not None for item in kept] == [True] * 3 + [False] * 7
        committed = dict(zip(stored["per_example"]["ids"], stored["per_example"]["committed"], strict=True))
        for item in kept[:3]:
            assert item.trace.counts()["committed"] == committed[item.id]
            steps = [step for written in item.trace.rounds for step in written.steps if step.committed]
            assert "".join(step.source[0] for step in steps) == item.sources


def test_storing_outputs_changes_no_number(session):
    asked = [point(session, **more) for more in ({"keep_traces": 0}, {}, {"keep_outputs": False})]
    kept, traced, none = (judge(session, [item])[0] for item in asked)
    assert none.get(outputs.ENTRY) is None
    assert all(item.trace is None for item in kept[outputs.ENTRY])
    for record in (kept, traced):
        assert {name: value for name, value in record.items() if name != outputs.ENTRY} == none


def test_storing_outputs_does_not_change_a_points_identity(session):
    full, bare = point(session), point(session, keep_outputs=False, keep_traces=0)
    assert full == bare and full.configuration() == bare.configuration() and session.key(full) == session.key(bare)
    assert "keep" not in full.configuration() and "keep_outputs" not in full.coordinates()


def test_methods_of_several_generations_keep_texts_without_sources(session):
    (record,) = judge(session, [point(session, Settings(method="seq_cascade", alpha=0.5, temperature=1.0))])
    assert all(item.sources == "" and item.output == "".join(item.pieces).strip() for item in record[outputs.ENTRY])


def test_a_failed_write_leaves_no_record_without_outputs(records, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "write", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with ResultStore(tmp_path / "a.jsonl") as store:
        with pytest.raises(OSError, match="no space"):
            store.append(records[0])
        assert store.done_keys() == set()


def test_records_that_are_taken_over_from_another_store_bring_their_outputs(records, path, tmp_path):
    with ResultStore(tmp_path / "b.jsonl") as store:
        assert store.take_over([records[0]["key"]], [path]) == 1
        assert outputs.read(tmp_path / "b.jsonl", store.records[0]) == outputs.read(path, records[0])


def test_points_that_were_measured_without_outputs_are_counted(records, path, capsys):
    kept, bare = records[0], {name: value for name, value in records[0].items() if name != outputs.ENTRY}
    bare["key"] = "f" * 32
    with ResultStore(path) as store:
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"], bare["key"]])
        store.append(bare)
        experiment.tell_without_outputs(store, replace(EVALUATION, keep_outputs=False), [bare["key"]])
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"]])  # a run does not count points of other runs
        assert capsys.readouterr().out == ""
        experiment.tell_without_outputs(store, EVALUATION, [kept["key"], bare["key"]])
        assert "1 of these 2 points have no stored outputs beside" in capsys.readouterr().out
        next(outputs.folder(store.path).glob("examples-*")).unlink()
        assert not outputs.kept(store.path, kept) and outputs.read(store.path, kept) is None


def test_damaged_outputs_are_named(records, path):
    output_file = outputs.folder(path) / f"{records[0]['key']}.jsonl"
    output_file.write_text(output_file.read_text()[:-20])
    with pytest.raises(ValueError, match=rf"{output_file.name}:11 is damaged .*measure its point into another store"):
        outputs.read(path, records[0])


def rows(path, *lengths):
    path.write_text("source,reference\n" + "".join(f"{'cold ' * n},kalt\n" for n in lengths))
    return path


def opened(session, task, examples):
    """Returns a session on another task."""
    asked = replace(EVALUATION, task=task, quality_examples=examples)
    return Session(session.source, asked, pair=session.pair)


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_long_prompts_are_cut_or_skipped_and_counted(session, tmp_path, too_long):
    task = FileTask(path=rows(tmp_path / "a.csv", 2, 90, 3, 90, 4), too_long=too_long, max_input_length=40)
    with pytest.warns(UserWarning, match=r"a: [12] prompts of more than 40 tokens were (cut|skipped)"):
        limited = opened(session, task, 3)
    assert [example.id for example in limited.examples] == ([0, 1, 2] if too_long == "cut" else [0, 2, 4])
    assert limited.fitted.told() == ({"prompts_cut": 1} if too_long == "cut" else {"prompts_skipped": 2})
    if too_long == "skip":
        with pytest.raises(ValueError, match=r"a has 3 examples of at most 40 tokens, fewer than the 4"):
            opened(session, task, 4)


def test_several_references_are_refused_if_a_metric_accepts_one(session, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"source": "cold", "reference": ["kalt", "kühl"]}) + "\n")
    with pytest.raises(ValueError, match="example 0 has 2 references, but bleu accepts one"):
        opened(session, str(path), 1)


def test_outputs_of_a_task_made_in_python_keep_the_order_of_its_examples(session):
    """Checks the order although rows are decoded by length; the configuration says how to run the point again."""
    examples = [Example(n, "cold " * words, "kalt") for n, words in enumerate((6, 2, 8, 1, 4))]
    own_session = opened(session, Task(name="own", splits=("test",), read=lambda split: examples), 5)
    assert list(np.argsort(np.asarray(own_session.prompts.length), kind="stable")) != list(range(5))
    chosen = Point(pair=own_session.source, evaluation=own_session.evaluation, settings=TOKEN)
    (record,) = judge(own_session, [chosen])
    kept = record[outputs.ENTRY]
    assert [output.id for output in kept] == list(range(5)) and record["quality"]["examples"] == 5
    assert [output.prompt for output in kept] == [example.source for example in own_session.examples]
    assert [output.trace is not None for output in kept] == [True] * 3 + [False] * 2
    assert "task = %gin.REQUIRED  # a Task made in Python, give it as 'module.NAME'" in chosen.configuration()


def test_a_prompt_of_exactly_the_limit_is_not_cut(session, tmp_path, recwarn):
    path = rows(tmp_path / "a.csv", 8)
    longest = len(opened(session, str(path), 1).fitted.prompts[0])
    limited = opened(session, FileTask(path=path, max_input_length=longest), 1)
    assert limited.fitted.told() == {} and not [warning for warning in recwarn if "were cut" in str(warning.message)]


@pytest.mark.laws
def test_running_a_records_configuration_again_gives_the_same_tokens(tmp_path, monkeypatch):
    """Runs a file task in its own scope again through gin, as `run --from_record` does."""
    import gin

    monkeypatch.chdir(tmp_path)
    task = FileTask(path=str(rows(tmp_path / "a.csv", 2, 3, 4)), max_output_length=10)
    evaluation = Evaluation(task=task, quality_examples=3, latency_examples=0)
    arguments = {"pair": ModelPair(name="tatoeba_en_de"), "settings": TOKEN}
    first = experiment.run(evaluation=evaluation, output="results/a.jsonl", **arguments)
    record, store = experiment.find_record(first["key"][:10])
    assert record["key"] == first["key"] and str(store) == "results/a.jsonl"
    with gin.unlock_config():
        gin.clear_config()
        gin.parse_config(record["configuration"])
    second = gin.get_configurable(experiment.run)(output="results/b.jsonl")
    gin.clear_config()
    said = experiment.compare_rerun(record, store, second, "results/b.jsonl")
    assert said == "the same key; the same tokens in 3 of 3 outputs"
    changed = second | {"key": "f" * 32, "provenance": {**second["provenance"], "code": "x"}}
    assert "another key" in experiment.compare_rerun(record, store, changed, "results/b.jsonl")
    assert "other code" in experiment.compare_rerun(record, store, changed, "results/b.jsonl")


def test_records_are_found_by_the_beginning_of_their_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ResultStore("results/a.jsonl") as store:
        for key in ("aaaa1111", "aaaa2222"):
            store.append({"key": key, "configuration": "x"})
        store.append({"key": "bbbb1111"})
    assert experiment.find_record("aaaa2")[0]["key"] == "aaaa2222"
    refused = {"aaaa": "2 records", "cccc": "no record in results", "aa": "at least 4", "bbbb": "is not a point"}
    for key, said in refused.items():
        with pytest.raises(ValueError, match=said):
            experiment.find_record(key)
    with pytest.raises(ValueError, match="begins with 'zzzz': its 3 keys are in the lines' entry") as caught:
        experiment.find_record("zzzz", "results/a.jsonl")
    assert "give --store" not in str(caught.value)


def test_outputs_of_a_store_are_found_through_a_link(records, path, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(path)
    assert outputs.read(tmp_path / "link.jsonl", records[0]) == outputs.read(path, records[0]) is not None


def test_stages_name_points_with_the_words_of_the_tables():
    shared = {"pair": ModelPair(name="tatoeba_en_de"), "evaluation": Evaluation(task="tiny_translation")}
    chosen = [Point(settings=Settings(method="chow", alpha=alpha), **shared) for alpha in (0.2, 0.4)]
    assert measuring._named(chosen).startswith("SpecCascade [Chow] α=0.2 T=0 γ=")
    assert measuring._named(chosen).endswith(" and 1 more")
