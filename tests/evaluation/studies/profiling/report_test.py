"""Tables of a profile with known numbers."""

import pytest

from speccascade_jax.evaluation.studies.profiling import report


def _one(phase, us, module="", waiting=0.0, count=10, name="x"):
    shape, op_name = "f32[1,9]{1,0}", "jit(generation)/jit(_generate)/while/body/score/dot_general;other"
    times = {"us": us, "traced_us": 2 * us, "waiting_us": waiting, "count": count}
    return {"name": name, "phase": phase.split("/"), "module": module, "opcode": "dot", "shape": shape,
            "op_name": op_name, **times}  # fmt: skip


@pytest.fixture
def measured():
    """10 rounds in 2 generations."""
    return {
        "label": "a point",
        "batch": 1,
        "rounds": 10,
        "generations": 2,
        "tokens_per_round": 2.5,
        "traced_ms": 4.0,
        "untraced_ms": 1.2,
        "tracing_us": 0.3,
        "instructions": [
            _one("prefill", 100.0, "mlp", count=2),
            _one("verify/rule", 0.0),
            _one("score", 600.0, "mlp", name="large"),
            _one("draft", 100.0),
            _one("draft/model", 200.0, "mlp", waiting=50.0, count=60),
            _one("draft/model", 100.0, "norms", count=60),
        ],
    }


def test_parts_of_a_round_with_their_sums(measured):
    grid = report.phases(measured)
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
        "A generation: 0.55 ms by this table; 0.60 ms timed without the profiler (120 µs per round, prefill included); "
        "2.00 ms traced, 55.0% of it in the table."
    )


@pytest.mark.parametrize(("untraced", "said"), [(2.9, False), (2.0, True), (4.0, True)])
def test_a_table_that_the_clock_contradicts_says_so(measured, untraced, said):
    """1.1 ms by the instructions, 1.8 ms that none of them took: 2.9 ms."""
    notes = report.phases(measured | {"untraced_ms": untraced}).notes
    assert any("disagree" in note for note in notes) == said


def test_modules_by_phase(measured):
    grid = report.modules(measured)
    assert grid.header == ["module", "draft / model", "prefill", "score"]
    assert grid.rows == [["mlp", "20.0", "50.0", "60.0"], ["norms", "10.0", "–", "–"]]


def test_the_dearest_instructions_of_a_round_come_first(measured):
    rows = report.instructions(measured, 2).rows
    assert rows[0] == ["large: dot f32[1,9]", "60.0", "1.0", "score: mlp", "score/dot_general"]
    assert [row[1] for row in rows] == ["60.0", "20.0"]


def test_everything_is_printed(measured, capsys):
    report.show(measured, 0)
    said = capsys.readouterr().out
    assert "Where a round's time goes: a point" in said and "dearest" not in said
