"""Newer encoder-decoders against transformers with equal random weights: logits, sharded files, greedy text."""

import copy
import dataclasses
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.early_exit import early_exit, exit_params
from speccascade_jax.pairs.pair import Pair
from tests.parity.families_test import NEW, PROMPTS, WAYS
from tests.parity.transformers_test import torch, transformers
from tests.support import parity_greedy

pytestmark = pytest.mark.parity

UMT5 = {
    "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
# All families decode with the same engine, so each way is compared on the family whose mechanisms it could break.
CASES = [("umt5", "block of 5"), ("t5gemma", "block of 12"), ("t5gemma2", "block of 5")]
if os.environ.get("SPECCASCADE_CASES") == "all":
    CASES = list(itertools.product(("umt5", "t5gemma", "t5gemma2"), WAYS))

STACK = {
    "vocab_size": 61, "num_attention_heads": 4, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 12,
    "max_position_embeddings": 512,
}  # fmt: skip
T5GEMMA = {
    # of different widths and depths; the windows are far shorter than the inputs
    "encoder": STACK | {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_key_value_heads": 2,
    },
    "decoder": STACK | {
        "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 4,
    },
    "vocab_size": 61,
}  # fmt: skip
T5GEMMA2 = {
    # of different depths and windows; the encoder's sides of an even window differ by one token
    "encoder": {
        "text_config": STACK | {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
    "decoder": STACK | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}},
    },
}  # fmt: skip


def their_model(kind: str, gain: float = 1.5) -> Any:
    """Returns a random model of transformers with weights that are large enough to reveal a mistake."""
    return their_umt5(gain) if kind == "umt5" else their_t5gemma(kind, gain)


def their_t5gemma(kind: str, gain: float) -> Any:
    # The library changes the options that it is given.
    name, options = {"t5gemma": ("T5Gemma", T5GEMMA), "t5gemma2": ("T5Gemma2", T5GEMMA2)}[kind]
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(options))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                # A small embedding: otherwise the tied output layer would only repeat the last token.
                size = 0.05 if "embed" in name else gain
                weight.copy_(torch.randn_like(weight) * size * weight.shape[-1] ** -0.5)
    return model


def their_umt5(gain: float) -> Any:
    config = transformers.UMT5Config(**UMT5)
    torch.manual_seed(0)
    model = transformers.UMT5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "Attention" in name:
                weight.mul_(gain)  # the relative biases must be so large that they change the logits
        # An output layer of its own: a tied one would only repeat the last token.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, config.d_model))
    return model


@pytest.mark.filterwarnings("ignore:.*a different lm_head.weight is stored")
@pytest.mark.parametrize("kind", ["umt5", "t5gemma", "t5gemma2"])
def test_logits_equal_transformers(kind, tmp_path):
    """Compares logits from several shards, with padding, in one pass, with a cache, with stacked layers, in 16 bits."""
    theirs = their_model(kind, gain=1.0)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    rng = np.random.default_rng(0)
    encoder, decoder = rng.integers(3, 61, (3, 40)), rng.integers(3, 61, (3, 45))
    real = np.arange(40) < np.array([[40], [25], [7]])

    def reference(dtype: torch.dtype) -> np.ndarray:
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor(encoder * real), "attention_mask": torch.tensor(real).long()}
            return theirs.to(dtype)(decoder_input_ids=torch.tensor(decoder), **inputs).logits.float().numpy()

    def ours(**options: Any) -> tuple[np.ndarray, np.ndarray]:
        model, params = checkpoints.load(tmp_path, **options)
        prompt = Prompt(jnp.asarray(decoder[:, :1]), jnp.ones((3,), jnp.int32), jnp.asarray(encoder * real))

        @jax.jit
        def logits(params):
            cached = model.extend(params, model.prefill(params, prompt, 48), jnp.asarray(decoder))[0].logits
            return model._apply(params, encoder * real, decoder, method="__call__"), cached

        return tuple(np.asarray(array) for array in logits(params))

    wanted = reference(torch.float32)
    deviation = wanted.std()
    for scan in (False, True):
        assert max(np.abs(logits - wanted).max() for logits in ours(scan_layers=scan)) < 2e-5 * deviation
    # Root mean square errors: 2% of the deviation, or what rounding to 16 bits costs transformers.
    error, their_error = (
        np.sqrt(np.mean((half - wanted) ** 2)) for half in (ours(dtype="bfloat16")[1], reference(torch.bfloat16))
    )
    assert error < max(0.02 * deviation, 1.1 * their_error)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """Returns a function from a family to its target, a smaller draft, and the reference's outputs."""
    return parity_greedy.once_per_kind(written, tmp_path_factory)


def written(kind: str, folder):
    theirs = their_model(kind)
    theirs.save_pretrained(folder)
    model, plain = checkpoints.load(folder)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 61, length) for length in PROMPTS]
    text, logits = [], []
    for prompt in prompts:
        ids = torch.tensor(prompt)[None]
        with torch.no_grad():
            # Without a cache: transformers' own has too few layers if UMT5's decoder is deeper than its encoder.
            options = {"do_sample": False, "eos_token_id": None, "use_cache": kind != "umt5"}
            out = theirs.generate(ids, max_new_tokens=NEW, **options)
            logits.append(theirs(input_ids=ids, decoder_input_ids=out).logits[0].numpy())
        text.append(out[0, 1:].numpy())
    target = BoundModel(params=model.prepare(plain), model=model)
    return target, smaller(model, plain), [prompt.tolist() for prompt in prompts], np.stack(text), np.stack(logits)


def smaller(model: Any, params: Any) -> BoundModel:
    """Returns a draft with fewer units and layers, whose weights are noisy: it is rejected often."""
    rng, units = np.random.default_rng(8), 32

    def cut(path: Any, leaf: np.ndarray) -> np.ndarray:
        noisy = leaf + 0.1 * leaf.std() * rng.normal(size=leaf.shape).astype(np.float32)
        name = jax.tree_util.keystr(path)
        return noisy[:units] if "'wo'" in name else noisy[:, :units] if "'wi_" in name else noisy

    params, config = exit_params(jax.tree_util.tree_map_with_path(cut, params), 2), model.config
    changes = {"d_ff": units, "num_decoder_layers": 2}
    if isinstance(config, DecoderConfig):
        changes = {"d_ff": units, "num_layers": 2, "encoder": dataclasses.replace(config.encoder, d_ff=units)}
    small = dataclasses.replace(model, config=dataclasses.replace(config, **changes))
    return BoundModel(params=small.prepare(params), model=small)


@pytest.mark.filterwarnings("ignore:.*a different lm_head.weight is stored")
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_greedy_text_equals_transformers(kind, way, greedy):
    """Decodes encoder inputs of different lengths in one batch, with a draft that is often rejected."""
    target, draft, prompts, text, logits = greedy(kind)
    pair = Pair(target=target, draft=early_exit(target, 2) if way == "exit" else draft)
    parity_greedy.assert_decodes(pair, prompts, text, logits, **WAYS[way])
