"""Tasks whose data may be absent on a machine; their tests are then skipped."""

import pytest

from speccascade_jax.data.tasks import table


def load_or_skip(name: str, split: str, limit: int | None = None) -> list[table.Example]:
    """Returns the examples of a task; skips the test if its data are missing."""
    try:
        return table.get_task(name).load(split, limit)
    except FileNotFoundError as error:
        pytest.skip(str(error))
