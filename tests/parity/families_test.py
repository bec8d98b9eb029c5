"""Newer decoder-only families against transformers with equal random weights: logits, sharded files, greedy text."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.decoder import teacher_forced_logits
from speccascade_jax.models.early_exit import early_exit, exit_params
from speccascade_jax.pairs.pair import Pair
from tests.parity.transformers_test import NEWER, their_decoder, torch
from tests.support import parity_greedy

pytestmark = pytest.mark.parity

PROMPTS, NEW = (1, 5, 23, 40), 40
WAYS = {
    "alone": {"method": "autoregressive"},
    "block of 1": {"block_size": 1},
    "block of 5": {"block_size": 5},
    "block of 12": {"block_size": 12},
    "tree": {"tree": (2, 1)},
    "joint": {"block_size": 5, "verify": "block"},
    "exit": {"block_size": 3},
}
# The families share one decoder, so each way is compared on the family whose mechanisms it could break;
# SPECCASCADE_CASES=all compares every family in every way (docs/models.md).
CASES = [
    ("qwen3", "block of 12"), ("qwen3_moe", "joint"), ("gemma3", "block of 5"),
    ("gemma1", "block of 1"), ("mistral", "tree"), ("smollm3", "exit"),
    ("gemma4, small", "tree"), ("gemma4, small", "exit"), ("gemma4, experts", "block of 5"),
]  # fmt: skip
SHALLOW = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4, small": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # the draft, the first layer, is dense
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": [0]},
    "gemma4": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4, experts": {},
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    **{kind: {"num_hidden_layers": 2} for kind in ("qwen3", "gemma1", "mistral", "mixtral")},
}
"""Options of a family with few layers, which compile faster."""
if os.environ.get("SPECCASCADE_CASES") == "all":
    CASES = list(itertools.product(SHALLOW, WAYS))
EXITS = {"gemma4, small": 3}
"""Layers of early exits where they are not the first; this one has no keys and values of its own."""


@pytest.mark.parametrize("kind", [kind for kind in NEWER if f"{kind}, images" not in NEWER or kind == "gemma3"])
def test_logits_equal_transformers(kind, tmp_path):
    """Compares logits from several shards, with separate and stacked layers, and with weights and caches of 16 bits."""
    theirs = their_decoder(kind, gain=1.0)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = np.random.default_rng(0).integers(3, 96, (3, 60))

    def reference(dtype: torch.dtype) -> np.ndarray:
        with torch.no_grad():
            return theirs.to(dtype)(input_ids=torch.tensor(tokens)).logits.float().numpy()

    def ours(**options) -> np.ndarray:
        model, params = checkpoints.load(tmp_path, **options)
        return np.asarray(jax.jit(teacher_forced_logits, static_argnums=0)(model, params, jnp.asarray(tokens)))

    wanted = reference(torch.float32)
    deviation = wanted.std()
    # A model whose layers differ has no scan.
    for scan in (False,) if kind == "qwen3_moe" or "4" in kind else (False, True):
        assert np.abs(ours(scan_layers=scan) - wanted).max() < 2e-5 * deviation
    if kind.endswith(("images", "unified")):  # other files of the same layers
        return
    # Root mean square errors: 2% of the deviation, or what rounding to 16 bits costs transformers (1.4 to 2.5% here).
    # After rounding, a few tokens choose other experts and get other logits, so experts are judged by the median token.
    middle = np.median if kind in ("qwen3_moe", "mixtral", "gemma4, experts") else np.mean
    error, their_error = (
        np.sqrt(middle(np.mean((half - wanted) ** 2, axis=-1)))
        for half in (ours(dtype="bfloat16"), reference(torch.bfloat16))
    )
    assert error < max(0.02 * deviation, 1.1 * their_error)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """Returns a function from a family to its target, a draft with other weights, and the reference's outputs."""
    return parity_greedy.once_per_kind(written, tmp_path_factory)


def written(kind: str, folder):
    theirs = their_decoder(kind, post=1.0, **SHALLOW[kind])
    theirs.save_pretrained(folder)
    model, plain = checkpoints.load(folder)
    rng = np.random.default_rng(7)
    noisy = jax.tree.map(lambda x: x + 0.1 * x.std() * rng.normal(size=x.shape).astype(np.float32), plain)
    target = BoundModel(params=model.prepare(plain), model=model)
    # The draft is the first layer with other weights, which is rejected often, and compiles fast.
    small = dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=1))
    draft = BoundModel(params=small.prepare(exit_params(noisy, 1)), model=small)
    prompts = [rng.integers(3, 99, length) for length in PROMPTS]
    text, logits = [], []
    for prompt in prompts:
        with torch.no_grad():
            ids = torch.tensor(prompt)[None]
            ids = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
            logits.append(theirs(input_ids=ids).logits[0, len(prompt) - 1 :].numpy())
        text.append(ids[0, len(prompt) :].numpy())
    return target, draft, [prompt.tolist() for prompt in prompts], np.stack(text), np.stack(logits)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_greedy_text_equals_transformers(kind, way, greedy):
    """Decodes prompts of different lengths in one batch, beyond windows, with a draft that is often rejected."""
    target, draft, prompts, text, logits = greedy(kind)
    pair = Pair(target=target, draft=early_exit(target, EXITS.get(kind, 1)) if way == "exit" else draft)
    parity_greedy.assert_decodes(pair, prompts, text, logits, **WAYS[way])
