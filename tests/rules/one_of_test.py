"""Tests of several verifiers in one program."""

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.rngs import RoundKeys
from speccascade_jax.core.types import Draft, LawPair
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


@pytest.mark.parametrize("dtype", [np.int32, np.float16])
def test_laws_of_other_dtypes_share_a_program_with_laws_of_float32(dtype):
    """A law of a user may be int or half, and decides alone as it is."""
    rule = sc.Rule(name="user", law=lambda laws, alpha: laws.p_tilde.astype(dtype))
    both = OneOf((Speculative(sc.RULES["lossy"]), Speculative(rule)))
    values, numbers = np.ones((1, 3, 4), np.float32), np.ones(1, np.int32)
    pair = LawPair(q=values, p=values, q_tilde=values, p_tilde=values, greedy=values[..., :1] > 1)
    draft = Draft(np.ones((1, 2), np.int32), numbers, values, values, numbers > 1, numbers, values[..., 0] > 1)
    keys = RoundKeys(np.zeros((1, 2), np.uint32), numbers, numbers)
    alpha = np.full(1, 0.5, np.float32)
    verdict = jax.eval_shape(lambda place: both.chosen(place).verify(pair, draft, keys, alpha, "rule"), 0)
    assert verdict.law == jax.ShapeDtypeStruct((1, 3, 4), np.float32)
