"""Traces as HTML of their own, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from speccascade_jax.results.report import templates

_ALONE = """{% import "macros.html" as m with context %}<div class="sc"><style>{{ style | safe }}</style>
{{ m.legend() }}{% for trace in traces %}{% if trace.prompt %}<p class="legend">{{ trace.prompt }}</p>{% endif %}
{{ m.trace(trace) }}{% endfor %}</div>"""


def alone(traces: Iterable[Any]) -> str:
    """HTML of `results.store.trace.Trace`s, with its style and no script."""
    made: str = templates.environment().from_string(_ALONE).render(traces=list(traces), style=templates.style())
    return made
