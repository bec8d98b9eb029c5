"""Fixtures: a tiny pair with a draft and a middle model, and policies for it."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.methods import build_selection
from speccascade_jax.pairs import policy_files
from speccascade_jax.pairs.policy_files import Card, Policy
from tests.support import tiny_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return ModelPair(name=str(tiny_pair.write(tmp_path_factory.mktemp("pair"), middle=True)))


@pytest.fixture
def write_policy(pair):
    """Returns a function that writes a perceptron that always takes the drafter `best`; `card` updates its card."""

    def write(path, drafters, best, **card):
        loaded = sc.load_pair(pair.name)
        target, features = build_selection.target_of(loaded)
        prints = build_selection.prints(loaded, drafters)
        bias = np.where(np.arange(len(drafters)) == best, 9, 0).astype(np.float32)
        layer = {"kernel": np.zeros((features, len(drafters)), np.float32), "bias": bias}
        facts = {"arms": tuple(prints), "prints": tuple(prints.values()), "target": target} | card
        policy = Policy({"layers_0": layer}, Card(scores="perceptron", features=features, **facts))
        policy_files.save(path, policy)
        return str(path)

    return write
