"""Tests of drafting with a Gemma 4 assistant in its target's cache: outputs, memory, and settings that are refused."""

import dataclasses

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.engine.generate import compiled_for
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import gemma4_assistant_files as files

PROMPTS = [[7, 30, 20, 5, 9, 1, 4, 44, 3], [12, 9, 1], [8]]
NUMBERS = {"max_new_tokens": 20, "stop_ids": (1,)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    paths = files.write_target(folder / "target"), files.write(folder / "assistant")
    return Pair.load(*paths, others={"lookup": "lookup:2"})


def test_greedy_output_is_the_targets(pair):
    """Compares with the target alone; a prompt of one token gets its first token from the target."""
    out = sc.decode(pair, PROMPTS, block_size=3, **NUMBERS)
    alone = sc.decode(pair, PROMPTS, method="autoregressive", **NUMBERS)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    assert out.stats["rejected"] > 5


@pytest.mark.sample(1)
@pytest.mark.laws
@pytest.mark.parametrize("way", [{"tree": (2, 1)}, {"block_size": 3, "verify": "block"}])
def test_a_sampled_row_is_the_same_alone_and_among_others(pair, way):
    """Padding of other rows must change no draft, also that of a row whose prompt has one token."""
    settings = {**NUMBERS, **way, "temperature": 1.0, "rule": "token_v3", "alpha": 0.4, "seed": 4}
    together = sc.decode(pair, PROMPTS, **settings)
    for row, prompt in enumerate(PROMPTS):
        tokens = [token.id for token in sc.stream(pair, prompt, example_id=row, **settings)]
        assert tokens == together.tokens[row, : together.lengths[row]].tolist()


@pytest.mark.laws
def test_drafting_needs_no_cache_of_its_own(pair):
    """Compares memory with that of a drafter without a model; in short blocks, attention needs less than a cache."""

    def memory(draft):
        """Returns the bytes of the temporary arrays of a generation."""
        engine, params = assemble(pair, method="spec_decode", block_size=1, drafters=(draft,))
        compiled = compiled_for(engine, params, make_prompt(pair, PROMPTS), make_controls(3), max_new_tokens=4000)
        return compiled.memory_analysis().temp_size_in_bytes

    config = files.TARGET
    keys = 3 * config.global_kv_heads * config.global_head_dim * 4000 * 4  # bytes of those of the global layer
    assert memory("draft") - memory("lookup") < 0.6 * keys


def test_settings_without_meaning_are_refused(pair):
    refused = "it cannot generate alone, verify drafts, be the setting `tail`, or have block_size='auto'"
    with pytest.raises(ValueError, match=refused):
        sc.decode(pair, PROMPTS, block_size="auto")
    equal = dataclasses.replace(pair.target, params=dict(pair.target.params))
    stacked = dataclasses.replace(pair, others={"middle": equal})
    with pytest.raises(ValueError, match="reads its target's states or cache: use it to draft for the target only$"):
        sc.decode(stacked, PROMPTS, drafters=(sc.Level(model="middle", budget=3, block_size=2, drafters=("draft",)),))
    with pytest.raises(ValueError, match="^Assistant has no early exits: it drafts for its target only$"):
        early_exit(pair.draft, 1)
