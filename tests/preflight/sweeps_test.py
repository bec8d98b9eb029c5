"""Tests of the programs that a sweep compiles, and of the table of their reports; nothing is compiled."""

import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, ModelPair
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.preflight import sweeps
from speccascade_jax.preflight.chips import CHIPS
from speccascade_jax.preflight.compiling import DoesNotFitError
from speccascade_jax.preflight.report import Costs, Memory, Report

PAIR = ModelPair(name="published", target="t5_1_1_base", draft="t5_1_1_small", dtype="bfloat16")
EVALUATION = Evaluation(task="tiny_translation", quality_examples=64, quality_batch=32, latency_examples=4)


def planned(mesh=(1, 1), **arguments):
    arguments = {"pair": PAIR, "evaluation": EVALUATION, "methods": ("spec_decode",)} | arguments
    return sweeps.planned(experiment.points_of(arguments), "v5e:2x4", mesh)


def rounds(programs):
    return [(p.method, p.job.batch, p.points) for p in programs if p.job.part == "round"]


def test_points_that_differ_in_alpha_share_a_program():
    programs = planned(methods=("token_v3",), alphas={"token_v3": (0.2, 0.5, 0.8)})
    cascade = [entry for entry in rounds(programs) if "Token" in entry[0]]
    assert cascade == [("SpecCascade [Token]", 1, 3), ("SpecCascade [Token]", 32, 3)]
    assert {p.job.target for p in programs} == {"t5_1_1_base"} and {p.job.dtype for p in programs} == {"bfloat16"}


@pytest.mark.parametrize(("temperatures", "kinds"), [((0.5, 0.7), 1), ((0.5, 1.0), 2), ((0.0, 0.5, 1.0), 3)])
def test_temperatures_share_a_program_where_sampling_takes_the_same_branch(temperatures, kinds):
    lossless = [entry for entry in rounds(planned(temperatures=temperatures)) if entry[0] == "SpecDecode"]
    assert len(lossless) == 2 * kinds


def test_one_prefill_serves_all_methods_of_one_draft():
    programs = planned(methods=("spec_decode", "chow", "token_v3"))
    assert len([p for p in programs if p.job.part == "prefill"]) == 1


def test_a_stack_has_a_prefill_of_its_own():
    stack = Settings(method="spec_decode", drafters=(Level(model="draft", budget=2, block_size=2),))
    programs = planned(methods=("spec_decode", stack))
    assert len([p for p in programs if p.job.part == "prefill"]) == 2


def test_rows_are_spread_over_the_mesh_and_latency_is_not_measured_there():
    programs = planned(mesh=(4, 2))
    assert {p.job.batch for p in programs} == {32} and {p.job.mesh for p in programs} == {(4, 2)}


def report(peak=10**9, **costs):
    memory = Memory(arguments=peak, outputs=0, aliases=0, temporaries=0, code=0)
    return Report(job={}, chip="v5e", memory=memory, stages={"score": Costs(**costs)}, versions={"jax": "0"})


def result(**more):
    (program,) = [p for p in planned() if p.job.batch == 1 and p.method == "SpecDecode"]
    return sweeps.Result(program, report(**more))


def test_a_program_that_does_not_fit_is_refused_with_the_missing_bytes():
    memory = CHIPS["v5e"].memory
    (line,) = sweeps.refusals([result(peak=memory + 5_000), result(peak=memory)])
    assert f"needs {memory + 5_000:,} bytes" in line and "5,000 more than it has" in line and "--mesh" in line


def test_a_program_that_the_compiler_refuses_is_named():
    program = result().planned
    for error, outcome in (
        (DoesNotFitError("5 bytes are missing"), "no"),
        (RuntimeError("5 bytes are missing"), "error"),
    ):
        failed = sweeps.run([program], lambda job, error=error: (_ for _ in ()).throw(error), list)
        assert sweeps.refusals(failed) == ["SpecDecode (round, batch 1): 5 bytes are missing"]
        assert sweeps.grid(failed, "v5e", (1, 1)).rows[0][:3] == ["SpecDecode", "1", outcome]


def test_the_table_shows_the_band_of_a_round():
    row = sweeps.grid([result(hbm_bytes=819e6, cycles=1.5e6, ops=500)], "v5e", (1, 1)).rows[0]
    assert row == ["SpecDecode", "1", "yes", "1.00", "819", "1.00", "500", "0", "1 to 1.5", "memory"]
