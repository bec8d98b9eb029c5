"""Tests of safetensors files: those that the library writes are read, and errors name damaged parts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.checkpoints import CheckpointError
from speccascade_jax.checkpoints.safetensors import DTYPES, open_file

library = pytest.importorskip("safetensors.numpy", reason="writing test files needs safetensors")


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {f"tensor.{word}": rng.integers(0, 2, (3, 4)).astype(jnp.dtype(name)) for word, name in DTYPES.items()}


@pytest.fixture
def file(tmp_path, arrays):
    more = {"empty": np.zeros((0, 3), np.float32), "one": np.float32([7]), "scalar": np.array(2.5, np.float32)}
    library.save_file(arrays | more, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


def test_every_dtype_survives_a_round_trip(file, arrays):
    opened = open_file(file)
    assert opened.keys() == arrays.keys() | {"empty", "one", "scalar"}
    for name, array in arrays.items():
        got = opened[name].read()
        assert (opened[name].shape, opened[name].dtype) == ((3, 4), array.dtype.name)
        assert got.dtype == array.dtype and np.array_equal(got, array)
    assert opened["empty"].read().shape == (0, 3)
    assert opened["scalar"].read() == 2.5


def test_arrays_are_aligned_so_that_jax_need_not_copy(file):
    arrays = [tensor.read() for tensor in open_file(file).values()]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)


def test_truncation_names_the_tensors_that_are_lost(file):
    whole = file.read_bytes()
    last = list(open_file(file))[-2:]
    file.write_bytes(whole[:-13])
    with pytest.raises(CheckpointError, match=rf"a.safetensors is truncated: 13 of .* tensors \(.*{last[-1]}"):
        open_file(file)


def with_header(content):
    """Returns a change that replaces a file by a header alone."""
    return lambda whole: len(content).to_bytes(8, "little") + content


def entry(name="tensor.F32", **changes):
    """Returns a change of a tensor's entry in the header."""

    def change(whole):
        end = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:end])
        header[name] |= changes
        return with_header(json.dumps(header).encode())(whole) + whole[end:]

    return change


NO_SIZES = {"shape": ([1.0], ["1"], [1e999], 1, [True]), "data_offsets": ([0], "04", [0, 4.0]), "dtype": (["F32"],)}
DAMAGES = [
    *(
        (lambda whole, size=size: whole[:size], r"damaged or not a safetensors file: its header")
        for size in (0, 7, 8, 100)
    ),
    (lambda whole: whole + b"more", r"damaged .*: 4 bytes follow its last tensor"),
    (entry(dtype="F8_E4M3"), r"tensor tensor.F32 has dtype 'F8_E4M3', but only F64, .*quantised"),
    (entry(shape=[3, 5]), r"tensor tensor.F32 of shape \[3, 5\] and dtype F32 does not fit into bytes"),
    (entry(shape=[-3, -4]), r"tensor tensor.F32 of shape \[-3, -4\]"),
    (entry(shape=None), r"the header's entry for tensor tensor.F32 is invalid: \{'dtype': 'F32', 'shape': None"),
    *((entry(**{name: value}), "tensor tensor.F32") for name, values in NO_SIZES.items() for value in values),
    # Two tensors overlap.
    (entry(name="one", data_offsets=[0, 4]), r"tensor \S+ begins at byte \d+ of the data, not at \d+"),
    *((with_header(text), "is damaged") for text in (b"[" * 100_000, b"9" * 5000, b"{", b"[1]")),
]


@pytest.mark.parametrize(("change", "said"), DAMAGES)
def test_damage_is_named_with_the_file_and_the_tensor(file, change, said):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"a\.safetensors.* {said}"):
        open_file(file)


@settings(max_examples=200, deadline=None)
@given(bit=st.integers(0, 10_000))
def test_no_flipped_bit_of_the_header_reads_outside_the_file(tmp_path_factory, bit):
    folder = tmp_path_factory.getbasetemp() / "flips"
    folder.mkdir(exist_ok=True)
    file = folder / "b.safetensors"
    library.save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)}, file)
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    bit %= 8 * header
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    try:
        opened = open_file(file)
    except CheckpointError as error:
        assert "b.safetensors" in str(error)
    else:
        assert sum(tensor.read().nbytes for tensor in opened.values()) == len(content) - header
