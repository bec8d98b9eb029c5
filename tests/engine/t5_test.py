"""Greedy speculative decoding with T5 is greedy decoding of the target, and rows don't see their neighbours.

Float32 sums of another order may decide a near-tie otherwise: a row may differ after a position where the target's
two best logits lie closer than `GAP`. Such rows are listed in a warning, and are few.
"""

import functools
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.arrays import bucket
from speccascade_jax.core.controls import make_controls
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.t5 import T5, T5Config, T5Module, teacher_forced_logits
from speccascade_jax.pairs.prompts import make_prompt

GAP, EQUAL_SHARE, BATCH, BLOCK = 1e-4, 0.95, 16, 5
SHIPPED = "tatoeba_en_de"
PROMPTS = 500

forced = jax.jit(teacher_forced_logits, static_argnums=0)


def decode(pair, prompts, *, batch, limit, ids=None, method="speculative", rule="spec_decode", **controls):
    """Tokens `[N, limit]` in batches of `batch`, all in one bucket; the last batch is filled up with its first row."""
    built = assemble(pair, rule=rule, block_size=BLOCK, method=method)
    width = max(len(p) for p in prompts)
    ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
    collected = []
    for begin in range(0, len(prompts), batch):
        rows = np.arange(begin, min(begin + batch, len(prompts)))
        filled = np.resize(rows, batch)
        prompt = make_prompt(pair, [prompts[i] for i in filled], min_length=width)
        values = make_controls(batch, **{name: np.asarray(column)[filled] for name, column in controls.items()})
        out = generate(*built, prompt, 0, controls=values, max_new_tokens=limit, example_ids=ids[filled])
        assert (np.asarray(out.failed_at) < 0).all()
        collected.append(jax.tree.map(np.asarray, (out.tokens, out.stats)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(prompts)], *collected)


def gap_at(pair, prompt, written, position, width, limit):
    """How far the target's two best logits lie apart at `position` of an output, by teacher forcing."""
    encoder = np.zeros((1, width), np.int32)
    encoder[0, : len(prompt)] = prompt
    fed = np.zeros((1, limit), np.int32)
    fed[0, 1 : position + 1] = written[:position]
    logits = np.asarray(forced(pair.target.model, pair.target.params, encoder, fed))[0, position]
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def assert_equal_but_for_near_ties(pair, prompts, found, expected, what):
    """Rows are equal, or differ first where the target nearly ties; at least `EQUAL_SHARE` of them are equal."""
    width, limit = bucket(max(len(p) for p in prompts)), expected.shape[1]
    listed = []
    for row in np.flatnonzero((found != expected).any(-1)):
        position = int(np.argmax(found[row] != expected[row]))
        gap = gap_at(pair, prompts[row], expected[row], position, width, limit)
        assert gap < GAP, f"{what}: row {row} differs at {position}, where the two best are {gap:g} apart"
        listed.append(f"row {row} at {position} (gap {gap:.1e})")
    if listed:
        warnings.warn(f"{what}: {len(listed)} of {len(found)} rows differ after a near-tie: {listed}", stacklevel=2)
    assert len(listed) <= (1 - EQUAL_SHARE) * len(found)


# --- a small pair with random weights


class Ids:
    """Bare ids with an end of sequence."""

    vocab_size, stop_ids = 41, (1,)

    def decode(self, ids, after=()):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def random_pair():
    """A target, and a draft that is the target with disturbed weights: part of the drafts is kept."""
    config = T5Config(41, 48, 24, 2, 12, 32, 1, 2)
    token = jnp.ones((1, 1), jnp.int32)
    target = jax.jit(T5Module(config).init)(jax.random.key(0), token, token)["params"]
    rng = np.random.default_rng(1)
    draft = jax.tree.map(lambda x: x + 0.15 * np.std(x) * rng.normal(size=x.shape).astype(np.float32), target)
    models = [sc.BoundModel(params=p, model=T5(config)) for p in (target, draft)]
    return sc.Pair(target=models[0], draft=models[1], vocabulary=Ids())


@pytest.fixture(scope="module")
def random_prompts():
    rng = np.random.default_rng(2)
    return [[*rng.integers(2, 41, rng.integers(1, 15)).tolist(), 1] for _ in range(BATCH)]


