"""Decoder-only models against Hugging Face transformers on the same random weights (needs torch and transformers).

Each kind's weights go the whole way: their safetensors → ours → our own format → ours, before anything is compared.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from tests.support import parity_greedy

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")

WIDTH, NEW = 40, 200
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    # a window far shorter than the prompts
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 12}),
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}, "rms_norm_eps": 1e-5}),
    "qwen2.5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
}


def theirs(kind: str):
    """A random model whose weights are large enough to show a mistake."""
    family, options = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                # a short embedding, or a tied model would only repeat its last token
                gain = 1.0 if name.endswith("bias") else 0.3 if "embed" in name else 1.5
                weight.copy_(torch.randn_like(weight) * gain * weight.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """Their model, and ours after safetensors → ours → our own format → ours."""
    folder, reference = tmp_path_factory.mktemp(request.param), theirs(request.param)
    reference.save_pretrained(folder / "theirs", safe_serialization=True)
    model, params = checkpoints.load(folder / "theirs")
    checkpoints.save(folder / "ours", model, params)
    again, params = checkpoints.load(folder / "ours")
    assert again == model
    return reference, model, model.prepare(params)


def test_logits_equal_transformers(both):
    """All at once, and cached in blocks, beyond the window and beyond the scaled rotary length."""
    reference, model, params = both
    tokens = np.random.default_rng(0).integers(3, 99, (3, WIDTH))
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor(tokens)).logits.numpy()
    found = model._apply(params, jnp.asarray(tokens), method="__call__")
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=0)
    prompt = Prompt(jnp.asarray(tokens[:, :21]), jnp.full((3,), 21))
    cache = model.prefill(params, prompt, WIDTH, 6)
    for at in (20, 25, 30, 35):
        out, cache = model.extend(params, cache, jnp.asarray(tokens[:, at : at + 5]))
        np.testing.assert_allclose(out.logits, wanted[:, at : at + 5], atol=2e-4, rtol=0)


def test_greedy_generation_equals_transformers(both):
    """200 steps, token for token, up to a position where the two best logits nearly tie."""
    reference, model, params = both
    tokens = np.random.default_rng(1).integers(3, 99, (2, WIDTH))
    with torch.no_grad():
        written = reference.generate(
            torch.tensor(tokens), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        ).numpy()
        logits = reference(input_ids=torch.tensor(written)).logits.numpy()
    found = parity_greedy.tokens(model, params, Prompt(jnp.asarray(tokens), jnp.full((2,), WIDTH)), NEW)
    parity_greedy.assert_equal_but_for_near_ties(found, written[:, WIDTH:], logits[:, WIDTH - 1 :])
