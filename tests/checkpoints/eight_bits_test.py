"""Checkpoints in 8 bits: what they decode to, how small they are, and what is wrong with them in words."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints import CheckpointError, converting, eight_bits, load, reading, save
from speccascade_jax.models.products import quantised

KERNEL, EMBEDDING = "decoder/layers_1/mlp/wo/kernel", "token_embedder/embedding"


@pytest.fixture
def narrow(tmp_path, model, params):
    save(tmp_path / "narrow", model, params, "int8")
    return tmp_path / "narrow"


def test_every_number_is_off_by_half_a_127th_of_its_columns_largest_at_most(narrow, model, arrays):
    loaded, restored = load(narrow)
    found = flatten_dict(restored, sep="/")
    assert loaded == model and found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == jnp.float32
        if (kind := name.rsplit("/", 1)[-1]) not in ("kernel", "embedding"):
            np.testing.assert_array_equal(found[name], array)
            continue
        largest = np.abs(array).max(axis=0 if kind == "kernel" else 1, keepdims=True)
        off = np.abs(np.asarray(found[name]) - array)
        assert np.all(off <= largest / 254 * (1 + 1e-5)) and off.max() > 0, name


def test_loading_it_in_8_bits_changes_nothing_more(narrow):
    """Scales are the largest of a column through 127, there as here."""
    kernel = flatten_dict(load(narrow)[1], sep="/")[KERNEL]
    numbers, scales = quantised(np.asarray(kernel))
    np.testing.assert_allclose(numbers * scales, kernel, rtol=1e-6)


def test_what_is_stored(narrow):
    record = json.loads((narrow / "config.json").read_text())
    assert (record["format"], record["dtype"]) == (2, "int8")
    table = record["arrays"]
    assert table[KERNEL]["dtype"] == table[EMBEDDING]["dtype"] == "int8"
    kernel, embedding = (table[name + eight_bits.SCALES]["shape"] for name in (KERNEL, EMBEDDING))
    assert kernel == [1, table[KERNEL]["shape"][1]] and embedding == [table[EMBEDDING]["shape"][0], 1]
    assert {row["dtype"] for name, row in table.items() if "norm" in name or "rel_" in name} == {"float32"}


def test_other_dtypes_are_of_what_was_stored(narrow):
    whole = flatten_dict(load(narrow)[1], sep="/")[KERNEL]
    half = flatten_dict(load(narrow, dtype="bfloat16")[1], sep="/")[KERNEL]
    np.testing.assert_array_equal(half, np.asarray(whole).astype(jnp.bfloat16))


def test_conversions(narrow, tmp_path, arrays):
    """To float32 and back to 8 bits: the same numbers, whose scales may differ in the last bit."""
    converting.convert(reading.find(narrow), tmp_path / "wide", "float32")
    converting.convert(reading.find(tmp_path / "wide"), tmp_path / "again", "int8")
    first, again = (flatten_dict(load(path)[1], sep="/") for path in (narrow, tmp_path / "again"))
    for name in arrays:
        np.testing.assert_allclose(again[name], first[name], rtol=1e-6)


@pytest.mark.parametrize("shape", [None, (3, 1)])
def test_numbers_without_their_scales_are_refused(narrow, shape):
    stored = reading.find(narrow)
    numbers = eight_bits.Tensor((10, 8), "int8", narrow, lambda: None)
    tensors = {KERNEL: numbers}
    if shape:
        tensors[KERNEL + eight_bits.SCALES] = eight_bits.Tensor(shape, "float32", narrow, lambda: None)
    said = "there are no scales" if shape is None else r"there are scales \[3, 1\]"
    with pytest.raises(CheckpointError, match=rf"{KERNEL} holds 8 bits \[10, 8\], but {said} for them; "):
        eight_bits.widened(stored.path, tensors)


def test_flipped_numbers_are_found(narrow):
    """Their digests are those of the stored bytes."""
    path = narrow / "config.json"
    record = json.loads(path.read_text())
    record["arrays"][KERNEL]["blake2b"] = "0" * 32
    record.pop("blake2b")
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=KERNEL):
        load(narrow)
