"""Histograms of the divergence of draft and target at each position, as in Holsman et al. (2025), Figure 3.

A survey computes a histogram with `count` and writes it into its JSON file; `read` reads such files for a figure. Needs
no JAX.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.storage.files import expanded

BINS = 30
_LAST = {"js": 0.3, "tv": 0.3, "js_reference": 0.3, "kl": 1.5, "kl_reversed": 1.5}
LAST_EDGES = {f"{name}{form}": last for name, last in _LAST.items() for form in ("", "_scaled")}
"""Last edge of the histogram of each quantity in a survey, the same in all files. The paper truncates `js` at 0.3."""
UNITS = {"js": "bits", "js_reference": "nats", "kl": "nats", "kl_reversed": "nats"}


def check(quantity: str) -> None:
    """Raises ValueError if there is no histogram of a quantity.

    Raises:
        ValueError: the message names the most similar quantities.
    """
    if quantity not in LAST_EDGES:
        near = names.hint(quantity, LAST_EDGES)
        raise ValueError(f"no histogram of {quantity!r}: {near}choose one of {', '.join(LAST_EDGES)}")


def count(quantity: str, values: np.ndarray) -> dict[str, Any]:
    """Returns the histogram of `values` `[N]`, each at least 0 and possibly infinite, as JSON values.

    Returns:
        `quantity`; `edges` (31, ascending) of bins closed below and open above; `counts` (30); `above`: number of
        values at or above the last edge; `median` (`None` if infinite).

    Raises:
        ValueError: no such quantity, or no values.
    """
    check(quantity)
    if not len(values):
        raise ValueError(f"no positions for a histogram of {quantity}: the outputs are empty")
    edges = np.linspace(0.0, LAST_EDGES[quantity], BINS + 1)
    inside = values[values < edges[-1]]
    median = float(np.median(values))
    return {
        "quantity": quantity,
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "counts": np.histogram(inside, edges)[0].tolist(),
        "above": len(values) - len(inside),
        "median": median if np.isfinite(median) else None,
    }


def line(histogram: dict[str, Any]) -> str:
    """Returns a one-line description of a histogram."""
    total = sum(histogram["counts"]) + histogram["above"]
    median = "infinite" if histogram["median"] is None else f"{histogram['median']:.3g}"
    beyond = f"{histogram['above'] / total:.1%} of {total:,} positions at {histogram['edges'][-1]:g} or above"
    return f"{name_of(histogram['quantity'])} of draft and target: median {median}, {beyond}"


def name_of(quantity: str) -> str:
    """Returns the name of a quantity for figures and tables, with its unit."""
    plain = quantity.removesuffix("_scaled")
    details = ", ".join([*([UNITS[plain]] if plain in UNITS else []), *(["p̃, q̃"] if plain != quantity else [])])
    return plain + (f" ({details})" if details else "")


def read(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Returns the surveys in files that `experiments/survey.py` wrote; their histograms must be of the same quantity.

    Raises:
        ValueError: a file is not a survey, or the files have histograms of different quantities.
        OSError: a file cannot be read.
    """
    surveys, seen = list[dict[str, Any]](), dict[str, str | Path]()
    for path in paths:
        try:
            survey = json.loads(expanded(path).read_text())
            survey["task"], survey["pair"], survey["along"], survey["histogram"]["counts"]
        except (ValueError, TypeError, KeyError) as error:
            why = "give the file that experiments/survey.py wrote with --gin.survey.output"
            raise ValueError(f"{expanded(path)} holds no histogram: {why}") from error
        surveys.append(survey)
        seen[survey["histogram"]["quantity"]] = path
    if len(seen) > 1:
        listed = ", ".join(f"{quantity} in {path}" for quantity, path in seen.items())
        raise ValueError(f"histograms of different quantities ({listed}): draw one figure for each")
    return surveys
