"""Tests of sessions (a pair that measures points), with tabular models: batches, keys, resumption, and records."""

import json
from dataclasses import replace

import gin
import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.names import DRAFT, PER_EXAMPLE, TARGET
from speccascade_jax.core.types import STORED
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.data.tasks.task import FewShotTask, Record
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.engine.generate import compilations
from speccascade_jax.evaluation import environment, experiment, measuring, session
from speccascade_jax.evaluation.points import ModelPair, Point, Settings, validate_evaluation
from speccascade_jax.pairs import prompts
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.analysis.significance import CALLS
from speccascade_jax.results.report import printing
from speccascade_jax.results.store import migration, outputs
from speccascade_jax.results.store.record_key import judged_key
from speccascade_jax.results.store.result_store import ResultStore, read_records
from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection.make_data import Writer
from speccascade_jax.storage import files
from tests.support import chat_families, golden_points, text_pair, tiny_pair

SMALL = text_pair.evaluation(quality_examples=7, quality_batch=5, latency_examples=2, latency_trials=2)
SOURCE = text_pair.SOURCE


@pytest.fixture(scope="module")
def loaded(pair) -> session.Session:
    return session.Session(SOURCE, SMALL, pair)


def _point(name="opt", alpha=None, temperature=1.0, seed=0, block=2) -> Point:
    return text_pair.point(name, SMALL, seed, alpha=alpha, block_size=block, temperature=temperature)


def test_all_alphas_share_two_compilations(loaded):
    list(measuring.evaluate(loaded, [_point(alpha=0.0)]))
    before = compilations()
    records = list(measuring.evaluate(loaded, [_point(alpha=alpha) for alpha in (0.1, 0.4, 0.9)]))
    list(measuring.evaluate(loaded, [_point(alpha=0.2, temperature=0.5, seed=3)]))
    assert compilations() == before
    assert [record["point"]["alpha"] for record in records] == [0.1, 0.4, 0.9]


def test_rules_of_a_sweep_share_the_programs_of_one_rule(loaded, tmp_path):
    """A batch and a single example are two programs; records of shared programs equal those of each rule alone."""
    names = ("chow", "diff", "token_v1")
    alone = [measuring.judge(loaded, [_point(name, alpha=0.3, block=4)])[0] for name in names]
    before, store = compilations(), ResultStore(tmp_path / "sweep.jsonl")
    opened = session.Session(SOURCE, SMALL, loaded.pair)
    experiment.measure([[_point(name, alpha=0.3, block=4)] for name in names], store, opened, progress=False)
    assert compilations() == before + 2
    for record, judged in zip(store.records, alone, strict=True):
        assert record["quality"] == judged["quality"] and record["counts"] == judged["counts"]
    opened.share(_point(name, block=4).settings for name in names[1:])
    list(measuring.evaluate(opened, [_point("diff", alpha=0.2, block=4)]))
    assert compilations() == before + 2


def test_an_alpha_alone_and_among_others_gives_the_same_outputs(loaded):
    alone = measuring.judge(loaded, [_point(alpha=0.4)])[0]
    among = measuring.judge(loaded, [_point(alpha=alpha) for alpha in (-0.3, 0.4)])[1]
    assert alone["counts"] == among["counts"] and alone["quality"] == among["quality"]


def test_counts_equal_those_of_decode(loaded, pair):
    task = TASKS["tiny_translation"]
    examples = task.load(limit=7)
    counts = ("rounds", "drafted", "kept", "rejected", "committed")
    rows = {}
    for some in (examples[:5], examples[2:]):  # five rows each time, so that both use one program
        ids = [pair.vocabulary.encode(e.source)[: task.max_input_length] for e in some]
        numbers = {"alpha": 0.4, "block_size": 2, "temperature": 1.0, "max_new_tokens": 6}
        out = sc.decode(pair, ids, rule="opt", **numbers, example_ids=[e.id for e in some])
        for n, example in enumerate(some):
            rows[example.id] = [out.stats["rows"][name][n] for name in counts]
    record = measuring.judge(loaded, [_point(alpha=0.4)])[0]
    assert [record["counts"][name] for name in counts] == np.sum(list(rows.values()), axis=0).tolist()


