"""Tests of several verifiers in one program."""

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import LawPair
from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.one_of import OneOf

CHOW, DIFF = sc.RULES["chow"], sc.RULES["diff"]


@pytest.mark.parametrize("other", [
    Speculative(sc.RULES["spec_decode"]),  # does not read q
    Speculative(sc.RULES["lossy"]),  # counts no deferrals
    Speculative(sc.RULES["fuzzy_kl"]),  # reads logs
    Deferral(DIFF), BlockWise(DIFF),
])  # fmt: skip
def test_verifiers_that_an_engine_treats_differently_are_refused(other):
    with pytest.raises(ValueError, match=rf"chow \| {other.name} cannot share a program"):
        OneOf((Speculative(CHOW), other))


def test_flags_are_those_of_the_verifiers():
    both = OneOf((Speculative(CHOW), Speculative(DIFF)))
    for flag in ("reads_q", "lossless", "defers", "reads_logs", "joint"):
        assert getattr(both, flag) == getattr(both.verifiers[0], flag)
    assert both.name == "chow | diff"


def test_the_law_is_that_of_the_chosen_verifier():
    both = OneOf((Speculative(CHOW), Speculative(DIFF)))
    q, p = np.array([0.5, 0.3, 0.2], np.float32), np.array([0.1, 0.2, 0.7], np.float32)
    pair, alpha = LawPair(q=q, p=p, q_tilde=q, p_tilde=p, greedy=np.array([False])), np.array([0.3])
    laws = jax.jit(lambda place: both.chosen(place).law(pair, alpha))
    for place, verifier in enumerate(both.verifiers):
        np.testing.assert_array_equal(laws(place), verifier.law(pair, alpha))
    assert not np.array_equal(laws(0), laws(1))
