"""Decoder-only models against Hugging Face transformers on the same random weights (needs torch and transformers).

Each kind's weights go the whole way: their safetensors → ours → our own format → ours, before anything is compared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.accept import Speculative
from speccascade_jax.api import make_controls
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.engine import Engine
from speccascade_jax.generation import generate
from speccascade_jax.models.base import Prompt
from speccascade_jax.rules import RULES

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")

WIDTH, NEW, GAP = 40, 200, 2e-4
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
                weight.copy_(torch.randn_like(weight) * (1.0 if name.endswith("bias") else 1.5 * weight.shape[-1] ** -0.5))
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
    engine = Engine(
        target=model, drafter=NoDrafter(), accept=Speculative(RULES["spec_decode"]), bonus="target"
    )
    prompt = Prompt(jnp.asarray(tokens), jnp.full((2,), WIDTH))
    controls = make_controls(2, alpha=0.0, temperature=0.0)
    out = generate(engine, {"target": params, "drafter": {}}, prompt, 0, controls=controls, max_new_tokens=NEW)
    for row, (found, wanted) in enumerate(zip(jax.device_get(out.tokens), written[:, WIDTH:], strict=True)):
        differs = np.flatnonzero(found != wanted)
        if len(differs):
            best = np.sort(logits[row, WIDTH - 1 + differs[0]])[-2:]
            assert best[1] - best[0] < GAP, f"row {row} differs at {differs[0]} with a gap of {best[1] - best[0]}"
    assert len(set(written[0, WIDTH:].tolist())) > 8  # no mere repetition
