"""Tests of the time of each instruction, on hand-made timelines and on a real trace, and of its phase and module."""

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.evaluation.studies.profiling.traces import Event, HloText, Place, own_times, place_of, read_runs


def _own(*events: tuple[str, float, float]):
    run = sorted((Event(name, begin, end, end, 0) for name, begin, end in events), key=lambda event: event.begin)
    spent = own_times([run], lambda name: name.startswith("while"))
    total = max(end for *_, end in events) - min(begin for _, begin, _ in events)
    assert sum(cost.total for cost in spent.values()) == pytest.approx(total)
    return {name: (cost.running, cost.waiting, cost.count) for name, cost in spent.items() if cost.total}


@pytest.mark.parametrize(("events", "expected"), [
    # instructions that run one after another
    ([("a", 0, 10), ("b", 10, 14), ("a", 14, 15)], {"a": (11, 0, 2), "b": (4, 0, 1)}),
    ([("a", 0, 10), ("b", 13, 14)], {"a": (10, 0, 1), "b": (1, 3, 1)}),  # a gap is waiting time of the next one
    # a loop has no time of its own, unless it became one kernel, which is an instruction
    ([("while", 0, 17), ("a", 2, 5), ("b", 5, 17)], {"a": (3, 2, 1), "b": (12, 0, 1)}),
    ([("while.1", 0, 4), ("a", 5, 6)], {"while.1": (4, 0, 1), "a": (1, 1, 1)}),
    ([("a", 0, 10), ("b", 4, 6)], {"a": (9, 0, 1), "b": (1, 0, 1)}),  # two instructions that run at once share the time
    ([("a", 0, 10), ("b", 6, 12)], {"a": (8, 0, 1), "b": (4, 0, 1)}),
])  # fmt: skip
def test_time_is_charged_to_the_running_instruction(events, expected):
    assert _own(*events) == expected


def test_time_between_two_runs_is_charged_to_no_instruction():
    first = [Event("a", 0, 1, 1, 0), Event("b", 1, 3, 3, 0)]
    second = [Event("a", 1000, 1001, 1001, 1), Event("b", 1002, 1003, 1003, 1)]
    spent = own_times([first, second], lambda name: False)
    assert (spent["a"].total, spent["b"].total) == (2, 4)


def test_an_instruction_on_other_threads_lasts_until_they_finish_or_the_next_begins():
    ends_last, said_late = Event("dot", 0, 4, 9, 0), Event("dot", 20, 24, 90, 0)
    after = [Event("a", 10, 12, 12, 0), Event("b", 30, 31, 31, 0), Event("c", 31, 40, 40, 0)]
    spent = own_times([[ends_last, after[0], said_late, *after[1:]]], lambda name: False)
    assert (spent["dot"].running, spent["dot"].count) == (9 + 10, 2)
    assert [(spent[name].running, spent[name].waiting) for name in "abc"] == [(2, 1), (1, 0), (9, 0)]


def test_a_loop_contains_instructions_that_other_threads_finish():
    events = [Event("while", 0, 3, 90, 0), Event("dot", 2, 5, 7, 0), Event("a", 8, 50, 80, 0)]
    spent = own_times([events], lambda name: name == "while")
    assert {name: cost.total for name, cost in spent.items()} == {"dot": 2 + 5, "a": 1 + 42}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Traces a loop of 5 rounds with a product, run twice under the profiler."""

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
    assert scored and all(cost.count == 2 * 5 for cost in scored)
    whole = sum(run[-1].end - run[0].begin for run in runs)
    assert sum(cost.total for cost in spent.values()) == pytest.approx(whole)


@pytest.mark.tools
def test_missing_runs_and_traces_are_named(traced, tmp_path):
    with pytest.raises(ValueError, match=r"0 runs of jit_other, not 2: .*; its planes: .*/host:CPU"):
        read_runs(traced[0], "jit_other", 2)
    with pytest.raises(ValueError, match="2 runs of jit_work, not 3: the profiler lost some"):
        read_runs(traced[0], "jit_work", 3)
    with pytest.raises(FileNotFoundError, match=r"no trace \(\*.xplane.pb\)"):
        read_runs(tmp_path, "jit_work", 2)


# The shape of a compiled generation: a loop over rounds, in it a loop over drafted tokens; products without a name.
TEXT = """\
HloModule jit_generation, is_scheduled=true, entry_computation_layout={(f32[8,9]{1,0})->f32[9]{0}}

