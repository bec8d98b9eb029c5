"""T5 against Hugging Face transformers on the same random weights (needs torch and transformers)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.models.base import Prompt
from speccascade_jax.models.t5 import T5, T5Config, teacher_forced_logits

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
    if not c.tied:
        # transformers 5 shares it with the embedding whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(c.num_embeddings, c.d_model) * c.d_model**-0.5)
    return model


def attention(weights: dict[str, np.ndarray], prefix: str) -> dict:
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return {ours: {"kernel": weights[f"{prefix}.{theirs}.weight"].T} for ours, theirs in names.items()}


def layer(weights: dict[str, np.ndarray], prefix: str, config: T5Config, decoder: bool) -> dict:
    """One block's weights under our names."""
    last = f"{prefix}.layer.{2 if decoder else 1}"
    inner = ("wi_0", "wi_1", "wo") if config.gated else ("wi", "wo")
    out = {
        "mlp": {n: {"kernel": weights[f"{last}.DenseReluDense.{n}.weight"].T} for n in inner},
        "pre_mlp_layer_norm": {"scale": weights[f"{last}.layer_norm.weight"]},
    }
    own = attention(weights, f"{prefix}.layer.0.SelfAttention")
    norm = {"scale": weights[f"{prefix}.layer.0.layer_norm.weight"]}
    if not decoder:
        return out | {"attention": own, "pre_attention_layer_norm": norm}
    return out | {
        "self_attention": own,
        "pre_self_attention_layer_norm": norm,
        "encoder_decoder_attention": attention(weights, f"{prefix}.layer.1.EncDecAttention"),
        "pre_cross_attention_layer_norm": {"scale": weights[f"{prefix}.layer.1.layer_norm.weight"]},
    }


def parameters(model, config: T5Config) -> dict:
    """transformers' weights as our parameter tree."""
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    out: dict = {"token_embedder": {"embedding": weights["shared.weight"]}}
    for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        bias = weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].T
        out[stack] = {
            "relpos_bias": {"rel_embedding": bias},
            f"{stack}_norm": {"scale": weights[f"{stack}.final_layer_norm.weight"]},
        }
        for i in range(layers):
            out[stack][f"layers_{i}"] = layer(weights, f"{stack}.block.{i}", config, stack == "decoder")
    if not config.tied:
        out["decoder"]["logits_dense"] = {"kernel": weights["lm_head.weight"].T}
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name):
    """Teacher-forced and cached logits, with padding and with distances beyond every exact bucket."""
    config = CONFIGS[name]
    rng = np.random.default_rng(0)
    encoder = rng.integers(2, config.vocab_size, (3, 40), dtype=np.int32)
    encoder[1, 25:] = 0
    encoder[2, 7:] = 0
    decoder = rng.integers(2, config.vocab_size, (3, 45), dtype=np.int32)
    decoder[:, 0] = 0
    theirs = reference(config)
    with torch.no_grad():
        wanted = theirs(
            input_ids=torch.tensor(encoder, dtype=torch.long),
            attention_mask=torch.tensor(encoder > 0, dtype=torch.long),
            decoder_input_ids=torch.tensor(decoder, dtype=torch.long),
        ).logits.numpy()
    model, params = T5(config), parameters(theirs, config)
    found = teacher_forced_logits(model, params, encoder, decoder)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32), jnp.asarray(encoder))
    cached, _ = model.extend(params, model.prefill(params, prompt, 48), decoder)
    np.testing.assert_allclose(cached.logits, wanted, atol=1e-4, rtol=1e-4)
