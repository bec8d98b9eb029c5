"""What tells curves of one method apart: block size, bonus, draft temperature, acceptance head. Needs no JAX."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from speccascade_jax.results.store import Record

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
