"""The templates that HTML is made of. They escape every text that comes from prompts, models and files.

Traces are HTML of their own too, for notebooks.
"""

import functools
from collections.abc import Iterable
from typing import Any

from speccascade_jax.runtime.paths import shipped

SAID = {
    "draft": "drafted and kept",
    "replaced": "replaced by the target",
    "bonus": "the bonus behind a block kept whole",
    "target": "by the target, nothing was drafted",
}
LOST = {"rejected": "rejected", "unread": "not looked at", "kept": "kept", "unverified": "committed unseen", "": ""}
CLASSES = {"draft": "d", "replaced": "r", "bonus": "b", "target": "g"}


@functools.cache
def environment() -> Any:
    """Jinja's, which escapes; what a text must not contain raw is an error there, not an omission here."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("report")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    made.filters |= {"short": _short, "seen": _seen}
    made.globals |= {"said": SAID, "lost": LOST, "letters": CLASSES}
    return made


def style() -> str:
    """The style sheet of outputs and traces."""
    return shipped("report", "style.css").read_text("utf-8")


_TRACES = """{% import "macros.html" as m with context %}<div class="sc"><style>{{ style | safe }}</style>
{{ m.legend() }}{% for trace in traces %}{% if trace.prompt %}<p class="legend">{{ trace.prompt }}</p>{% endif %}
{{ m.trace(trace) }}{% endfor %}</div>"""


def traces(of: Iterable[Any]) -> str:
    """Returns HTML of `results.store.trace.Trace`s, with its style and no script."""
    made: str = environment().from_string(_TRACES).render(traces=list(of), style=style())
    return made


def _short(number: float) -> str:
    """A number in three digits."""
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def _seen(text: str) -> str:
    """A token's text where it must be seen: one without any is the output's end, or a part of a character."""
    return text.replace("\n", "↵\n") or "■"
