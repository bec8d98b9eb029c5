"""Our own worker: the pair in the type of weights that was asked for."""

import jax
import pytest

from benchmarks.peers import pairs, planting
from benchmarks.peers.workers.ours import Ours
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.pairs.pair import Pair

SIZE, WRITTEN = 300, 12


@pytest.fixture
def told(tmp_path):
    """What a worker is told of a small planted pair, its prompts, and what its target writes behind them."""
    configs = T5Config(SIZE, SIZE, 64, 2, 16, 32, 1, 1), T5Config(SIZE, SIZE, 48, 1, 16, 32, 1, 1)
    prepared = pairs.planted(tmp_path, "small", *configs, WRITTEN)
    after, prompts = planting.successors(SIZE, seed=0), prepared.prompts[:2]
    return prepared.told(), prompts, [planting.expected(after, prompt, WRITTEN) for prompt in prompts]


@pytest.mark.tools
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_both_models_are_held_in_what_was_asked_for_and_write_the_planted_tokens(told, dtype, monkeypatch):
    pair, prompts, wanted = told
    load, loaded = Pair.load, []
    monkeypatch.setattr(Pair, "load", lambda *paths, **given: loaded.append(load(*paths, **given)) or loaded[-1])
    ours = Ours()
    for times in (1, 2):  # whatever pair was there before is dropped
        ours.load(pair)
        for options in ({"method": "autoregressive"}, {"rule": "spec_decode", "block_size": 3}):
            assert ours.write({"dtype": dtype, **options}, prompts, pair) == wanted
        assert len(loaded) == times
    for bound in loaded[0].models.values():
        assert dtype in {str(leaf.dtype) for leaf in jax.tree.leaves(bound.params)}
