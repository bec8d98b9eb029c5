"""Fixtures for comparisons with other implementations: programs are compiled as users compile them."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def as_users_compile(all_optimised):
    """Compiles with all optimizations (see `tests/conftest.py`)."""
