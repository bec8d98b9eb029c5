"""Tests of pass@1 with a fake sandbox; generated code never runs without permission."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import TASKS, get_task
from speccascade_jax.data.tasks.task import FewShotTask, Record, Template
from speccascade_jax.evaluation import measuring, points
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.metrics import code, quality, sandbox
from speccascade_jax.metrics.sandbox import running
from tests.support import text_pair

HARNESS = code.harness(before="def f():\n", after="\nassert f() == 1\n")


@pytest.fixture
def programs(monkeypatch) -> list[str]:
    """Returns the programs that would have been run; a program's second line sets its outcome."""
    seen: list[str] = []

    def run(program: str, *, timeout: float) -> sandbox.Outcome:
        assert timeout == code.SECONDS
        seen.append(program)
        kind = program.splitlines()[1].strip()
        return sandbox.Outcome(kind if kind in code.KINDS else "failed", "", 0.1)

    monkeypatch.setattr(sandbox, "run", run)
    return seen


def test_a_program_joins_the_code_before_the_completion_and_the_tests():
    assert code.program("    return 1", HARNESS) == "def f():\n    return 1\n\nassert f() == 1\n"


@pytest.mark.parametrize("reference", ["return 1", "[1]", '"text"', "{}", '{"before": 1, "after": ""}'])
def test_a_reference_without_a_harness_is_rejected(reference):
    with pytest.raises(ValueError, match="is not a test harness; make one with metrics.code.harness"):
        code.program("x", reference)


def test_the_score_is_the_share_of_passed_programs_and_every_outcome_is_stored(programs):
    said = ["    passed", "    timeout", "    failed", "    passed", "    memory"]
    measured = quality.measure(["pass_at_1"], range(5), said, [HARNESS] * 5)
    assert measured["value"] == 40.0 and len(programs) == 5
    kinds = [tuple(code.KINDS)[row.index(1)] for row in measured["per_example"]["statistics"]["pass_at_1"]]
    assert kinds == ["passed", "timeout", "failed", "passed", "memory"]


def test_only_passed_counts_and_the_signature_says_so():
    assert tuple(code.KINDS)[0] == "passed" and sandbox.Outcome(tuple(code.KINDS)[0], "", 0.0).passed
    signature = quality.METRICS["pass_at_1"].signature()
    assert "counts:passed,failed" in signature and "10 s" in signature


def test_only_pass_at_1_executes_code():
    assert [name for name, metric in quality.METRICS.items() if metric.executes] == ["pass_at_1"]


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code_runs_only_with_permission(name, monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: None)
    with pytest.raises(ValueError, match=rf"task {name} is scored by pass_at_1.*Evaluation\.execute_code = True"):
        points.validate_evaluation(Evaluation(task=name))
    points.validate_evaluation(Evaluation(task=name, execute_code=True))
    points.validate_evaluation(Evaluation(task="tiny_translation"))


def test_without_a_sandbox_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: "no namespaces on this system")
    with pytest.raises(ValueError, match="task humaneval .*is not possible here: no namespaces on this system"):
        points.validate_evaluation(Evaluation(task="humaneval", execute_code=True))
    points.validate_evaluation(Evaluation(task="gsm8k", execute_code=True))


def test_a_session_refuses_before_it_decodes(monkeypatch):
    from speccascade_jax.evaluation.session import Session

    unloaded = object.__new__(Session)  # an empty session, because the refusal needs none of its parts
    with pytest.raises(ValueError, match="Evaluation.execute_code = True"):
        measuring.judge(unloaded, [point(execute_code=False)])


def test_an_evaluation_runs_the_pairs_output_after_the_prompt(programs, tmp_path, monkeypatch):
    from speccascade_jax.evaluation.session import Session

    monkeypatch.setattr(sandbox, "available", lambda: None)
    asked = [Record(id=n, question=f"The {name}", reference=HARNESS) for n, name in enumerate(("dog", "cat", "sun"))]
    task = FewShotTask(
        name="toy", splits=("test",), records=lambda _: asked, template=Template(question="{question}"),
        clean=str.rstrip, metrics=("pass_at_1",), max_output_length=6,
    )  # fmt: skip
    monkeypatch.setitem(TASKS, "toy", task)
    evaluation = text_pair.evaluation(task="toy", execute_code=True, quality_batch=3)
    pair = _writes_spaces(text_pair.make(tmp_path))
    alone = text_pair.point("autoregressive", evaluation)
    (record,) = measuring.judge(Session(alone.pair, alone.evaluation, pair), [alone])
    assert programs == [code.program(" a a a", HARNESS)] * 3  # a space at the beginning belongs to the program
    assert record["quality"]["all"] == {"pass_at_1": 0.0}


def _writes_spaces(pair: sc.Pair) -> sc.Pair:
    """Returns the pair with a target that writes a space and a letter alternately."""
    space, letter = (pair.vocabulary.encode(" a")[n] for n in (0, -1))
    table = np.zeros((text_pair.PIECES, text_pair.PIECES), np.float32)
    table[:, space], table[space] = 5.0, np.eye(text_pair.PIECES)[letter]
    return dataclasses.replace(pair, target=sc.TableLM(table))


def point(**changes) -> Point:
    evaluation = Evaluation(task="humaneval", **changes).resolved()
    return Point(pair=ModelPair(name="p"), evaluation=evaluation, settings=Settings(method="spec_decode"))


def test_code_tasks_are_scored_by_pass_at_1():
    assert get_task("humaneval").metrics == get_task("mbpp").metrics == ("pass_at_1",)


def test_run_refuses_without_protection(monkeypatch):
    monkeypatch.setattr(running, "available", lambda: "no walls here")
    monkeypatch.setattr(running.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(sandbox.SandboxUnavailable, match="no walls here"):
        sandbox.run("print(1)")
    assert sandbox.describe() == "no walls here"


def test_run_refuses_on_other_operating_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(running.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    assert "only on Linux" in running.available.__wrapped__()
    assert "darwin" in running.available.__wrapped__()


@pytest.mark.parametrize(
    "limits", [{"timeout": 0}, {"timeout": float("nan")}, {"memory": 1 << 20}, {"processes": 0}, {"output_limit": -1}]
)
def test_invalid_limits_are_rejected(limits):
    (name,) = limits
    with pytest.raises(ValueError, match=f"{name} is {limits[name]}: it must be"):
        sandbox.run("print(1)", **limits)
