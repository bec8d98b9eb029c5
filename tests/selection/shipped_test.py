"""The shipped pair of two directions with the policy that it ships: the right draft for each sentence."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import get_task

DRAFTERS = (sc.Arm(drafter="draft", name="en_de"), "de_en")


@pytest.mark.laws
@pytest.mark.parametrize(("task", "right"), [("tiny_translation", 0), ("tiny_translation_de_en", 1)])
def test_the_shipped_policy_knows_which_way_a_sentence_is_to_go(task, right):
    texts = [get_task(task).build_prompt(example) for example in get_task(task).load(limit=200)]
    found = sc.decode(sc.load_pair("tatoeba_two_ways"), texts, drafters=DRAFTERS, choose="greedy", max_new_tokens=1)
    assert np.mean(np.asarray(found.generation.inner["choice"]) == right) >= 0.95
