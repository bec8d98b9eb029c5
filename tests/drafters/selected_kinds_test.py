"""Drafters of every kind in one batch, models, early exits, n-grams and none, under targets of both families."""

import dataclasses

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Arm
from speccascade_jax.models import ngrams
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.pairs.policy_files import Card, Policy
from tests.methods.build_selection_test import t5
from tests.support import tiny_decoders

ARMS = ("draft", "exit", "lookup", "autoregressive")
PROMPTS = [[n, 5, n + 1, 5, 1] for n in range(2, 10)] * 3
DECODER = dataclasses.replace(tiny("gemma2_2b", vocab_size=64), num_layers=4)


def _pair(target, draft):
    lookup = ngrams.prompt_lookup(target.model.vocab_size, 3, encoder_decoder=target.model.is_encoder_decoder)
    return sc.Pair(target=target, draft=draft, others={"exit": early_exit(target, 1), "lookup": lookup}, name="kinds")


@pytest.fixture(scope="module", params=["t5", pytest.param("decoder", marks=pytest.mark.laws)])
def pair(request):
    if request.param == "t5":
        return _pair(t5(0, 3), t5(1))
    return _pair(tiny_decoders.bound(DECODER), tiny_decoders.bound(DECODER, noise=0.3))


def decode(pair, temperature, **chosen):
    return sc.decode(pair, PROMPTS, temperature=temperature, max_new_tokens=12, seed=4, block_size=3, **chosen)


def target_alone(pair, temperature=0.0):
    return sc.decode(pair, PROMPTS, method="autoregressive", temperature=temperature, max_new_tokens=12, seed=4).tokens


@pytest.mark.laws
def test_greedy_outputs_are_the_targets_and_sampled_ones_each_drafters_own(pair):
    """To the last bit: an exit, which drafts in the target's cache, leaves other rows' slots alone, and they its."""
    greedy = decode(pair, 0.0, drafters=ARMS, choose="random")
    np.testing.assert_array_equal(greedy.tokens, target_alone(pair))
    mixed = decode(pair, 1.0, drafters=ARMS, choose="random")
    choice = np.asarray(mixed.generation.inner["choice"])
    assert set(choice) == set(range(len(ARMS)))
    for place, arm in enumerate(ARMS):
        alone = target_alone(pair, 1.0) if arm == "autoregressive" else decode(pair, 1.0, drafters=(arm,)).tokens
        rows = choice == place
        np.testing.assert_array_equal(np.asarray(mixed.tokens)[rows], np.asarray(alone)[rows], arm)


def test_a_policy_chooses_by_the_prompt_and_greedy_outputs_stay_the_targets(pair):
    prints = build_selection.prints(pair, tuple(Arm(drafter=name) for name in ARMS))
    target, features = build_selection.target_of(pair)
    kernel = 5 * np.random.default_rng(2).normal(size=(features, len(ARMS))).astype(np.float32)
    card = Card(
        scores="perceptron", features=features, arms=tuple(prints), prints=tuple(prints.values()), target=target
    )
    policy = Policy({"layers_0": {"kernel": kernel, "bias": np.zeros(len(ARMS), np.float32)}}, card)
    found = decode(pair, 0.0, drafters=ARMS, choose="greedy", policy=policy)
    assert len(set(np.asarray(found.generation.inner["choice"]))) > 1
    np.testing.assert_array_equal(found.tokens, target_alone(pair))
