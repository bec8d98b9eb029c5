"""HTML templates of reports and traces, which escape every text from prompts, models and files.

In notebooks, traces are shown as HTML without a report.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from speccascade_jax.runtime.paths import shipped

SAID = {
    "draft": "drafted and kept",
    "replaced": "replaced by the target",
    "bonus": "the bonus token after a block that was kept whole",
    "target": "from the target; nothing was drafted",
}
LOST = {
    "rejected": "rejected",
    "unread": "not examined",
    "kept": "kept",
    "unverified": "committed without verification",
    "": "",
}
CLASSES = {"draft": "d", "replaced": "r", "bonus": "b", "target": "g"}


@functools.cache
def environment() -> Any:
    """Returns the Jinja environment, which escapes all text and raises an error for undefined names."""
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("report")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    jinja.filters |= {"short": _short, "seen": _seen, "unbroken": _unbroken}
    jinja.globals |= {"said": SAID, "lost": LOST, "letters": CLASSES}
    return jinja


def style() -> str:
    """Returns the style sheet of outputs and traces."""
    return shipped("report", "style.css").read_text("utf-8")


_TRACES = """{% import "macros.html" as m with context %}<div class="sc"><style>{{ style | safe }}</style>
{{ m.legend() }}{% for trace in traces %}{% if trace.prompt %}<p class="legend">{{ trace.prompt }}</p>{% endif %}
{{ m.trace(trace) }}{% endfor %}</div>"""


def traces(of: Iterable[Any]) -> str:
    """Returns traces (`results.store.trace.Trace`) as HTML, with the style sheet and without scripts."""
    html: str = environment().from_string(_TRACES).render(traces=list(of), style=style())
    return html


def _short(number: float) -> str:
    """Returns a number as text with three significant digits."""
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def _unbroken(cell: str) -> str:
    """Returns a cell of a table with non-breaking spaces inside an interval and before a mark."""
    return re.sub(r"(?<=,) (?=[^\[\]]*\])| (?=[*≈]$)", "\N{NO-BREAK SPACE}", cell)


def _seen(text: str) -> str:
    """Returns a token's text in visible form, with a sign for a line end and for an empty text.

    A token has an empty text if it ends the output, or if it is a part of a character.
    """
    return text.replace("\n", "↵\n") or "■"
