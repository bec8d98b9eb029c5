r"""Show one output in the terminal as it is generated, with the source of every token and the ends of rounds.

    python -m experiments.show
    python -m experiments.show --method=token_v3 --alpha=0.5 --temperature=1 --seed=3 \
        --prompt="We have no time to lose. The train leaves in ten minutes."
    python -m experiments.show --pair=stories --prompt="Once upon a time" --temperature=1 --picture=story.svg
    python -m experiments.show --method=diff --alpha=0.1 --trace      every position, with q, p, π, ranks
    python -m experiments.show --temperature=1 --verify=block        block-wise verification
    python -m experiments.show --temperature=1 --tree=3,2,1          drafts that branch
    python -m experiments.show --method=autoregressive_draft         the draft alone; autoregressive: the target

A token has one of four sources: a kept draft token, the replacement of a rejected one, the bonus token after a block
that was kept whole, or the target if nothing was drafted. Each source has its own colour, or its own brackets where
there are no colours (NO_COLOR is set, or the output is not a terminal). The last lines show tokens per round, the
acceptance rate (kept draft tokens over kept and rejected ones), the time to the first token (including loading and
compilation), and tokens/s after the first round.
"""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

import speccascade_jax as sc
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.store.trace import Step, Trace
from speccascade_jax.runtime import gin_flags, interrupts
from speccascade_jax.storage.files import check_replaceable, rewrite

PAIR = flags.DEFINE_string("pair", "tatoeba_en_de", "A shipped pair, or the folder of one (sc.load_pair).")
TARGET_PATH = flags.DEFINE_string(
    "target", None, "With --draft: any two checkpoints (sc.Pair.load), instead of a pair."
)
DRAFT_PATH = flags.DEFINE_string("draft", None, "The draft's checkpoint.")
PROMPT = flags.DEFINE_string(
    "prompt",
    "The weather was cold. I stayed at home and read a book until my sister came back.",
    "The prompt.",
)
METHOD = flags.DEFINE_string(
    "method",
    "spec_decode",
    "A rule, or a method such as autoregressive, fuzzy or token_cascade, or your own as module.NAME.",
)
ALPHA = flags.DEFINE_float("alpha", None, "The rule's trade-off; required by rules that have one.")
BLOCK_SIZE = flags.DEFINE_integer(
    "block_size", None, "Draft tokens per round; the default depends on the method and is mostly 5."
)
VERIFY = flags.DEFINE_string(
    "verify", "token", "How drafts are verified: token by token (token), or a whole block jointly (block)."
)
TREE = flags.DEFINE_list(
    "tree", None, "Draft a tree instead of a block: the number of children per token, depth by depth (3,2,1)."
)
STOP_THRESHOLD = flags.DEFINE_float("stop_threshold", None, "For bild: draft while max q is at least 1 minus this.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy; 1 samples from the models' unchanged distributions.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the fewest tokens whose probabilities sum to this.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from this many most probable tokens; 0: all.")
TRACE = flags.DEFINE_bool(
    "trace", False, "Also list every position: the proposed and the written token, and their probabilities."
)
SEED = flags.DEFINE_integer("seed", 0, "The random seed.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Maximum number of output tokens.")
PICTURE = flags.DEFINE_string("picture", None, "Also write the page to this file, as SVG.")

# source of a token -> its colour, and the brackets that replace the colour on consoles without colours
LOOKS = {
    "draft": ("green", ("", "")),
    "replaced": ("bold red", ("[", "]")),
    "bonus": ("bold blue", ("(", ")")),
    "target": ("bold yellow", ("<", ">")),
}
ROUND, END = "|", "■"
_MARKS = ("rich-terminal", *LOOKS)
"""Texts that every picture of this command contains; files without them are not overwritten."""


class Page:
    """A console, with or without colours, on which the output appears token by token."""

    def __init__(self, console: Console):
        self.console = console
        self.coloured = console.color_system is not None and not console.no_color

    def token(self, token: sc.StreamedToken) -> None:
        """Prints a token."""
        self.console.print(self.text(token), end="", soft_wrap=True)

    def text(self, token: sc.StreamedToken) -> Text:
        """Returns a token in the style of its source, after a boundary mark if it begins a new round."""
        boundary = ROUND if token.slot == 0 and token.round > 0 else ""
        # assembled, because `boundary + token` would give the token the style of the boundary
        return Text.assemble((boundary, "dim" if self.coloured else ""), self._dressed(token.text, token.source))

    def legend(self) -> Text:
        """Returns the legend: each source's name in its style, and the marks of rounds and of the end."""
        names = [self._dressed(name, name) for name in LOOKS]
        return Text("   ").join([*names, Text(f"{ROUND} next round   {END} end")])

    def _dressed(self, text: str, source: str) -> Text:
        style, (before, after) = LOOKS[source]
        if self.coloured or not text:
            return Text(text, style=style)
        word = text.lstrip()
        return Text(f"{text[: len(text) - len(word)]}{before}{word}{after}")


