"""Tests that checkpoints of every format are read from a bucket as from a disk, and that errors name damaged parts."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from speccascade_jax.checkpoints import describe, load
from speccascade_jax.checkpoints.safetensors import open_file
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import CheckpointError
from tests.checkpoints import llama2c_test
from tests.support import huggingface_files

BUCKET = BucketPath("gs://bucket/models")


def uploaded(folder: Path) -> str:
    """Copies a folder into the bucket; returns its address there."""
    for file in folder.rglob("*"):
        if file.is_file():
            (BUCKET / folder.name / file.relative_to(folder)).write(file.read_bytes())
    return str(BUCKET / folder.name)


def of_huggingface(path: Path, kind: str) -> Path:
    parameters = huggingface_files.random_parameters(kind)
    return huggingface_files.write(
        path / kind, huggingface_files.entries(kind), huggingface_files.tensors(kind, parameters), shards=2
    )


def of_llama2c(path: Path) -> Path:
    (path / "llama").mkdir()
    llama2c_test.write(path / "llama" / "model.bin")
    return path / "llama"


@pytest.mark.parametrize("kind", ["ours", "t5x", "gemma2", "llama2c"])
def test_parameters_are_those_of_the_local_copy(bucket, kind, tmp_path, saved, t5x, arrays):
    makers = {"ours": lambda: saved, "t5x": lambda: t5x(arrays).parent, "llama2c": lambda: of_llama2c(tmp_path)}
    local = makers.get(kind, lambda: of_huggingface(tmp_path, kind))()
    there = uploaded(local)
    model, params = load(local)
    loaded, read = load(there)
    assert loaded == model and jax.tree.all(jax.tree.map(np.array_equal, read, params))
    assert describe(there) == describe(local)


def test_only_the_header_is_read_before_the_arrays(bucket, tmp_path):
    file = next(of_huggingface(tmp_path, "gemma2").glob("*.safetensors"))
    place = BUCKET / "model.safetensors"
    place.write(file.read_bytes())
    tensors, local = open_file(place), open_file(file)
    assert all(np.array_equal(tensors[name].read(), local[name].read()) for name in local)
    place.write(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model.safetensors is truncated: 1 of .* bytes of data are missing"):
        open_file(place)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 31, 32, 33, 1000, 4097, 100_003, 62_600, 1_048_577])
def test_sizes_are_found_without_reading_the_object(bucket, size):
    place = BUCKET / "object"
    place.write(bytes(size))
    assert place.stat().st_size == size


def test_a_missing_array_is_named(bucket, t5x, arrays):
    there = BucketPath(uploaded(t5x(arrays)))
    lost = next(path for path in there.below() if path.startswith("target.token_embedder") and path.endswith("0.0"))
    (there / lost).unlink()
    with pytest.raises(CheckpointError, match="1 of .* arrays|1 array can't be read .token_embedder/embedding"):
        load(there)


def test_a_place_without_a_checkpoint_is_named(bucket):
    with pytest.raises(FileNotFoundError, match="gs://bucket/none does not exist: give a directory written by save"):
        load("gs://bucket/none")
