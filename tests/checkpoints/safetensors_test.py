"""The container: what the library writes is read, and what is damaged is named."""

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


def rewrite(file, change) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_every_dtype_is_read_as_it_was_written(file, arrays):
    opened = open_file(file)
    assert opened.keys() == arrays.keys() | {"empty", "one", "scalar"}
    for name, array in arrays.items():
        got = opened[name].read()
        assert (opened[name].shape, opened[name].dtype) == ((3, 4), array.dtype.name)
        assert got.dtype == array.dtype and np.array_equal(got, array)
    assert opened["empty"].read().shape == (0, 3)
    assert opened["scalar"].read() == 2.5


def test_arrays_lie_where_jax_adopts_them(file):
    arrays = [tensor.read() for tensor in open_file(file).values()]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size)


def test_truncation_names_the_tensors_that_are_lost(file):
    whole = file.read_bytes()
    last = list(open_file(file))[-2:]
    file.write_bytes(whole[:-13])
    with pytest.raises(CheckpointError, match=rf"a.safetensors is truncated: 13 of .* tensors \(.*{last[-1]}"):
        open_file(file)
    for length in (0, 7, 8, 100):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a.safetensors is damaged or no safetensors file: its header"):
            open_file(file)


def test_bytes_after_the_last_tensor(file):
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"a.safetensors is damaged .*: 4 bytes follow its last tensor"):
        open_file(file)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F8_E4M3"}, r"a.safetensors: tensor tensor.F32 has dtype 'F8_E4M3', known are F64, .*quantised"),
        ({"shape": [3, 5]}, r"tensor tensor.F32 of shape \[3, 5\] and dtype F32 can't lie in bytes"),
        ({"shape": [-3, -4]}, r"tensor tensor.F32 of shape \[-3, -4\]"),
        ({"shape": None}, r"the header's entry of tensor tensor.F32 is \{'dtype': 'F32', 'shape': None"),
        *(
            ({name: value}, r"a\.safetensors.* tensor tensor.F32")
            for name, values in {
                "shape": ([1.0], ["1"], [1e999], 1, [True]),
                "data_offsets": ([0], "04", [0, 4.0]),
                "dtype": (["F32"],),
            }.items()
            for value in values
        ),
    ],
)
def test_damaged_entries_name_the_tensor(file, entry, said):
    rewrite(file, lambda header: header["tensor.F32"].update(entry))
    with pytest.raises(CheckpointError, match=said):
        open_file(file)


def test_tensors_that_overlap(file):
    def move(header):
        header["tensor.F32"]["data_offsets"] = header["tensor.I32"]["data_offsets"]

    rewrite(file, move)
    with pytest.raises(CheckpointError, match=r"tensor \S+ begins at byte \d+ of the data, not at \d+"):
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


@pytest.mark.parametrize("header", [b"[" * 100_000, b"9" * 5000, b"{", b"[1]"])
def test_headers_that_are_no_object_name_the_file(tmp_path, header):
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"header of .*a\.safetensors is damaged"):
        open_file(tmp_path / "a.safetensors")
