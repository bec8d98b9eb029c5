"""Tests of loading only a process's part of each parameter, in every format, and of the bytes that are read for it.

Processes are simulated here by the parts that their devices would hold; `slices_on_devices_test` starts real ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints import CheckpointError, byte_ranges, save, save_t5x
from speccascade_jax.checkpoints.array_plan import Piece, Stored, fused, stream
from speccascade_jax.checkpoints.native_arrays import chunks_of
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.checkpoints.slices import Blocks, bounds, locate, stream_parts
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.sharding import interleave_fused, spec_of
from speccascade_jax.models.stacks import stack_params
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.runtime.mesh import MODEL
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import UnreadableError
from tests.checkpoints import gemma_jax_test, llama2c_test, maxtext_test, t5x_test
from tests.checkpoints.buckets_test import uploaded
from tests.checkpoints.conftest import random_arrays, write_t5x
from tests.support import huggingface_files as hf
from tests.support.damage import edit_json
from tests.support.memory import bytes_read

SHARDS = 4
T5_SIZES = T5Config(120, 120, 16, 4, 6, 24, 2, 3)
WIDE = T5Config(1024, 1024, 128, 4, 64, 256, 2, 3)
"""Model sizes for which half of a kernel is at least one chunk."""
QWEN = dataclasses.replace(hf.KINDS["qwen2.5"], num_kv_heads=4, num_embeddings=96, vocab_size=96)
GEMMA = dataclasses.replace(maxtext_test.GEMMA, num_kv_heads=4, num_embeddings=96, vocab_size=96)


def nested(arrays):
    return unflatten_dict({name: jnp.asarray(array) for name, array in arrays.items()}, sep="/")


def saved(path: Path, config=T5_SIZES, *, stacked=False, dtype="float32") -> Path:
    params = nested(random_arrays(config))
    save(path, T5(config), stack_params(params) if stacked else params, dtype)
    return path


def huggingface(path: Path, kind: str, config, arrays=None) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hf.KINDS, kind, config)
        return hf.write(path, hf.entries(kind), hf.tensors(kind, arrays or random_arrays(config)), shards=2)


def decoder(path: Path) -> Path:
    save(path, DecoderLM(QWEN), nested(random_arrays(QWEN)), "bfloat16")
    return path


def llama2c(path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama2c_test, "VOCAB", 12)
        llama2c_test.write(path.with_suffix(".bin"))
    return path.with_suffix(".bin")


def gemma(path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"V": 96, "K": 4, "N": 8}.items():
            patch.setattr(gemma_jax_test, name, value)
        return gemma_jax_test.write(path, gemma_jax_test.arrays())


def t5x(path: Path, config=T5_SIZES, *, scanned=False) -> Path:
    return save_t5x(path, T5(config), nested(random_arrays(config)), scan_layers=scanned)


FORMATS = {
    "ours": saved,
    "ours stacked": lambda path: saved(path, stacked=True),
    "ours in 8 bits": lambda path: saved(path, WIDE, dtype="int8"),
    "ours in 16 bits": decoder,
    "T5X": t5x,
    "T5X scanned": lambda path: t5x(path, scanned=True),
    "T5X in one chunk": lambda path: write_t5x(path, t5x_test.scanned(random_arrays(T5_SIZES), "")),
    "T5X in msgpack": lambda path: write_t5x(path, (given := random_arrays(T5_SIZES)), inline=tuple(given)),
    "transformers, T5": lambda path: huggingface(path, "t5_1.1", T5_SIZES),
    "transformers, Qwen": lambda path: huggingface(path, "qwen2.5", QWEN),
    "llama2.c": llama2c,
    "Gemma": gemma,
    "MaxText": lambda path: maxtext_test.write(path, maxtext_test.maxtext_arrays(GEMMA, True)),
}


def layout(devices, shards):
    """Returns the layout of a process that has these of `shards` devices along `model`."""

    def of(name, shape):
        spec, parts = spec_of(name), []
        for device in devices:
            part = [slice(None)] * len(shape)
            if MODEL in spec:
                axis = spec.index(MODEL)
                width, rest = divmod(shape[axis], shards)
                assert not rest, name
                part[axis] = slice(device * width, (device + 1) * width)
            parts.append(tuple(part))
        return parts, shards

    return of


def expected(stored: Stored, shards: int) -> dict[str, np.ndarray]:
    """Returns the fused parameters for a mesh, read as a whole."""
    arrays, plan = {}, fused(stored.plan)
    for name, array in stream(stored, plan, "float32"):
        widths = [piece.shape[-1] for piece in plan[name]]
        arrays[name] = interleave_fused(np.split(array, np.cumsum(widths)[:-1], axis=-1), shards)
    return arrays


def parts_of(path, devices, shards=SHARDS) -> dict[str, Blocks]:
    stored = find(path)
    return dict(stream_parts(stored, fused(stored.plan), "float32", layout(devices, shards)))


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_equal_those_of_the_whole_parameters(tmp_path, kind):
    path = FORMATS[kind](tmp_path / "model")
    shards = 2 if kind == "llama2.c" else SHARDS
    whole = expected(find(path), shards)
    for devices in ([*range(shards)], [shards - 1], [0, shards - 1]):
        read, wanted = parts_of(path, devices, shards), layout(devices, shards)
        assert read.keys() == whole.keys()
        for name, array in whole.items():
            for part in wanted(name, array.shape)[0]:
                assert np.array_equal(read[name][bounds(part, array.shape)], array[part]), (name, part)


SHARES = {
    "ours": lambda path: saved(path, WIDE),
    "ours stacked": lambda path: saved(path, WIDE, stacked=True),
    "T5X": lambda path: t5x(path, WIDE),
    "T5X scanned": lambda path: t5x(path, WIDE, scanned=True),
    "transformers": lambda path: huggingface(path, "t5_1.1", WIDE),
}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes are counted in /proc")
@pytest.mark.parametrize(
    ("kind", "in_bucket"),
    [
        *((kind, False) for kind in SHARES),
        *(pytest.param(kind, True, marks=[pytest.mark.parity] * (kind != "ours stacked")) for kind in SHARES),
    ],
)
def test_a_process_reads_its_share_alone(tmp_path, bucket, kind, in_bucket):
    """Compares the bytes that are read with the files' size times the parameters' share, for one of two processes."""
    path = SHARES[kind](tmp_path / "model")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    stored = find(uploaded(path) if in_bucket else path)
    plan, held = fused(stored.plan), 0
    total = sum(array.size for _, array in stream(stored, plan, "float32"))
    bucket.sent.clear()
    before = bytes_read()
    for _, blocks in stream_parts(stored, plan, "float32", layout([0, 1], 4)):
        held += sum(block.size for block in blocks.values())
    read = bucket.sent.total() if in_bucket else bytes_read() - before
    assert 0.5 < held / total < 0.53
    assert 0.9 * held / total < read / size < 1.05 * held / total


def reads(path: Path, devices) -> dict[str, list[int]]:
    """Returns the sizes of the parts that are read of each stored array, in bytes."""
    sizes: dict[str, list[int]] = {}

    def counted(name, tensor):
        if tensor.read_part is None:
            return tensor

        def read_part(part):
            sizes.setdefault(name, []).append((array := tensor.read_part(part)).nbytes)
            return array

        return dataclasses.replace(tensor, read_part=read_part)

    stored = find(path)
    tensors = {name: counted(name, tensor) for name, tensor in stored.tensors.items()}
    counting = dataclasses.replace(stored, tensors=tensors)
    list(stream_parts(counting, fused(stored.plan), "float32", layout(devices, SHARDS)))
    return sizes


def test_each_stored_part_is_read_once(tmp_path):
    """Adjacent parts are read together, others apart, and a chunk of several layers once for all of them."""
    kernel = "decoder.block.0.layer.2.DenseReluDense.wi_0.weight"
    theirs = FORMATS["transformers, T5"](tmp_path / "theirs")
    size = find(theirs).tensors[kernel].nbytes
    assert reads(theirs, [0, 1])[kernel] == [size // 2]
    assert reads(theirs, [0, 3])[kernel] == [size // 4] * 2
    assert reads(theirs, [0, 0, 1, 1])[kernel] == [size // 2]
    scanned = FORMATS["T5X in one chunk"](tmp_path / "scanned")
    once = reads(scanned, [0, 3])
    assert len(once) > 20 and all(len(sizes) == 1 for sizes in once.values())


def test_chunks_follow_the_axis_that_a_mesh_splits():
    assert chunks_of("decoder/layers_1/mlp/wo/kernel", (4096, 64), 4) == (256, 64)
    assert chunks_of("decoder/layers/self_attention/query/kernel", (5, 64, 4096), 2) == (1, 64, 512)
    assert chunks_of("decoder/layers_1/mlp/wi/kernel", (64, 4096 + 2), 4) == (64, 2049)
    assert chunks_of("decoder/decoder_norm/scale", (1 << 20,), 4) == (1 << 20,)
    assert chunks_of("token_embedder/embedding", (64, 16), 4) == (64, 16)


def test_only_the_parts_that_a_process_reads_must_be_finite(tmp_path):
    arrays = random_arrays(T5_SIZES)
    arrays["token_embedder/embedding"][70, 3] = np.nan  # the row lies in the third of four parts
    path = huggingface(tmp_path / "hf", "t5_1.1", T5_SIZES, arrays)
    parts_of(path, [0, 1])
    with pytest.raises(CheckpointError, match=r"not finite \(shared.weight: 1 of 480 values are NaN"):
        parts_of(path, [2])


def test_chunks_of_our_format_have_digests(tmp_path):
    path = saved(tmp_path / "model", WIDE)
    record = json.loads((path / "config.json").read_text())
    (name, digests), *_ = record["parts"].items()
    assert len(digests) in (2, 4, 8, 16)

    def spoil(record):
        del record["blake2b"]
        record["parts"][name][-1] = digests[0]

    edit_json(path / "config.json", spoil)
    parts_of(path, [0])
    with pytest.raises(CheckpointError, match=rf"(?s)can't be read \({name}\).*do not match the checksum"):
        parts_of(path, [3])


def test_a_file_that_ends_early_is_named(tmp_path):
    path = huggingface(tmp_path / "hf", "t5_1.1", T5_SIZES)
    stored = find(path)
    last = next(path.glob("*1-of*.safetensors"))
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="(?s)1 array can't be read .*ends 4 bytes before the array does"):
        list(stream_parts(stored, stored.plan, None, layout([3], SHARDS)))


@pytest.mark.parametrize("place", ["local", "bucket", "rows"])
def test_any_part_of_an_array_of_bytes_is_read(tmp_path, bucket, monkeypatch, place):
    """Reads every part of a small array: of rows, columns and blocks, alone and together with the bytes between."""
    if place == "rows":
        monkeypatch.setattr(byte_ranges, "_MOST_REQUESTS", 1)
        monkeypatch.setattr(byte_ranges, "_BLOCK", 40)
    array = np.arange(3 * 4 * 5, dtype=np.int16).reshape(3, 4, 5)
    file = tmp_path / "file" if place == "local" else BucketPath("gs://bucket/file")
    file.write_bytes(b"abc" + array.tobytes())
    spans = [[slice(*ends) for ends in itertools.combinations(range(size + 1), 2)] for size in array.shape]
    draws = list(itertools.product(*spans))
    for part in draws if place == "local" else draws[::29]:
        assert np.array_equal(byte_ranges.read_bytes(file, 3, array.shape, np.int16, part), array[part])
    with pytest.raises(UnreadableError, match=r"ends 2 bytes before|OUT_OF_RANGE"):
        byte_ranges.read_bytes(file, 5, array.shape, np.int16, (slice(2, 3), slice(3, 4), slice(4, 5)))


def test_parts_of_merged_and_reordered_axes_are_found():
    array = np.random.default_rng(0).normal(size=(2, 4, 6, 5))  # 4 heads of 5, the second of 2 stacked arrays
    piece = Piece("x", array.shape, (6, 20), order=(1, 0, 2), take=(0, 1))
    whole = piece.view(array).reshape(6, 20)
    for part in itertools.product([slice(0, 6), slice(2, 3)], [slice(0, 20), slice(5, 15), slice(7, 8), slice(3, 19)]):
        stored, cut = locate(piece, part)
        values = piece._replace(take=(0, 0)).view(array[stored]).reshape(cut.covered)[cut.part]
        assert np.array_equal(values, whole[part])
        assert (
            stored[0] == slice(1, 2) and stored[1].stop - stored[1].start <= -(-(part[1].stop - part[1].start) // 5) + 1
        )
