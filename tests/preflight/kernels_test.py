"""Tests that kernels are a part of programs for every kind of TPU, and of no other program."""

import dataclasses
import re
from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec

from speccascade_jax import preflight, streaming
from speccascade_jax.models import decode_attention, families
from speccascade_jax.preflight import topologies
from speccascade_jax.preflight.programs import Traced
from speccascade_jax.runtime import platforms
from tests.support import compiling
from tests.support.compiling import needs_tpu_compiler

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler, pytest.mark.xdist_group("kernels")]


def kernels(target, draft=None, **arguments):
    return len(compiling._compiled(preflight.job_of(target, draft, **arguments))[1].kernels)


@pytest.mark.parametrize("topology", ["v5p", "v6e"])
def test_a_step_of_a_t5_has_five_kernels_a_layer(topology):
    alone = {"method": "autoregressive", "prompt_length": 80, "max_new_tokens": 80}
    assert kernels("t5_1_1_small", topology=topology, **alone) == 8 * 5


def test_gemma_has_kernels_on_a_mesh_and_in_a_scan():
    arguments = {"prompt_length": 100, "max_new_tokens": 80, "topology": "v5e:2x2", "mesh": (1, 2)}
    # five kernels for the local layers and five for the global ones, in a scan over pairs of them
    assert kernels("gemma2_2b", method="autoregressive", **arguments) == 2 * 5


def test_a_block_of_128_query_heads_fits_into_the_smallest_vmem():
    """The sizes of Llama 3.1 405B in float32; Mosaic refused chunks of 512 slots."""
    placed = topologies.sharding_of("v5e", None, PartitionSpec())
    shapes = [(2, 16, 128 * 128), *[(2, 16, 8 * 128)] * 2, (16, 128, 1024), (16, 1024, 128), (1, 1, 16, 1024)]
    *columns, keys, values, bias = (jax.ShapeDtypeStruct(shape, "float32", sharding=placed) for shape in shapes)
    start = jax.ShapeDtypeStruct((2,), "int32", sharding=placed)
    attend = jax.jit(partial(decode_attention.attend, query_heads=128, size=128))
    with platforms.traced_for("tpu"):
        compiled = attend.lower(tuple(columns), keys, values, start, bias).compile()
    assert "decode_attention" in compiled.as_text()


def test_a_round_of_a_stream_copies_no_values_of_wide_heads(monkeypatch):
    wide = dataclasses.replace(compiling.MODELS["tiny_gemma"], head_dim=128, num_layers=1)
    monkeypatch.setitem(families.PRESETS, "wide_heads", wide)
    traced = Traced.of(preflight.job_of("wide_heads", None, method="autoregressive", **compiling.SMALL))
    with platforms.traced_for("tpu"):
        compiled = streaming._free_round(traced.engine, traced.program[1], traced.state, traced.controls)
    rows, slots, width = traced.state.target_cache.values[0].shape
    assert width == 128 and f"bf16[{rows},{slots},{width}]" in compiled.as_text()
    assert not re.findall(rf"bf16\[{rows},{slots},{width}\]\S* copy\(", compiled.as_text())


def test_a_switch_lets_xla_compile_all(monkeypatch):
    monkeypatch.setenv(platforms.SWITCH, "0")
    compiling._compiled.cache_clear()
    assert compiling.compiled("t5", method="autoregressive")[1].kernels == []
    compiling._compiled.cache_clear()
