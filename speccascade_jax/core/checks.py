"""Checks of arguments before anything is compiled; an error message names the wrong value and a remedy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.names import shown

MOST = 2**31 - 1
LONGEST = 2**17
"""The upper limit of `max_new_tokens`, the number of tokens that one generation may write."""


def per_row(name: str, value: Any, batch: int) -> np.ndarray:
    """Converts a number, or one number per row, to a float32 array `[batch]`.

    Because the result's dtype and shape are fixed, JAX does not trace a program again if the caller passes an int
    instead of a float.

    Raises:
        ValueError: the value is not numeric, is not finite, or has another length than the batch.
    """
    try:
        numbers = np.asarray(value)
    except ValueError:  # a list of rows of different lengths
        numbers = np.asarray(None)
    # The kinds are booleans, complex numbers, objects, texts and dates; bfloat16 has kind "V" and is accepted.
    if numbers.dtype.kind in "bcOSUMm":
        raise ValueError(f"{name}={shown(value)} is not a number; give a float, or one per row")
    # Values beyond float32 become infinite here; the check below reports them.
    with np.errstate(over="ignore"):
        array = numbers.astype(np.float32)
    # Other shapes are refused, because some of them, such as `[1]` and `[batch, 1]`, would broadcast by accident.
    if array.shape not in ((), (batch,)):
        shapes = f"{array.shape}, but the batch has {batch} rows; give one number or [{batch}]"
        raise ValueError(f"{name} has shape {shapes}")
    if not np.all(finite := np.isfinite(array)):
        raise ValueError(f"{name}={float(numbers[~finite].ravel()[0])} is not finite; give a finite number")
    # The result always has the shape `[batch]`, so that one number and a number per row use the same compiled program.
    return np.broadcast_to(array, (batch,))


def several(name: str, values: Any, least: int = 0) -> tuple[Any, ...]:
    """Returns `values` as a tuple; raises ValueError for a single value, or for fewer than `least` values."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name}={shown(values)} is one value where a tuple is meant; write ({shown(values)},)")
    if len(values) < least:
        raise ValueError(f"{name}={shown(tuple(values))} is empty: give at least {least}")
    return tuple(values)


def check_text(name: str, text: str) -> None:
    """Raises a `ValueError` if a text contains half of a surrogate pair, which no vocabulary or file can encode."""
    # JSON can contain such a half as an escape sequence, so it may come from a file that another program wrote.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at character {error.start}, half of a surrogate pair"
        raise ValueError(f"{name} holds {half}: remove it, say by text.encode('utf-8', 'replace').decode()") from error


def check_sizes(config: Any, layers: str, *more: str) -> None:
    """Raises a `ValueError` if a model configuration has a size below 1 or too few rows in its embedding.

    Args:
        config: the configuration.
        layers: the name of the field with the number of layers. It may be 0: an early exit can precede all layers.
        more: names of further fields with sizes to check.
    """
    for name in (layers, "vocab_size", "d_model", "num_heads", "head_dim", "d_ff", *more):
        size, least = getattr(config, name), 0 if name == layers else 1
        if size < least:
            raise ValueError(f"{name} is {size}: give {'a positive number' if least else '0 or more'}")
    if config.num_embeddings + config.missing_rows < config.vocab_size:
        raise ValueError(
            f"num_embeddings is {config.num_embeddings}, below vocab_size {config.vocab_size}: "
            "the embedding needs a row for every real token; raise num_embeddings"
        )


def whole(name: str, value: Any, low: int, high: int = MOST) -> int:
    """Returns `value` as an int; raises ValueError if it is not a whole number from `low` to `high`."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # NaN fails every comparison, so `not value >= low` refuses it as well.
    if not number or not value >= low or value != math.inf and value != value // 1:
        raise ValueError(f"{name}={shown(value)} is not a whole number >= {low}")
    if value > high:
        raise ValueError(f"{name}={shown(value)} is too large: give at most {high}")
    return int(value)


def integer(name: str, value: Any) -> Any:
    """Converts a float or a NumPy number to an int; returns any other value unchanged, for the caller to check.

    Raises:
        ValueError: the number is a fraction or not finite.
    """
    if isinstance(value, (bool, int)) or not isinstance(value, (float, np.integer, np.floating)):
        return value
    if not math.isfinite(value) or value != int(value):
        # The message offers the integers below and above, because rounding would be a guess.
        near = f"{math.floor(value)} or {math.ceil(value)}" if math.isfinite(value) else "one"
        raise ValueError(f"{name}={float(value):g} is not a whole number: write {near}")
    return int(value)


def check_seed(seed: Any) -> int:
    """Returns `seed` as an int; raises ValueError unless it is a whole number that fits into 32 bits."""
    # The first check accepts numbers of up to 64 bits, so that the message below can name the limit of 32 bits.
    if whole("seed", seed, 0, 2**64) >= 2**32:
        raise ValueError(f"seed={shown(seed)} does not fit into 32 bits; choose one below {2**32}")
    return int(seed)


def check_example_ids(example_ids: Any, rows: int) -> np.ndarray:
    """Returns the ids that determine each row's random bits: `[rows]` whole numbers, by default `0 … rows − 1`.

    Raises:
        ValueError: the number of ids is not the number of rows, or an id is not a whole number below 2³¹.
    """
    if example_ids is None:
        return np.arange(rows, dtype=np.int32)
    # Ids are folded into random keys as int32. A larger id would wrap around and repeat another row's random bits.
    ids = np.asarray(example_ids)
    if ids.shape != (rows,):
        raise ValueError(f"example_ids have shape {ids.shape}, but the batch has {rows} rows; give one id per row")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"example_ids={ids.tolist()[:3]}… must be whole numbers from 0 to {2**31 - 1}")
    return ids