def test_a_record_has_all_entries(loaded):
    (record,) = measuring.evaluate(loaded, [_point(alpha=0.6)])
    record = json.loads(json.dumps(files.plain(record), allow_nan=False))
    assert record["key"] == loaded.key(_point(alpha=0.6))
    assert record["point"]["method"] == "opt" and "points.Settings:" in record["configuration"]
    assert set(record["versions"]) >= {"python", "jax", "flax", "speccascade_jax"}
    assert record["package"] == environment.package() and set(record["package"]) == {"version", "revision", "dirty"}
    assert record["provenance"]["code"] == loaded.code(_point(alpha=0.6).settings)
    assert record["device"]["platform"] == jax.default_backend() and record["device"]["count"] >= 1
    assert record["quality"]["low"] <= record["quality"]["high"] and record["quality"]["examples"] == 7
    assert record["latency"]["examples"] == 2 and record["latency"]["trials"] == 2
    scores, times = record["quality"]["per_example"], [record[x] for x in ("latency", "target_latency")]
    assert sorted(scores["ids"]) == sorted(example.id for example in loaded.examples[:7])
    assert np.shape(scores["statistics"]["bleu"]) == (7, 10)
    counted = record["per_example"]
    assert counted["ids"] == scores["ids"] and set(counted) == {"ids", *PER_EXAMPLE}
    assert all(sum(counted[name]) == record["counts"][name] for name in PER_EXAMPLE)
    assert all(np.shape(timed[f"per_example_{name}"]) == (2, 2) for timed in times for name in ("tokens", *CALLS))
    assert np.min(times[0]["per_example_draft_steps"]) > 0 and not np.any(times[1]["per_example_draft_steps"])
    assert times[1]["per_example_tokens"] == times[1]["per_example_target_calls"]
    method_ms, target_ms = (np.sum(timed["per_example_ms"]) for timed in times)
    assert method_ms / target_ms == pytest.approx(record["relative_latency"]["value"])
    assert record["relative_latency"]["value"] > 0 and len(record["relative_latency"]["trials"]) == 2
    assert record["counts"]["drafted"] > 0 and not record["inconclusive"]
    measures = record["measures"]
    assert measures["acceptance_rate"] + measures["rejection_rate"] == pytest.approx(1.0)
    assert record["wall_seconds"] > 0 and record["started"].endswith("+00:00")


def test_target_and_draft_alone_are_measured_by_the_same_loop(loaded):
    for name in (TARGET, DRAFT):
        (record,) = measuring.evaluate(loaded, [_point(name)])
        assert record["counts"]["drafted"] == 0 and record["measures"]["rejection_rate"] is None
        calls, steps = (record["counts"][count] for count in ("target_calls", "draft_steps"))
        assert (calls, steps)[name == DRAFT] == record["counts"]["committed"] and 0 in (calls, steps)
        assert record["measures"]["draft_share"] == (name == DRAFT)
        passes = {"draft_steps": name == DRAFT, "target_calls": name == TARGET}
        for model_passes, takes_part in passes.items():
            assert sum(record["per_example"][model_passes]) == record["counts"][model_passes]
            tokens = np.asarray(record["latency"]["per_example_tokens"])
            assert record["latency"][f"per_example_{model_passes}"] == (tokens * takes_part).tolist()


def test_keys_distinguish_everything_that_matters(loaded, pair):
    points = _point(alpha=0.1), _point(alpha=0.2), _point(alpha=0.1, seed=1), _point("diff", 0.1)
    keys = {loaded.key(point) for point in points}
    changed = replace(pair, draft=sc.TableLM(np.asarray(pair.draft.params) + 1e-3))
    keys.add(session.Session(SOURCE, SMALL, changed).key(_point(alpha=0.1)))
    assert len(keys) == 5
    assert session.Session(SOURCE, SMALL, pair).key(_point(alpha=0.1)) in keys


def _asking(monkeypatch, *stops, **changes) -> Point:
    """Returns a point on a few-shot task whose outputs end before `stops`."""
    asked = [Record(id=n, question=f"The {n} dogs", reference="cat") for n in range(4)]
    task = FewShotTask(
        name="toy", splits=("test",), records=lambda _: asked, stop_strings=stops, metrics=("answer_f1",),
        max_output_length=24, **changes,
    )  # fmt: skip
    monkeypatch.setitem(TASKS, "toy", task)
    part = replace(SMALL, task="toy", max_new_tokens=24, quality_examples=4, quality_batch=4, latency_examples=0)
    return replace(_point(alpha=0.4), evaluation=part.resolved())


def test_generation_stops_at_a_tasks_stop_string_that_is_one_token(pair, monkeypatch):
    point = _asking(monkeypatch)
    free = session.Session(SOURCE, point.evaluation, pair)
    wrote = free.prepare(point, np.arange(4), [0.4] * 4)(0)
    vocabulary, token = pair.vocabulary, 0
    for token in np.asarray(wrote.tokens)[0, 4:].tolist():
        text = vocabulary.decode([token], after=vocabulary.encode("a"))
        if prompts.stop_ids(vocabulary, [text])[-1] == token:
            break
    point = _asking(monkeypatch, text, "more than one token")
    cut = session.Session(SOURCE, point.evaluation, pair)
    stopped = cut.prepare(point, np.arange(4), [0.4] * 4)(0)
    for row, ends in zip(np.asarray(wrote.tokens), np.asarray(stopped.lengths), strict=True):
        places = np.flatnonzero(np.isin(row, [*vocabulary.stop_ids, token]))
        assert ends == (places[0] + 1 if len(places) else 24)
    assert np.asarray(stopped.lengths).sum() < np.asarray(wrote.lengths).sum()
    assert free.key(point) != cut.key(point)
    point = _asking(monkeypatch, "more than one token")
    assert session.Session(SOURCE, point.evaluation, pair).key(point) == free.key(point)


