"""Tests of the costs of one step of a loop over tokens, and of the layouts of a peer's arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from benchmarks.peers_compiled import PROGRAMS, markdown, specs, step_costs
from speccascade_jax.preflight import hlo
from speccascade_jax.preflight.execution import Assumptions

LOOP = """
%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %y = f32[1024]{0} negate(%x)
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %y)
}
%condition (q: (s32[], f32[1024])) -> pred[] {
  %q = (s32[], f32[1024]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}
ENTRY %main (a: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %a = (s32[], f32[1024]{0}) parameter(0)
  %n = s32[] get-tuple-element(%a), index=0
  %b = f32[1024]{0} get-tuple-element(%a), index=1
  %before = f32[1024]{0} negate(%b)
  %start = (s32[], f32[1024]{0}) tuple(%n, %before)
  ROOT %w = (s32[], f32[1024]{0}) while(%start), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
}
"""


def test_a_step_is_one_iteration_with_its_condition_and_nothing_before_the_loop():
    costs = step_costs(hlo.parse(LOOP), {"y": 70, "before": 900, "less": 5}, Assumptions())
    assert (costs.cycles, costs.ops) == (75, 2)
    assert costs.hbm_bytes == pytest.approx(2 * 4 * 1024, abs=64)  # the condition's scalars


def test_heads_and_hidden_units_are_split_whatever_their_axis():
    heads, of_state = specs(next(program for program in PROGRAMS if program.name == "Gemma 2 9B"), 8)
    wide, tall = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 64, 256), (2, 256, 64)))
    assert heads("['mlp']['gating_einsum']", wide) == PartitionSpec(None, None, "model")
    assert heads("['mlp']['gating_einsum']", tall) == PartitionSpec(None, "model")
    assert of_state(".cache['layer_0']['k']", jax.ShapeDtypeStruct((8, 32, 4, 16), jnp.bfloat16)) == PartitionSpec(
        None, None, "model"
    )


def test_the_table_has_a_row_for_each_complete_batch():
    entry = {"costs": {"hbm_bytes": 2.5e9, "cycles": 3_000_000, "ops": 9, "collectives": 0}, "peak": 1e9}
    entries = {f"Gemma 2 2B|8|{side}": entry for side in ("peer", "ours")} | {"Gemma 2 2B|8|round": {"error": "large"}}
    *_, row = markdown(entries).splitlines()
    assert row == "| Gemma 2 2B | 8 | 2 500, 2 500, – | 2.00, 2.00, – | 9, 9, – | 0, 0, – | 1.00, 1.00, – |"
