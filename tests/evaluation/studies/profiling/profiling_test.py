"""Tests of the profile of a tiny pair, whose parts add up to the traced time, and of tables of known numbers."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from speccascade_jax import checkpoints
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.vocabularies import load
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Settings
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.profiling.traces import Spent
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.models.t5 import T5, T5Config
from tests.support import random_t5

EVALUATION = Evaluation(task="tiny_translation", max_new_tokens=8)
SETTINGS = Settings(method="opt", alpha=0.2, block_size=3, temperature=1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> ModelPair:
    folder = tmp_path_factory.mktemp("pair")
    texts = [example.source for example in get_task("tiny_translation").load(limit=40)]
    (folder / "vocabulary.model").write_bytes(load.train(texts, 320))
    for seed, part in enumerate(("target", "draft")):
        config = T5Config(320, 320, 16, 2, 8, 16, 1, 1)
        checkpoints.save(folder / part, T5(config), random_t5.parameters(config, seed))
    return ModelPair(name=str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def measured(pair, folder) -> dict:
    files = {"output": str(folder / "profile.json"), "keep": str(folder / "trace")}
    arguments = {"pair": pair, "evaluation": EVALUATION, "settings": SETTINGS} | files
    return profiling.profile(**arguments, batch=2, generations=2, trials=2)


def _seen(measured) -> dict[str, set[str]]:
    """Returns phase -> modules."""
    out: dict[str, set[str]] = {}
    for entry in measured["instructions"]:
        out.setdefault("/".join(entry["phase"]), set()).add(entry["module"])
    return out


@pytest.mark.tools
def test_every_part_of_a_round_is_measured(measured):
    seen = _seen(measured)
    assert {"draft/model", "draft/sampling", "score", "sampling", "verify", "verify/rule", "commit", "prefill"} <= set(
        seen
    )
    parts = {"self_attention", "encoder_decoder_attention", "mlp", "logits_dense", "norms"}
    assert parts <= seen["draft/model"] and parts <= seen["score"]
    assert not any(seen[phase] - {""} for phase in ("sampling", "verify", "verify/rule", "commit"))


@pytest.mark.tools
def test_the_models_run_once_per_round_and_once_per_draft_step(measured):
    """Checks counts: an instruction in the wrong part, inside or outside the drafting loop, would have another one."""
    counts = {phase: {x["count"] for x in measured["instructions"] if x["phase"] == phase.split("/") and x["module"]}
              for phase in ("score", "draft/model", "prefill")}  # fmt: skip
    rounds = measured["rounds"]
    assert counts["score"] == {rounds}
    assert len(counts["draft/model"]) == 1
    assert rounds < min(counts["draft/model"]) <= (SETTINGS.block_size + 1) * rounds
    assert counts["prefill"] == {measured["generations"]}


@pytest.mark.tools
def test_the_parts_add_up_to_the_traced_time(measured):
    traced = sum(entry["traced_us"] for entry in measured["instructions"]) / 1e3
    assert 0 < traced <= measured["traced_ms"]
    for entry in measured["instructions"]:
        assert 0 <= entry["waiting_us"] <= entry["traced_us"] and 0 < entry["us"] <= entry["traced_us"]


def test_tracing_overhead_is_subtracted_from_each_execution():
    assert profiling.without_profiler(Spent(running=9000.0, waiting=1000.0, count=4), 0.5) == 10 - 4 * 0.5
    assert profiling.without_profiler(Spent(running=1000.0, count=4), 0.5) == 0.25


@pytest.mark.tools
def test_tracing_overhead_is_measured(tmp_path):
    assert 0 <= profiling.tracing_cost(tmp_path, calls=2, passes=2) < 1000


@pytest.mark.tools
def test_totals_are_kept_as_json_and_traces_on_request(measured, folder):
    assert (measured["batch"], measured["generations"]) == (2, 2)
    assert 1 <= measured["tokens_per_round"] <= SETTINGS.block_size + 1
    assert measured["tokens"] <= 2 * 2 * 8
    assert json.loads((folder / "profile.json").read_text()) == measured
    assert len(list((folder / "trace").rglob("*.xplane.pb"))) == 2


@pytest.fixture
def persistent_cache(tmp_path):
    """Turns on JAX's persistent cache in a folder of the test's own; turns it off afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_of_an_older_source_are_not_taken_from_the_cache(persistent_cache):
    """Compiles the same computation under another scope again, because the table uses the scope's name."""

    def program(scope):
        class Sines:
            @staticmethod
            def generate(params, prompt, seed, max_new_tokens):
                with jax.named_scope(scope):
                    return jnp.sin(params) @ params + seed

        call = partial(Sines.generate, jnp.eye(3), params=jnp.eye(3), max_new_tokens=1)
        return profiling._compiled(Sines, [call], 0)[0].as_text()

    assert "/first/" in program("first") and list(persistent_cache.iterdir())
    assert "/second/" in program("second")