def test_examples_are_loaded_before_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    monkeypatch.setattr(session, "load_source", lambda source: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="has 0 exemplars, but shots=3; lower shots"):
        session.Session(SOURCE, _asking(monkeypatch, shots=3).evaluation)
    with pytest.raises(ValueError, match="has 200 examples in split 'test', fewer than the 500 requested: lower"):
        session.Session(SOURCE, replace(SMALL, quality_examples=500))
    with pytest.raises(FileNotFoundError, match="gsm8k"):
        session.Session(SOURCE, replace(SMALL, task="gsm8k"))


def _on(loaded, first, count, timed=0, trials=2) -> Point:
    window = replace(loaded.evaluation, first_example=first, quality_examples=count)
    return replace(_point(alpha=0.4), evaluation=replace(window, latency_examples=timed, latency_trials=trials))


def test_a_point_is_measured_on_its_own_examples(loaded):
    points = [_on(loaded, 0, 7)], [_on(loaded, 3, 2)]
    whole, part = (measuring.judge(loaded, item)[0]["quality"]["per_example"] for item in points)
    rows = dict(zip(whole["ids"], whole["statistics"]["bleu"], strict=True))
    ids = [example.id for example in loaded.examples[3:5]]
    assert sorted(part["ids"]) == sorted(ids)
    assert part["statistics"]["bleu"] == [rows[item] for item in part["ids"]]


def test_a_point_is_timed_on_its_own_examples_in_the_set_number_of_trials(loaded, monkeypatch):
    (record,) = measuring.evaluate(loaded, [_on(loaded, 3, 2, timed=3, trials=1)])
    assert np.shape(record["latency"]["per_example_ms"]) == (1, 3) and record["point"]["first_example"] == 3
    timed, prepare = [], loaded.prepare
    monkeypatch.setattr(loaded, "prepare", lambda point, rows: timed.append(rows.tolist()) or prepare(point, rows))
    measuring.time_beside_target(loaded, [_on(loaded, 3, 2, timed=3, trials=1)])
    assert timed == [[3], [4], [5]] * 2  # the target alone is timed on the same examples


def test_examples_that_are_not_loaded_are_refused(loaded):
    for point in (_on(loaded, 6, 2), _on(loaded, 5, 1, timed=3)):
        with pytest.raises(ValueError, match=r"examples [56] to 7 are requested, but only 7 are loaded: lower"):
            list(measuring.evaluate(loaded, [point]))


def test_a_later_first_example_loads_that_many_more(pair):
    shifted = replace(SMALL, first_example=196, quality_examples=4)
    later = session.Session(SOURCE, shifted, pair)
    assert len(later.examples) == 200 and later.window(shifted, 4).tolist() == [196, 197, 198, 199]
    with pytest.raises(ValueError, match="fewer than the 201 requested: lower .* or first_example"):
        session.Session(SOURCE, replace(shifted, quality_examples=5), pair)


