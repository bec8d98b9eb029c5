"""Tests of the check of a mesh's shape, before any device is used; a single device has no mesh."""

from __future__ import annotations

import jax
import pytest

from speccascade_jax.runtime import mesh

COUNT = len(jax.devices())


@pytest.mark.parametrize(("shape", "message"), [
    ((2,), r"mesh=\(2,\) has 1 numbers: give two, \(data, model\)"),
    ((1, 2, 3), "has 3 numbers: give two"),
    ((0, 1), "mesh's data axis.*0"),
    ((1, 1.5), "mesh's model axis.*1.5"),
    (8, r"mesh=8 is one value where two are meant: write \(data, model\), say \(2, 1\)"),
    ((4, COUNT), rf"mesh=\(4, {COUNT}\) needs {4 * COUNT} devices, but there are {COUNT}"),
])  # fmt: skip
def test_invalid_and_too_large_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        mesh.make(shape)


def test_one_device_makes_no_mesh():
    assert mesh.make((1, 1)) is None
