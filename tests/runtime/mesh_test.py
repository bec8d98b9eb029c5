"""A mesh's shape is checked before a device is asked for, and one device is no mesh."""

from __future__ import annotations

import jax
import pytest

from speccascade_jax.runtime import mesh


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2,), r"mesh=\(2,\) has 1 numbers: give two, \(data, model\)"),
        ((1, 2, 3), "has 3 numbers: give two"),
        ((0, 1), "mesh's data axis.*0"),
        ((1, 1.5), "mesh's model axis.*1.5"),
        (8, "mesh"),
    ],
)
def test_what_is_no_shape_is_refused(shape, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mesh.checked(shape)


def test_a_mesh_larger_than_the_devices_is_refused():
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"mesh=\(4, {count}\) takes {4 * count} devices and there are {count}"):
        mesh.make((4, count))


def test_one_device_is_no_mesh():
    assert mesh.make((1, 1)) is None
