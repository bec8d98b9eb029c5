"""Construction of `Controls` (α, temperatures and other numbers per row) from Python numbers, with checks of ranges."""

from typing import Any, cast

import numpy as np

from speccascade_jax.core.checks import per_row
from speccascade_jax.core.types import Controls, Sampling


def make_sampling(
    batch: int, temperature: Any = 0.0, top_p: Any = 1.0, top_k: Any = 0, *, name: str = "temperature"
) -> Sampling:
    """Returns a `Sampling` (temperature, top-p, top-k) that holds NumPy arrays with one number per row.

    Args:
        batch: number of rows.
        temperature: a number, or one number per row; 0 is greedy decoding.
        top_p: a number in (0, 1], or one number per row; 1 switches top-p off.
        top_k: a whole number, or one number per row; 0 switches top-k off.
        name: the name of the temperature in error messages.

    Raises:
        ValueError: temperature < 0, top_p outside (0, 1], top_k negative or not whole.
    """
    t, p, k = per_row(name, temperature, batch), per_row("top_p", top_p, batch), per_row("top_k", top_k, batch)
    _refuse(t < 0, name, t, "is negative; give 0 for greedy decoding, 1 for the model's own distribution")
    _refuse((p <= 0) | (p > 1), "top_p", p, "is outside (0, 1]; 1 switches it off")
    _refuse((k < 0) | (k != np.floor(k)), "top_k", k, "is not a whole number >= 0; 0 switches it off")
    return Sampling(*cast(Any, (t, p, k)))  # the arrays stay on the host, because jit moves them to the device


def make_controls(
    batch: int,
    *,
    alpha: Any = 0.0,
    temperature: Any = 0.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
    stop_threshold: Any = 0.0,
    inner: tuple[Controls, ...] = (),
) -> Controls:
    """Returns `Controls` for `batch` rows as NumPy arrays; a setting is one number for all rows, or one per row.

    With `draft_temperature=None` the draft has the target's temperature. In a hierarchy of draft-and-verify engines,
    `inner` holds the controls of the engines that draft for this one. A number outside its range raises a ValueError,
    as in `make_sampling`.

    Examples:
        >>> from speccascade_jax.extend import make_controls
        >>> controls = make_controls(2, alpha=[0.1, 0.5], temperature=1.0)
        >>> print(controls.alpha, controls.draft.temperature, controls.target.top_p)
        [0.1 0.5] [1. 1.] [1. 1.]
    """
    # If no draft temperature is given, the draft samples with the target's settings.
    draft = target = make_sampling(batch, temperature, top_p, top_k)
    if draft_temperature is not None:
        draft = make_sampling(batch, draft_temperature, top_p, top_k, name="draft_temperature")
    alphas: Any = per_row("alpha", alpha, batch)
    thresholds: Any = per_row("stop_threshold", stop_threshold, batch)
    return Controls(alphas, thresholds, draft, target, inner)


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, why: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name}={float(values[row]):g} (row {row}) {why}")
