"""What curves are called in tables and legends: put together from what records say of their methods. Needs no JAX."""

from pathlib import Path

from speccascade_jax.core.names import natural
from speccascade_jax.results.store import Record

SHARES = {
    "rejection_rate": "rejected share of examined draft tokens",
    "rejections_per_token": "rejected draft tokens per generated token",
    "deferral_rate": "share of tokens deferred to the target",
    "target_share": "share of tokens that the target wrote",
    "draft_share": "share of tokens that the draft wrote",
}
"""Measures that qualities are plotted against."""

_METRICS = {
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "chrf": "chrF",
    "exact_match": "exact match",
}


def metric_name(metric: str) -> str:
    """A metric as readers know it."""
    return _METRICS.get(metric, metric)


def label(record: Record, apart: str = "", *, threshold: bool = True) -> str:
    """A curve's name for readers: its method's title, and in brackets what sets it apart or was chosen for it.

    Args:
        apart: what else tells it from other curves of its panel (`distinctions.suffixes`).
        threshold: whether a stop threshold is part of the name, and not what the curve runs along.
    """
    point = record["point"]
    text: str = point["title"]
    if point["details"]:
        text += f" [{', '.join(point['details'])}]"
    if point["head"]:
        text += f" {Path(point['head']).stem}"
    if threshold and point["stop_threshold"] is not None:
        text += f" {point['symbol']} {point['stop_threshold']:g}"
    return text + apart


def place(record: Record, curve: str) -> tuple[int, tuple[tuple[float, str], ...]]:
    """Sorts curves in the order of paper 1's Table 2, those of methods without a place there behind, by name."""
    return record["point"]["rank"], natural(curve)
