"""Tests of loading onto eight simulated devices: equal to loading onto one; two processes read only their shares."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from speccascade_jax.checkpoints.native_arrays import chunks_of
from speccascade_jax.checkpoints.tree_writing import TreeWriter
from speccascade_jax.models.t5 import T5Config
from tests.checkpoints.buckets_test import uploaded
from tests.checkpoints.conftest import random_arrays
from tests.checkpoints.slices_test import huggingface, saved, t5x
from tests.support.sliced_loads import compared, measured

SMALL = T5Config(64, 64, 16, 8, 4, 32, 2, 3)
LARGE = T5Config(8192, 8192, 512, 8, 64, 1024, 2, 3)


def orbax(path: Path, config: T5Config) -> Path:
    """Writes what T5X writes through Orbax, in the chunks of a mesh."""
    (path / "state").mkdir(parents=True)
    writer = TreeWriter(path / "state")
    for name, array in random_arrays(config).items():
        writer.add(f"target/{name}", array, chunks_of(name, array.shape, array.itemsize))
    writer.close()
    return path


FORMATS = {
    "ours": saved,
    "stacked": lambda path, config: saved(path, config, stacked=True),
    "t5x": lambda path, config: t5x(path, config),
    "scanned": lambda path, config: t5x(path, config, scanned=True),
    "orbax": lambda path, config: orbax(path / "checkpoint_1", config),
    "theirs": lambda path, config: huggingface(path, "t5_1.1", config),
}


def test_parameters_on_eight_devices_equal_those_of_one(tmp_path):
    """Compares fused and stacked parameters too, on every device, split and replicated."""
    paths = [str(FORMATS[kind](tmp_path / kind, SMALL)) for kind in ("ours", "scanned", "theirs")]
    assert compared(tmp_path / "compared.json", paths) == dict.fromkeys(paths, [])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parity
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes and memory are counted in /proc")
def test_each_of_two_processes_reads_and_holds_its_share(tmp_path, bucket):
    """Expects at most 5% more bytes than its share of the files, and memory for the share and two arrays."""
    empty, largest = str(saved(tmp_path / "empty", SMALL)), 4 * LARGE.num_embeddings * LARGE.d_model
    paths = {kind: make(tmp_path / kind, LARGE) for kind, make in FORMATS.items()}
    copies = {kind: f"{uploaded(tmp_path / kind)}/{path.relative_to(tmp_path / kind)}" for kind, path in paths.items()}
    bucket.sent.clear()
    results = measured(tmp_path, empty, [*map(str, paths.values()), *copies.values()])
    for number, kind in itertools.product(range(2), FORMATS):
        local, copied = results[number][str(paths[kind])], results[number][copies[kind]]
        key = f"process-{number}", f"bucket/models/{kind}/"
        sent = sum(count for (token, name), count in bucket.sent.items() if token == key[0] and name.startswith(key[1]))
        for result, read in ((local, local["read"]), (copied, sent)):
            share = result["once"] / result["total"]
            print(
                number, kind, {name: round(value / 1e6, 2) for name, value in result.items()}, f"sent {sent / 1e6:.2f}"
            )
            assert 0.9 * share < read / size_of(tmp_path / kind) < 1.05 * share < 0.53, kind
            assert result["peak"] <= result["share"] + 2 * largest, kind
