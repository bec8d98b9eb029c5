"""Tests of the costs of a store's programs, with a compiler that compiles nothing."""

from dataclasses import dataclass, field
from typing import Any

import gin
import pytest

from speccascade_jax import preflight
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.preflight import costs
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.report import Costs, Memory, Report
from speccascade_jax.results.store import program_costs
from speccascade_jax.results.store.program_costs import Hardware
from speccascade_jax.runtime import gin_flags
from tests.support import program_costs as made
from tests.support.program_costs import V5E


@dataclass
class Compiler:
    """A fake of `preflight.report` that records its arguments, and fails for the programs that a test names."""

    peak: int = 1000
    errors: dict[str, Exception] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, target, draft=None, **arguments):
        self.calls.append({"target": target, "draft": draft, **arguments})
        if error := self.errors.get(arguments.get("method")):
            raise error
        return Report(
            job={},
            chip=arguments["topology"].split(":")[0],
            memory=Memory(arguments=self.peak, outputs=0, aliases=0, temporaries=0, code=0),
            stages={"score": Costs(hbm_bytes=819e3, cycles=3000, ops=7, collectives=2, sent_bytes=86e3)},
            more={"draft": Costs(ops=5), "catch-up": Costs(ops=3)} if arguments["part"] == "round" else {},
            complete=arguments.get("method") == "chow",
            versions={"jax": "1", "libtpu": "2"},
        )


def completed(path, compiler, records=None, *hardware):
    lines = list[str]()
    entries = costs.complete(path, records or made.records(), hardware or (V5E,), compiler, lines.append)
    return entries, lines


def test_every_program_is_compiled_once(tmp_path):
    path, compiler = tmp_path / "a.costs.json", Compiler()
    entries, lines = completed(path, compiler)
    assert len(entries) == len(compiler.calls) == len(lines) == 9
    assert lines[5].startswith("[6/9] compiled for v5e: round of spec_decode, ")
    assert entries == program_costs.read(path)
    again, lines = completed(path, compiler)
    assert again == entries and len(compiler.calls) == 9 and not lines
    completed(path, compiler, None, V5E, Hardware(topology="v5p", prompt_length=32))
    assert [call["topology"] for call in compiler.calls[9:]] == ["v5p"] * 9


def test_entries_hold_seconds_by_part(tmp_path):
    entries, _ = completed(tmp_path / "a.costs.json", Compiler())
    (chow,) = (x for x in entries.values() if x["program"]["settings"].get("method") == "chow")
    # the chip: 819 GB/s, 1.5 GHz, 5 µs per collective and 86 GB/s, 1 µs per op
    assert chow["stages"]["score"] == pytest.approx(
        {"memory": 1e-6, "compute": 2e-6, "collectives": 11e-6, "ops": 7e-6}
    )
    assert [chow["more"][name]["ops"] for name in ("draft", "catch-up")] == pytest.approx([5e-6, 3e-6])
    assert chow["complete"] and chow["versions"] == {"jax": "1", "libtpu": "2"} and chow["launch"] == 1e-6


def test_the_compiler_gets_the_pair_and_the_settings(tmp_path):
    compiler = Compiler()
    completed(tmp_path / "a.costs.json", compiler)
    (chow,) = (call for call in compiler.calls if call.get("method") == "chow")
    assert chow["target"].endswith("tatoeba_en_de_large/target") and chow["draft"].endswith("large/draft")
    expected = {"topology": "v5e", "mesh": (1, 1), "dtype": "bfloat16", "part": "round", "batch": 1}
    expected |= {"prompt_length": 32, "max_new_tokens": 64, "block_size": 5, "bonus": "rule", "temperature": 0.0}
    assert expected.items() <= chow.items()
    # the costs of one iteration of each loop are stored separately, so that counts can multiply them
    assert chow["drafted"] == chow["catching_up"] == 0
    assert {call["part"] for call in compiler.calls} == {"prefill", "round"}
    for call in compiler.calls:
        preflight.job_of(**{name: x for name, x in call.items() if name not in ("drafted", "catching_up")})


