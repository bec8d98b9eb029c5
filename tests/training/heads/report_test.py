"""Tests of recorded blocks: the prefix and the measures of each token, and the report."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import Prompt
from speccascade_jax.evaluation import session
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.models import teacher_forcing
from speccascade_jax.pairs import head_files
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.training.heads import calibration
from speccascade_jax.training.heads import report as acceptance_report
from tests.stopping.acceptance_head_test import CARD, random_params
from tests.support import reference, tiny_pair
from tests.training.heads.train_test import examples

FEW = {"quality_examples": 3, "quality_batch": 2, "latency_examples": 0, "max_new_tokens": 9}
SMALL = Evaluation(task="tiny_translation", keep_outputs=False, keep_traces=0, **FEW).resolved()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    pair = sc.load_pair(tiny_pair.write(tmp_path_factory.mktemp("pair")))
    return session.Session(ModelPair(name="tiny"), SMALL, pair)


@pytest.fixture(scope="module")
def blocks(loaded):
    settings = Settings(rule="token_v3", alpha=0.5, block_size=3, temperature=1.0)
    point = Point(pair=ModelPair(name="tiny"), evaluation=SMALL, settings=settings)
    return acceptance_report.collect(loaded, point)


def test_each_block_is_placed_after_the_committed_tokens():
    committed = np.array([[5, 6, 7, 8], [5, 6, 0, 0]])
    sequences = acceptance_report.behind(committed, np.array([1, 2]), np.array([[1, 2], [3, 4]]))
    assert sequences[0, :3].tolist() == [5, 1, 2] and sequences[1, :4].tolist() == [5, 6, 3, 4]


@pytest.mark.laws
def test_every_drafted_token_is_judged_at_its_own_prefix(loaded, blocks):
    """Recomputes the first block of each example, whose prefix is the prompt alone."""
    assert set(blocks.rows.tolist()) == {0, 1, 2} and blocks.counted.any(-1).all()
    for row in range(3):
        first = int(np.argmax(blocks.rows == row))
        prompt = jax.tree.map(lambda x, row=row: x[row : row + 1], loaded.prompts)
        tokens = blocks.tokens[first : first + 1, : blocks.lengths[first]]
        _check_block(loaded.pair, prompt, tokens, blocks, first)


def _check_block(pair: sc.Pair, prompt: Prompt, tokens: np.ndarray, blocks, at):
    length = tokens.shape[1]
    hidden = teacher_forcing.states(pair.draft.model, pair.draft.params, prompt, tokens)
    np.testing.assert_allclose(blocks.hidden[at, :length], hidden[0], rtol=1e-3, atol=1e-4)
    logits = [teacher_forcing.along(bound, prompt, tokens)[0] for bound in (pair.draft, pair.target)]
    for slot, token in enumerate(tokens[0]):
        q, p = (np.asarray(x[slot]) for x in logits)
        law = reference.target_law("token_v3", q, p, 0.5, 1.0)
        drawn = reference.softmax(q)
        assert blocks.kept[at, slot] == pytest.approx(min(1.0, law[token] / drawn[token]), abs=2e-3)
        assert blocks.q_of_proposal[at, slot] == pytest.approx(drawn[token], rel=1e-3)
        assert blocks.max_q[at, slot] == pytest.approx(drawn.max(), rel=1e-3)


@pytest.mark.tools
def test_the_report_covers_heads_and_baselines(blocks, tmp_path):
    cards = {f"depth{d}_wrej{w}": dataclasses.replace(CARD, depth=d, w_rej=float(w)) for d, w in ((0, 1), (2, 6))}
    trained = {name: head_files.Head(random_params(card.depth), card) for name, card in cards.items()}
    card = dataclasses.replace(CARD, depth=1, w_rej=1.0, law=True)
    trained["depth1_wrej1_law"] = head_files.Head(random_params(1, features=CARD.features + 2), card)
    report = acceptance_report.judge(blocks, examples(), trained)
    kept = blocks.kept[blocks.counted]
    assert report["tokens"] == len(kept) and report["blocks"] == len(blocks.rows)
    assert set(report["slot"]) == {"1", "2", "3"}
    for kind in ("label", "slot"):
        assert sum(group["the mean"]["positions"] for group in report[kind].values()) == len(kept)
    assert report["slot"]["1"]["the mean"]["kept"] == pytest.approx(blocks.kept[:, 0].mean(), rel=1e-5)
    logits = np.asarray(heads.logits(trained["depth2_wrej6"].params, blocks.hidden[blocks.counted]), np.float64)
    undone, as_it_is = (1 / (1 + np.exp(-logits - shift)) for shift in (np.log(6), 0))
    of_head = report["overall"]["depth2_wrej6"]
    assert of_head["brier"] == pytest.approx(calibration.brier(undone, kept), rel=1e-4)
    assert of_head["ece_as_it_is"] == pytest.approx(calibration.reliability(as_it_is, kept).ece, rel=1e-3)
    known = np.stack([blocks.max_q, blocks.q_of_proposal], axis=-1)
    inputs = np.concatenate([blocks.hidden, np.log(np.maximum(known, 1e-6))], axis=-1)[blocks.counted]
    logits = np.asarray(heads.logits(trained["depth1_wrej1_law"].params, inputs), np.float64)
    brier = calibration.brier(1 / (1 + np.exp(-logits)), kept)
    assert report["overall"]["depth1_wrej1_law"]["brier"] == pytest.approx(brier, rel=1e-4)
    label = report["overall"][acceptance_report.LABEL]
    assert label["ece"] == pytest.approx(0, abs=1e-6)
    assert label["brier"] <= min(values["brier"] for values in report["overall"].values())
    assert report["overall"]["max q"]["auc"] == pytest.approx(calibration.auc(blocks.max_q[blocks.counted], kept))
    report |= {"shown": ["depth0_wrej1"]}
    said = acceptance_report.overall(report).markdown() + acceptance_report.by_group(report, "slot").markdown()
    assert "depth2_wrej6" in said and "entropy of q, mapped" in said and "nan" not in said
    predicted = acceptance_report.predictions(blocks, examples(), trained)
    acceptance_report.draw(predicted, kept, tmp_path / "new" / "reliability.png")
    assert (tmp_path / "new" / "reliability.png").stat().st_size > 10_000
    json.dumps(report)


def test_a_report_on_prompts_of_the_training_data_is_refused(loaded):
    """Puts two of the evaluation's three prompts into the data, with other padding."""
    prompts, data = loaded.prompts, examples()
    encoder = np.zeros((len(data.ids), prompts.encoder_tokens.shape[1] + 3), np.int32)
    encoder[:, :12] = data.encoder_tokens
    encoder[[8, 9], :-3] = prompts.encoder_tokens[1:]
    with pytest.raises(ValueError, match="2 of the report's 3 prompts are in the data .*split or .*first_example"):
        acceptance_report.check_unseen(dataclasses.replace(data, encoder_tokens=encoder), prompts)
    acceptance_report.check_unseen(data, prompts)


def test_no_heads_and_unknown_heads_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no heads in"):
        acceptance_report.load_heads(tmp_path)
    head_files.save(tmp_path / "one.msgpack", head_files.Head(random_params(0), CARD))
    with pytest.raises(ValueError, match="shown names 'two', which is no trained head: name some of one"):
        acceptance_report.load_heads(tmp_path, ("two",))
