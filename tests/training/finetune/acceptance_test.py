"""Tests of the acceptance rate: equal to sums by hand along the target's outputs, kept outputs, restacked prompts."""

from functools import cache

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.extend import make_prompt
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training.finetune import acceptance as module
from speccascade_jax.training.finetune.acceptance import Acceptance, Rates, acceptance, restacked
from speccascade_jax.training.finetune.batches import Batch
from tests.support import random_t5

VOCAB, EOS = 6, 1
RNG = np.random.default_rng(0)
TABLES = [RNG.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32) for _ in range(2)]
TARGET, DRAFT = (sc.TableLM(table) for table in TABLES)


def decoder_batch(rows, width=12, seed=0):
    """Returns prompts of one to three tokens; every fourth row only fills the batch up."""
    rng = np.random.default_rng(seed)
    answers = np.where(np.arange(rows) % 4 == 3, 0, rng.integers(1, 4, rows)).astype(np.int32)
    tokens = rng.integers(2, VOCAB, (rows, width)).astype(np.int32)
    return Batch(tokens, np.where(answers > 0, width, 0).astype(np.int32), answers, None, None)


@cache
def measured():
    return Acceptance(TARGET, [decoder_batch(24), decoder_batch(8, 9, seed=1)], (EOS,), rows=16)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_rates_are_means_over_the_positions_of_the_targets_outputs(name):
    study = measured()
    rates, accepted, positions = study(DRAFT), [], []
    p, q = (np.exp(table) / np.exp(table).sum(-1, keepdims=True) for table in TABLES)
    same = np.minimum(p, q).sum(-1) if name == "sampled" else p.argmax(-1) == q.argmax(-1)
    for batch in study.outputs(name):
        for tokens, length, start in zip(*map(np.asarray, batch[:3]), strict=True):
            if length:
                accepted.append(same[tokens[start - 1 : length - 1]].sum())
                positions.append(length - start)
    np.testing.assert_allclose(rates.accepted[name], accepted, rtol=1e-5)
    assert rates.positions[name].tolist() == positions
    assert len(positions) == 24
    rate = rates.interval(name)
    assert rate.value == pytest.approx(sum(accepted) / sum(positions), rel=1e-5)
    assert rate.low < rate.value < rate.high


def test_outputs_are_the_targets_own():
    greedy, sampled = (measured().outputs(name) for name in ("greedy", "sampled"))
    for batch in greedy:
        tokens, lengths, answers = map(np.asarray, batch[:3])
        for row, length, start in zip(tokens, lengths, answers, strict=True):
            assert (
                row[start:length].tolist() == TABLES[0][row[max(start - 1, 0) : max(length - 1, 0)]].argmax(-1).tolist()
            )
    assert any((np.asarray(a.tokens) != np.asarray(b.tokens)).any() for a, b in zip(greedy, sampled, strict=True))


def test_the_target_accepts_itself_and_outputs_are_decoded_once(monkeypatch):
    study = measured()
    study(DRAFT)
    monkeypatch.setattr(module, "_decode", None)
    rates = study(TARGET)
    assert rates.interval("greedy").value == 1.0
    assert rates.interval("sampled").value == pytest.approx(1.0, abs=1e-6)
    difference = study(DRAFT).minus(rates, "sampled")
    assert difference.low < difference.value < difference.high < 0
    assert rates.minus(rates, "sampled").high == 0, "differences are paired"


def test_the_rate_is_the_share_that_speculative_decoding_keeps():
    """One drafted token per round: its acceptance is the rate at the positions of the target's distribution."""
    batch = decoder_batch(64, width=34)
    rates = acceptance(TARGET, DRAFT, [batch], ())
    pair = sc.Pair(target=TARGET, draft=DRAFT)
    prompts = [row[:start].tolist() for row, start in zip(batch.tokens, batch.answers, strict=True) if start]
    decoder = sc.METHODS["spec_decode"].build(
        pair, sc.extend.Settings(method="spec_decode", block_size=1, temperature=1.0, bonus="none")
    )
    stats = decoder.fetch(make_prompt(pair, prompts), 0, np.arange(len(prompts)), 200).stats
    kept = stats.kept.sum() / stats.examined.sum()
    assert kept == pytest.approx(rates.interval("sampled").value, abs=0.03)


def test_logged_numbers_and_few_prompts():
    numbers = measured()(DRAFT).numbers()
    low, high = numbers["acceptance_greedy_interval"]
    assert low < numbers["acceptance_greedy"] < high
    few = acceptance(TARGET, DRAFT, [decoder_batch(4)], (EOS,))
    halved = Rates({"sampled": few.accepted["sampled"] / 2}, few.positions)
    for rate in (few.interval("sampled"), few.minus(halved, "sampled")):
        assert rate.low == rate.value == rate.high > 0, "three prompts have no interval"
    assert few.minus(halved, "sampled").value == pytest.approx(few.interval("sampled").value / 2)
    with pytest.raises(ValueError, match="no validation prompts: give at least one"):
        Acceptance(TARGET, [Batch(*(np.zeros_like(field) for field in decoder_batch(4)[:3]))], (EOS,))


def test_prompts_of_several_shapes_become_batches_of_one():
    target = random_t5.bound(T5Config(13, 16, 8, 2, 4, 8, 1, 1))
    wide = Batch(*(np.ones(shape, np.int32) for shape in ((3, 6), 3, 3, (3, 4), 3)))
    narrow = Batch(*(np.full(shape, 2, np.int32) for shape in ((2, 3), 2, 2, (2, 7), 2)))
    narrow.lengths[0] = 0
    (first, second) = restacked([wide, narrow], 3)
    assert first.tokens.shape == second.tokens.shape == (3, 6)
    assert first.encoder_tokens.shape == second.encoder_tokens.shape == (3, 7)
    assert second.tokens.tolist() == [[2, 2, 2, 0, 0, 0], [0] * 6, [0] * 6]
    assert second.lengths.tolist() == [2, 0, 0]
    rates = acceptance(target, random_t5.bound(target.model.config, noise=0.5), [wide, narrow], (EOS,))
    assert len(rates.positions["greedy"]) == 4
    assert 0 < rates.interval("sampled").value < 1
