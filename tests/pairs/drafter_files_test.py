"""Tests of files with a drafter's parameters: round trips, and refusal of another target."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.pairs import drafter_files
from speccascade_jax.storage import array_file
from speccascade_jax.storage.errors import CheckpointError

PARAMS = {"fuse": np.arange(6.0, dtype=np.float32).reshape(2, 3), "block": {"bias": np.ones(3, np.float32)}}


def pair_of(seed, name="mine"):
    table = np.random.default_rng(seed).normal(size=(4, 4))
    return sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(-table), name=name)


def test_saved_parameters_are_read_back_unchanged(tmp_path):
    drafter_files.save(tmp_path / "head", PARAMS, pair_of(0), layers=(1, 3))
    params, about = drafter_files.load(tmp_path / "head", pair_of(0, "another name"))
    np.testing.assert_array_equal(params["fuse"], PARAMS["fuse"])
    np.testing.assert_array_equal(params["block"]["bias"], PARAMS["block"]["bias"])
    assert about == {"layers": [1, 3]}


def test_a_drafter_for_another_target_is_rejected_with_a_one_line_error(tmp_path):
    drafter_files.save(tmp_path / "head", PARAMS, pair_of(0))
    trained_for, loaded_for = (pair_of(seed).print_of("target") for seed in (0, 1))
    with pytest.raises(
        ValueError, match=f"drafter for the target {trained_for} of pair 'mine', .* of 'yours' is {loaded_for}"
    ) as e:
        drafter_files.load(tmp_path / "head", pair_of(1, "yours"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("damage", "error", "message"), [
    (lambda path: path.unlink(), FileNotFoundError, "no file of a drafter's parameters at"),
    (lambda path: path.write_bytes(path.read_bytes()[:-30]), CheckpointError, "head"),
    (lambda path: array_file.save(path, PARAMS, {"depth": 1}), CheckpointError, "does not hold a drafter's parameters"),
])  # fmt: skip
def test_an_unusable_file_is_rejected(tmp_path, damage, error, message):
    path = tmp_path / "head"
    drafter_files.save(path, PARAMS, pair_of(0))
    damage(path)
    with pytest.raises(error, match=message):
        drafter_files.load(path, pair_of(0))
