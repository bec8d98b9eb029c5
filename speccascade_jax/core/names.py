"""What an error says about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: object, known: Iterable[str]) -> str:
    """`"did you mean a, b? "` with the nearest of the known names, at most three; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    return f"did you mean {', '.join(near)}? " if near else ""


TARGET = "autoregressive"


DRAFT = "autoregressive_draft"


PER_EXAMPLE = ("committed", "target_calls", "discarded", "draft_steps", "drafted")
"""Counts that records hold example by example, so that rates and predicted times have intervals."""
