"""Exactness tests of engines whose models attend by the kernel for TPUs, which is interpreted on this machine.

Outputs are compared with the product of `π` over all prefixes, from logits that XLA computes without a cache's kernel.
`SPECCASCADE_KERNEL_LAWS=20000` tests all cases with this many rows each; `make test-laws` tests some with fewer.
"""

import dataclasses
import itertools
import os

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import Prompt
from speccascade_jax.models import teacher_forcing
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.runtime import platforms
from tests.support import conformance, random_t5, tiny_decoders

WIDE = int(os.environ.get("SPECCASCADE_KERNEL_LAWS", "0"))
VOCAB, LENGTH, BATCH = 4, 5, 16
T5_SIZES = {"num_heads": 2, "head_dim": 64, "d_model": 32, "d_ff": 48, "vocab_size": VOCAB, "num_embeddings": VOCAB}
T5 = T5Config(num_encoder_layers=1, num_decoder_layers=2, **T5_SIZES)
GEMMA = dataclasses.replace(tiny("gemma2_2b", vocab_size=VOCAB, window=5), num_kv_heads=2, head_dim=64)
LLAMA = dataclasses.replace(tiny("llama3.1_8b", vocab_size=VOCAB), num_kv_heads=1, head_dim=128)
MODELS = {
    "t5": (random_t5.bound(T5), random_t5.bound(dataclasses.replace(T5, num_decoder_layers=1), seed=1), 9),
    # the ring of the local layers has 128 slots, and a generation goes around its end
    "ring": (tiny_decoders.bound(GEMMA), tiny_decoders.bound(dataclasses.replace(GEMMA, num_layers=1), seed=1), 125),
    "decoder": (tiny_decoders.bound(LLAMA), tiny_decoders.bound(dataclasses.replace(LLAMA, num_layers=1), seed=1), 9),
}
BLOCK, TREE = {"block_size": 3}, {"tree": (2, 1)}
QUICK = [("ring", "token_v3", BLOCK)]
CASES = [
    *QUICK,
    ("t5", "token_v3", BLOCK),
    ("t5", "spec_decode", TREE),
    ("ring", "token_v3", TREE),
    ("t5", "chow", BLOCK),
    ("decoder", "spec_decode", BLOCK | {"verify": "block"}),
    ("ring", "spec_decode", BLOCK),
    ("decoder", "opt", BLOCK),
]
ALPHAS = {"chow": 0.4, "opt": 0.1, "token_v3": 0.3}


def prompt_of(length, rows):
    return [[1 + n * n % 3 for n in range(length)]] * rows


def sequence_law(target, draft, rule, length):
    """Returns the probability of every output, `[VOCAB ** LENGTH]`, in the order of the outputs as numbers."""
    outputs = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)), np.int32)
    prefixes = outputs[::VOCAB]  # no logits after the last token are needed
    tokens = np.array(prompt_of(length, len(prefixes)), np.int32)
    lengths = np.full(len(prefixes), length, np.int32)
    prompt = Prompt(tokens, lengths)
    if target.model.is_encoder_decoder:
        prompt = Prompt(np.zeros((len(prefixes), 1), np.int32), np.ones_like(lengths), tokens, lengths)
    logits = [teacher_forcing.along(bound, prompt, prefixes) for bound in (draft, target)]
    law = np.asarray(sc.target_law(rule, *logits, alpha=ALPHAS.get(rule)), np.float64)
    law = np.repeat(law, VOCAB, axis=0)
    return np.prod(np.take_along_axis(law, outputs[..., None], -1)[..., 0], -1)


def sampled(pair, rule, settings, length, rows):
    """Returns outputs as numbers, `[rows]`, in batches: the interpreter copies the whole cache for each row."""
    places = VOCAB ** np.arange(LENGTH - 1, -1, -1)
    numbers = []
    for seed in range(-(-rows // BATCH)):
        out = sc.decode(
            pair, prompt_of(length, BATCH), rule=rule, alpha=ALPHAS.get(rule), temperature=1.0, seed=seed,
            max_new_tokens=LENGTH, **settings,
        )  # fmt: skip
        numbers.append(np.asarray(out.tokens) @ places)
    return np.concatenate(numbers)


@pytest.mark.laws
@pytest.mark.parametrize(("name", "rule", "settings"), CASES if WIDE else QUICK)
def test_outputs_have_the_rules_distribution(name, rule, settings, request):
    if WIDE:
        request.getfixturevalue("optimised")
    target, draft, length = MODELS[name]
    law = sequence_law(target, draft, rule, length)
    jax.clear_caches()
    with platforms.interpreted(True):
        numbers = sampled(sc.Pair(target=target, draft=draft), rule, settings, length, WIDE or 640)
    jax.clear_caches()
    counts = np.bincount(numbers, minlength=len(law))
    expected = law * counts.sum()
    # the first and the last two tokens, whose cells are large, and whole outputs
    shapes = {"first": (VOCAB**2, -1), "last": (-1, VOCAB**2), "whole": (len(law), 1)}
    axes = {"last": 0}
    p_values = {
        part: conformance.pooled_p_value(*(x.reshape(shape).sum(axes.get(part, 1)) for x in (counts, expected)))
        for part, shape in shapes.items()
    }
    print(f"{name} {rule} {settings}: {counts.sum()} rows, {p_values}")
    assert conformance.holm(list(p_values.values())) > 1e-3, p_values
