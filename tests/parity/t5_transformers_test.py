"""T5 against Hugging Face transformers on the same random weights (needs torch and transformers)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.t5 import T5Config, teacher_forced_logits
from tests.support import parity_greedy

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")

CONFIGS = {
    "t5_1.0_tied_relu": T5Config(61, 61, 24, 3, 8, 40, 2, 2, gated=False, tied=True),
    "t5_1.1_untied_gated": T5Config(61, 61, 32, 4, 6, 48, 2, 3),
}


def reference(config: T5Config):
    """A random transformers model of these sizes with weights large enough to show a mistake."""
    c = config
    settings = transformers.T5Config(
        vocab_size=c.num_embeddings,
        d_model=c.d_model,
        d_kv=c.head_dim,
        d_ff=c.d_ff,
        num_heads=c.num_heads,
        num_layers=c.num_encoder_layers,
        num_decoder_layers=c.num_decoder_layers,
        relative_attention_num_buckets=c.relative_buckets,
        relative_attention_max_distance=c.relative_max_distance,
        feed_forward_proj="gated-gelu" if c.gated else "relu",
        tie_word_embeddings=c.tied,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(settings).eval()
    with torch.no_grad():
        model.shared.weight.mul_(0.3)  # else a tied model would only repeat its last token
        for name, weight in model.named_parameters():
            if "SelfAttention" in name or "EncDecAttention" in name:
                weight.mul_(2.0)  # what stands where must matter
    if not c.tied:
        # transformers 5 shares it with the embedding whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(c.num_embeddings, c.d_model) * c.d_model**-0.5)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def both(request, tmp_path_factory):
    """Their model, and ours after safetensors → ours → our own format → ours."""
    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp("t5")
    theirs = reference(config)
    theirs.save_pretrained(folder / "theirs", safe_serialization=True)
    checkpoints.save(folder / "ours", *checkpoints.load(folder / "theirs"))
    model, params = checkpoints.load(folder / "ours")
    assert model.config == config
    return theirs, model, model.prepare(params)


def test_logits_equal_transformers(both):
    """Teacher-forced and cached logits, with padding and with distances beyond every exact bucket."""
    theirs, model, params = both
    rng = np.random.default_rng(0)
    encoder = rng.integers(2, model.vocab_size, (3, 40), dtype=np.int32)
    encoder[1, 25:] = 0
    encoder[2, 7:] = 0
    decoder = rng.integers(2, model.vocab_size, (3, 45), dtype=np.int32)
    decoder[:, 0] = 0
    with torch.no_grad():
        wanted = theirs(
            input_ids=torch.tensor(encoder, dtype=torch.long),
            attention_mask=torch.tensor(encoder > 0, dtype=torch.long),
            decoder_input_ids=torch.tensor(decoder, dtype=torch.long),
        ).logits.numpy()
    found = teacher_forced_logits(model, params, encoder, decoder)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32), jnp.asarray(encoder))
    cached, _ = model.extend(params, model.prefill(params, prompt, 48), decoder)
    np.testing.assert_allclose(cached.logits, wanted, atol=1e-4, rtol=1e-4)


def test_greedy_generation_equals_transformers(both):
    """200 steps, token for token, up to a position where the two best logits nearly tie."""
    theirs, model, params = both
    encoder = np.random.default_rng(1).integers(2, model.vocab_size, (2, 24), dtype=np.int32)
    ids = torch.tensor(encoder, dtype=torch.long)
    with torch.no_grad():
        # no cache: transformers gives its own too few layers where the decoder has more than the encoder
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
        written = theirs.generate(ids, max_new_tokens=200, **settings)
        logits = theirs(input_ids=ids, decoder_input_ids=written).logits.numpy()
    prompt = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones((2,), jnp.int32), jnp.asarray(encoder))
    found = parity_greedy.tokens(model, params, prompt, 200)
    parity_greedy.assert_equal_but_for_near_ties(found, written.numpy()[:, 1:], logits)
