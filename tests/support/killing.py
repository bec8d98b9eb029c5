"""A killed process, simulated by an exception: earlier writes stay, later ones do not happen."""

import contextlib

import pytest


class KilledError(Exception):
    """The kill of the process."""


@contextlib.contextmanager
def killed_at(where, name, call):
    """Ends the block at the `call`-th call of `where.name`, before its effect; yields the calls' arguments."""
    plain, calls = getattr(where, name), []

    def dies(*args, **more):
        if len(calls) == call - 1:
            raise KilledError
        calls.append(args)
        return plain(*args, **more)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(where, name, dies)
        yield calls
