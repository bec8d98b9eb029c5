"""Tests of T5 and decoder-only models against transformers with equal random weights (needs torch, transformers).

Before a comparison, weights pass through all conversions: transformers' safetensors → our parameters → our format → our
parameters.
"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import checkpoints
from speccascade_jax.core.types import Prompt
from speccascade_jax.models.t5 import T5Config, teacher_forced_logits
from tests.support import parity_greedy

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra: make parity")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")

WIDTH, NEW = 40, 200
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500_000.0}
DECODERS = {
    # the window is far shorter than the prompts
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 12}),
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "qwen2.5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
}
GEMMA3 = {
    # five local layers, a global one, and the first of the next group
    "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
QWEN3_MOE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True,
    "mlp_only_layers": [1],
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
GEMMA4 = {
    # five local layers and a global one, whose heads are wider, and whose values are its keys
    "num_hidden_layers": 6, "sliding_window": 8, "global_head_dim": 16, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_SMALL = GEMMA4 | {
    # the last three layers have no keys and values, and each layer reads an embedding of its own
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
GEMMA4_EXPERTS = GEMMA4 | {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
    "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16,
}  # fmt: skip
VISION4 = {"model_type": "gemma4_vision", "patch_size": 4, "position_embedding_size": 8, "num_key_value_heads": 2}
NEWER = {
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3, images": ("Gemma3", GEMMA3 | {"num_hidden_layers": 6}),
    # the second layer is dense
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "gemma1": ("Gemma", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4, unified": ("Gemma4Unified", GEMMA4 | {"num_hidden_layers": 2}),
    "gemma4, small": ("Gemma4", GEMMA4_SMALL),
    "gemma4, small, images": ("Gemma4", GEMMA4_SMALL),
    "gemma4, experts": ("Gemma4", GEMMA4_EXPERTS),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
}
"""Families that `tests/parity/families_test.py` compares."""
T5S = {
    "t5_1.0_tied_relu": T5Config(61, 61, 24, 3, 8, 40, 2, 2, gated=False, tied=True),
    "t5_1.1_untied_gated": T5Config(61, 61, 32, 4, 6, 48, 2, 3),
}


def their_decoder(kind: str, gain: float = 1.5, post: float = 0.25, **more: Any):
    """Returns a random model of transformers with weights that are large enough to reveal a mistake.

    `post` is the scale of Gemma 4's norms after each block: with a small one, few layers repeat the last token.
    """
    family, options = (DECODERS | NEWER)[kind]
    name = f"{family}{'Text' * family.startswith(('Gemma3', 'Gemma4'))}Config"
    config, purpose = getattr(transformers, name)(**SIZES | options | more), "CausalLM"
    if kind.endswith("images"):
        ids = {"image_token_index": 98, "boi_token_index": 97, "eoi_token_index": 96, "mm_tokens_per_image": 4}
        vision = VISION if family == "Gemma3" else VISION | VISION4
        config = getattr(transformers, f"{family}Config")(text_config=config.to_dict(), vision_config=vision, **ids)
        purpose = "ConditionalGeneration"
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}For{purpose}")(config).eval()
    with torch.no_grad():
        scalars = [(name, scalar) for name, scalar in model.named_buffers() if name.endswith("layer_scalar")]
        for name, weight in (*model.named_parameters(), *scalars):
            if re.search(r"norm(_[12])?\.weight$|scal(ar|e)$", name):
                weight.add_(0.2 * torch.randn_like(weight))
                # Gemma 4 has no factor of queries, and scales of 1 would make it sensitive to rounding.
                if family.startswith("Gemma4"):
                    weight.mul_(0.15 if "q_norm" in name else post if "post_" in name else 1.0)
            else:
                # A small embedding: otherwise a tied model would only repeat its last token.
                # Gemma 4's router divides its input by √E, and flat probabilities would hide a mistake in weights.
                size = 1.0 if name.endswith("bias") else 0.3 if "embed" in name else 8.0 if "router" in name else gain
                weight.copy_(torch.randn_like(weight) * size * weight.shape[-1] ** -0.5)
    return model


def their_t5(config: T5Config):
    """Returns a random T5 of transformers of these sizes, with weights that are large enough to reveal a mistake."""
    c = config
    settings = transformers.T5Config(
        vocab_size=c.num_embeddings, d_model=c.d_model, d_kv=c.head_dim, d_ff=c.d_ff, num_heads=c.num_heads,
        num_layers=c.num_encoder_layers, num_decoder_layers=c.num_decoder_layers, tie_word_embeddings=c.tied,
        relative_attention_num_buckets=c.relative_buckets, relative_attention_max_distance=c.relative_max_distance,
        feed_forward_proj="gated-gelu" if c.gated else "relu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(settings).eval()
    with torch.no_grad():
        model.shared.weight.mul_(0.3)  # Otherwise a tied model would only repeat its last token.
        for name, weight in model.named_parameters():
            if "SelfAttention" in name or "EncDecAttention" in name:
                weight.mul_(2.0)  # the relative biases must be so large that they change the logits
    if not c.tied:
        # transformers 5 ties it to the embedding whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(c.num_embeddings, c.d_model) * c.d_model**-0.5)
    return model


def whole_way(reference, folder):
    """Returns their model, and ours after safetensors → ours → our own format → ours."""
    reference.save_pretrained(folder / "theirs", safe_serialization=True)
    model, params = checkpoints.load(folder / "theirs")
    checkpoints.save(folder / "ours", model, params)
    again, params = checkpoints.load(folder / "ours")
    assert again == model
    return reference, model, model.prepare(params)


@pytest.fixture(scope="module", params=DECODERS)
def decoders(request, tmp_path_factory):
    return whole_way(their_decoder(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=T5S)
def t5s(request, tmp_path_factory):
    pair = whole_way(their_t5(T5S[request.param]), tmp_path_factory.mktemp("t5"))
    assert pair[1].config == T5S[request.param]
    return pair


def test_a_decoders_logits_equal_transformers(decoders):
    """Compares one pass and cached blocks, beyond the window and beyond the scaled rotary length."""
    reference, model, params = decoders
    tokens = np.random.default_rng(0).integers(3, 99, (3, WIDTH))
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor(tokens)).logits.numpy()
    logits = model._apply(params, jnp.asarray(tokens), method="__call__")
    np.testing.assert_allclose(logits, wanted, atol=2e-4, rtol=0)
    prompt = Prompt(jnp.asarray(tokens[:, :21]), jnp.full((3,), 21))
    cache = model.prefill(params, prompt, WIDTH, 6)
    for offset in (20, 25, 30, 35):
        out, cache = model.extend(params, cache, jnp.asarray(tokens[:, offset : offset + 5]))
        np.testing.assert_allclose(out.logits, wanted[:, offset : offset + 5], atol=2e-4, rtol=0)


def test_a_decoders_greedy_generation_equals_transformers(decoders):
    """Compares 200 tokens one by one, up to a position at which the two best logits nearly tie."""
    reference, model, params = decoders
    tokens = np.random.default_rng(1).integers(3, 99, (2, WIDTH))
    with torch.no_grad():
        written = reference.generate(
            torch.tensor(tokens), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        ).numpy()
        logits = reference(input_ids=torch.tensor(written)).logits.numpy()
    our_tokens = parity_greedy.tokens(model, params, Prompt(jnp.asarray(tokens), jnp.full((2,), WIDTH)), NEW)
    parity_greedy.assert_equal_but_for_near_ties(our_tokens, written[:, WIDTH:], logits[:, WIDTH - 1 :])


def test_a_t5s_logits_equal_transformers(t5s):
    """Compares teacher-forced and cached logits, with padding and with distances beyond every exact bucket."""
    theirs, model, params = t5s
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
    logits = teacher_forced_logits(model, params, encoder, decoder)
    np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=1e-4)
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32), jnp.asarray(encoder))
    cached, _ = model.extend(params, model.prefill(params, prompt, 48), decoder)
    np.testing.assert_allclose(cached.logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_t5s_greedy_generation_equals_transformers(t5s):
    theirs, model, params = t5s
    encoder = np.random.default_rng(1).integers(2, model.vocab_size, (2, 24), dtype=np.int32)
    ids = torch.tensor(encoder, dtype=torch.long)
    with torch.no_grad():
        # Without a cache: transformers' own has too few layers if the decoder is deeper than the encoder.
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
        written = theirs.generate(ids, max_new_tokens=NEW, **settings)
        logits = theirs(input_ids=ids, decoder_input_ids=written).logits.numpy()
    prompt = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones((2,), jnp.int32), jnp.asarray(encoder))
    our_tokens = parity_greedy.tokens(model, params, prompt, NEW)
    parity_greedy.assert_equal_but_for_near_ties(our_tokens, written.numpy()[:, 1:], logits)


def their_odd_t5(kind: str):
    """Returns a T5 of transformers with another start, another padding, another output layer, or mT5's name."""
    theirs = their_t5(T5Config(61, 61, 24, 3, 8, 40, 2, 2, gated=kind == "mt5", tied=True))
    if kind == "mt5":
        settings = transformers.MT5Config(**{**theirs.config.to_dict(), "model_type": "mt5"})
        other = transformers.MT5ForConditionalGeneration(settings).eval()
        other.load_state_dict(theirs.state_dict())
        theirs = other
    if kind == "ids":
        ids = {"decoder_start_token_id": 3, "pad_token_id": 1, "eos_token_id": 2}
        for config in (theirs.config, theirs.generation_config):
            for name, value in ids.items():
                setattr(config, name, value)
    else:
        torch.manual_seed(11)  # with this seed transformers writes many different tokens
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(61, 24) * 0.5)
    return theirs