%fused_computation.1 (param_0.1: f32[9]) -> f32[9] {
  %param_0.1 = f32[9]{0} parameter(0)
  ROOT %maximum.1 = f32[9]{0} maximum(%param_0.1, %param_0.1), metadata={op_name="jit(generation)/jit(_generate)/while/body/verify/rule/max" stack_frame_id=3}
}

%draft_body (state.1: (f32[8,9], f32[1,8], f32[1,9])) -> (f32[8,9], f32[1,8], f32[1,9]) {
  %state.1 = (f32[8,9]{1,0}, f32[1,8]{1,0}, /*index=2*/f32[1,9]{1,0}) parameter(0)
  %kernel.1 = f32[8,9]{1,0} get-tuple-element(%state.1), index=0
  %hidden.1 = f32[1,8]{1,0} get-tuple-element(%state.1), index=1
  %dot.1 = f32[1,9]{1,0} dot(%hidden.1, %kernel.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %slice.1 = f32[1,9]{1,0} slice(%dot.1), slice={[0:1], [0:9]}, metadata={op_name="jit(generation)/jit(_generate)/while/body/draft/while/body/slice" stack_frame_id=4}
  %alone.1 = f32[1,8]{1,0} negate(%hidden.1)
  %copy.1 = f32[1,8]{1,0} copy(%alone.1)
  ROOT %tuple.1 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) tuple(%kernel.1, %copy.1, %slice.1)
}

%round_body (state.3: (f32[8,9], f32[1,8], f32[1,9])) -> (f32[8,9], f32[1,8], f32[1,9]) {
  %state.3 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) parameter(0)
  %kernel.3 = f32[8,9]{1,0} get-tuple-element(%state.3), index=0
  %view.3 = f32[8,9]{1,0} bitcast(%kernel.3)
  %hidden.3 = f32[1,8]{1,0} get-tuple-element(%state.3), index=1
  %law.3 = f32[1,9]{1,0} get-tuple-element(%state.3), index=2
  %tuple.3 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) tuple(%view.3, %hidden.3, %law.3)
  %while.1 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) while(%tuple.3), condition=%draft_cond, body=%draft_body, metadata={op_name="jit(generation)/jit(_generate)/while/body/draft/while" stack_frame_id=5}
  %scores.3 = f32[1,8]{1,0} dot(%hidden.3, %hidden.3), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %softmax.3 = f32[1,8]{1,0} exponential(%scores.3), metadata={op_name="jit(generation)/jit(_generate)/while/body/score/T5Module.extend/decoder/layers_0/self_attention/exp" stack_frame_id=6}
  %fusion.3 = f32[9]{0} fusion(%law.3), kind=kLoop, calls=%fused_computation.1
  %between.3 = f32[1,8]{1,0} negate(%softmax.3)
  %kept.3 = f32[1,8]{1,0} floor(%between.3), metadata={op_name="jit(generation)/jit(_generate)/while/body/commit/floor" stack_frame_id=9}
  %copy.3 = f32[1,8]{1,0} copy(%kept.3)
  %drawn.3 = f32[1,9]{1,0} get-tuple-element(%while.1), index=2
  ROOT %tuple.4 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) tuple(%kernel.3, %copy.3, %drawn.3)
}

