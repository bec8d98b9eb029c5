"""Tests of fine-tuning's loss and gradients against transformers on the same batch (needs torch, transformers).

transformers' gradients are saved as if they were a model and read as a checkpoint, so both have our names and layouts.
"""

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.training.finetune.losses import counted_positions, token_losses
from tests.parity.transformers_test import T5S, their_decoder, their_t5

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")

LENGTHS, ENCODER_LENGTHS, ANSWERS = np.array([9, 4, 1, 0]), np.array([12, 3, 17, 0]), np.array([2, 1, 0, 0])
"""Lengths of four rows; the last one only fills the batch up."""
REAL = 3
WITHIN = 1e-5


def _tokens(lengths, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[B, width]` that end with EOS, with tokens after them too, and a mask of those that count."""
    tokens = np.random.default_rng(width).integers(2, 61, (len(lengths), width), dtype=np.int32)
    mask = np.arange(width) < lengths[:, None]
    tokens[np.arange(width) == lengths[:, None] - 1] = 1
    return tokens, mask


def _load(model, folder):
    model.save_pretrained(folder, safe_serialization=True)
    return checkpoints.load(folder, dtype="float32", prepared=False)


def _their_loss_and_gradients(model, folder, **inputs):
    """Returns the loss of their model, and the gradients in our layout."""
    loss = model(**{name: torch.tensor(array[:REAL], dtype=torch.long) for name, array in inputs.items()}).loss
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    return loss.item(), _load(model, folder)[1]


def _assert_equal(ours, theirs):
    """Compares losses, and each array of gradients relative to its largest entry."""
    (loss, gradients), (their_loss, their_gradients) = ours, theirs
    assert float(loss) == pytest.approx(their_loss, rel=WITHIN)
    our_gradients, wanted = (flax.traverse_util.flatten_dict(tree, sep="/") for tree in (gradients, their_gradients))
    assert our_gradients.keys() == wanted.keys()
    for name, array in wanted.items():
        largest = float(np.abs(array).max())
        assert largest > 0, name
        np.testing.assert_allclose(our_gradients[name], array, atol=WITHIN * largest, rtol=0, err_msg=name)


def _mean(losses, counted):
    return jnp.sum(jnp.where(counted, losses, 0.0)) / jnp.sum(counted)


@pytest.mark.parametrize("kind", T5S)
def test_a_t5s_loss_and_gradients_equal_transformers(kind, tmp_path):
    reference = their_t5(T5S[kind])
    model, params = _load(reference, tmp_path / "weights")
    (encoder, real), (tokens, counted) = _tokens(ENCODER_LENGTHS, 19), _tokens(LENGTHS, 11)
    inputs = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))

    @jax.value_and_grad
    def objective(params):
        def apply(*arguments, method):
            return model.module.apply({"params": params}, *arguments, method=method)

        logits = apply(apply(encoder, real, method="encode"), real, inputs, method="decode")
        counts = counted_positions(jnp.asarray(LENGTHS), jnp.zeros(4, jnp.int32), 11)
        return _mean(token_losses(logits, jnp.asarray(tokens), model.config.vocab_size), counts)

    ours = jax.jit(objective)(params)
    labels = np.where(counted, tokens, -100)
    masked = {"input_ids": np.where(real, encoder, 0), "attention_mask": real}
    theirs = _their_loss_and_gradients(reference, tmp_path / "gradients", **masked, labels=labels)
    _assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["qwen2.5", "gemma2"])
def test_a_decoders_loss_on_answers_and_its_gradients_equal_transformers(kind, tmp_path):
    reference = their_decoder(kind)
    model, params = _load(reference, tmp_path / "weights")
    # every row has an answer of at least one token after a prompt of at least one
    lengths, answers = LENGTHS + 3 * (LENGTHS > 0), ANSWERS + 1
    tokens, real = _tokens(lengths, 14)

    @jax.value_and_grad
    def objective(params):
        logits = model.module.apply({"params": params}, jnp.asarray(tokens))
        counts = counted_positions(jnp.asarray(lengths), jnp.asarray(answers), 14)
        return _mean(token_losses(logits[:, :-1], jnp.asarray(tokens[:, 1:]), model.config.vocab_size), counts[:, 1:])

    ours = jax.jit(objective)(params)
    labels = np.where(real & (np.arange(14) >= answers[:, None]), tokens, -100)
    theirs = _their_loss_and_gradients(
        reference, tmp_path / "gradients", input_ids=tokens, attention_mask=real, labels=labels
    )
    _assert_equal(ours, theirs)
