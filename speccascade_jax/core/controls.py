"""Construction of `Controls` from Python numbers; meaningless numbers are refused before anything is compiled."""

from typing import Any, cast

import numpy as np

from speccascade_jax.core.checks import per_row
from speccascade_jax.core.types import Controls, Sampling


def make_sampling(
    batch: int, temperature: Any = 0.0, top_p: Any = 1.0, top_k: Any = 0, *, name: str = "temperature"
) -> Sampling:
    """Returns a `Sampling` of `[batch]` values on the host.

    Args:
        batch: number of rows.
        temperature: a number, or one number per row; 0 is greedy decoding.
        top_p: a number in (0, 1], or one number per row; 1 switches it off.
        top_k: a whole number, or one number per row; 0 switches it off.
        name: how an error calls the temperature.

    Raises:
        ValueError: temperature < 0, top_p outside (0, 1], top_k negative or not whole.
    """
    t, p, k = per_row(name, temperature, batch), per_row("top_p", top_p, batch), per_row("top_k", top_k, batch)
    _refuse(t < 0, name, t, "is negative; 0 is greedy decoding, 1 the model's own distribution")
    _refuse((p <= 0) | (p > 1), "top_p", p, "is outside (0, 1]; 1 switches it off")
    _refuse((k < 0) | (k != np.floor(k)), "top_k", k, "is not a whole number >= 0; 0 switches it off")
    return Sampling(*cast(Any, (t, p, k)))  # NumPy arrays: jit moves them to the device


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
    """Returns `Controls` for `batch` rows on the host; every argument is a number or one number per row.

    `draft_temperature=None` gives the draft the target's temperature. Errors as in `make_sampling`.
    """
    # Without a draft temperature of its own, the draft samples exactly as the target does.
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