@pytest.mark.laws
def test_random_pair_greedy_is_the_target_alone(random_pair, random_prompts):
    greedy = {"temperature": np.zeros(BATCH), "alpha": np.zeros(BATCH)}
    run = functools.partial(decode, random_pair, random_prompts, limit=14, **greedy)
    expected, _ = run(batch=BATCH, method="autoregressive")
    # at temperature 0 and α = 0 the cascade is lossless too: its draft caches are read at the bonus position as well
    found, stats = run(batch=BATCH, rule="token_v3")
    assert_equal_but_for_near_ties(random_pair, random_prompts, found, expected, "random pair, batch of 16")
    assert 0 < stats.kept.sum() < stats.drafted.sum()
    alone, _ = run(batch=1, rule="token_v3")
    assert_equal_but_for_near_ties(random_pair, random_prompts, alone, expected, "random pair, batch of 1")


def check_permutation(pair, prompts, limit, rule):
    """A batch in another order gives the same rows, bit for bit, greedy and sampled ones together."""
    settings = {"alpha": np.linspace(0, 1, BATCH), "temperature": np.tile([0.0, 1.0, 0.5, 1.0], BATCH // 4)}
    order = np.random.default_rng(3).permutation(BATCH)
    ids = np.arange(BATCH) * 7
    first, stats = decode(pair, prompts, batch=BATCH, limit=limit, rule=rule, ids=ids, **settings)
    moved = {name: column[order] for name, column in settings.items()}
    again, counts = decode(
        pair, [prompts[i] for i in order], batch=BATCH, limit=limit, rule=rule, ids=ids[order], **moved
    )
    np.testing.assert_array_equal(again, first[order])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]), counts, stats)


def test_random_pair_permuted(random_pair, random_prompts):
    check_permutation(random_pair, random_prompts, 14, "token_v3")


# --- the shipped pair


@pytest.fixture(scope="module")
def shipped():
    """The pair, 500 sentences as ids, and how long an output may get."""
    pair = sc.load_pair(SHIPPED)
    assert pair.target.model.config.dtype == "float32"
    sources = [example.source for example in TASKS["tiny_translation"].load()]
    sentences = dict.fromkeys(s for source in sources for s in re.split(r"(?<=[.!?]) ", source))
    prompts = [[*pair.vocabulary.encode(s), pair.vocabulary.eos_id] for s in list(sentences)[:PROMPTS]]
    assert len(prompts) == PROMPTS
    return SimpleNamespace(pair=pair, prompts=prompts, limit=32)


@pytest.fixture(scope="module")
def greedy(shipped):
    """What the target writes alone, in batches of 16."""
    return decode_greedily(shipped, BATCH, method="autoregressive")[0]


def decode_greedily(shipped, batch, **more):
    zeros = np.zeros(PROMPTS)
    return decode(shipped.pair, shipped.prompts, batch=batch, limit=shipped.limit, temperature=zeros, **more)


@pytest.mark.laws
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_greedy_speculation_is_the_target_alone(shipped, greedy, batch):
    """500 prompts; a batch of 1 against batches of 16 also shows that rows don't see their neighbours."""
    found, stats = decode_greedily(shipped, batch)
    assert_equal_but_for_near_ties(shipped.pair, shipped.prompts, found, greedy, f"shipped pair, batch of {batch}")
    assert stats.kept.sum() > 0 and stats.target_calls.sum() < stats.committed.sum()


@pytest.mark.laws
def test_what_the_target_writes_alone_is_its_teacher_forced_argmax(shipped, greedy):
    """The expectation itself, without caches: every token written is the best one given those before it."""
    width = bucket(max(len(p) for p in shipped.prompts))
    rows = np.arange(BATCH)
    encoder = np.zeros((BATCH, width), np.int32)
    for row in rows:
        encoder[row, : len(shipped.prompts[row])] = shipped.prompts[row]
    fed = np.concatenate([np.zeros((BATCH, 1), np.int32), greedy[:BATCH, :-1]], axis=1)
    logits = np.asarray(forced(shipped.pair.target.model, shipped.pair.target.params, encoder, fed))
    best = np.sort(logits, -1)
    clear = (best[..., -1] - best[..., -2] > GAP) & (greedy[:BATCH] > 0)
    np.testing.assert_array_equal(logits.argmax(-1)[clear], greedy[:BATCH][clear])
    assert clear.mean() > 0.1
