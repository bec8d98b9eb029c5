"""How models lie on a mesh: every parameter has its place, and fused kernels are the same kernels.

What eight devices compute is in `tests/models/on_devices_test.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from speccascade_jax.models import sharding
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.memory_estimate import abstract, needs
from speccascade_jax.models.t5 import T5, T5Config

SMALL = T5Config(29, 32, 16, 4, 8, 24, 1, 2, tied=False)
MODELS = {"t5": T5(SMALL), **{name: DecoderLM(tiny(name)) for name in ("gemma2_2b", "qwen2.5_7b")}}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_lies_somewhere_by_a_row_of_the_table(name):
    model = MODELS[name]
    leaves = flatten_dict(abstract(model), sep="/")
    places = {path: sharding.spec_of(path) for path in leaves}
    assert all(len(place) == len(leaves[path].shape) for path, place in places.items())
    split = {path.rsplit("/", 2)[-2] for path, place in places.items() if "model" in place}
    assert {"query", "key", "value", "out", "wi_0", "wi_1", "wo"} <= split
    whole = {path.rsplit("/", 1)[-1] for path, place in places.items() if "model" not in place}
    assert whole == {"scale"}


def test_fused_kernels_are_split_where_the_next_product_needs_no_exchange():
    """Columns of what makes heads and units, rows of what takes them: one sum over devices behind each pair."""
    layer, grouped = "decoder/layers_0", dataclasses.replace(tiny("gemma2_2b"), num_heads=8, num_kv_heads=2)
    size = grouped.head_dim
    for name, spec, columns, widths in (
        ("mlp/wi_01/kernel", P(None, "model"), 10, (5, 5)),
        ("mlp/wo/kernel", P("model", None), 10, None),
        ("self_attention/qkv/bias", P("model"), 12 * size, (8 * size, 2 * size, 2 * size)),
        ("self_attention/out/kernel", P("model", None), 10, None),
    ):
        assert sharding.spec_of(f"{layer}/{name}") == spec
        assert sharding.fused_widths(f"{layer}/{name}", columns, grouped) == widths


def test_a_parameter_that_no_row_names_is_refused():
    with pytest.raises(ValueError, match="'decoder/adapter/kernel' lies on a mesh: add a row to sharding.LOGICAL_AXES"):
        sharding.spec_of("decoder/adapter/kernel")


@given(shards=st.integers(1, 4), columns=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_what_is_put_side_by_side_comes_apart(shards, columns):
    kernels = [np.random.default_rng(n).normal(size=(2, width * shards)) for n, width in enumerate(columns)]
    joined = sharding.interleave_fused(kernels, shards)
    back = sharding.split_fused(joined, [kernel.shape[-1] for kernel in kernels], shards)
    assert all(np.array_equal(one, other) for one, other in zip(kernels, back, strict=True))
    first = np.split(joined, shards, axis=-1)[0]  # what the first device holds: its share of each
    assert np.array_equal(first, np.concatenate([np.split(kernel, shards, axis=-1)[0] for kernel in kernels], axis=-1))


def test_a_model_that_does_not_divide_is_refused_by_the_size_that_does_not():
    grouped = dataclasses.replace(tiny("gemma2_2b"), num_heads=8, num_kv_heads=2, num_embeddings=128, d_ff=64)
    with pytest.raises(
        ValueError, match=r"num_kv_heads=2 of m does not divide by the 4 parts of mesh=\(1, 4\): .* 2, or"
    ):
        sharding.check(grouped, (1, 4), "m")
    sharding.check(grouped, (4, 2), "m")


def test_what_each_device_holds_is_its_share_and_what_all_hold():
    """Worked out by hand: norms are whole everywhere, kernels and caches are split."""
    model, given = T5(SMALL), {"batch": 4, "length": 10, "block_size": 2}
    one, spread = needs(model, **given), needs(model, **given, mesh=(2, 4))
    norms = 4 * sum(
        leaf.size for path, leaf in flatten_dict(abstract(model), sep="/").items() if path.endswith("scale")
    )
    assert spread.parameter_bytes == norms + (one.parameter_bytes - norms) // 4
    by_rows = 4 * 4 + 4 * 4 * 10  # lengths, and the mask of the encoder's padding, which have no heads
    assert spread.cache_bytes == by_rows // 2 + (one.cache_bytes - by_rows) // 8
    assert spread.laws_bytes == one.laws_bytes // 8
    assert spread.parameters == one.parameters and spread.call_bytes < one.call_bytes / 4 + norms
    with pytest.raises(ValueError, match=r"a batch of 3 does not divide by the 2 parts that mesh=\(2, 4\)"):
        needs(model, **given | {"batch": 3}, mesh=(2, 4))
