"""Tests that the attention kernel is a part of programs for every kind of TPU, and of no other program."""

import pytest

from speccascade_jax import preflight
from speccascade_jax.runtime import platforms
from tests.support import compiling
from tests.support.compiling import needs_tpu_compiler

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler, pytest.mark.xdist_group("kernels")]


def kernels(target, draft=None, **arguments):
    return len(compiling._compiled(preflight.job_of(target, draft, **arguments))[1].kernels)


@pytest.mark.parametrize("topology", ["v5p", "v6e"])
def test_a_step_of_a_t5_has_two_kernels_a_layer(topology):
    alone = {"method": "autoregressive", "prompt_length": 80, "max_new_tokens": 80}
    assert kernels("t5_1_1_small", topology=topology, **alone) == 16


def test_gemma_attends_by_kernels_on_a_mesh_and_in_a_scan():
    arguments = {"prompt_length": 100, "max_new_tokens": 80, "topology": "v5e:2x2", "mesh": (1, 2)}
    # one kernel for the local layers and one for the global ones, in a scan over pairs of them
    assert kernels("gemma2_2b", method="autoregressive", **arguments) == 2


def test_a_switch_lets_xla_compile_all(monkeypatch):
    monkeypatch.setenv(platforms.SWITCH, "0")
    compiling._compiled.cache_clear()
    assert compiling.compiled("t5", method="autoregressive")[1].kernels == []
    compiling._compiled.cache_clear()
