"""Section `memory`: self-speculation holds the target's weights once."""

from dataclasses import replace

import pytest

from benchmarks import memory
from benchmarks.setting import Bench, Sizes, quick
from speccascade_jax.pairs.pair import load_pair


@pytest.mark.laws
def test_an_exit_needs_the_targets_weights_and_at_most_a_head(folder):
    pair = load_pair(folder)
    rows = memory.run(Bench(replace(quick(Sizes()), batches=(1,)), pair))["memory"]
    held = {row["drafts"]: row["arguments_megabytes"] for row in rows}
    assert list(held) == ["nothing", "the draft", "exit:1", "exit:1, own head"]
    config = pair.target.model.config
    head = config.d_model * config.num_embeddings * 4 / 1e6
    assert held["exit:1"] == pytest.approx(held["nothing"], abs=1e-4)  # controls of a draft
    assert held["exit:1, own head"] == pytest.approx(held["nothing"] + head, rel=0.01)
    assert held["the draft"] > held["exit:1"]
