"""Tests of T5 against T5X's results for its own checkpoints (logits, scores and greedy decoding)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.data.directory import require
from speccascade_jax.models.t5 import teacher_forced_logits


@pytest.fixture(params=["tied_1enc_2dec", "untied_2enc_3dec", "orbax_untied_2enc_3dec"], scope="module")
def golden(request):
    """Returns model, parameters and T5X's results of one checkpoint."""
    try:
        checkpoint = require("t5x_golden", request.param, "checkpoint_1000")
        computed = np.load(require("t5x_golden", request.param.removeprefix("orbax_"), "golden.npz"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    model, params = checkpoints.load(checkpoint)
    assert model.config.tied == request.param.startswith("tied")
    return model, params, computed


def test_teacher_forced_logits_and_scores(golden):
    model, params, computed = golden
    forced = jax.jit(teacher_forced_logits, static_argnums=0)
    logits = forced(model, params, computed["encoder_tokens"], computed["decoder_input_tokens"])
    # The largest difference depends on the order of sums: below 1e-5 as users compile, 1.09e-5 with the test suite's
    # compiler flags, 2.15e-5 with JAX 0.12, which knows fewer of these flags.
    np.testing.assert_allclose(logits, computed["logits"], rtol=1e-5, atol=4e-5)
    laws = jax.nn.log_softmax(logits)
    scores = jnp.take_along_axis(laws, computed["target_tokens"][..., None], -1)[..., 0].sum(-1)
    np.testing.assert_allclose(scores, computed["scores"], atol=1e-3)


def test_greedy_decoding(golden):
    model, params, computed = golden
    rows, new = computed["greedy"].shape
    tokens = jnp.zeros((rows, 1), jnp.int32)
    prompt = Prompt(tokens, jnp.ones((rows,), jnp.int32), jnp.asarray(computed["encoder_tokens"]))
    cache, extend = jax.jit(model.prefill, static_argnums=2)(params, prompt, new), jax.jit(model.extend)
    ended = np.zeros(rows, bool)
    columns = []
    for _ in range(new):
        out, cache = extend(params, cache, tokens)
        best = np.where(ended, 0, np.argmax(out.logits[:, 0], -1))
        ended |= best == 1
        columns.append(best)
        tokens = jnp.asarray(best[:, None], jnp.int32)
    np.testing.assert_array_equal(np.stack(columns, 1), computed["greedy"])
