"""Compiled programs are given back when the process runs out of room for more, and not before."""

import jax
import jax.numpy as jnp

from speccascade_jax.runtime import program_memory


def test_programs_are_dropped_only_when_crowded():
    double = jax.jit(lambda x: 2 * x)
    assert double(jnp.float32(1)) == 2 and double._cache_size() == 1
    assert not program_memory.release_when_crowded(share=1.0)
    assert double._cache_size() == 1
    assert program_memory.release_when_crowded(share=0.0) == program_memory._MAPS.exists()
    assert double._cache_size() == (0 if program_memory._MAPS.exists() else 1)
    assert double(jnp.float32(2)) == 4


def test_systems_without_proc_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(program_memory, "_MAPS", tmp_path / "maps")
    assert not program_memory.release_when_crowded(share=0.0)