@pytest.mark.filterwarnings("ignore:.*a different lm_head.weight is stored")
@pytest.mark.parametrize("kind", ["ids", "head", "mt5"])
def test_t5s_with_unusual_configurations_write_the_outputs_of_transformers(kind, tmp_path):
    """Compares greedy tokens through `decode`: id 0 is in the prompts, and one of them is padded."""
    their_odd_t5(kind).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    pad = theirs.config.pad_token_id
    ids = np.random.default_rng(1).integers(4, 61, (2, 24), dtype=np.int64)
    ids[:, 5], ids[1, 17:] = 0, pad
    mask = torch.tensor(np.arange(24) < np.array([[24], [17]]), dtype=torch.long)
    with torch.no_grad():
        written = theirs.generate(
            torch.tensor(ids), attention_mask=mask, max_new_tokens=60, do_sample=False, eos_token_id=None
        )
        logits = theirs(input_ids=torch.tensor(ids), attention_mask=mask, decoder_input_ids=written).logits.numpy()
    pair = sc.Pair.load(tmp_path, tmp_path)
    out = sc.decode(pair, ids, temperature=0.0, max_new_tokens=60, block_size=3, stop_ids=())
    parity_greedy.assert_equal_but_for_near_ties(out.tokens, written.numpy()[:, 1:], logits)


@pytest.mark.filterwarnings("ignore:.*a different lm_head.weight is stored")
def test_another_output_layer_beside_a_tied_embedding_is_read_as_transformers_reads_it(tmp_path):
    theirs = their_decoder("gemma2")
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(99, 32) * 0.3)
    theirs.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(3, 99, (2, 12))
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    model, params = checkpoints.load(tmp_path, prepared=True)
    np.testing.assert_allclose(model._apply(params, jnp.asarray(tokens), method="__call__"), wanted, atol=2e-4, rtol=0)
