"""What every test shares: hundreds of programs are compiled in one process, given back in time, and never kept."""

import os

import pytest

from speccascade_jax import compilation_cache
from speccascade_jax.programs import release_when_crowded

# for this process and those that tests start: nothing is written into the user's cache, nothing stale is read from it
os.environ[compilation_cache.VARIABLE] = "off"


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Drops compiled programs between tests before the process runs out of memory maps."""
    yield
    release_when_crowded()