ENTRY %main.1 (params.1: f32[8,9], prompt.1: f32[1,8]) -> f32[9] {
  %params.1 = f32[8,9]{1,0} parameter(0), metadata={op_name="params[\\'drafter\\'][\\'model\\'][\\'decoder\\'][\\'logits_dense\\'][\\'kernel\\']"}
  %prompt.1 = f32[1,8]{1,0} parameter(1), metadata={op_name="prompt.tokens"}
  %encoded.1 = f32[1,8]{1,0} negate(%prompt.1), metadata={op_name="jit(generation)/jit(_generate)/T5Module.start/T5Module.encode/encoder/layers_0/mlp/neg" stack_frame_id=7}
  %hoisted.1 = f32[1,8]{1,0} negate(%prompt.1), metadata={op_name="jit(generation)/jit(_generate)/while/body/score/T5Module.extend/decoder/layers_0/mlp/neg" stack_frame_id=10}
  %nameless.1 = f32[1,9]{1,0} dot(%encoded.1, %params.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %tuple.5 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) tuple(%params.1, %encoded.1, %nameless.1)
  %while.2 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) while(%tuple.5), condition=%round_cond, body=%round_body, metadata={op_name="jit(generation)/jit(_generate)/while" stack_frame_id=8}
  ROOT %out.1 = f32[1,9]{1,0} get-tuple-element(%while.2), index=2
}
"""  # noqa: E501
ROUND = "jit(generation)/jit(_generate)/while/body/"


@pytest.fixture(scope="module")
def program() -> HloText:
    return HloText.parse(TEXT)


def test_instructions_are_read_with_tuple_shapes_and_callers(program):
    loop = program.instructions["while.1"]
    assert (loop.opcode, loop.computation, loop.operands) == ("while", "round_body", ("tuple.3",))
    assert loop.called == ("draft_cond", "draft_body") and program.callers["draft_body"] is loop
    assert loop.shape == "(f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0})"
    assert program.instructions["drawn.3"].index == 2 and program.instructions["prompt.1"].index == 1


def test_loops_contain_instructions_but_products_do_not(program):
    assert program.is_control("while.1") and not program.is_control("dot.1") and not program.is_control("unknown")


@pytest.mark.parametrize(("name", "phase", "module"), [
    ("slice.1", "draft", ""),
    ("dot.1", "draft/model", "logits_dense"),  # module by its weights, two loops up; phase by its user
    ("alone.1", "draft", ""),
    ("copy.1", "draft/copies", ""),  # assigned to the phase of the loop that contains it
    ("scores.3", "score", "self_attention"),  # without weights: assigned to the phase of its user
    ("fusion.3", "verify/rule", ""),  # assigned to the phase of the instructions fused in it
    ("between.3", "commit", ""),  # its user decides about the phase, not its operands
    ("copy.3", "other/copies", ""),
    ("encoded.1", "prefill", "mlp"),
    ("hoisted.1", "prefill", "mlp"),  # moved out of the loop: runs once per generation
    ("nameless.1", "prefill", "logits_dense"),
    ("unknown", "other", ""),
])  # fmt: skip
def test_every_instruction_gets_its_phase_and_module(program, name, phase, module):
    assert program.place(name) == Place(tuple(phase.split("/")), module)


@pytest.mark.parametrize(("path", "phase", "module"), [
    (ROUND + "score/T5Module.extend/decoder/layers_1/mlp/wi_0/dot_general", "score", "mlp"),
    (ROUND + "score/T5Module.extend/decoder/layers_0/self_attention.keys_values/mul", "score", "self_attention"),
    (ROUND + "score/T5Module.extend/decoder/layers_0/pre_mlp_layer_norm/rsqrt", "score", "norms"),
    (ROUND + "score/T5Module.extend/decoder/layers_0/vmap(vmap())/scatter", "score", "cache writes"),
    (ROUND + "score/T5Module.extend/decoder/layers_0/add", "score", "residuals, masks"),
    (ROUND + "score/T5Module.extend/T5Module.logits/logits_dense/dot_general", "score", "logits_dense"),
    (ROUND + "draft/catch_up/while/body/T5Module.extend/token_embedder/gather", "draft/catch_up", "token_embedder"),
    (ROUND + "draft/while/body/sampling/cond/branch_1_fun/while/body/closed_call/ge", "draft/sampling", ""),
    (ROUND + "draft/while/body/draft/while/body/score/add", "draft/draft/score", ""),  # an engine inside a drafter
    (ROUND + "not", "other", ""),
    (ROUND + "verify/sub;" + ROUND + "commit/add", "verify", ""),  # merged instructions count for the first one's phase
    (ROUND + "verify/while/" + ROUND + "verify/mul", "verify", ""),  # an inlined instruction counts once
    ("jit(generation)/jit(_generate)/vmap(f)/row_keys.<locals>.<lambda>/while/body/add", "prefill", ""),
    ("", "other", ""),
])  # fmt: skip
def test_an_op_name_gives_phase_and_module(path, phase, module):
    assert place_of(path) == Place(tuple(phase.split("/")), module)
