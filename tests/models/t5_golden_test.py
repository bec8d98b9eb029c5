"""T5 against what T5X computes from its own checkpoints (logits, scores and greedy decoding)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.data.directory import require
from speccascade_jax.models.t5 import teacher_forced_logits

GOLDEN = {
    "tied_1enc_2dec": "tied_1enc_2dec",
    "untied_2enc_3dec": "untied_2enc_3dec",
    "orbax_untied_2enc_3dec": "untied_2enc_3dec",
}


@pytest.fixture(params=GOLDEN, scope="module")
def golden(request):
    """(model, params, what T5X computed) of one checkpoint."""
    try:
        checkpoint = require("t5x_golden", request.param, "checkpoint_1000")
        computed = np.load(require("t5x_golden", GOLDEN[request.param], "golden.npz"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    model, params = checkpoints.load(checkpoint)
    return model, params, computed


def test_teacher_forced_logits_and_scores(golden):
    model, params, computed = golden
    logits = teacher_forced_logits(model, params, computed["encoder_tokens"], computed["decoder_input_tokens"])
    vocabulary = model.vocab_size
    np.testing.assert_allclose(logits[..., :vocabulary], computed["logits"][..., :vocabulary], atol=1e-4)
    laws = jax.nn.log_softmax(logits)
    scores = jnp.take_along_axis(laws, computed["target_tokens"][..., None], -1)[..., 0].sum(-1)
    np.testing.assert_allclose(scores, computed["scores"], atol=1e-3)


def test_greedy_decoding(golden):
    model, params, computed = golden
    rows, new = computed["greedy"].shape
    tokens = jnp.zeros((rows, 1), jnp.int32)
    prompt = Prompt(tokens, jnp.ones((rows,), jnp.int32), jnp.asarray(computed["encoder_tokens"]))
    cache, extend = model.prefill(params, prompt, new), jax.jit(model.extend)
    ended = np.zeros(rows, bool)
    found = []
    for _ in range(new):
        out, cache = extend(params, cache, tokens)
        best = np.where(ended, 0, np.argmax(out.logits[:, 0], -1))
        ended |= best == 1
        found.append(best)
        tokens = jnp.asarray(best[:, None], jnp.int32)
    np.testing.assert_array_equal(np.stack(found, 1), computed["greedy"])