def test_paths_further_drafts_and_other_models_are_passed_on():
    record = made.records()[2]
    record["point"] |= {"target": "/big", "draft": "/small", "others": ["half=exit:2", "mid=/mid"]}
    job = costs.job(program_costs.programs(record, V5E)["round"])
    assert (job["target"], job["draft"], job["others"]) == ("/big", "/small", {"half": "exit:2", "mid": "/mid"})
    planned = Hardware(topology="v5e:2x4", mesh=(2, 4), models=("t5_1_1_base", "t5_1_1_small"))
    job = costs.job(program_costs.programs(record, planned)["round"])
    assert (job["target"], job["draft"], job["mesh"]) == ("t5_1_1_base", "t5_1_1_small", (2, 4))


@pytest.mark.parametrize("error", [ValueError("rule 'chow' is odd"), preflight.DoesNotFitError("3 GB too much")])
def test_a_method_that_cannot_be_compiled_is_noted_and_not_tried_again(tmp_path, error):
    path, compiler = tmp_path / "a.costs.json", Compiler(errors={"chow": error})
    entries, _ = completed(path, compiler)
    assert [str(error) in x["refused"] for x in entries.values() if "refused" in x] == [True]
    completed(path, compiler)
    assert len(compiler.calls) == 9


def test_a_program_larger_than_the_memory_is_refused(tmp_path):
    entries, _ = completed(tmp_path / "a.costs.json", Compiler(peak=chip_of("v5e").memory + 5))
    assert {x.get("refused") for x in entries.values()} == {"it needs 5 bytes more than v5e has"}


def test_an_error_of_the_target_alone_ends_the_command(tmp_path):
    error = ValueError("mesh=(1, 3) does not divide 8 heads")
    with pytest.raises(ValueError, match="does not divide"):
        completed(tmp_path / "a.costs.json", Compiler(errors={"autoregressive": error}))
    with pytest.raises(ValueError, match="the chips are"):
        completed(tmp_path / "a.costs.json", Compiler(), None, Hardware(topology="v9"))


def test_calls_of_every_model_of_a_pair_have_a_cost():
    """Checks the larger of traffic and compute, collectives, and half of the ops' starts."""
    pair, compiler = ModelPair(name="tatoeba_en_de", others={"half": "exit:2"}, mesh=(1, 2)), Compiler()
    entries = costs.per_call(pair=pair, topology="v5e:2x2", compile_report=compiler)
    assert entries == pytest.approx({"target": 2 + 11 + 3.5, "draft": 16.5, "half": 16.5})
    assert [call["part"] for call in compiler.calls] == ["target", "draft", "draft"]
    assert [str(call["draft"])[-5:] for call in compiler.calls] == ["None", "draft", "xit:2"]
    assert {call["mesh"] for call in compiler.calls} == {(1, 2)}
    assert costs.per_call(pair=pair, topology="v5e", start=1.0, compile_report=compiler)["target"] == pytest.approx(20)


def test_a_gin_file_gives_the_optimiser_these_costs(monkeypatch):
    files = ["optimize_hierarchy", "compiled_costs", "models/tatoeba_en_de", "tasks/tiny_translation"]
    gin.clear_config()
    gin_flags.parse_gin([f"gin/{name}.gin" for name in files], ["per_call.topology = 'v5e:2x4'"])
    asked = gin.query_parameter("optimize.costs")
    assert str(asked) == "@costs.per_call()" and gin.query_parameter("per_call.topology") == "v5e:2x4"
    gin.clear_config()


def test_finished_programs_are_kept_when_the_compiler_is_missing(tmp_path):
    path, compiler = tmp_path / "a.costs.json", Compiler(errors={"diff": ImportError("pip install libtpu")})
    with pytest.raises(ImportError, match="pip install libtpu"):
        completed(path, compiler)
    assert len(program_costs.read(path)) == 7
