"""The metric pass@1: whether a generated program passes its tests; the program runs in the sandbox."""

import json

from speccascade_jax.metrics import sandbox
from speccascade_jax.metrics.sandbox.running import KINDS

SECONDS = 10.0
"""The time limit of one program, in seconds."""


def harness(*, before: str, after: str) -> str:
    """Returns a reference for `pass_at_1`, made of the code before the generated code and the tests after it."""
    return json.dumps({"before": before, "after": after}, ensure_ascii=False)


def program(prediction: str, reference: str) -> str:
    """Returns the program that tests `prediction`: the code before it, the prediction itself, and the code after it.

    Raises:
        ValueError: the reference was not made by `harness`.
    """
    try:
        parts = json.loads(reference)
        return parts["before"] + prediction + "\n" + parts["after"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"reference {reference[:80]!r} is not a test harness; make one with metrics.code.harness"
        ) from error


def pass_at_1(prediction: str, reference: str) -> list[float]:
    """Runs the program; returns a list over `KINDS` with 1 for the way in which the program ended and 0 elsewhere.

    "passed" is the first entry of `KINDS`.

    Raises:
        sandbox.SandboxUnavailable: this system cannot protect itself from the program, so the program was not run.
    """
    kind = sandbox.run(program(prediction, reference), timeout=SECONDS).kind
    return [float(kind == known_kind) for known_kind in KINDS]
