"""Tests that the compiler's size of a program's arguments agrees with the estimate of `experiments.describe`."""

import dataclasses

import pytest

from speccascade_jax import checkpoints, preflight
from speccascade_jax.models import memory_estimate
from tests.support.compiling import needs_tpu_compiler

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler, pytest.mark.xdist_group("describe")]
CONFIGURATIONS = [
    # target, rows, positions, dtype, devices, mesh; layouts pad the positions to 128
    ("t5_1_1_small", 1, 128, "bfloat16", "v5e", (1, 1)),
    ("t5_1_1_small", 8, 256, "float32", "v5e", (1, 1)),
    ("t5_1_1_base", 64, 128, "bfloat16", "v5e", (1, 1)),
    ("t5_1_1_base", 4, 512, "bfloat16", "v5e:2x4", (2, 4)),
    ("t5_1_1_large", 2, 256, "bfloat16", "v5p:2x2x1", (1, 4)),
    ("gemma2_2b", 1, 1024, "bfloat16", "v5p", (1, 1)),
    ("gemma2_2b", 16, 512, "bfloat16", "v5e:2x2", (1, 4)),
    ("qwen2.5_7b", 2, 512, "bfloat16", "v6e:2x2", (1, 4)),
]


@pytest.mark.parametrize(("target", "batch", "positions", "dtype", "topology", "mesh"), CONFIGURATIONS)
def test_arguments_agree_with_describe(target, batch, positions, dtype, topology, mesh):
    model = checkpoints.named(target)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype=dtype))
    needs = memory_estimate.needs(model, batch=batch, length=positions, block_size=0, mesh=mesh)
    # a call reads all of its arguments, except an untied embedding, of which it reads a few rows
    config, width = model.config, 4 if dtype == "float32" else 2
    embedding = 0 if config.tied else config.num_embeddings * config.d_model * width // mesh[1]
    read = positions if model.is_encoder_decoder else positions // 2
    written = positions - (1 if model.is_encoder_decoder else read) - 1
    program = preflight.compiled(
        target, topology=topology, mesh=mesh, batch=batch, prompt_length=read, max_new_tokens=written, dtype=dtype,
        part="target",
    )  # fmt: skip
    arguments = program.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(needs.call_bytes + embedding, rel=0.05)


def test_a_program_that_does_not_fit_is_refused_with_the_bytes():
    with pytest.raises(
        preflight.DoesNotFitError, match=r"needs [\d,]{14} bytes .*: [\d,]+ are missing; use more devices"
    ):
        preflight.compiled("llama2_13b", topology="v5e", prompt_length=64, max_new_tokens=64, part="target")
