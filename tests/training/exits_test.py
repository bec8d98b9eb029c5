"""Tests of early-exit heads: their loss, the frozen target, resumption bit for bit, and drafting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import speccascade_jax as sc
from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.core.types import Prompt
from speccascade_jax.data.vocabularies import load
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import early_exit, shared_head
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.pairs import exit_files
from speccascade_jax.storage import files
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.training import exits
from speccascade_jax.training import runs as storage
from tests.support import tiny_decoders, tiny_pair
from tests.support.killing import killed_at
from tests.training.heads.train_test import settings, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a pair whose target has three decoder layers to `pair`, and its outputs to `data`."""
    path = tmp_path_factory.mktemp("exits")
    (path / "pair").mkdir()
    tiny_pair.write(path / "pair")
    pieces = load.Vocabulary(path / "pair" / "vocabulary.model").vocab_size
    config = T5Config(pieces, pieces + 4, 16, 2, 8, 24, 1, 3)
    draws = np.random.default_rng(1)
    flat = {name: draws.normal(size=shape) / 2 for name, shape in expected_shapes(config).items()}
    checkpoints.save(path / "pair" / "target", T5(config), unflatten_dict(flat, sep="/"), overwrite=True)
    write_data(path / "data", sc.load_pair(path / "pair"))
    return path


