"""Records in the form that a sweep writes, from formulas instead of models: quick and seeded.

Their curves have the shape of those of Narasimhan et al. (2024).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from typing import Any

import numpy as np

from speccascade_jax.evaluation import curves
from speccascade_jax.methods.settings import Settings
from speccascade_jax.methods.table import METHODS
from speccascade_jax.metrics import quality
from speccascade_jax.results.store.result_store import FORMAT

RULES = {
    "spec_decode": (None,),
    "lossy": (0.0, 0.2, 0.4, 0.6, 0.8),
    "chow": (0.1, 0.3, 0.5, 0.7, 0.9),
    "diff": (-0.2, 0.0, 0.1, 0.3, 0.6),
    "opt": (-0.2, 0.0, 0.2, 0.5, 0.9),
    "token_v3": (0.3, 0.8, 0.9, 0.97, 1.0),
}
_SHARED: dict[str, Any] = {
    "pair": "tatoeba_en_de", "split": "test", "max_new_tokens": 64, "quality_examples": 64, "quality_batch": 32,
    "first_example": 0, "latency_examples": 16, "latency_trials": 2, "resamples": 200, "top_p": 1.0, "top_k": 0,
    "draft_temperature": None,
}  # fmt: skip


def coordinates(
    task: str = "tiny_translation", temperature: float = 1.0, seeds: tuple[int, ...] = (0,)
) -> list[dict[str, Any]]:
    """Returns the points of a small sweep, each as a dictionary of its settings."""
    out = []
    for seed in seeds:
        shared = {**_SHARED, "task": task, "temperature": temperature, "seed": seed}
        for end in ("autoregressive", "autoregressive_draft"):
            out.append({**shared, "method": end, "alpha": None, "block_size": None, "bonus": None})
        for rule, grid in RULES.items():
            out += [{**shared, "method": rule, "alpha": alpha, "block_size": 5, "bonus": "rule"} for alpha in grid]
    return out


def facts(point: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts about the point's method that a sweep stores; for an unknown method, those of a rule."""
    name = point["method"]
    settings = Settings(method=name if name in METHODS else "token_v3", rule=point.get("rule"), stop=point.get("stop"))
    chosen = {"rule": None, "stop": None, "stop_threshold": None, "head": None, "drafters": ["draft"]} | curves.facts(
        settings
    )
    known = {"curve": curves.curve(settings), "family": curves.family(settings)}
    if name not in METHODS:
        chosen |= {"title": name, "law": name, "rank": len(METHODS)}
        known = {"curve": name, "family": name}
    if (stop := point.get("stop_threshold")) is not None:
        known["curve"] = f"{point.get('family', known['family'])}@{stop:g}"
    return chosen | known


def key_of(point: dict[str, Any]) -> str:
    """Returns a hash that has the form of a record's key."""
    return hashlib.blake2b(json.dumps(point, sort_keys=True).encode(), digest_size=16).hexdigest()


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a point without running anything; equal points give equal records."""
    noise = random.Random(key_of(point))
    key, point = key_of(point), facts(point) | point
    kept, gain = _kept_share(point), {"token_v3": 7.0, "opt": 1.5, "diff": 1.0, "chow": 0.4}.get(point["method"], 0.0)
    score = 13.0 + gain * math.sin(math.pi * min(kept * 1.05, 1.0)) - 4.0 * kept**4 + noise.gauss(0, 0.25)
    relative = {"autoregressive": 1.0, "autoregressive_draft": 0.12}.get(point["method"], 1.15 - 0.62 * kept)
    relative *= 1 + noise.gauss(0, 0.01)
    speculative = point["block_size"] is not None
    judged, (times, target) = _judged(key, score), _timed(key, relative)
    score, relative = judged["value"], sum(times) / sum(target)
    return {
        "key": key, "format": FORMAT, "point": point, "configuration": "", "started": "2026-01-01T00:00:00+00:00",
        "wall_seconds": 1.0, "fingerprints": {"weights": "fake", "examples": "fake"},
        "versions": {"python": "3"},
        "device": {"platform": "cpu", "kind": "cpu", "count": 1, "cpus": 2, "processor": "fake", "system": "fake"},
        "counts": {"drafted": 1000 if speculative else 0}, "inconclusive": not speculative, "by_position": {},
        "measures": {
            "rejection_rate": 1 - kept if speculative else None,
            "block_efficiency": 1 + 4 * kept if speculative else None,
            "rejections_per_token": (1 - kept) / 2 if speculative else None,
        },
        "quality": {
            "metric": "bleu", "low": score - 1.2, "high": score + 1.3, "interval": "95% bootstrap", **judged,
            "examples": 64, "tokens_per_example": 30.0, "all": {"bleu": score}, "signature": "fake",
        },
        "target_latency": {"ms_per_example": _over_trials(60.0, 2.0), "per_example_ms": target},
        "latency": {
            "ms_per_example": _over_trials(60 * relative, 2.0), "ms_per_token": _over_trials(2 * relative, 0.1),
            "per_example_ms": times, "tokens_per_example": 30.0, "examples": 16, "trials": 2,
        },
        "relative_latency": _over_trials(relative, 0.02) | {"per_token": relative},
    }  # fmt: skip


def _judged(key: str, score: float) -> dict[str, Any]:
    """Returns BLEU near `score` and its counts; the difficulty of an example is the same in every record."""
    shared, point_draws = np.random.default_rng(64), np.random.default_rng(int(key[:8], 16))
    lengths = shared.integers(15, 45, 64)
    share = score / 100 * shared.normal(1, 0.3, 64) * point_draws.normal(1, 0.1, 64)
    totals = lengths[:, None] - np.arange(4)
    counts = np.round(np.clip(share[:, None], 0, 1) * totals).astype(int)
    rows = np.column_stack([counts, totals, lengths, lengths])
    value = float(quality.get_metric("bleu").from_sums(rows.sum(0, keepdims=True), 64)[0])
    return {"value": value, "per_example": {"ids": list(range(64)), "statistics": {"bleu": rows.tolist()}}}


def _timed(key: str, relative: float) -> tuple[list[float], list[float]]:
    """Returns milliseconds of 16 examples over two trials: of the point, and of the target."""
    draws = np.random.default_rng(int(key[8:16], 16))
    target = 120 * np.random.default_rng(16).normal(1, 0.2, 16)
    return (target * relative * draws.normal(1, 0.05, 16)).tolist(), target.tolist()


def _kept_share(point: dict[str, Any]) -> float:
    if point["method"] == "autoregressive":
        return 0.0
    grid = RULES.get(point["method"], (0.5,))
    if point["alpha"] is None:
        return 0.3 if point["block_size"] else 1.0
    share_below = sum(alpha < point["alpha"] for alpha in grid) / len(grid)
    return 0.3 + 0.6 * share_below


def _over_trials(value: float, spread: float) -> dict[str, Any]:
    return {"value": value, "low": value - spread, "high": value + spread, "trials": [value - spread, value + spread]}