def test_an_interrupted_sweep_resumes_and_repeats_nothing(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    arguments = {
        "pair": SOURCE, "evaluation": SMALL, "methods": ["opt"], "alphas": {"opt": [0.0, 0.4, 0.8]},
        "block_sizes": [2], "temperatures": [1.0], "output": str(tmp_path / "sweep.jsonl"), "cooler": [0.5],
    }  # fmt: skip
    append, count = ResultStore.append, []

    def stop_after_three(store, record):
        append(store, record)
        count.append(record["key"])
        if len(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResultStore, "append", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        experiment.sweep(**arguments)
    assert experiment.sweep(**arguments) == tmp_path / "sweep.jsonl"
    assert len(count) == len(set(count)) == 6
    said = capsys.readouterr().out
    assert "6 points, 3 of them already in" in said and "[6/6]" in said and "left)" in said
    assert "SpecCascade [OPT]" in said and f"plot: {tmp_path / 'sweep.png'}" in said
    panel, cold = panels.panels(read_records(tmp_path / "sweep.jsonl"))
    assert not cold.curves and list(panel.cooler) == [0.5] and panel.cooler[0.5].latency is None
    assert panel.target and panel.draft and [spot.alpha for spot in panel.curves["opt"]] == [0.0, 0.4, 0.8]
    monkeypatch.setattr(experiment, "evaluate", lambda *_, **more: pytest.fail("measured again"))
    monkeypatch.setattr(experiment, "present", lambda *_: None)
    assert "no stored outputs" not in said
    experiment.sweep(**arguments | {"evaluation": replace(SMALL, keep_outputs=True)})
    assert "6 of these 6 points have no stored outputs beside" in capsys.readouterr().out
    fewer = {"alphas": {"opt": [0.4]}, "output": str(tmp_path / "fewer.jsonl"), "reuse": [arguments["output"]]}
    assert len(read_records(experiment.sweep(**arguments | fewer))) == 4
    in_parts = arguments | {"output": str(tmp_path / "parts.jsonl"), "num_shards": 2}
    for number, kept in enumerate((4, 2)):  # four groups: the target, the draft, its α's, the cooler target
        part = read_records(experiment.sweep(**in_parts, shard_id=number, reuse=[arguments["output"]]))
        assert (tmp_path / f"parts.shard-{number}-of-2.jsonl").exists() and len(part) == kept
    assert {r["key"] for r in read_records(experiment.sweep(**in_parts | {"num_shards": 1}))} == set(count)
    assert experiment.sweep(**in_parts | {"num_shards": 9}, shard_id=8) is None
    assert "part 8 of 9 has nothing to measure" in capsys.readouterr().out


def test_a_sweep_into_a_bucket_gives_the_tables_of_a_local_one(pair, tmp_path, monkeypatch, capsys, bucket):
    """Its records are those of a TPU, where buckets are used; they name no processor."""
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    monkeypatch.setattr(environment, "hardware", lambda mesh=None: {"platform": "tpu", "kind": "TPU v5 lite"})
    arguments = {
        "pair": SOURCE, "evaluation": replace(SMALL, keep_outputs=True), "methods": ["opt"], "alphas": {"opt": [0.4]},
        "block_sizes": [2], "temperatures": [1.0], "cooler": (),
    }  # fmt: skip
    local = experiment.sweep(**arguments, output=str(tmp_path / "a.jsonl"))
    parts = [
        experiment.sweep(**arguments, output="gs://bucket/a.jsonl", num_shards=2, shard_id=part) for part in (1, 0)
    ]
    assert {str(path) for path in parts} == {"gs://bucket/a.jsonl"}
    capsys.readouterr()
    in_bucket = experiment.sweep(**arguments, output="gs://bucket/a.jsonl", notes=True)
    said = capsys.readouterr().out
    assert (
        "Device: TPU v5 lite." in said
        and "3 points, 3 of them already in gs://bucket/a.jsonl" in said
        and "report: gs://bucket/a.html" in said
    )
    measured = [{r["key"]: (r["counts"], r["quality"]) for r in read_records(path)} for path in (local, in_bucket)]
    assert measured[0] == measured[1] and len(measured[0]) == 3
    beside = {name for name in in_bucket.parent.below() if "/" not in name}
    assert {"a.png", "a.html"} <= beside and all(outputs.kept(in_bucket, r) for r in read_records(in_bucket))
    copied = experiment.sweep(**arguments, output="gs://bucket/b.jsonl", reuse=[str(local)])
    tables = [panels.panels(read_records(path)) for path in (local, copied)]
    assert [p.target.records[0]["latency"] for p in tables[0]] == [p.target.records[0]["latency"] for p in tables[1]]


@pytest.mark.parametrize(("changes", "message"), [
    ({"together": ("block_sizes",)}, "together: did you mean block_size.*'block_sizes' is not one of"),
    ({"share": "draft"}, "share: .*'draft' is not one of rejection_rate, "),
    ({"methods": "token_v3"}, "methods='token_v3' is one value where a tuple is meant"),
    ({"draft_temperatures": ()}, r"draft_temperatures=\(\) is empty: give at least 1"),
    ({"methods": ["lossy"], "alphas": {"lossy": [0.5, 2]}}, r"outside the domain \[0, 1\) of rule 'lossy'"),
])  # fmt: skip
def test_nothing_is_loaded_for_a_sweep_with_a_bad_value(changes, message, monkeypatch):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=message):
        experiment.sweep(**{"pair": SOURCE, "evaluation": SMALL, "methods": ["opt"]} | changes)


@pytest.mark.parametrize("name", ["first.html", "first.png", "first.settings.gin", "first"])
def test_a_store_shares_its_name_with_no_other_output(name, tmp_path):
    shared = {"pair": SOURCE, "evaluation": SMALL, "output": str(tmp_path / name)}
    with pytest.raises(ValueError, match=r"must end in \.jsonl: the plot, the report and the outputs"):
        experiment.sweep(**shared, methods=["opt"])
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        experiment.run(**shared, settings=Settings(method="opt", alpha=0.4))


@pytest.mark.parametrize("name", ["thesis.html", "thesis.png", "thesis.settings.gin"])
def test_a_sweep_refuses_files_of_others_beside_its_store_before_loading(name, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pytest.fail("loaded"))
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name} was not made by this command"):
        experiment.sweep(pair=SOURCE, evaluation=SMALL, methods=["opt"], output=str(tmp_path / "thesis.jsonl"))
    assert [*tmp_path.iterdir()] == [tmp_path / name]


