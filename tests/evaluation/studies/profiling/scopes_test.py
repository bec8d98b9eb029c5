"""Where instructions belong, from names as XLA writes them and, where it wrote none, from what stands around."""

import pytest

from speccascade_jax.evaluation.studies.profiling.scopes import HloText, Place, place_of

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

%draft_cond (state.2: (f32[8,9], f32[1,8], f32[1,9])) -> pred[] {
  %state.2 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) parameter(0)
  ROOT %constant.1 = pred[] constant(true)
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

%round_cond (state.4: (f32[8,9], f32[1,8], f32[1,9])) -> pred[] {
  %state.4 = (f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0}) parameter(0)
  ROOT %constant.2 = pred[] constant(true)
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


def test_instructions_are_read_with_shapes_of_tuples_and_callers(program):
    loop = program.instructions["while.1"]
    assert (loop.opcode, loop.computation, loop.operands) == ("while", "round_body", ("tuple.3",))
    assert loop.called == ("draft_cond", "draft_body") and program.callers["draft_body"] is loop
    assert loop.shape == "(f32[8,9]{1,0}, f32[1,8]{1,0}, f32[1,9]{1,0})"
    assert program.instructions["drawn.3"].index == 2 and program.instructions["prompt.1"].index == 1


def test_loops_contain_others_and_products_do_not(program):
    assert program.is_control("while.1") and not program.is_control("dot.1") and not program.is_control("unknown")


@pytest.mark.parametrize(
    ("name", "phase", "module"),
    [
        ("slice.1", "draft", ""),
        ("dot.1", "draft/model", "logits_dense"),  # its weights, two loops up; the phase of what reads it
        ("alone.1", "draft", ""),
        ("copy.1", "draft/copies", ""),  # the loop it stands in
        ("scores.3", "score", "self_attention"),  # no weights: what reads it
        ("fusion.3", "verify/rule", ""),  # what is fused in it
        ("between.3", "commit", ""),  # what reads it, before what it reads
        ("copy.3", "other/copies", ""),
        ("encoded.1", "prefill", "mlp"),
        ("hoisted.1", "prefill", "mlp"),  # taken out of the loop: once per generation
        ("nameless.1", "prefill", "logits_dense"),
        ("unknown", "other", ""),
    ],
)
def test_every_instruction_has_its_place(program, name, phase, module):
    assert program.place(name) == Place(tuple(phase.split("/")), module)


@pytest.mark.parametrize(
    ("path", "phase", "module"),
    [
        (ROUND + "score/T5Module.extend/decoder/layers_1/mlp/wi_0/dot_general", "score", "mlp"),
        (ROUND + "score/T5Module.extend/decoder/layers_0/self_attention.keys_values/mul", "score", "self_attention"),
        (ROUND + "score/T5Module.extend/decoder/layers_0/pre_mlp_layer_norm/rsqrt", "score", "norms"),
        (ROUND + "score/T5Module.extend/decoder/layers_0/vmap(vmap())/scatter", "score", "cache writes"),
        (ROUND + "score/T5Module.extend/decoder/layers_0/add", "score", "residuals, masks"),
        (ROUND + "score/T5Module.extend/T5Module.logits/logits_dense/dot_general", "score", "logits_dense"),
        (ROUND + "draft/catch_up/while/body/T5Module.extend/token_embedder/gather", "draft/catch_up", "token_embedder"),
        (ROUND + "draft/while/body/sampling/cond/branch_1_fun/while/body/closed_call/ge", "draft/sampling", ""),
        (ROUND + "draft/while/body/draft/while/body/score/add", "draft/draft/score", ""),  # an engine that drafts
        (ROUND + "not", "other", ""),
        (ROUND + "verify/sub;" + ROUND + "commit/add", "verify", ""),  # merged: the first
        (ROUND + "verify/while/" + ROUND + "verify/mul", "verify", ""),  # inlined: once
        ("jit(generation)/jit(_generate)/vmap(f)/row_keys.<locals>.<lambda>/while/body/add", "prefill", ""),
        ("", "other", ""),
    ],
)
def test_paths(path, phase, module):
    assert place_of(path) == Place(tuple(phase.split("/")), module)
