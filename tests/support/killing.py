"""A process that is killed, as an exception: what it wrote before stays, what it would have written does not come."""

import contextlib

import pytest


class KilledError(Exception):
    """Stands for the process being killed."""


@contextlib.contextmanager
def killed_at(where, name, call):
    """The block dies at the `call`-th call of `where.name`, before that does anything; yields the calls' arguments."""
    plain, calls = getattr(where, name), []

    def dies(*args, **more):
        if len(calls) == call - 1:
            raise KilledError
        calls.append(args)
        return plain(*args, **more)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(where, name, dies)
        yield calls