def trainer(folder, run_dir, **changes):
    return exits.ExitTrainer(**settings(folder, run_dir) | {"layers": (0, 2), "peak": 1e-2} | changes)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Returns a finished run, its evaluation before training, and the one after."""
    run = exits.Run(trainer(folder, tmp_path_factory.mktemp("finished") / "run"))
    return run, run.evaluate(), run.finish()


def file_of(run):
    return run.directory / exits.FILE


def test_the_divergence_of_a_step_matches_numpy(finished):
    run, _, _ = finished
    batch = run.batches(0)[0]
    hidden, taught, counted = run.lesson(batch)
    model, kernel = run.models[1], run.state.params["002"]
    divergence = exits.divergences(model, kernel, hidden[1], taught, counted)

    def law(bound):
        logits = np.asarray(along(bound, batch.prompt, batch.tokens), np.float64)
        logits -= logits.max(-1, keepdims=True)
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    exit_probs, target_probs = law(early_exit(run.pair.target, 2, np.asarray(kernel))), law(run.pair.target)
    expected = (target_probs * (np.log(target_probs) - np.log(exit_probs))).sum(-1)[np.asarray(counted)].sum()
    assert float(divergence) == pytest.approx(expected, rel=1e-3)


def test_training_moves_heads_towards_the_unchanged_target(finished, folder):
    run, before, after = finished
    for layer in before:
        assert after[layer]["kl"] < 0.97 * before[layer]["kl"]
        assert after[layer]["shared_mass"] > before[layer]["shared_mass"]
    again = sc.load_pair(folder / "pair").target
    jax.tree.map(np.testing.assert_array_equal, run.pair.target.params, again.params)


def test_a_head_starts_as_the_targets_head(finished):
    run, _, _ = finished
    bound = run.pair.target
    batch = run.batches(0)[0]
    plain, with_head = early_exit(bound, 1), early_exit(bound, 1, shared_head(bound))
    logits, expected = (np.asarray(along(model, batch.prompt, batch.tokens)) for model in (with_head, plain))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shared_head_reproduces_the_plain_early_exit(tied):
    config = T5Config(20, 24, 16, 2, 8, 24, 1, 2, tied=tied)
    draws = np.random.default_rng(2)
    flat = {name: draws.normal(size=shape).astype(np.float32) for name, shape in expected_shapes(config).items()}
    t5 = sc.BoundModel(T5(config).prepare(unflatten_dict(flat, sep="/")), T5(config))
    prompt = Prompt(np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.array([[3, 4, 1]], np.int32))
    decoder = tiny_decoders.bound(dataclasses.replace(tiny("gemma2_2b", vocab_size=20), tied=tied))
    for bound, model_prompt in ((t5, prompt), (decoder, Prompt(np.array([[3, 4]], np.int32), np.array([2], np.int32)))):
        tokens = np.array([[5, 6, 7]], np.int32)
        plain, with_head = early_exit(bound, 1), early_exit(bound, 1, jnp.asarray(shared_head(bound)))
        logits, expected = (np.asarray(along(model, model_prompt, tokens)) for model in (with_head, plain))
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_killed_run_resumes_bit_for_bit(finished, folder, tmp_path):
    whole, _, result = finished
    broken = trainer(folder, tmp_path / "broken")
    with killed_at(storage, "save_state", whole.steps_per_epoch + 2):
        exits.Run(broken).finish()
    resumed = exits.Run(broken)
    assert resumed.finish() == result
    assert file_of(resumed).read_bytes() == file_of(whole).read_bytes()


@pytest.mark.laws
def test_heads_in_a_bucket_equal_local_ones(finished, folder, bucket):
    whole, _, result = finished
    place = "gs://bucket/exits"
    assert trainer(folder, place).run() == result
    remote = files.expanded(place) / exits.FILE
    assert remote.read_bytes() == file_of(whole).read_bytes()
    assert exit_files.load(str(remote)).fingerprint == exit_files.load(file_of(whole)).fingerprint


def test_the_lowest_exit_can_be_trained_towards_the_one_above_it(finished, folder, tmp_path):
    run, _, _ = finished
    changes = {"layers": (0,), "towards": 2, "init_from": str(file_of(run))}
    fine = exits.Run(trainer(folder, tmp_path / "fine", **changes))
    before = fine.evaluate()["layer 0"]
    assert fine.finish()["layer 0"]["kl"] < before["kl"]
    heads, old = exit_files.load(file_of(fine)), exit_files.load(file_of(run))
    np.testing.assert_array_equal(heads.kernels[2], old.kernels[2])
    assert np.abs(heads.kernels[0] - old.kernels[0]).max() > 1e-3
    assert heads.card.towards == {0: 2, 2: None} and old.card.towards == {0: None, 2: None}
    # the teacher is the upper exit's distribution, not the target's
    upper = early_exit(run.pair.target, 2, np.asarray(old.kernels[2]))
    batch = fine.batches(0)[0]
    taught = fine.lesson(batch)[1]
    np.testing.assert_allclose(taught, jax.nn.log_softmax(along(upper, batch.prompt, batch.tokens)), atol=2e-5)


@pytest.mark.laws
def test_a_trained_head_drafts_by_its_name(finished, folder):
    run, _, _ = finished
    pair = sc.load_pair(folder / "pair", others={"two": f"exit:2:{file_of(run)}"})
    bound = pair.model("two")
    np.testing.assert_array_equal(bound.params["decoder"]["logits_dense"]["kernel"], run.state.params["002"])
    settings = {"max_new_tokens": 12}
    out = sc.decode(pair, ["Tom is here."], drafters=("two",), block_size=3, **settings)
    alone = sc.decode(pair, ["Tom is here."], method="autoregressive", **settings)
    np.testing.assert_array_equal(out.tokens, alone.tokens)


def test_heads_that_do_not_fit_are_refused(finished, folder, tmp_path):
    run, _, _ = finished
    for word, error, message in (
        (f"exit:1:{file_of(run)}", ValueError, "holds no head for the exit at layer 1: it holds heads for layers 0, 2"),
        (f"exit:9:{file_of(run)}", ValueError, "no exit at layer 9"),
        ("exit:1:nowhere", FileNotFoundError, "no file of exit heads at"),
    ):
        with pytest.raises(error, match=message):
            sc.load_pair(folder / "pair", others={"odd": word})
    tiny_pair.write(tmp_path)
    with pytest.raises(ValueError, match=r"holds exit heads for the model .* \(pair .*, but the target is"):
        sc.load_pair(tmp_path, others={"odd": f"exit:0:{file_of(run)}"})
    torn = tmp_path / "torn.msgpack"
    torn.write_bytes(file_of(run).read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="torn.msgpack"):
        exit_files.load(torn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "layers=.. is empty"),
        ({"layers": (-1,)}, "layers=-1 is not a whole number"),
        ({"layers": (1, 1)}, r"layers=\(1, 1\) names a layer twice"),
        ({"towards": 2}, "towards=2: the exit that teaches the others needs a trained head; set init_from"),
        ({"warmup": 1.0}, "warmup=1.0 is not a share of the steps"),
        ({"peak": 0.0}, "peak=0.0"),
    ],
)
def test_invalid_settings_are_refused(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer(folder, tmp_path, **changes)


def test_layers_and_data_of_another_model_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="layer 3 has no exit to train: give layers from 0 to 2"):
        exits.Run(trainer(folder, tmp_path / "run", layers=(3,)))
    tiny_pair.write(tmp_path)
    with pytest.raises(ValueError, match="the data were made with the pair .* make data with this pair"):
        exits.Run(trainer(folder, tmp_path / "run", pair=ModelPair(name=str(tmp_path)), layers=(0,)))
