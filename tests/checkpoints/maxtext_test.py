"""Tests of MaxText's layouts: logits of models that were written as MaxText's converter writes them."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load
from speccascade_jax.checkpoints.tree_writing import write_tree
from speccascade_jax.models import decoder_presets
from speccascade_jax.models.decoder import DecoderLM, teacher_forced_logits, tiny
from tests.support.tiny_decoders import flat_parameters

FORCED = jax.jit(teacher_forced_logits, static_argnums=0)
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 9)).astype(np.int32)
GEMMA = dataclasses.replace(tiny("gemma2_2b"), num_layers=4, query_scale=8**-0.5, window=4096, max_length=8192)
LLAMA = dataclasses.replace(tiny("llama3.1_8b"), num_layers=3)


def maxtext_arrays(c, scanned):
    """Returns MaxText's arrays by name of a model with `flat_parameters`."""
    gemma, flat, layers = c.post_norms, dict(flat_parameters(c)), {}
    embedding = flat["token_embedder/embedding"] * np.float32(c.embedding_scale)
    out = {"token_embedder/embedding": embedding, "decoder/decoder_norm/scale": flat["decoder/decoder_norm/scale"]}
    out["decoder/decoder_norm/scale"] = out["decoder/decoder_norm/scale"] + c.norm_offset
    if not c.tied:
        out["decoder/logits_dense/kernel"] = flat["decoder/logits_dense/kernel"]
    norms = {"post_mlp_layer_norm": "post_ffw_norm", "pre_mlp_layer_norm": "pre_ffw_norm"}
    norms |= {f"{at}_self_attention_layer_norm": f"{at}_self_attention_norm" for at in ("pre", "post")}
    norms = norms if gemma else {"pre_mlp_layer_norm": "post_self_attention_layer_norm"}
    for name in [name for name in flat if "layers_" in name]:
        _, layer, module, *rest = name.split("/")
        number, array = int(layer[7:]), flat[name]
        if rest[0] in ("query", "key", "value"):
            array = array.reshape(c.d_model, -1, c.head_dim)
        if rest[0] == "query":
            array = array * np.float32(c.scale)
        array = array.reshape(c.num_heads, c.head_dim, -1) if rest[0] == "out" else array
        array = array + np.float32(c.norm_offset) if rest == ["scale"] else array
        group, kind = (number // 2, ("_local", "_global")[number % 2]) if gemma else (number, "")
        layers.setdefault("/".join([norms.get(module, module) + kind, *rest]), {})[group] = array
    for name, parts in layers.items():
        arrays = [parts[group] for group in range(len(parts))]
        if scanned:
            out[f"decoder/layers/{name}"] = np.stack(arrays, axis=1)
        else:
            out |= {f"decoder/layers_{group}/{name}": array for group, array in enumerate(arrays)}
    return out


def write(path, arrays, root="params/params/"):
    (path / "items").mkdir(parents=True)
    state = {"step": np.int32(3), "opt_state/mu/x": np.zeros(2, np.float32)}
    write_tree(path / "items", state | {root + name: array for name, array in arrays.items()})
    return path


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("config", [GEMMA, LLAMA], ids=["gemma2", "llama3.1"])
def test_logits_equal_those_of_the_model(tmp_path, monkeypatch, config, scanned):
    config = config if config is GEMMA else dataclasses.replace(config, rope_pairs="adjacent")
    monkeypatch.setitem(decoder_presets.PRESETS, "llama3.1_tiny", LLAMA)
    path = write(tmp_path / "3", maxtext_arrays(config, scanned))
    expected = FORCED(DecoderLM(config), unflatten_dict(flat_parameters(config), sep="/"), TOKENS)
    for part in (path, path / "items"):
        model, params = load(part)
        np.testing.assert_allclose(FORCED(model, params, TOKENS), expected, rtol=2e-4, atol=2e-5)
    assert "format: MaxText (Orbax)" in describe(path)


def test_models_that_no_preset_describes_and_damage_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="are the sizes of no Llama preset.*to_huggingface"):
        load(write(tmp_path / "llama", maxtext_arrays(LLAMA, True), "params/"))
    arrays = maxtext_arrays(GEMMA, True)
    del arrays["decoder/layers/mlp_global/wo/kernel"]
    with pytest.raises(CheckpointError, match=r"arrays are missing.*mlp_global/wo/kernel"):
        load(write(tmp_path / "gemma", arrays))
