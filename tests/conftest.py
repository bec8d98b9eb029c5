"""What every test shares: hundreds of programs are compiled in one process, given back in time, and never kept."""

import os

import jax
import pytest

from speccascade_jax import compilation_cache
from speccascade_jax.programs import release_when_crowded

# for this process and those that tests start: nothing is written into the user's cache, nothing stale is read from it
os.environ[compilation_cache.VARIABLE] = "off"
# LLVM optimises a program for longer than the few rounds of a test gain by it; what XLA itself does stays as it is
QUICKLY = "jax_disable_most_optimizations"
os.environ[QUICKLY.upper()] = "1"
jax.config.update(QUICKLY, True)


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Drops compiled programs between tests before the process runs out of memory maps."""
    yield
    release_when_crowded()


@pytest.fixture(scope="module")
def optimised():
    """Compiles a file's programs as users do: where running costs more than compiling."""
    jax.config.update(QUICKLY, False)
    yield
    jax.config.update(QUICKLY, True)
