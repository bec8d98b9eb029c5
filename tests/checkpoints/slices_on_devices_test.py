"""Loads onto eight simulated devices: equal to loads onto one device; two processes read and hold their shares."""

from __future__ import annotations

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
    """Fused and stacked parameters too, on every device, split and whole."""
    paths = [str(FORMATS[kind](tmp_path / kind, SMALL)) for kind in ("ours", "scanned", "theirs")]
    assert compared(tmp_path / "compared.json", paths) == dict.fromkeys(paths, [])


@pytest.mark.parity
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes and memory are counted in /proc")
def test_each_of_two_processes_reads_and_holds_its_share(tmp_path, bucket):
    """At most 5% more bytes than the files' share; memory of the share and two arrays, and half an array of noise."""
    empty = str(saved(tmp_path / "empty", SMALL))
    local = {str(make(tmp_path / kind, LARGE)): tmp_path / kind for kind, make in FORMATS.items()}
    there = {uploaded(folder): folder for folder in local.values()}
    there = {
        next(f"{place}/{Path(path).relative_to(folder)}" for path, folder in local.items() if folder == mine): mine
        for place, mine in there.items()
    }
    bucket.sent.clear()
    largest = 4 * 8192 * 512
    for number, results in enumerate(measured(tmp_path, empty, [*local, *there])):
        for path, result in results.items():
            if path == empty:
                continue
            folder = local.get(path) or there[path]
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            sent = sum(
                count
                for (token, name), count in bucket.sent.items()
                if token == f"process-{number}" and name.startswith(f"bucket/models/{folder.name}/")
            )
            read = result["read"] if path in local else sent
            print(number, path, {name: round(value / 1e6, 2) for name, value in result.items()}, read / size)
            assert 0.9 * result["once"] / result["total"] < read / size < 1.05 * result["once"] / result["total"], path
            assert result["peak"] <= result["share"] + 2.5 * largest, path
