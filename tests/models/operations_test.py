"""Operations of generations: those of training's formula, which XLA's counts confirm, for the tokens that are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.operations import config_of, generation_flops
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.training.finetune.watching import FORWARD_AND_BACKWARD, training_flops

LLAMA = replace(tiny("llama2_7b"), num_layers=3, num_heads=6, num_kv_heads=2, d_model=48, d_ff=80)
SMALL = T5Config(1000, 1024, 192, 3, 64, 320, 2, 3)
PROMPT, OUTPUT, FED = 7, 10, 25


def forward(config, *lengths):
    return training_flops(config, *map(np.array, lengths)) / FORWARD_AND_BACKWARD


def test_a_decoder_reads_prompts_without_logits_and_sees_half_of_its_output():
    """Training's forward pass over n tokens costs `a n + b n²`, which gives the cost of a token and of a key."""
    once, twice = forward(LLAMA, [1]), forward(LLAMA, [2])
    key = (twice - 2 * once) / 2
    logits = 2 * LLAMA.d_model * LLAMA.num_embeddings
    keys = (PROMPT - 1) * PROMPT / 2 + FED * (PROMPT + OUTPUT / 2)
    expected = (once - key - logits) * (PROMPT - 1 + FED) + logits * FED + key * keys
    assert generation_flops(LLAMA, prompt=PROMPT, output=OUTPUT, fed=FED) == pytest.approx(expected, rel=1e-12)


def test_examples_broadcast_and_short_ones_fit_in_a_window():
    windowed = replace(LLAMA, window=4, pattern=("local", "global", "global"))
    counts = {"prompt": np.array([PROMPT, 2]), "output": np.array([[OUTPUT, 1]]), "fed": np.array([[FED, 3]])}
    whole, less = generation_flops(LLAMA, **counts), generation_flops(windowed, **counts)
    assert whole.shape == less.shape == (1, 2) and less[0, 1] == whole[0, 1]


@pytest.mark.parametrize("window", [4, PROMPT + 3, PROMPT + OUTPUT])
def test_every_token_sees_the_tokens_in_its_window(window):
    """Counts the keys of every query one by one; a read token is at each place of the output equally often."""

    def keys(longest):
        reading = [min(place, longest) for place in range(1, PROMPT)]
        writing = [min(place, longest) for place in range(PROMPT, PROMPT + OUTPUT + 1)]
        return sum(reading) + FED * sum(writing) / len(writing)

    counts = {"prompt": PROMPT, "output": OUTPUT, "fed": FED}
    windowed = replace(LLAMA, window=window, pattern=("local", "global", "global"))
    saved = generation_flops(LLAMA, **counts) - generation_flops(windowed, **counts)
    assert saved == pytest.approx(4 * LLAMA.num_heads * LLAMA.head_dim * (keys(np.inf) - keys(window)), rel=1e-12)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, gated=False), replace(LLAMA, encoder=LLAMA)])
def test_a_t5_encodes_once_and_reads_every_fed_token(config):
    """Training sees all tokens at once; one token after one start token sees itself and half of an output of none."""
    source = 9
    assert generation_flops(config, prompt=1, output=0, fed=1, encoded=source) == forward(config, [1], [source])
    encoder = forward(config, [0], [source])
    parts = [generation_flops(config, prompt=1, output=4, fed=n, encoded=source) for n in (0, 1, 3)]
    assert parts[0] == encoder and parts[2] - parts[0] == pytest.approx(3 * (parts[1] - parts[0]))


def test_only_models_of_known_sizes_are_counted():
    assert config_of(DecoderLM(LLAMA)) is LLAMA and config_of(T5(SMALL)) is SMALL
    assert config_of(object()) is None
