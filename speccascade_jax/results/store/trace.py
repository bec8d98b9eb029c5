"""A trace: one output token by token, with what was proposed, kept and rejected, and what the laws said of it.

Nothing here imports JAX: a trace is made from what `engine.tracing.facts` recorded, on the host, or read from a file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speccascade_jax.core.names import SOURCES
from speccascade_jax.results.report.traces import alone

Texts = Callable[[list[int], list[int]], list[str]]
"""Ids, and those of the output before them -> what each adds to the text."""


@dataclass(frozen=True)
class Candidate:
    """A token at a position, and what the laws there say of it.

    Attributes:
        id, text: of the token.
        q, p: the raw laws of draft and target; q_tilde, p_tilde: those that tokens are drawn from; pi: the rule's.
            `q` and `q_tilde` are `None` where nothing was drafted; all are where nothing was scored.
        rank_q, rank_p: the token's place by `q` and `p`, 1 for the most likely.
    """

    id: int
    text: str
    q: float | None
    p: float | None
    q_tilde: float | None
    p_tilde: float | None
    pi: float | None
    rank_q: int | None
    rank_p: int | None


@dataclass(frozen=True)
class Step:
    """A position of a block.

    Attributes:
        slot: its place in the block, from 0.
        committed: the token that became part of the output; `None` behind the last of the round.
        source: "draft", "replaced", "bonus" or "target", where something was committed.
        proposed: what was drafted; `None` behind the block's end.
        fate: of what was proposed: "kept", "rejected", "unread" (behind the output's end, or behind a rejection, if the
            block is not examined as a whole) or "unverified" (committed without the target having seen it); empty
            where nothing was proposed.
        entropy_q, entropy_p: of the laws, nats; max_q: the draft's confidence; confidence: the product of `max_q` over
            the block up to here; divergence: total variation of `q` and `p`; deferral: the rule's `r` of the proposed
            token, 0 without one. Those of `q` are `None` where nothing was drafted.
        stop: what the stop policy compared with its threshold before the token was drawn, or where it ended the block;
            `None` where it was not asked.
    """

    slot: int
    committed: Candidate | None
    source: str
    proposed: Candidate | None
    fate: str
    entropy_q: float | None
    entropy_p: float | None
    max_q: float | None
    confidence: float | None
    divergence: float | None
    deferral: float | None
    stop: float | None = None


@dataclass(frozen=True)
class Round:
    """A round: its steps, and how many tokens were drafted, kept and committed; whether one was rejected.

    Attributes:
        examined: how many of the drafted tokens were: all that are not kept are rejected with the first where a block
            is verified as one.
        spent: how many were drafted in all: of a tree those beside the path too.
    """

    steps: tuple[Step, ...]
    drafted: int
    kept: int
    committed: int
    rejected: bool
    unverified: bool
    examined: int = -1
    spent: int = -1

    def __post_init__(self) -> None:
        # of a file that does not say
        if self.examined < 0:
            object.__setattr__(self, "examined", self.kept + self.rejected)
        if self.spent < 0:
            object.__setattr__(self, "spent", self.drafted)


@dataclass(frozen=True)
class Trace:
    """One output.

    Attributes:
        rounds: of the row, in order; prompt: what it was given, or empty.
        threshold: what the stop policy compares with, in words; empty where blocks have one length.
    """

    rounds: tuple[Round, ...]
    prompt: str = ""
    threshold: str = ""

    @property
    def text(self) -> str:
        """The output."""
        return "".join(step.committed.text for round_ in self.rounds for step in round_.steps if step.committed)

    def counts(self) -> dict[str, int]:
        """What the engine's counters say too (METHODS section 9): rounds, drafted, kept, rejected, examined, …"""
        verified = [each for each in self.rounds if not each.unverified]
        sources = [step.source for each in self.rounds for step in each.steps if step.committed]
        return {
            "rounds": len(self.rounds),
            "target_calls": len(verified),
            "drafted": sum(each.spent for each in self.rounds),
            "kept": sum(each.kept for each in verified),
            "rejected": sum(each.examined - each.kept for each in verified),
            "examined": sum(each.examined for each in verified),
            "committed": len(sources),
            **{source: sources.count(source) for source in SOURCES},
        }

    def at_positions(self) -> dict[str, list[int]]:
        """How many proposals were examined and kept at each position of the block, as the counters say too."""
        verified = [each for each in self.rounds if not each.unverified]
        longest = max((each.drafted for each in self.rounds), default=0)
        examined = [sum(each.examined > n for each in verified) for n in range(longest)]
        return {"examined_at": examined, "kept_at": [sum(each.kept > n for each in verified) for n in range(longest)]}

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it: numbers to five digits."""
        found: dict[str, Any] = _short(dataclasses.asdict(self))
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Trace:
        """What `to_json` gave."""

        def step(each: Mapping[str, Any]) -> Step:
            both = {name: each[name] and Candidate(**each[name]) for name in ("committed", "proposed")}
            return Step(**{**each, **both})

        rounds = ({**each, "steps": tuple(map(step, each["steps"]))} for each in found["rounds"])
        return cls(tuple(Round(**each) for each in rounds), found.get("prompt", ""), found.get("threshold", ""))

    def _repr_html_(self) -> str:
        return Traces([self])._repr_html_()


class Traces(list[Trace]):
    """Traces, one per row; a notebook shows them."""

    def __repr__(self) -> str:
        return f"<Traces of {len(self)} outputs: a notebook shows them, trace[0].rounds holds them>"

    def _repr_html_(self) -> str:
        return alone(self)


def read(facts: Any, row: int, texts: Texts, *, prompt: str = "", threshold: str = "", alone: bool = False) -> Trace:
    """A row's trace.

    Args:
        facts: `engine.tracing.RoundFacts` with NumPy arrays `[R, B, …]`.
        texts: ids, and those of the output before them -> what each adds.
        alone: whether the draft writes alone, whose tokens are then all drafts.
    """
    committed = [
        int(token)
        for number, tokens in zip(facts.origins.num_new[:, row], facts.tokens[:, row], strict=True)
        for token in tokens[:number]
    ]
    pieces, rounds, at = texts(committed, []), [], 0
    for number, count in enumerate(facts.origins.num_new[:, row].tolist()):
        if not count:
            continue  # the row was done, and others were not
        one = _Reader(facts, number, row, texts, alone)
        rounds.append(one.round(committed[:at], pieces[at : at + count]))
        at += count
    return Trace(tuple(rounds), prompt, threshold)


@dataclass(frozen=True)
class _Reader:
    """Reads one round of one row."""

    facts: Any
    number: int
    row: int
    texts: Texts
    alone: bool

    def _at(self, name: str) -> Any:
        return getattr(self.facts, name)[self.number, self.row]

    def round(self, before: Sequence[int], pieces: Sequence[str]) -> Round:
        drafted, kept = int(self._at("drafted")), int(self._at("num_kept"))
        rejected, unverified = bool(self._at("rejected")), bool(self._at("unverified"))
        examined = int(self._at("examined"))
        proposed = self._at("proposed").tolist()[:drafted]
        shown = self.texts(proposed, [*before])
        steps, product = [], 1.0
        for slot in range(max(drafted, len(pieces))):
            step = self._step(slot, proposed, shown, pieces)
            product *= 1.0 if step.max_q is None else step.max_q
            fate = self._fate(slot, drafted, kept, examined, unverified)
            own = None if step.max_q is None else product
            steps.append(dataclasses.replace(step, fate=fate, confidence=own))
        return Round(tuple(steps), drafted, kept, len(pieces), rejected, unverified, examined, int(self._at("spent")))

    @staticmethod
    def _fate(slot: int, drafted: int, kept: int, read: int, unverified: bool) -> str:
        if slot >= drafted:
            return ""
        if slot < kept:
            return "unverified" if unverified else "kept"
        return "rejected" if slot < read else "unread"

    def _step(self, slot: int, proposed: Sequence[int], shown: Sequence[str], pieces: Sequence[str]) -> Step:
        written, drafted = slot < len(pieces), slot < len(proposed)
        tokens = self._at("tokens").tolist()
        source = SOURCES[int(self.facts.origins.source[self.number, self.row, slot])] if written else ""
        scored = not self._at("unverified")
        own: dict[str, Any] = {
            name: float(self._at(name)[slot]) for name in ("entropy_q", "max_q", "deferral", "divergence")
        }
        own["divergence"] = own["divergence"] if scored else None
        stop = float(self._at("stop")[slot])
        return Step(
            slot=slot,
            committed=self._candidate("of_committed", slot, tokens[slot], pieces[slot], drafted) if written else None,
            source="draft" if written and self.alone else source,
            proposed=self._candidate("of_proposed", slot, proposed[slot], shown[slot], True) if drafted else None,
            fate="",
            confidence=None,
            entropy_p=float(self._at("entropy_p")[slot]) if scored else None,
            stop=None if math.isnan(stop) else stop,
            **{name: value if drafted else None for name, value in own.items()},
        )

    def _candidate(self, kind: str, slot: int, token: int, text: str, drafted: bool) -> Candidate:
        chances = getattr(self.facts, kind)
        found = {
            one.name: getattr(chances, one.name)[self.number, self.row, slot].item()
            for one in dataclasses.fields(Candidate)
            if one.name not in ("id", "text")
        }
        unknown = set() if drafted else {"q", "q_tilde", "rank_q"}
        unknown |= {"p", "p_tilde", "pi", "rank_p"} if self._at("unverified") else set()
        return Candidate(token, text, **{name: None if name in unknown else value for name, value in found.items()})


def _short(value: Any) -> Any:
    """Numbers to five digits, whatever they are in."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