def test_run_adds_one_record_and_prints_it(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    arguments = {
        "pair": SOURCE, "evaluation": SMALL, "output": str(tmp_path / "runs.jsonl"),
        "settings": Settings(method="opt", alpha=0.4, block_size=2, temperature=1.0),
    }  # fmt: skip
    first = experiment.run(**arguments)
    assert experiment.run(**arguments) == first
    assert len(read_records(tmp_path / "runs.jsonl")) == 1
    said = capsys.readouterr().out
    assert "bleu" in said and "latency / target's" in said and first["key"] in said


def test_a_dry_run_lists_the_points_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pytest.fail("loaded"))
    shared = {"pair": ModelPair(name="tatoeba_en_de"), "evaluation": SMALL, "methods": ["spec_decode"]}
    assert experiment.sweep(**shared, dry_run=True) is None
    assert capsys.readouterr().out.count("\n") == 3
    (tmp_path / "one.csv").write_text("source,reference\na,b\n")
    wrong = {
        "no pair 'nowhere'": {"pair": ModelPair(name="nowhere")},
        "nowhere/x does not exist": {"pair": replace(shared["pair"], others={"x": "nowhere/x"})},
        "one has 1 examples in split": {"evaluation": replace(SMALL, task=str(tmp_path / "one.csv"))},
    }
    for said, changes in wrong.items():
        with pytest.raises((ValueError, OSError), match=said):
            experiment.sweep(**shared | changes, dry_run=True)


def test_two_checkpoints_are_loaded_under_their_name(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(sc.Pair, "load", classmethod(lambda cls, *parts, **named: asked.append((parts, named)) or pair))
    source = ModelPair(name="two", target="a", draft="b", vocabulary="c", dtype="bfloat16")
    assert session.Session(source, SMALL).pair.vocabulary is pair.vocabulary
    more = {"draft_dtype": STORED, "mesh": (1, 1), "draft_whole": False}
    assert asked == [(("a", "b", "c"), {"dtype": "bfloat16", "name": "two", "others": {}} | more)]


@pytest.mark.parametrize(("stored", "middle", "expected"), [
    ("float32", False, None), ("int8", False, "int8"), ("int8", True, STORED),
])  # fmt: skip
def test_a_record_names_the_dtype_of_its_drafts_and_different_dtypes_have_other_keys(
    tmp_path, stored, middle, expected
):
    """Checks that `draft_dtype="stored"` has the key of the dtype that it stands for; a middle draft is in float32."""
    path = str(tiny_pair.write(tmp_path, draft_dtype=stored, middle=middle))
    keys = {}
    for dtype in (STORED, None, "int8"):
        point = replace(_point(), pair=ModelPair(name=path, draft_dtype=dtype))
        opened = session.Session(point.pair, SMALL)
        identity, described = opened.identity(point), measuring.describe(opened, point)
        keys[dtype] = identity.key, identity.judged_key
        assert described["key"] == keys[dtype][0]
        assert described["point"]["draft_dtype"] == (expected if dtype == STORED else dtype)
        assert f"draft_dtype = {described['point']['draft_dtype']!r}" in described["configuration"]
    assert len({*keys[None], *keys["int8"]}) == 4 and (expected == STORED or keys[STORED] == keys[expected])
    assert len({key for pair in keys.values() for key in pair}) == (6 if expected == STORED else 4)


def test_prompts_are_cut_as_the_task_says(pair, monkeypatch):
    text = TASKS["tiny_translation"].load(limit=1)[0].source
    ids = pair.vocabulary.encode(text)
    for cut, kept in ((lambda ids, room: ids[:room], ids[:5]), (lambda ids, room: ids[-room:], ids[-5:])):
        short = replace(TASKS["tiny_translation"], max_input_length=5)
        monkeypatch.setattr(type(short), "cut", lambda self, ids, room, cut=cut: cut(ids, room))
        monkeypatch.setitem(TASKS, "tiny_translation", short)
        with_cut_prompts = session.Session(SOURCE, replace(SMALL, quality_examples=1, latency_examples=0), pair)
        assert with_cut_prompts.prompts.tokens[0, : with_cut_prompts.prompts.length[0]].tolist() == kept


# --- chat


CHAT = {"chat": True, "quality_examples": 3, "quality_batch": 3, "latency_examples": 0}


@pytest.fixture(scope="module")
def chatting(tmp_path_factory) -> sc.Pair:
    """Returns a pair with the tokenizer of `chat_families`' Gemma 4, which writes a channel, an answer and its end."""
    vocabulary = load_vocabulary(chat_families.write(tmp_path_factory.mktemp("chat"), "gemma4"))
    written = [
        token for text in ("0", "<|channel>", "1", "<channel|>", "2", "<turn|>") for token in vocabulary.encode(text)
    ]
    table = np.zeros((vocabulary.vocab_size, vocabulary.vocab_size), np.float32)
    table[[*vocabulary.encode("\n"), *written[:-1]], written] = 30.0
    return sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table), vocabulary=vocabulary)


