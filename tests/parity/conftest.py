"""Other implementations are compared with programs as users compile them."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def as_users_compile(all_optimised):
    """See `tests/conftest.py`."""
