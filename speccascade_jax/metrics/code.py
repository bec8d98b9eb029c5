"""pass@1: whether a generated program passes its tests, run in the sandbox."""

import json

from speccascade_jax.metrics import sandbox
from speccascade_jax.metrics.sandbox.running import KINDS

SECONDS = 10.0
"""Time limit of one program."""


def harness(*, before: str, after: str) -> str:
    """Returns a reference for `pass_at_1`: the text before the generated code, and the tests after it."""
    return json.dumps({"before": before, "after": after}, ensure_ascii=False)


def program(prediction: str, reference: str) -> str:
    """Returns the program that tests `prediction`: the reference's code before and after it.

    Raises:
        ValueError: the reference is no `harness`.
    """
    try:
        parts = json.loads(reference)
        return parts["before"] + prediction + "\n" + parts["after"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"reference {reference[:80]!r} is not a test harness; make one with metrics.code.harness"
        ) from error


def pass_at_1(prediction: str, reference: str) -> list[float]:
    """Runs the program and returns a one-hot list over `KINDS`: 1 for the way in which it ended, 0 for the others.

    "passed" is the first kind.

    Raises:
        sandbox.SandboxUnavailable: this system offers no protection; nothing was run.
    """
    kind = sandbox.run(program(prediction, reference), timeout=SECONDS).kind
    return [float(kind == known_kind) for known_kind in KINDS]
