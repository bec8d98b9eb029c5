"""Tests of the small array functions."""

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.arrays import write_few_slots, write_slots


def test_a_few_slots_are_written_as_in_any_buffer():
    buffer = jnp.asarray(np.random.default_rng(0).integers(0, 99, (3, 12)))
    update, start = buffer[:, :4] + 100, jnp.array([0, 5, 8])
    np.testing.assert_array_equal(write_few_slots(buffer, update, start), write_slots(buffer, update, start, axis=1))