def show(tokens: Iterable[sc.StreamedToken], page: Page) -> tuple[list[sc.StreamedToken], list[float]]:
    """Prints tokens as they arrive; returns them and their arrival times in seconds. Ctrl-C ends the output."""
    seen, arrival_times = [], []
    with page.console.status("compiling, or loading compiled programs …") as waiting:
        try:
            for token in tokens:
                waiting.stop()
                seen.append(token)
                arrival_times.append(time.perf_counter())
                page.token(token)
        except KeyboardInterrupt:
            pass
    return seen, arrival_times


def draw(tokens: Sequence[sc.StreamedToken], prompt: str, path: str, title: str) -> None:
    """Writes an output as an SVG picture, in colours and wrapped, with the legend above it."""
    page = Page(Console(file=io.StringIO(), record=True, force_terminal=True, width=96, highlight=False))
    page.console.print(page.legend(), "")
    page.console.print(Text.assemble((prompt, "dim"), *(page.text(token) for token in tokens), END))
    rewrite(path, page.console.export_svg(title=title), *_MARKS)


def summary(
    tokens: Sequence[sc.StreamedToken], arrival_times: Sequence[float], begin: float, speculative: bool = True
) -> list[str]:
    """Returns lines with an output's token counts, rounds and times; `arrival_times` and `begin` are in seconds."""
    if not tokens:
        return ["no token was written"]
    counts, rounds = Counter(token.source for token in tokens), tokens[-1].round + 1
    later = [when for token, when in zip(tokens, arrival_times, strict=True) if token.round > 0]
    examined = counts["draft"] + counts["replaced"]
    accepted = f"; acceptance rate {counts['draft'] / examined:.0%}" if speculative and examined else ""
    rate = f", then {len(later) / (later[-1] - arrival_times[0]):.0f} tokens/s" if later else ""
    return [
        f"{len(tokens)} tokens in {rounds} rounds: {len(tokens) / rounds:.2f} tokens per round",
        ", ".join(f"{counts[source]} {source}" for source in LOOKS) + accepted,
        f"first token after {arrival_times[0] - begin:.2f} s{rate}",
    ]


def _pair() -> sc.Pair:
    if (TARGET_PATH.value is None) != (DRAFT_PATH.value is None):
        raise ValueError("give --target and --draft, or --pair alone")
    if TARGET_PATH.value is None:
        return sc.load_pair(PAIR.value)
    return sc.Pair.load(target=TARGET_PATH.value, draft=DRAFT_PATH.value)


def _settings() -> dict[str, Any]:
    flagged = (METHOD, ALPHA, BLOCK_SIZE, VERIFY, STOP_THRESHOLD, TEMPERATURE, TOP_P, TOP_K, SEED, MAX_NEW_TOKENS)
    try:
        tree = None if TREE.value is None else tuple(map(int, TREE.value))
    except ValueError:
        raise ValueError(f"--tree={','.join(TREE.value)} is not a list of whole numbers: write --tree=3,2,1") from None
    return {flag.name: flag.value for flag in flagged} | {"tree": tree}


_TEXTS = ("proposed", "written", "fate")
_COLUMNS = ("round", *_TEXTS, "q", "p", "π", "rank", "H", "max q", "product", "TV", "r", "stop")


def positions(trace: Trace) -> Table:
    """Returns every position of a trace, as a table."""
    title = "rank: by q, by p; H: entropy of q in nats; product: of max q; stop: value that the policy compared"
    table = Table(title=title, padding=0)
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in _TEXTS else "right")
    for number, round_ in enumerate(trace.rounds):
        for step in round_.steps:
            table.add_row(f"{number}.{step.slot}", *map(Text, _cells(step)), end_section=step is round_.steps[-1])
    return table


def _cells(step: Step) -> list[str]:
    said, written = step.proposed or step.committed, step.committed
    numbers = [getattr(said, name, None) for name in ("q", "p", "pi")]
    rank = [getattr(said, name, None) for name in ("rank_q", "rank_p")]
    more = [step.entropy_q, step.max_q, step.confidence, step.divergence, step.deferral, step.stop]
    return [
        repr(step.proposed.text) if step.proposed else "",
        repr(written.text) if written else "",
        step.fate or step.source,
        *map(_short, numbers),
        ", ".join("–" if place is None else str(place) for place in rank),
        *map(_short, more),
    ]


def _short(number: float | None) -> str:
    return "–" if number is None else f"{number:.3g}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]!r}; flags look like --method=chow; --help explains")
    with gin_flags.one_line_errors():
        begin = time.perf_counter()
        if PICTURE.value:
            check_replaceable(PICTURE.value, *_MARKS)
        pair, settings = _pair(), _settings()
        tokens = sc.stream(pair, PROMPT.value, **settings)
        page = Page(Console(highlight=False))
        page.console.print(Text.assemble(("prompt: ", "dim"), PROMPT.value))
        page.console.print(page.legend())
        seen, arrival_times = show(tokens, page)
        page.console.print(END if seen else "")
        for line in summary(seen, arrival_times, begin, METHOD.value not in (TARGET, DRAFT)):
            page.console.print(line)
        if TRACE.value:
            wide = Console(highlight=False, width=max(page.console.width, 116))
            wide.print(positions(sc.decode(pair, [PROMPT.value], trace=True, **settings).trace[0]))
        if PICTURE.value:
            draw(seen, PROMPT.value, PICTURE.value, f"{PAIR.value}, {METHOD.value}, T = {TEMPERATURE.value:g}")


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
