"""Fixtures for checkpoints: a tiny T5, and a small writer of T5X's native format and its variants."""

import dataclasses
import shutil
from pathlib import Path

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints import save
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.data.directory import data_directory
from speccascade_jax.models.t5 import T5, T5Config

CONFIG = T5Config(24, 24, 8, 2, head_dim=3, d_ff=10, num_encoder_layers=2, num_decoder_layers=3)


def random_arrays(config: T5Config, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in sorted(expected_shapes(config).items())}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return random_arrays(CONFIG)


@pytest.fixture
def model() -> T5:
    return T5(CONFIG)


@pytest.fixture
def params(arrays):
    return unflatten_dict({name: jnp.asarray(a) for name, a in arrays.items()}, sep="/")


@pytest.fixture
def wide() -> tuple[T5, dict]:
    """Returns a model and parameters with several arrays of more than a few kilobytes."""
    config = dataclasses.replace(CONFIG, vocab_size=500, num_embeddings=512, d_model=64, head_dim=16, d_ff=96)
    return T5(config), unflatten_dict({n: jnp.asarray(a) for n, a in random_arrays(config).items()}, sep="/")


def write_array(folder: Path, array: np.ndarray) -> None:
    dtype = "bfloat16" if array.dtype == jnp.bfloat16 else array.dtype.newbyteorder("<").str
    metadata = {"shape": list(array.shape), "chunks": list(array.shape), "dtype": dtype, "fill_value": None}
    metadata |= {"compressor": {"id": "gzip", "level": 1}, "dimension_separator": "."}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}, "metadata": metadata}
    ts.open(spec, create=True).result().write(array).result()


def plain_pointer(folder: str, array: np.ndarray) -> dict:
    metadata = {"shape": list(array.shape), "chunks": list(array.shape), "compressor": {"id": "gzip"}}
    kvstore = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "zarr", "dtype": array.dtype.name, "kvstore": kvstore, "metadata": metadata}


def write_t5x(path: Path, arrays, *, pointer=plain_pointer, version=3, inline=(), at_top=False) -> Path:
    """Writes a native checkpoint; `pointer(folder, array)` returns a msgpack entry; `inline` arrays stay in msgpack."""
    path.mkdir(parents=True)
    leaves = {}
    for name, array in arrays.items():
        folder = "target." + name.replace("/", ".")
        if name in inline:
            leaves[name] = array
            continue
        write_array(path / folder, array)
        leaves[name] = pointer(folder, array)
    target = unflatten_dict(leaves, sep="/")
    state = {"step": 7, "param_states": {"gone": {"v": plain_pointer("state.gone.v", np.zeros(3, np.float32))}}}
    content = {"target": target, "state": state}
    content = content if at_top else {"version": version, "optimizer": content}
    (path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return path


@pytest.fixture
def golden():
    """Returns a function from names of folders, such as "t5x_golden", to the path among the data; skips if absent."""

    def folder(*parts: str) -> Path:
        path = data_directory().joinpath(*parts)
        if not path.exists():
            pytest.skip(f"{path} is not there: set SPECCASCADE_DATA to the folder that holds t5x_golden and models")
        return path

    return folder


@pytest.fixture
def t5x(tmp_path):
    """Returns a function that writes a native checkpoint `run/checkpoint_<step>` below `tmp_path`."""

    def write(arrays, step: int = 7, **options) -> Path:
        return write_t5x(tmp_path / "run" / f"checkpoint_{step}", arrays, **options)

    return write


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory):
    """Returns the folder of the fixtures `model` and `params`, written by `save`."""
    flat = {name: jnp.asarray(array) for name, array in random_arrays(CONFIG).items()}
    save(path := tmp_path_factory.mktemp("saved") / "mine", T5(CONFIG), unflatten_dict(flat, sep="/"))
    return path


@pytest.fixture
def saved(tmp_path, saved_once):
    """Returns the folder of a copy of `saved_once`."""
    return shutil.copytree(saved_once, tmp_path / "mine")
