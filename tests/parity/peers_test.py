"""Tests of models exported by `benchmarks/peers`: equal logits in transformers, equal tokens with patched caches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import speccascade_jax as sc
from benchmarks.peers import exporting
from benchmarks.peers.protocol import cut
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.models import decoder, t5
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")
pytest.importorskip("transformers", reason="needs the parity extra: make parity")

NEW = 40
GAIN, SHORT = 2.5, 0.3
# Decoders deeper and shallower than their encoders: the caches of release 5 are wrong for both.
T5S = {"deeper": T5Config(61, 61, 32, 2, 8, 40, 1, 3), "less_deep": T5Config(61, 61, 32, 2, 8, 40, 4, 3)}
LLAMA = DecoderConfig(
    vocab_size=61, num_embeddings=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=40,
    max_length=128, rope_pairs="adjacent",
)  # fmt: skip
LLAMAS = {"adjacent": LLAMA, "tied": dataclasses.replace(LLAMA, tied=True)}
LLAMAS |= {"halves": dataclasses.replace(LLAMA, rope_pairs="halves")}


def _exported(config, folder):
    """Writes random weights to a folder and returns our model with the same weights."""
    draws, flat = np.random.default_rng(0), {}
    for name, shape in expected_shapes(config).items():
        flat[name] = (GAIN * draws.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
        if name.endswith("scale"):
            flat[name] = (1 + 0.2 * draws.normal(size=shape)).astype(np.float32)
        elif name.endswith("embedding"):
            flat[name] = (SHORT * draws.normal(size=shape)).astype(np.float32)
    for part in ("target", "draft"):
        exporting.write(config, flat, folder / part)
    kind = t5.T5 if isinstance(config, T5Config) else decoder.DecoderLM
    return kind(config), unflatten_dict({name: jnp.asarray(values) for name, values in flat.items()}, sep="/")


def _theirs(family, folder, new=NEW):
    """Returns the benchmark's worker, with the folder's models loaded."""
    from benchmarks.peers.workers.huggingface import HuggingFace  # imported here, because the worker needs transformers

    pair = {"folder": str(folder), "family": family, "new_tokens": new, "stop": [60]}
    peer = HuggingFace()
    peer.load(pair)
    return peer, pair


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in (T5S | LLAMAS).items()])
def test_logits_and_greedy_tokens_are_equal(config, tmp_path):
    model, params = _exported(config, tmp_path)
    peer, pair = _theirs("t5" if model.is_encoder_decoder else "llama", tmp_path)
    draws = np.random.default_rng(1)
    prompts = draws.integers(2, 60, (2, 12))
    fed = (prompts, draws.integers(2, 60, (2, 9))) if model.is_encoder_decoder else (prompts,)
    with torch.no_grad():
        arguments = dict(zip(("input_ids", "decoder_input_ids"), map(torch.tensor, fed), strict=False))
        wanted = peer._model("target", "float32")(**arguments).logits.numpy()
    logits = (t5 if model.is_encoder_decoder else decoder).teacher_forced_logits(model, params, *map(jnp.asarray, fed))
    np.testing.assert_allclose(logits, wanted, atol=1e-3, rtol=1e-3)
    mended = ["target", "draft"] if model.is_encoder_decoder else []
    _compare_tokens(peer, pair, tmp_path, prompts.tolist(), mended)


def _compare_tokens(peer, pair, folder, prompts, mended):
    """Checks that every mode writes our tokens up to the stop id, with batch 1."""
    ours = sc.Pair.load(folder / "target", folder / "draft")
    wanted = sc.decode(ours, prompts, method="autoregressive", max_new_tokens=NEW, temperature=0.0, stop_ids=[60])
    assert (
        max(len(set(row)) for row in wanted.tokens.tolist()) > 8
    )  # the tokens must vary; otherwise nothing would be compared
    for row, prompt in enumerate(prompts):
        expected = wanted.tokens[row, : wanted.lengths[row]].tolist()
        for mode, tokens in (("plain", None), ("assisted", 3), ("lookup", None)):
            options = {"dtype": "float32", "mode": mode, "tokens": tokens, "mended": mended}
            (written,) = peer.write(options, [prompt], pair)
            written = cut(written, [60])
            assert written == expected[: len(written)] and len(written) >= len(expected) - 1, mode