def test_survey_and_profile_do_not_overwrite_a_store(tmp_path):
    store = tmp_path / "sweep.jsonl"
    store.write_text('{"key":"x","point":{}}\n')
    kwargs = {"pair": ModelPair(name="nowhere"), "evaluation": EVALUATION, "settings": Settings(), "output": str(store)}
    for call in (partial(surveying.survey, rules=("opt",)), profiling.profile):
        with pytest.raises(ValueError, match=r"sweep\.jsonl was not made by this command"):
            call(**kwargs)
    assert store.read_text() == '{"key":"x","point":{}}\n'


@pytest.mark.parametrize(("setting", "said"), [
    ({"batch": 0}, "batch=0 is not a whole number >= 1"),
    ({"generations": 1.5}, "generations=1.5 is not a whole number >= 1"),
    ({"trials": 0}, "trials=0 is not a whole number >= 1"),
    ({"top": -1}, "top=-1 is not a whole number >= 0"),
    ({"settings": Settings(method="lossy", alpha=1.5)}, "alpha=1.5 is outside the domain"),
])  # fmt: skip
def test_a_bad_setting_is_named_before_anything_is_loaded(setting, said):
    arguments = {"evaluation": EVALUATION, "settings": SETTINGS} | setting
    with pytest.raises(ValueError, match=said):
        profiling.profile(pair=ModelPair(name="no such pair"), **arguments)


def _one(phase, us, module="", waiting=0.0, count=10, name="x"):
    shape, op_name = "f32[1,9]{1,0}", "jit(generation)/jit(_generate)/while/body/score/dot_general;other"
    times = {"us": us, "traced_us": 2 * us, "waiting_us": waiting, "count": count}
    return {"name": name, "phase": phase.split("/"), "module": module, "opcode": "dot", "shape": shape,
            "op_name": op_name, **times}  # fmt: skip


@pytest.fixture
def ten_rounds():
    """Returns a profile of 10 rounds in 2 generations."""
    totals = {"label": "a point", "batch": 1, "rounds": 10, "generations": 2, "tokens_per_round": 2.5}
    totals |= {"traced_ms": 4.0, "untraced_ms": 1.2, "tracing_us": 0.3}
    return totals | {
        "instructions": [
            _one("prefill", 100.0, "mlp", count=2),
            _one("verify/rule", 0.0),
            _one("score", 600.0, "mlp", name="large"),
            _one("draft", 100.0),
            _one("draft/model", 200.0, "mlp", waiting=50.0, count=60),
            _one("draft/model", 100.0, "norms", count=60),
        ],
    }


def test_the_table_lists_the_parts_of_a_round_with_their_sums(ten_rounds):
    grid = profiling.phases(ten_rounds)
    assert grid.rows == [
        ["draft", "40.0", "40.0%", "80.0", "5.0", "13.0"],
        ["draft / model", "30.0", "30.0%", "60.0", "5.0", "12.0"],
        ["draft / rest", "10.0", "10.0%", "20.0", "0.0", "1.0"],
        ["score", "60.0", "60.0%", "120.0", "0.0", "1.0"],
        ["verify", "0.0", "0.0%", "0.0", "0.0", "1.0"],
        ["a round", "100.0", "100.0%", "200.0", "5.0", "15.0"],
        ["prefill, per generation", "50.0", "–", "100.0", "0.0", "1.0"],
    ]
    assert grid.notes[0] == "2 generations, 5.0 rounds each, 2.50 tokens per round and row."
    assert grid.notes[2] == (
        "One generation: 0.55 ms by this table; 0.60 ms timed without the profiler (120 µs per round, prefill included)"
        "; 2.00 ms traced, 55.0% of it in the table."
    )


@pytest.mark.parametrize(("untraced", "said"), [(2.9, False), (2.0, True), (4.0, True)])
def test_a_table_notes_a_disagreement_with_the_clock(ten_rounds, untraced, said):
    """Checks 1.1 ms in instructions and 1.8 ms in none of them: 2.9 ms."""
    notes = profiling.phases(ten_rounds | {"untraced_ms": untraced}).notes
    assert any("disagree" in note for note in notes) == said


def test_the_table_lists_modules_by_phase(ten_rounds):
    grid = profiling.modules(ten_rounds)
    assert grid.header == ["module", "draft / model", "prefill", "score"]
    assert grid.rows == [["mlp", "20.0", "50.0", "60.0"], ["norms", "10.0", "–", "–"]]


def test_the_most_expensive_instructions_of_a_round_come_first(ten_rounds):
    rows = profiling.dearest(ten_rounds, 2).rows
    assert rows[0] == ["large: dot f32[1,9]", "60.0", "1.0", "score: mlp", "score/dot_general"]
    assert [row[1] for row in rows] == ["60.0", "20.0"]


def test_everything_is_printed(ten_rounds, capsys):
    profiling.show(ten_rounds, 0)
    said = capsys.readouterr().out
    assert "Where a round's time goes: a point" in said and "most expensive" not in said
