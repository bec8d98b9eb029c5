"""Tests of Gemma 2 in Google's JAX releases: layouts of heads and gates, padded vocabulary, damaged files."""

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load
from speccascade_jax.checkpoints.tree_writing import write_tree
from speccascade_jax.models.decoder_presets import tiny

CONFIG = dataclasses.replace(tiny("gemma2_2b"), num_layers=2, query_scale=8**-0.5, window=4096, max_length=8192)
V, E, N, K, H, F = 97, CONFIG.d_model, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.d_ff


def layout(turned: bool) -> dict[str, tuple[int, ...]]:
    layer = {"attn/q_einsum/w": (N, E, H), "attn/kv_einsum/w": (2, K, E, H), "attn/attn_vec_einsum/w": (N, H, E)}
    layer |= {"mlp/gating_einsum": (2, F, E) if turned else (2, E, F), "mlp/linear": (F, E)}
    norms = ("pre_attention", "post_attention", "pre_ffw", "post_ffw")
    layer |= {f"{norm}_norm/scale": (E,) for norm in norms}
    shapes = {"embedder/input_embedding": (V, E), "final_norm/scale": (E,)}
    return shapes | {f"layer_{i}/{name}": shape for i in range(2) for name, shape in layer.items()}


def arrays(turned: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in layout(turned).items()}


def write(path, stored):
    path.mkdir()
    write_tree(path, stored)
    return path


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("root", ["", "transformer/"])
@pytest.mark.parametrize("turned", [False, True])
def test_products_equal_the_einsums_of_the_stored_arrays(tmp_path, turned, root, prepared):
    stored = arrays(turned)
    model, params = load(write(tmp_path / "g", {root + n: a for n, a in stored.items()}))
    assert model.config == dataclasses.replace(CONFIG, pattern=("local", "global"))
    x = np.random.default_rng(1).normal(size=(3, E)).astype(np.float32)
    heads = np.random.default_rng(2).normal(size=(3, N, H)).astype(np.float32)
    layer = params["decoder"]["layers_1"]
    q, kv = stored["layer_1/attn/q_einsum/w"], stored["layer_1/attn/kv_einsum/w"]
    gates = stored["layer_1/mlp/gating_einsum"]
    gates = gates.transpose(0, 2, 1) if turned else gates
    mixed = np.einsum("tnh,nhe->te", heads, stored["layer_1/attn/attn_vec_einsum/w"])
    expected = {
        "query": np.einsum("te,neh->tnh", x, q).reshape(3, -1),
        "key": np.einsum("te,neh->tnh", x, kv[0]).reshape(3, -1),
        "value": np.einsum("te,neh->tnh", x, kv[1]).reshape(3, -1),
        "wi_0": x @ gates[0],
        "wi_1": x @ gates[1],
    }
    if prepared:
        layer = load(tmp_path / "g", prepared=True)[1]["decoder"]["layers_1"]
        fused = np.concatenate([expected[name] for name in ("query", "key", "value")], axis=-1)
        expected = {"qkv": fused, "wi_01": np.concatenate([expected["wi_0"], expected["wi_1"]], axis=-1)}
    for name, value in expected.items():
        kernel = layer["mlp" if name.startswith("wi") else "self_attention"][name]["kernel"]
        np.testing.assert_allclose(x @ np.asarray(kernel), value, rtol=1e-4, atol=1e-4)
    out = np.asarray(layer["self_attention"]["out"]["kernel"])
    np.testing.assert_allclose(heads.reshape(3, -1) @ out, mixed, rtol=1e-4, atol=1e-4)


def test_gemma_1_is_refused_by_its_absent_norms(tmp_path):
    stored = {name: array for name, array in arrays().items() if "post_" not in name}
    with pytest.raises(CheckpointError, match="such as Gemma 1: in this format only Gemma 2 is read; take"):
        describe(write(tmp_path / "g", stored))


def test_other_arrays_are_unchanged(tmp_path):
    stored = arrays()
    path = write(tmp_path / "g", stored)
    flat = flatten_dict(load(path)[1], sep="/")
    ours = {
        "embedder/input_embedding": "token_embedder/embedding",
        "final_norm/scale": "decoder/decoder_norm/scale",
        "layer_1/mlp/linear": "decoder/layers_1/mlp/wo/kernel",
        "layer_1/pre_attention_norm/scale": "decoder/layers_1/pre_self_attention_layer_norm/scale",
        "layer_1/post_attention_norm/scale": "decoder/layers_1/post_self_attention_layer_norm/scale",
        "layer_1/pre_ffw_norm/scale": "decoder/layers_1/pre_mlp_layer_norm/scale",
        "layer_1/post_ffw_norm/scale": "decoder/layers_1/post_mlp_layer_norm/scale",
    }
    assert all(np.array_equal(flat[name], stored[theirs]) for theirs, name in ours.items())
    assert "format: Gemma 2 of Google's JAX releases" in describe(path)


@pytest.mark.parametrize(("name", "shape", "said"), [
    ("layer_1/mlp/linear", None, r"1 of \d+ arrays are missing \(layer_1/mlp/linear\)"),
    # this array exists only in Gemma 3
    ("layer_0/attn/_query_norm/scale", (H,), r"no place for 1 array \(layer_0/attn/_query_norm/scale\)"),
    ("layer_1/attn/kv_einsum/w", (2, K, E, H + 2), r"layer_1/attn/kv_einsum has shape \[2, 2, 32, 10\]"),
    ("layer_9999999999/mlp/linear", (F, E), r"g: its 10,000,000,000 layers exceed the maximum"),
    ("layer_x/mlp/linear", (F, E), r"no place for 1 array"),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(tmp_path, name, shape, said):
    changed = arrays() | {name: None if shape is None else np.zeros(shape, np.float32)}
    with pytest.raises(CheckpointError, match=said):
        load(write(tmp_path / "g", {name: array for name, array in changed.items() if array is not None}))
