"""What curves are called in tables and legends: put together from what records say of their methods. Needs no JAX."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.core.names import natural
from speccascade_jax.results.store.result_store import Record

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


MIXABLE = {"block_size": "γ = {}", "bonus": "bonus {}", "draft_temperature": "draft T = {}"}
"""What keeps panels apart unless a table is asked to put it side by side -> how it is then told in a curve's name."""

HEAD, POLICY = "head", "policy"
"""Acceptance heads and selection policies never keep panels apart: other weights are another curve, whatever their file
is called."""


def suffixes(records: Sequence[Record], kinds: Sequence[Hashable], names: Sequence[str]) -> list[str]:
    """For each record what tells it from the others of its kind, as " (γ = 3, head 73861f)"; empty where nothing does.

    Args:
        kinds: of each record, what it would otherwise be called; names: in `MIXABLE`, `HEAD` or `POLICY`.
    """
    values: dict[tuple[Hashable, str], set[Any]] = defaultdict(set)
    for kind, record in zip(kinds, records, strict=True):
        for name in names:
            values[kind, name].add(setting(record, name))
    found = []
    for kind, record in zip(kinds, records, strict=True):
        words = [_told(record, name) for name in names if len(values[kind, name]) > 1]
        found.append(f" ({', '.join(words)})" if words else "")
    return found


def setting(record: Record, name: str) -> Any:
    """A value that tells records apart; of a head or a policy its fingerprint, `None` where none is asked."""
    return record["fingerprints"].get(name) if name in (HEAD, POLICY) else record["point"][name]


def _told(record: Record, name: str) -> str:
    """A value for a curve's name; a draft temperature that is not named is the method's own or the target's."""
    value = setting(record, name)
    if name in (HEAD, POLICY):
        return f"{name} {value[:6]}" if value else f"no {name}"
    return MIXABLE[name].format(f"{value:g}" if isinstance(value, int | float) else "own" if value is None else value)
