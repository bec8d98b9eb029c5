"""Tests that greedy speculative decoding with T5 writes the target's output, and that rows are independent.

Every output is compared with the target's teacher-forced logits, which use no cache. Each token must have the highest
logit after its prefix. Float32 sums in another order may decide a near-tie differently, so a token's logit may be up to
`GAP` below the highest, in a few rows.
"""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.arrays import bucket, right_pad
from speccascade_jax.core.controls import make_controls
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.t5 import T5Config, teacher_forced_logits
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import random_t5

GAP, EQUAL_SHARE, BATCH, BLOCK, EOS = 1e-4, 0.95, 16, 5, 1
PROMPTS = 500

forced = jax.jit(teacher_forced_logits, static_argnums=0)


def decode(case, *, batch=BATCH, ids=None, order=slice(None), method="speculative", rule="spec_decode", **controls):
    """Decodes all prompts in batches of `batch`, padded to one width; returns tokens `[N, limit]` and counters.

    The last batch is filled up with repeated rows. `order` is the order of the prompts.
    """
    built = assemble(case.pair, rule=rule, block_size=BLOCK, method=method, stop_ids=[EOS])
    prompts = [case.prompts[i] for i in np.arange(len(case.prompts))[order]]
    ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
    collected = []
    for begin in range(0, len(prompts), batch):
        rows = np.arange(begin, min(begin + batch, len(prompts)))
        filled = np.resize(rows, batch)
        prompt = make_prompt(case.pair, [prompts[i] for i in filled], min_length=max(map(len, prompts)))
        values = make_controls(batch, **{name: np.asarray(column)[filled] for name, column in controls.items()})
        out = generate(*built, prompt, 0, controls=values, max_new_tokens=case.limit, example_ids=ids[filled])
        assert (np.asarray(out.failed_at) < 0).all()
        collected.append(jax.tree.map(np.asarray, (out.tokens, out.stats)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *collected)


def check_greedy(case, **how):
    """Checks that tokens at temperature 0 are the target's, until the end or the limit; returns the counters."""
    zeros = np.zeros(len(case.prompts))
    # at temperature 0 and α = 0 a cascade is lossless too, and it also reads the draft at the bonus position
    tokens, stats = decode(case, temperature=zeros, alpha=zeros, **how)
    encoded = np.asarray(right_pad(case.prompts, bucket(max(map(len, case.prompts)))))
    fed = np.pad(tokens[:, :-1], [(0, 0), (1, 0)])
    deficits = []
    for begin in range(0, len(tokens), BATCH):
        rows = slice(begin, begin + BATCH)
        logits = forced(case.pair.target.model, case.pair.target.params, encoded[rows], fed[rows])
        written = np.take_along_axis(np.asarray(logits), tokens[rows][..., None], axis=-1)[..., 0]
        deficits.append(np.asarray(logits.max(-1)) - written)
    inside = np.arange(tokens.shape[1])[None] < stats.committed[:, None]
    gaps = np.where(inside, np.concatenate(deficits), 0.0)
    assert gaps.max() < GAP, (
        f"row {gaps.max(1).argmax()} has a token whose logit is {gaps.max():g} below the target's best"
    )
    assert (gaps.max(1) == 0).mean() >= EQUAL_SHARE
    last = tokens[np.arange(len(tokens)), stats.committed - 1]
    assert ((last == EOS) | (stats.committed == case.limit)).all()
    # if all outputs were equal, the test would prove nothing
    assert len({tuple(row) for row in tokens.tolist()}) > len(tokens) // 2
    return stats


@pytest.fixture(scope="module")
def small():
    """Returns a target, and a draft with disturbed weights, so that some draft tokens are kept."""
    config, rng = T5Config(41, 48, 24, 2, 12, 32, 1, 2), np.random.default_rng(2)
    prompts = [[*rng.integers(2, 41, rng.integers(1, 15)).tolist(), EOS] for _ in range(BATCH)]
    pair = sc.Pair(target=random_t5.bound(config), draft=random_t5.bound(config, noise=0.15))
    return SimpleNamespace(pair=pair, prompts=prompts, limit=14)


@pytest.mark.laws
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_a_random_pair_writes_the_targets_greedy_output(small, batch):
    stats = check_greedy(small, batch=batch, rule="token_v3")
    assert 0 < stats.kept.sum() < stats.drafted.sum()


def test_a_batch_in_another_order_gives_the_same_rows(small):
    """Compares tokens and counters bit for bit, in a batch with greedy and sampled rows."""
    settings = {"alpha": np.linspace(0, 1, BATCH), "temperature": np.tile([0.0, 1.0, 0.5, 1.0], BATCH // 4)}
    settings["ids"] = np.arange(BATCH) * 7
    order = np.random.default_rng(3).permutation(BATCH)
    first = decode(small, rule="token_v3", **settings)
    moved = {name: column[order] for name, column in settings.items()}
    again = decode(small, rule="token_v3", order=order, **moved)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]), again, first)


@pytest.fixture(scope="module")
def shipped():
    """Returns the pair that the package ships, 500 tokenised sentences, and the output limit."""
    pair = sc.load_pair("tatoeba_en_de")
    assert pair.target.model.config.dtype == "float32" and pair.vocabulary.eos_id == EOS
    sources = [example.source for example in TASKS["tiny_translation"].load()]
    sentences = dict.fromkeys(s for source in sources for s in re.split(r"(?<=[.!?]) ", source))
    prompts = [[*pair.vocabulary.encode(s), EOS] for s in list(sentences)[:PROMPTS]]
    assert len(prompts) == PROMPTS
    return SimpleNamespace(pair=pair, prompts=prompts, limit=32)


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize(("method", "batch"), [("autoregressive", BATCH), ("speculative", BATCH), ("speculative", 1)])
def test_the_shipped_pair_writes_the_targets_greedy_output(shipped, method, batch):
    """Checks speculation in batches of 16 and 1, and the target alone, in which an error of both would show."""
    stats = check_greedy(shipped, method=method, batch=batch)
    assert method == "autoregressive" or (stats.kept.sum() > 0 and stats.target_calls.sum() < stats.committed.sum())
