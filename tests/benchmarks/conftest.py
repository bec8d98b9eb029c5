"""Fixtures with small pairs for the benchmarks: tabular models in memory, and random T5s in a folder."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import checkpoints
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.t5 import T5, T5Config
from tests.support import random_t5

SIZE = 320


@pytest.fixture(scope="session")
def vocabulary_file(tmp_path_factory):
    texts = [text for e in get_task("tiny_translation").load(limit=40) for text in (e.source, e.reference)]
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.model"
    path.write_bytes(load.train(texts, SIZE))
    return path


@pytest.fixture(scope="session")
def tabular(vocabulary_file):
    """Returns a pair whose distributions are rows of a table."""
    draws = np.random.default_rng(0)
    target = draws.normal(size=(SIZE, SIZE))
    draft = target + 0.7 * draws.normal(size=(SIZE, SIZE))
    vocabulary = load.Vocabulary(vocabulary_file)
    return sc.Pair(target=sc.TableLM(2 * target), draft=sc.TableLM(2 * draft), vocabulary=vocabulary, name="tabular")


@pytest.fixture(scope="session")
def folder(vocabulary_file, tmp_path_factory):
    """Returns a folder with a pair of random, very small T5s."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "vocabulary.model").write_bytes(vocabulary_file.read_bytes())
    for seed, part in enumerate(("target", "draft")):
        config = T5Config(SIZE, SIZE, 16, 2, 8, 16, 1, 1)
        checkpoints.save(folder / part, T5(config), random_t5.parameters(config, seed))
    return folder
