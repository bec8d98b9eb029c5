"""The law of block verification by sampling in hierarchies, beside other drafters, and under planned lengths.

`tests/rules/block_wise_test.py` has it exactly, one block at a time; `tests/laws_test.py` rule by rule.
"""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.pairs.pair import Pair
from tests.support import conformance, reference

pytestmark = pytest.mark.laws

SMALL, MIDDLE = conformance.tables(3, seed=21)
LARGE = conformance.tables(3, seed=22)[1]


def decoded(**settings):
    """Tokens `[20000, 6]` behind one prompt."""
    small, middle, large = (sc.TableLM(table) for table in (SMALL, MIDDLE, LARGE))
    pair = Pair(target=large, draft=small, others={"middle": middle})
    return np.asarray(sc.decode(pair, [[0]] * 20_000, max_new_tokens=6, **settings).tokens)


@pytest.mark.parametrize(("above", "below"), [("token", "block"), ("block", "token"), ("block", "block")])
def test_a_block_verified_level_hands_up_its_law(above, below):
    level = Level(model="middle", budget=4, block_size=3, rule="opt", alpha=0.2, temperature=0.7, verify=below)
    tokens = decoded(rule="token_v3", alpha=0.4, drafters=(level,), temperature=0.9, verify=above, seed=2)
    handed = reference.transitions("opt", SMALL, MIDDLE, 0.2, 0.7)
    law = reference.law_over_handed("token_v3", np.log(np.maximum(handed, 1e-300)), handed, LARGE, 0.4, 0.9)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


ARMS = ("draft", Arm(drafter="middle", block_size=2), "autoregressive")


@pytest.mark.parametrize("drafters", [{"drafters": ARMS, "choose": "random"}, {"block_size": "auto"}])
def test_drafters_beside_each_other_and_lengths_that_are_planned(drafters):
    law = reference.transitions("spec_decode", SMALL, LARGE, 0.0, 1.0)
    assert conformance.sequence_p_value(decoded(temperature=1.0, verify="block", **drafters), law) > 1e-3
