"""Own times: what each instruction is charged, on timelines made by hand and on a real trace."""

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.evaluation.studies.profiling.scopes import HloText
from speccascade_jax.evaluation.studies.profiling.traces import Event, own_times, read_runs


def _own(*events: tuple[str, float, float]):
    made = sorted((Event(name, begin, end, end, 0) for name, begin, end in events), key=lambda event: event.begin)
    spent = own_times([made], lambda name: name.startswith("while"))
    total = max(end for *_, end in events) - min(begin for _, begin, _ in events)
    assert sum(each.total for each in spent.values()) == pytest.approx(total)
    return {name: (each.running, each.waiting, each.count) for name, each in spent.items() if each.total}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("a", 0, 10), ("b", 10, 14), ("a", 14, 15)], {"a": (11, 0, 2), "b": (4, 0, 1)}),  # one after another
        ([("a", 0, 10), ("b", 13, 14)], {"a": (10, 0, 1), "b": (1, 3, 1)}),  # a gap is waiting of the next
        # a loop has no time of its own, but where it became one kernel it is an instruction
        ([("while", 0, 17), ("a", 2, 5), ("b", 5, 17)], {"a": (3, 2, 1), "b": (12, 0, 1)}),
        ([("while.1", 0, 4), ("a", 5, 6)], {"while.1": (4, 0, 1), "a": (1, 1, 1)}),
        ([("a", 0, 10), ("b", 4, 6)], {"a": (9, 0, 1), "b": (1, 0, 1)}),  # two at once share the time
        ([("a", 0, 10), ("b", 6, 12)], {"a": (8, 0, 1), "b": (4, 0, 1)}),
    ],
)
def test_time_is_charged_to_what_ran(events, expected):
    assert _own(*events) == expected


def test_time_between_two_runs_belongs_to_nobody():
    first = [Event("a", 0, 1, 1, 0), Event("b", 1, 3, 3, 0)]
    second = [Event("a", 1000, 1001, 1001, 1), Event("b", 1002, 1003, 1003, 1)]
    spent = own_times([first, second], lambda name: False)
    assert (spent["a"].total, spent["b"].total) == (2, 4)


def test_what_other_threads_finish_lasts_until_then_or_until_the_next_begins():
    ends_last, said_late = Event("dot", 0, 4, 9, 0), Event("dot", 20, 24, 90, 0)
    after = [Event("a", 10, 12, 12, 0), Event("b", 30, 31, 31, 0), Event("c", 31, 40, 40, 0)]
    spent = own_times([[ends_last, after[0], said_late, *after[1:]]], lambda name: False)
    assert (spent["dot"].running, spent["dot"].count) == (9 + 10, 2)
    assert {name: (spent[name].running, spent[name].waiting) for name in "abc"} == {
        "a": (2, 1),
        "b": (1, 0),
        "c": (9, 0),
    }


def test_a_loop_whose_instructions_other_threads_finish_contains_them_all():
    events = [Event("while", 0, 3, 90, 0), Event("dot", 2, 5, 7, 0), Event("a", 8, 50, 80, 0)]
    spent = own_times([events], lambda name: name == "while")
    assert {name: each.total for name, each in spent.items()} == {"dot": 2 + 5, "a": 1 + 42}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A loop of 5 rounds with a product, run twice under the profiler."""

    def work(x):
        def body(carry):
            n, y = carry
            with jax.named_scope("score"):
                return n + 1, jnp.tanh(y @ y)

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, x))

    folder = tmp_path_factory.mktemp("trace")
    x = jnp.eye(64)
    compiled = jax.jit(work).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with jax.profiler.trace(str(folder)):
        for _ in range(2):
            jax.block_until_ready(compiled(x))
    return folder, HloText.parse(compiled.as_text())


@pytest.mark.tools
def test_a_real_trace_has_every_execution_of_every_instruction(traced):
    folder, program = traced
    runs = read_runs(folder, "jit_work", 2)
    assert {event.name for run in runs for event in run} <= set(program.instructions)
    spent = own_times(runs, program.is_control)
    scored = [spent[name] for name in spent if program.place(name).phase == ("score",)]
    assert scored and all(each.count == 2 * 5 for each in scored)
    whole = sum(run[-1].end - run[0].begin for run in runs)
    assert sum(each.total for each in spent.values()) == pytest.approx(whole)


@pytest.mark.tools
def test_what_is_not_in_a_trace_is_named(traced, tmp_path):
    with pytest.raises(ValueError, match=r"0 runs of jit_other, not 2: .*; its planes: .*/host:CPU"):
        read_runs(traced[0], "jit_other", 2)
    with pytest.raises(ValueError, match="2 runs of jit_work, not 3: the profiler lost some"):
        read_runs(traced[0], "jit_work", 3)
    with pytest.raises(FileNotFoundError, match=r"no trace \(\*.xplane.pb\)"):
        read_runs(tmp_path, "jit_work", 2)
