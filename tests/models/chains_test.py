"""Tests of where models compute products as chains: only with parameters that the kernels read as they are."""

import jax.numpy as jnp
import pytest

from speccascade_jax.core.types import Packed
from speccascade_jax.models.chains import computes_around
from speccascade_jax.runtime import platforms

SIZE = 256
X = jnp.zeros((1, 1, SIZE), jnp.float32)
MATRIX, SCALE = jnp.zeros((SIZE, SIZE)), jnp.zeros((SIZE,), jnp.bfloat16)
PACKED = Packed(jnp.zeros((2, SIZE, SIZE // 2)), None, SIZE)


@pytest.mark.parametrize(("params", "x", "platform", "computes"), [
    ({"wi": MATRIX, "scale": SCALE}, X, "tpu", True),
    ({"wi": MATRIX, "scale": SCALE}, X, "cpu", False),
    ({"wi": MATRIX, "wo": PACKED}, X, "tpu", False),  # a CPU's layout
    ({"wi": MATRIX.astype(jnp.bfloat16)}, X, "tpu", False),  # the kernel converts nothing
    ({"wi": MATRIX}, X.astype(jnp.bfloat16), "tpu", False),
    ({"wi": MATRIX[:, :200]}, X[..., :200], "tpu", False),  # no whole tiles
])  # fmt: skip
def test_chains_take_whole_tiles_of_plain_matrices_of_the_inputs_type(params, x, platform, computes):
    with platforms.traced_for(platform, "TPU v5e"):
        assert computes_around(params, x, (x.shape[-1],)) == computes
