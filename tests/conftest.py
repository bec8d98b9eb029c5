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


LONGEST_FIRST = (
    "laws_test", "configs_test", "benchmarks/command_test", "engine_t5_test", "stopping_test", "methods_test",
    "engine_edges_test", "stories_test", "docs_test", "training/loop_test", "killed_sweep_test", "drafters_nested_test",
)  # fmt: skip
"""Files that should not be what one of two processes is still busy with when the other is done."""


def pytest_collection_modifyitems(items):
    """Long files first, all else in its order."""

    def place(item):
        name = item.path.with_suffix("").as_posix()
        return next((n for n, end in enumerate(LONGEST_FIRST) if name.endswith(end)), len(LONGEST_FIRST))

    items.sort(key=place)


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
