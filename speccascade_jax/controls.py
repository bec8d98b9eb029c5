"""Building `Controls` from Python numbers, and refusing what has no meaning, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from speccascade_jax.types import Controls, Sampling


def per_row(name: str, value: Any, batch: int) -> np.ndarray:
    """float32 `[batch]` from a number or one number per row.

    A Python float, a NumPy float and an int would each retrace; one dtype and one shape never do.

    Raises:
        ValueError: not numeric, of another length than the batch, or not finite.
    """
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not a number; give a float, or one per row") from error
    if array.ndim > 1 or (array.ndim == 1 and array.shape[0] != batch):
        raise ValueError(
            f"{name} has shape {array.shape}, but the batch has {batch} rows; give one number or [{batch}]"
        )
    if not np.all(np.isfinite(array)):
        bad = array if array.ndim == 0 else array[~np.isfinite(array)][0]
        raise ValueError(f"{name}={float(bad)} is not finite; give a finite number")
    return np.broadcast_to(array, (batch,))


def several(name: str, values: Any, least: int = 0) -> None:
    """Refuse one value where a tuple is meant, and a tuple of fewer than `least`.

    Raises:
        ValueError: as above.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name}={values!r} is one value where a tuple is meant; write ({values!r},)")
    if len(values) < least:
        raise ValueError(f"{name}={tuple(values)!r} is empty: give at least {least}")


def make_sampling(
    batch: int, temperature: Any = 0.0, top_p: Any = 1.0, top_k: Any = 0, *, name: str = "temperature"
) -> Sampling:
    """A `Sampling` of `[batch]` values; `name` is what an error calls the temperature.

    Raises:
        ValueError: temperature < 0, top_p outside (0, 1], top_k negative or not whole.
    """
    t, p, k = (per_row(n, v, batch) for n, v in ((name, temperature), ("top_p", top_p), ("top_k", top_k)))
    _refuse(t < 0, name, t, "is negative; 0 is greedy decoding, 1 the model's own law")
    _refuse((p <= 0) | (p > 1), "top_p", p, "is outside (0, 1]; 1 switches it off")
    _refuse((k < 0) | (k != np.floor(k)), "top_k", k, "is not a whole number >= 0; 0 switches it off")
    # unlike jnp.asarray, device_put compiles nothing
    return Sampling(*jax.device_put((t, p, k)))


def make_controls(
    batch: int,
    *,
    alpha: Any = 0.0,
    temperature: Any = 0.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
    stop_threshold: Any = 0.0,
    inner: Controls | None = None,
) -> Controls:
    """`Controls` for `batch` rows; every argument is a number or one number per row.

    `draft_temperature=None` gives the draft the target's temperature. Errors as in `make_sampling`.
    """
    if draft_temperature is None:
        draft = make_sampling(batch, temperature, top_p, top_k)
    else:
        draft = make_sampling(batch, draft_temperature, top_p, top_k, name="draft_temperature")
    return Controls(
        alpha=jax.device_put(per_row("alpha", alpha, batch)),
        stop_threshold=jax.device_put(per_row("stop_threshold", stop_threshold, batch)),
        draft=draft,
        target=make_sampling(batch, temperature, top_p, top_k),
        inner=inner,
    )


def whole(name: str, value: Any, low: int) -> int:
    """`value` as an int >= `low`, or a ValueError that names it."""
    number = float(value) if isinstance(value, (int, float, np.integer, np.floating)) else math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number == int(number) and number >= low):
        raise ValueError(f"{name}={value!r} is not a whole number >= {low}")
    return int(number)


def check_seed(seed: Any) -> int:
    """A seed: a whole number that fits into 32 bits, or a ValueError."""
    number = whole("seed", seed, 0)
    if number >= 2**32:
        raise ValueError(f"seed={seed} does not fit into 32 bits; choose one below {2**32}")
    return number


def own_temperature(method: str, temperature: Any, draft_temperature: Any) -> Any:
    """The temperature of a method's last word: the draft's where the draft writes alone, else the target's."""
    alone = method == "autoregressive_draft" and draft_temperature is not None
    return draft_temperature if alone else temperature


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, why: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name}={float(values[row]):g} (row {row}) {why}")
