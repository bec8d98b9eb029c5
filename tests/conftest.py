"""What every test shares: hundreds of programs are compiled in one process, and given back in time."""

import jax
import pytest

from speccascade_jax.programs import release_when_crowded


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Drops compiled programs between tests before the process runs out of memory maps."""
    yield
    release_when_crowded()


@pytest.fixture(autouse=True, scope="module")
def no_persistent_cache_is_left_on():
    """A sweep in the test's own process turns the persistent compilation cache on: off again for the others."""
    before = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", before)
