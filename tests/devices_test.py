"""Tests that an accelerator writes the CPU's tokens, except at near-ties; skipped unless both devices exist."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.models.t5 import teacher_forced_logits
from speccascade_jax.pairs.prompts import make_prompt
from tests.support.parity_greedy import assert_equal_but_for_near_ties

ROWS, LENGTH = 16, 48


def pair_on(device) -> sc.Pair:
    with jax.default_device(device):
        return sc.load_pair("tatoeba_en_de")


def written(pair, device, **settings) -> np.ndarray:
    """Returns int `[ROWS, LENGTH]`, greedy tokens."""
    texts = [example.source for example in get_task("tiny_translation").load(limit=ROWS)]
    with jax.default_device(device):
        return sc.decode(pair, texts, temperature=0.0, max_new_tokens=LENGTH, stop_ids=[], **settings).tokens


@pytest.fixture(scope="module")
def cpu():
    """Returns the CPU's greedy tokens of the target alone, and the target's logits before each."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no CPU beside it: {error}; unset JAX_PLATFORMS")
    pair = pair_on(device)
    tokens = written(pair, device, method="autoregressive")
    with jax.default_device(device):
        texts = [example.source for example in get_task("tiny_translation").load(limit=ROWS)]
        inputs = np.concatenate([np.zeros((ROWS, 1), np.int32), tokens[:, :-1]], axis=1)
        encoded = make_prompt(pair, texts).encoder_tokens
        logits = teacher_forced_logits(pair.target.model, pair.target.params, encoded, inputs)
    return tokens, np.asarray(logits)


@pytest.mark.parametrize(
    "settings", [{"method": "autoregressive"}, {"rule": "spec_decode", "block_size": 5}], ids=["alone", "lossless"]
)
def test_an_accelerator_writes_the_tokens_that_the_cpu_writes(cpu, settings):
    device = jax.devices()[0]
    if device.platform == "cpu":
        pytest.skip("no accelerator at hand")
    tokens = written(pair_on(device), device, **settings)
    assert_equal_but_for_near_ties(tokens, *cpu)
