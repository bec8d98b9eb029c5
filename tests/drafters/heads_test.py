"""Tests of drafters with an EAGLE-3 head; `tests/parity/eagle3_test.py` compares what they draft with a reference."""

import numpy as np
import pytest

import speccascade_jax as sc
from tests.support import eagle3_files

PROMPTS = [[7], [3, 9], [5, 60, 11, 33, 2, 90, 14, 8]]
SETTINGS = {"max_new_tokens": 16, "stop_ids": ()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle3")
    return sc.Pair.load(eagle3_files.write_target(folder / "target"), eagle3_files.write(folder / "head"))


@pytest.fixture(scope="module")
def alone(pair):
    return sc.decode(pair, PROMPTS, method="autoregressive", **SETTINGS).tokens


@pytest.mark.parametrize("way", [
    {"block_size": 3},
    pytest.param({"tree": (2, 1)}, marks=pytest.mark.laws),
    pytest.param({"block_size": 3, "stop": "confidence", "stop_threshold": 0.97}, marks=pytest.mark.laws),
    pytest.param({"drafters": ("draft", "autoregressive"), "choose": "random"}, marks=pytest.mark.laws),
])  # fmt: skip
def test_greedy_outputs_are_the_targets(pair, alone, way):
    out = sc.decode(pair, PROMPTS, **way, **SETTINGS)
    np.testing.assert_array_equal(out.tokens, alone)
    assert np.isin(out.tokens, eagle3_files.DRAFTED).mean() < 1  # the target also writes tokens that cannot be drafted
    assert out.stats["rejected"]


WRITES_ALONE = "it cannot generate alone, verify drafts, be the setting `tail`, or have block_size='auto'"


@pytest.mark.parametrize(("settings", "message"), [
    ({"method": "autoregressive_draft"}, WRITES_ALONE),
    ({"block_size": "auto"}, WRITES_ALONE),
    ({"tail": "draft"}, "^HeadDrafter reads the target's hidden states: leave its tail out$"),
    ({"drafters": (sc.Level(model="draft", budget=3, drafters=("draft",)),)}, "to draft for the target only$"),
])  # fmt: skip
def test_what_a_head_cannot_do_is_refused(pair, settings, message):
    with pytest.raises(ValueError, match=message):
        sc.decode(pair, PROMPTS[1:], **settings, max_new_tokens=4)