@pytest.fixture(autouse=True)
def roomy(request, monkeypatch):
    """Lets templates fit into the prompts of the task."""
    if "chatting" in request.fixturenames:
        monkeypatch.setitem(TASKS, "tiny_translation", replace(TASKS["tiny_translation"], max_input_length=200))


def _chat(pair, **changes):
    evaluation = replace(SMALL, **CHAT | {"template_variables": {"enable_thinking": True}} | changes)
    return session.Session(SOURCE, evaluation, pair)


def test_a_chat_task_reads_its_prompts_through_the_template(chatting):
    loaded, task = _chat(chatting), TASKS["tiny_translation"]
    for row, example in enumerate(loaded.examples):
        messages = [{"role": "user", "content": task.build_prompt(example)}]
        text = chatting.chat_template.render(messages, {"enable_thinking": True})
        assert loaded.prompts.tokens[row, : loaded.prompts.length[row]].tolist() == chatting.vocabulary.encode(text)
    assert loaded.pair.vocabulary.stop_ids == (*chatting.vocabulary.stop_ids, *chatting.vocabulary.encode("<turn|>"))


def test_thinking_is_cut_for_the_metric_only(chatting):
    texts = {}
    for cut in (False, True):
        loaded = _chat(chatting, cut_thinking=cut, max_new_tokens=20, keep_outputs=True)
        point = Point(pair=SOURCE, evaluation=loaded.evaluation, settings=Settings(method=TARGET))
        (record,) = measuring.judge(loaded, [point])
        texts[cut] = [output.output for output in record["outputs"]]
        assert record["quality"]["tokens_per_example"] == 6
    assert texts == {False: ["012"] * 3, True: ["02"] * 3}


def test_stop_strings_do_not_end_thinking(pair, monkeypatch):
    text = pair.vocabulary.decode(pair.vocabulary.encode("the")[-1:], after=[5])
    point = _asking(monkeypatch, text)
    for cut, more in ((False, 1), (True, 0)):
        opened = session.Session(SOURCE, replace(point.evaluation, cut_thinking=cut), pair)
        engine = opened.decoder(point.settings).require_engine()
        assert len(engine.stop_ids) == len(pair.vocabulary.stop_ids) + more


def test_only_options_of_chat_change_keys_and_configurations(chatting):
    variants = [
        {}, {"cut_thinking": True}, {"template_variables": {}}, {"template_variables": {"enable_thinking": False}},
        {"chat": False, "template_variables": {}}, {"chat": False, "template_variables": {}, "cut_thinking": True},
    ]  # fmt: skip
    keys, examples, texts, writers = set(), set(), [], []
    for changes in variants:
        loaded = _chat(chatting, **changes)
        point = Point(pair=SOURCE, evaluation=loaded.evaluation, settings=Settings(method=TARGET))
        identity, described = loaded.identity(point), measuring.describe(loaded, point)
        keys.add(identity.key)
        examples.add(loaded.loaded["examples"])
        texts.append(described["configuration"])
        assert described["point"].get("chat", False) is changes.get("chat", True)
        writers.append(Writer(loaded, "queries", chatting.target).settings())
    assert len(keys) == len(examples) == len(variants) == len(set(map(str, writers)))
    assert not {"chat", "variables", "cut_thinking"}.intersection(writers[4])
    assert "  chat = True" in texts[0] and "template_variables = {'enable_thinking': True}" in texts[0]
    assert not any(word in texts[4] for word in ("chat", "template_variables", "cut_thinking"))
    plain = session.Session(SOURCE, replace(SMALL, **CHAT | {"chat": False}), chatting)
    assert plain.loaded["examples"] in examples


def test_a_long_message_is_cut_and_its_template_is_not(chatting, monkeypatch):
    task = TASKS["tiny_translation"]
    whole = _chat(chatting).prompts
    for cut in (lambda ids, room: ids[:room], lambda ids, room: ids[len(ids) - room :]):
        short = replace(task, max_input_length=int(whole.length[0]) - 2)
        monkeypatch.setattr(type(short), "cut", lambda self, ids, room, cut=cut: cut(ids, room))
        monkeypatch.setitem(TASKS, "tiny_translation", short)
        with pytest.warns(UserWarning, match="prompts of more than"):
            loaded = _chat(chatting)
        vocabulary, longest = chatting.vocabulary, short.max_input_length
        words = vocabulary.encode(task.build_prompt(loaded.examples[0]))
        messages = [{"role": "user", "content": vocabulary.decode(cut(words, len(words) - 2))}]
        text = chatting.chat_template.render(messages, {"enable_thinking": True})
        assert loaded.fitted.prompts[0] == vocabulary.encode(text) and max(map(len, loaded.fitted.prompts)) <= longest
    monkeypatch.setitem(TASKS, "tiny_translation", replace(task, max_input_length=8))
    with pytest.raises(ValueError, match="tiny_translation: the chat template .* leaves no room for a message"):
        _chat(chatting)


