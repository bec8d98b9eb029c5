"""Tests that planted pairs have the planned outputs, in any dtype of weights, and the planned acceptance rate."""

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from benchmarks.peers import exporting, pairs, planting
from benchmarks.peers.workers.ours import Ours
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config

SIZE = 400


def _decoder(width, layers):
    return DecoderConfig(
        vocab_size=SIZE, num_embeddings=SIZE, d_model=width, num_layers=layers, num_heads=2, num_kv_heads=1,
        head_dim=16, d_ff=64, max_length=512,
    )  # fmt: skip


PAIRS = {
    # a vocabulary that is padded, heads narrower than the model, and an encoder of other depth than the decoder
    "t5": (planting.t5, T5Config(SIZE, SIZE, 96, 2, 32, 64, 1, 2), T5Config(SIZE, SIZE, 64, 1, 32, 48, 2, 1)),
    "decoder": (planting.decoder, _decoder(64, 2), _decoder(64, 1)),
}


def test_the_planted_successors_form_one_cycle():
    after = planting.successors(SIZE, seed=0)
    seen, token = set(), 5
    while token not in seen:
        seen.add(token)
        token = int(after[token])
    assert seen == set(range(planting.SPECIAL, SIZE))


@pytest.mark.parametrize("acceptance", [0.0, 0.55, 0.8, 1.0])
def test_a_draft_differs_at_the_planted_rate_everywhere(acceptance):
    after = planting.successors(SIZE, seed=0)
    draft = planting.astray(after, acceptance, seed=1)
    assert sorted(draft) == list(range(SIZE))
    right = [bool(draft[t] == after[t]) for t in planting.expected(after, [planting.SPECIAL], SIZE - 2)]
    assert np.mean(right) == pytest.approx(acceptance, abs=0.005)
    assert np.mean(right[:100]) == pytest.approx(acceptance, abs=0.06)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_engine_accepts_at_the_planted_rate_and_writes_the_planted_tokens(kind, tmp_path):
    plant, target, draft = PAIRS[kind]
    after = planting.successors(SIZE, seed=0)
    exporting.write(target, plant(target, after, seed=1), tmp_path / "target")
    exporting.write(draft, plant(draft, planting.astray(after, 0.8, seed=2), seed=3), tmp_path / "draft")
    pair = sc.Pair.load(tmp_path / "target", tmp_path / "draft")
    prompts = planting.start_prompts(after, 4, 12, seed=4)
    out = sc.decode(pair, prompts, rule="spec_decode", block_size=3, max_new_tokens=120, temperature=0.0)
    assert out.tokens.tolist() == [planting.expected(after, prompt, 120) for prompt in prompts]
    assert len(set(out.tokens[:, 0].tolist())) == 4  # a T5's first token depends on its input
    assert out.stats["acceptance_rate"] == pytest.approx(0.8, abs=0.04)


def test_invalid_planted_pairs_are_rejected():
    after = planting.successors(SIZE, seed=0)
    with pytest.raises(ValueError, match=r"acceptance=1.2 is not a rate: give a number from 0 to 1"):
        planting.astray(after, 1.2, seed=0)
    with pytest.raises(ValueError, match="give tied=False"):
        planting.t5(T5Config(SIZE, SIZE, 16, 2, 8, 16, 1, 1, tied=True), after, seed=0)


WRITTEN = 12


@pytest.fixture
def told(tmp_path):
    """Returns a small planted pair's description for workers, its prompts, and its target's outputs."""
    configs = T5Config(SIZE, SIZE, 64, 2, 16, 32, 1, 1), T5Config(SIZE, SIZE, 48, 1, 16, 32, 1, 1)
    prepared = pairs.planted(tmp_path, "small", *configs, WRITTEN)
    after, prompts = planting.successors(SIZE, seed=0), prepared.prompts[:2]
    return prepared.told(), prompts, [planting.expected(after, prompt, WRITTEN) for prompt in prompts]


@pytest.mark.tools
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_models_in_every_dtype_write_the_planted_tokens(told, dtype, monkeypatch):
    pair, prompts, wanted = told
    load, loaded = sc.Pair.load, []
    monkeypatch.setattr(sc.Pair, "load", lambda *paths, **more: loaded.append(load(*paths, **more)) or loaded[-1])
    ours = Ours()
    for times in (1, 2):  # loading a pair again drops the previous one
        ours.load(pair)
        for options in ({"method": "autoregressive"}, {"rule": "spec_decode", "block_size": 3}):
            assert ours.write({"dtype": dtype, **options}, prompts, pair) == wanted
        assert len(loaded) == times
    for bound in loaded[0].models.values():
        assert dtype in {str(leaf.dtype) for leaf in jax.tree.leaves(bound.params)}
