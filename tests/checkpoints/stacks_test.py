"""Tests that every checkpoint format loads with stacked and with separate layers, however its layers are stored."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load, save
from speccascade_jax.checkpoints.converting import convert, rows
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.models import stacks
from speccascade_jax.models.families import model_from
from speccascade_jax.models.sharding import spec_of
from speccascade_jax.models.t5 import T5
from speccascade_jax.runtime.mesh import AXES
from tests.checkpoints.conftest import CONFIG
from tests.checkpoints.t5x_test import scanned
from tests.support.checkpoint_arrays import flat, same

SCANNED = model_from(dataclasses.replace(CONFIG, scan_layers=True))
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)


@pytest.fixture
def stacked(params):
    return stacks.stack_params(jax.tree.map(np.asarray, params))


def test_a_stacked_checkpoint_is_read_in_either_layout(tmp_path, arrays, stacked):
    save(tmp_path / "s", SCANNED, stacked)
    record = json.loads((tmp_path / "s/config.json").read_text())
    assert record["config"]["scan_layers"] and "decoder/layers/mlp/wo/kernel" in record["arrays"]
    model, params = load(tmp_path / "s")
    assert model == SCANNED and same(params, flat(stacked))
    model, params = load(tmp_path / "s", scan_layers=False)
    assert not model.config.scanned and same(params, arrays)
    assert {row.sources for row in rows(find(tmp_path / "s")) if row.name == "decoder/layers_1/mlp/wo/kernel"} == {
        "decoder/layers/mlp/wo/kernel[1]"
    }


def test_a_checkpoint_of_separate_layers_is_stacked(tmp_path, arrays, model, params, stacked):
    save(tmp_path / "u", model, params)
    assert "scan_layers" not in (tmp_path / "u/config.json").read_text()  # earlier versions wrote no such field
    loaded, read = load(tmp_path / "u", scan_layers=True)
    assert loaded == SCANNED and same(read, flat(stacked))
    convert(find(tmp_path / "u"), tmp_path / "again", "float32")
    assert same(load(tmp_path / "again")[1], arrays)


def test_a_conversion_keeps_stacks_and_writes_them_layer_by_layer(tmp_path, stacked, arrays):
    save(tmp_path / "s", SCANNED, stacked)
    convert(find(tmp_path / "s"), tmp_path / "again", "float32")
    # the description contains the fingerprint of all arrays
    assert describe(tmp_path / "again") == describe(tmp_path / "s")
    assert same(load(tmp_path / "again")[1], flat(stacked))
    convert(find(tmp_path / "s"), tmp_path / "narrow", "int8")
    assert "decoder/layers_0/mlp/wo/kernel_scales" in (tmp_path / "narrow/config.json").read_text()


def test_layers_stored_in_another_order_are_stacked_in_the_order_of_the_model(tmp_path, arrays, params, stacked):
    save(tmp_path / "u", T5(CONFIG), params)
    stored = find(tmp_path / "u")
    turned = dict(reversed(stored.tensors.items()))
    convert(dataclasses.replace(stored, config=SCANNED.config, tensors=turned), tmp_path / "s", "float32")
    assert same(load(tmp_path / "s")[1], flat(stacked))


def test_t5x_layers_become_stacks_of_the_first_axis(t5x, arrays, stacked):
    model, params = load(t5x(scanned(arrays, "")), scan_layers=True)
    assert model == SCANNED and same(params, flat(stacked))


def test_kernels_are_packed_for_separate_layers_only(tmp_path, stacked):
    save(tmp_path / "s", SCANNED, stacked)
    model, params = load(tmp_path / "s", prepared=True)
    assert not model.config.scanned and "layers_0" in params["decoder"]
    with pytest.raises(ValueError, match="scan_layers=True, but matrices that are packed .* leave scan_layers out"):
        load(tmp_path / "s", prepared=True, scan_layers=True)
    with pytest.raises(
        ValueError, match=r"is packed, and packed matrices are not stacked: load with scan_layers=False"
    ):
        stacks.stack_params(params)
    save(tmp_path / "narrow", SCANNED, stacked, dtype="int8")
    assert load(tmp_path / "narrow")[0] == SCANNED
    assert "decoder/layers_0/mlp/wo/kernel_scales" in (tmp_path / "narrow/config.json").read_text()


def test_stacks_on_a_mesh_have_fused_kernels_and_an_axis_that_is_not_split(tmp_path, stacked):
    save(tmp_path / "s", SCANNED, stacked)
    model, params = load(tmp_path / "s", prepared=True, mesh=MESH)
    assert model.config.scanned
    leaves = flatten_dict(params, sep="/")
    assert leaves["decoder/layers/mlp/wi_01/kernel"].shape == (3, 8, 20)
    for name, leaf in leaves.items():
        assert leaf.sharding.spec == spec_of(name) or not leaf.sharding.spec
    separate = load(tmp_path / "s", prepared=True, mesh=MESH, scan_layers=False)[1]
    assert same(stacks.unstack_params(jax.tree.map(np.asarray, params)), flat(separate))


def test_stacks_that_do_not_fit_the_configuration_are_refused(tmp_path, stacked):
    with pytest.raises(CheckpointError, match=r"incomplete.*decoder/layers_2/"):
        cut = {**stacked, "decoder": {**stacked["decoder"]}}
        cut["decoder"]["layers"] = jax.tree.map(lambda x: x[:2], stacked["decoder"]["layers"])
        save(tmp_path / "cut", SCANNED, cut)