def test_chat_options_without_a_template_are_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="template_variables belong to a chat template: set Evaluation.chat = True"):
        validate_evaluation(replace(SMALL, template_variables={"enable_thinking": False}))
    path = str(tiny_pair.write(tmp_path))
    for call in (lambda: session.rehearse(ModelPair(name=path), replace(SMALL, chat=True)), lambda: _chat(pair)):
        with pytest.raises(ValueError, match=r"no chat template in .*: put the chat_template\.jinja"):
            call()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    session.rehearse(ModelPair(name=path), replace(SMALL, chat=True))


@pytest.mark.parametrize(("source", "chat", "message"), [
    (ModelPair(name="mine", target="no/target", draft="no/draft"), False, "does not exist"),
    (SOURCE, True, "no chat template in"),
])  # fmt: skip
def test_a_refused_sweep_leaves_no_store(pair, source, chat, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").mkdir()  # `no/target` is a path, not a name on the hub
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)
    shared = {"pair": source, "evaluation": replace(SMALL, chat=chat), "output": "results/x.jsonl"}
    for call in (
        lambda: experiment.sweep(**shared, methods=["opt"]),
        lambda: experiment.run(**shared, settings=Settings(method="opt", alpha=0.4)),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            call()
        assert [path.name for path in tmp_path.iterdir()] == ["no"]


# --- examples that a model fails on


def _damaged(pair, loaded, among):
    """Returns the pair with a target that fails on some examples, and their rows; `among`: whether one is timed."""
    outputs = loaded.prepare(_point("autoregressive", temperature=0.0, block=None), np.arange(7))(0).tokens
    return text_pair.damaged(pair, np.asarray(outputs), wanted=lambda rows: bool(rows & {0, 1}) is among)


@pytest.mark.parametrize("timed", [False, True])
def test_failed_examples_are_left_out_and_named_in_the_record(pair, loaded, timed):
    """Checks that they are not scored, counted or timed, and that the other examples' results are unchanged."""
    broken, rows = _damaged(pair, loaded, timed)
    opened = session.Session(SOURCE, SMALL, broken)
    point = _point("token_v3", 0.3, temperature=0.0)
    record, healthy = (next(measuring.evaluate(item, [point])) for item in (opened, loaded))
    ids = [opened.examples[row].id for row in range(7)]
    well = [ids[row] for row in range(7) if row not in rows]
    assert sorted(record["failed_examples"]) == sorted(ids[row] for row in rows)
    assert sorted(record["per_example"]["ids"]) == sorted(record["quality"]["per_example"]["ids"]) == sorted(well)
    assert record["quality"]["examples"] == len(well)
    by_id = dict(zip(healthy["per_example"]["ids"], healthy["per_example"]["committed"], strict=True))
    assert record["counts"]["committed"] == sum(by_id[item] for item in well)
    assert record["failure"].startswith(f"example {record['failed_examples'][0]}: NaN or infinite logits of the target")
    line = printing.one_line(record)
    assert f"{len(rows)} examples left out, example" in line and ("no latency" in line) is timed
    assert ("latency" in record) is not timed and ("failed_timings" in record) is timed
    assert not {"failed_examples", "failure", "failed_timings"} & healthy.keys()


def test_a_sweep_continues_after_failures_but_refuses_a_point_that_always_fails(pair, loaded, tmp_path):
    broken, rows = _damaged(pair, loaded, True)
    opened = session.Session(SOURCE, SMALL, broken)
    groups = [[_point(TARGET, temperature=0.0, block=None)], [_point("token_v3", 0.3, temperature=0.0)]]
    groups += [[_point("spec_decode", temperature=0.0)], [_point(DRAFT, temperature=0.0, block=None)]]
    with ResultStore(tmp_path / "sweep.jsonl") as store:
        experiment.measure(groups, store, opened)
        assert len(store.records) == 4
        experiment.present(store)
        # the target timed with it failed, so the relative time is not valid either
        assert all("failed_timings" in record and "latency" not in record for record in store.records)
        failed_counts = {record["point"]["method"]: len(record.get("failed_examples", ())) for record in store.records}
    assert failed_counts[DRAFT] == 0 and failed_counts[TARGET] == failed_counts["spec_decode"] == len(rows)
    hopeless = session.Session(SOURCE, SMALL, replace(pair, target=sc.TableLM(np.full((320, 320), np.nan))))
    with pytest.raises(FloatingPointError, match="the target model gave NaN or infinite logits"):
        measuring.judge(hopeless, [_point("token_v3", 0.3)])


def test_a_session_warns_of_values_outside_the_useful_range(loaded):
    with pytest.warns(UserWarning, match=r"alpha=7 of 'chow' lies outside 0 … 1: beyond it hardly anything changes"):
        loaded.check([Settings(method="chow", alpha=7), Settings(method="chow", alpha=0.5)])


def test_the_task_sets_the_prompt_limit_of_a_loaded_pair(pair):
    """Checks that a task of long prompts sets their limit, as for a pair that the session loads itself."""
    short = replace(pair, max_prompt_length=2)
    assert session.Session(SOURCE, SMALL, short).pair.max_prompt_length == TASKS["tiny_translation"].max_input_length
    assert session.Session(SOURCE, SMALL, pair).pair is pair


KEPT = text_pair.evaluation(
    quality_examples=4, quality_batch=4, latency_examples=1, latency_trials=1, resamples=5, keep_outputs=True
)
OPT = Settings(method="opt", alpha=0.4, block_size=2)
OLD = [record for record in golden_points.old_records() if "%gin.REQUIRED" not in record["configuration"]]


@pytest.fixture
def this_pair(pair, monkeypatch):
    """Makes sessions load the pair under any name."""
    monkeypatch.setattr(session, "load_pair", lambda name, **_: pair)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("record", OLD, ids=[record["point"]["curve"] for record in OLD])
def test_a_configuration_of_format_2_gives_todays_key(record):
    gin.clear_config()
    gin_flags.parse_gin([], text=record["configuration"])
    parts = {name: value() if callable(value) else value for name, value in gin.get_bindings("experiment.run").items()}
    gin.clear_config()
    point = Point(**parts | {"evaluation": parts["evaluation"].resolved()})
    fingerprints = {name: digest for name, digest in record["fingerprints"].items() if name != "code"}
    identity = {name: getattr(point, name) for name in ("pair", "evaluation", "settings", "seed")}
    assert judged_key(identity, fingerprints) == migration.migrated(record)["judged_key"]


def run(path, evaluation=KEPT):
    return experiment.run(pair=SOURCE, evaluation=evaluation, settings=OPT, output=str(path))


@pytest.mark.usefixtures("this_pair")
def test_points_of_other_code_are_measured_again_with_a_message(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.jsonl"
    first = run(path)
    assert run(path) == first and "measured again" not in capsys.readouterr().out
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    second = run(path)
    assert "1 of 1 points were measured by other code and are measured again" in capsys.readouterr().out
    assert second["key"] == first["key"] and second["supersedes"] == first["provenance"]["code"]
    assert second["started"] != first["started"]
    assert [record["provenance"]["code"] for record in read_records(path)] == ["changed"]
    assert run(path) == second


@pytest.mark.usefixtures("this_pair")
def test_a_record_names_its_keys_and_code_and_another_toolchain_keeps_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "s.jsonl"
    first = run(path)
    with ResultStore(path) as store:
        assert store.judged(first["judged_key"])["key"] == first["key"]
    assert set(first["provenance"]) == {"code", "toolchain"} and "code" not in first["fingerprints"]
    assert set(first["provenance"]["toolchain"]) == {"digest", "python", "jax", "platform"}
    assert json.loads(json.dumps(first["provenance"])) == first["provenance"]
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    monkeypatch.setattr(session, "toolchain", lambda: {"python": "3.99"})
    assert run(path) == first and "measured again" not in capsys.readouterr().out


@pytest.mark.usefixtures("this_pair")
def test_quality_is_measured_once_for_all_hardware_with_or_without_latency(tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    untimed = run(path, replace(KEPT, latency_examples=0))
    assert untimed["key"] == untimed["judged_key"] and "latency" not in untimed
    monkeypatch.setattr(measuring, "judge", lambda *_: pytest.fail("judged again"))
    timed = run(path)
    monkeypatch.setattr(session, "hardware", lambda mesh=None: {"platform": "other"})
    elsewhere = run(path)
    assert len({untimed["key"], timed["key"], elsewhere["key"]}) == 3
    assert {record["judged_key"] for record in (timed, elsewhere)} == {untimed["key"]}
    for record in (timed, elsewhere):
        assert record["latency"] and record["quality"] == untimed["quality"]
        assert outputs.read(path, record) == outputs.read(path, untimed)
    # the code has changed, so stored results are stale
    monkeypatch.setattr(session.Session, "code", lambda *_: "changed")
    with pytest.raises(pytest.fail.Exception, match="judged again"):
        run(path)


@pytest.mark.usefixtures("this_pair")
def test_points_timed_with_other_settings_are_counted_before_they_are_timed_again(tmp_path, monkeypatch, capsys):
    """A latency is valid only for its own devices and mesh: on others it is not reused, and the sweep says so."""
    path = tmp_path / "s.jsonl"
    run(path)
    assert "timed on other devices" not in capsys.readouterr().out
    monkeypatch.setattr(session, "hardware", lambda mesh: {"device": "another"})
    run(path)
    said = "1 of 1 points were timed on other devices, on another mesh or with other latency settings: here they keep"
    assert said in capsys.readouterr().out
