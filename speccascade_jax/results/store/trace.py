"""A trace: one output token by token, with what was proposed, kept and rejected, and what the laws said of it.

Nothing here imports JAX: a trace is made from what `engine.tracing.facts` recorded, on the host, or read from a file.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speccascade_jax.core.names import SOURCES
from speccascade_jax.results.report import templates

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
    proposed: Candidate | None = None
    fate: str = ""
    entropy_q: float | None = None
    entropy_p: float | None = None
    max_q: float | None = None
    confidence: float | None = None
    divergence: float | None = None
    deferral: float | None = None
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
        places = range(max((each.drafted for each in self.rounds), default=0))
        return {
            "examined_at": [sum(each.examined > n for each in verified) for n in places],
            "kept_at": [sum(each.kept > n for each in verified) for n in places],
        }

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it: numbers to five digits."""
        found: dict[str, Any] = _short(dataclasses.asdict(self))
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Trace":
        """What `to_json` gave."""

        def step(each: Mapping[str, Any]) -> Step:
            both = {name: each[name] and Candidate(**each[name]) for name in ("committed", "proposed")}
            return Step(**{**each, **both})

        rounds = ({**each, "steps": tuple(map(step, each["steps"]))} for each in found["rounds"])
        return cls(tuple(Round(**each) for each in rounds), found.get("prompt", ""), found.get("threshold", ""))

    def _repr_html_(self) -> str:
        return templates.traces([self])


class Traces(list[Trace]):
    """Traces, one per row; a notebook shows them."""

    def __repr__(self) -> str:
        return f"<Traces of {len(self)} outputs: a notebook shows them, trace[0].rounds holds them>"

    def _repr_html_(self) -> str:
        return templates.traces(self)


def read(facts: Any, row: int, texts: Texts, *, prompt: str = "", threshold: str = "", alone: bool = False) -> Trace:
    """A row's trace.

    Args:
        facts: `engine.tracing.RoundFacts` with NumPy arrays `[R, B, …]`.
        texts: ids, and those of the output before them -> what each adds.
        alone: whether the draft writes alone, whose tokens are then all drafts.
    """
    counts = facts.origins.num_new[:, row].tolist()
    tokens = zip(counts, facts.tokens[:, row].tolist(), strict=True)
    committed = [token for count, block in tokens for token in block[:count]]
    pieces, rounds, begin = texts(committed, []), [], 0
    for number, count in enumerate(counts):
        if count:  # else the row was done, and others were not
            told, end = _facts_at(facts, number, row), begin + count
            shown = texts(told["proposed"][: told["drafted"]], committed[:begin])
            rounds.append(_round(told, pieces[begin:end], shown, alone))
            begin = end
    return Trace(tuple(rounds), prompt, threshold)


def _facts_at(facts: Any, number: int, row: int) -> dict[str, Any]:
    """Returns the facts of one round of one row by their names, as plain numbers and lists `[G + 1]`."""
    fields = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return {
        name: _facts_at(value, number, row) if dataclasses.is_dataclass(value) else value[number, row].tolist()
        for name, value in fields.items()
    }


def _round(told: Mapping[str, Any], pieces: Sequence[str], shown: Sequence[str], alone: bool) -> Round:
    """Makes a round from its facts, the texts that it committed, and those that were proposed."""
    drafted, kept, examined, unverified = (told[name] for name in ("drafted", "num_kept", "examined", "unverified"))
    confidence = list(itertools.accumulate(told["max_q"][:drafted], operator.mul))

    def fate(slot: int) -> str:
        if slot < kept:
            return "unverified" if unverified else "kept"
        return "rejected" if slot < examined else "unread"

    steps = []
    for slot in range(max(drafted, len(pieces))):
        step = _step(told, slot, pieces[slot] if slot < len(pieces) else None, alone)
        if slot < drafted:
            proposed = _candidate(told, "of_proposed", slot, told["proposed"][slot], shown[slot])
            own = {name: told[name][slot] for name in ("entropy_q", "max_q", "deferral")}
            divergence = None if unverified else told["divergence"][slot]
            step = dataclasses.replace(
                step, proposed=proposed, fate=fate(slot), confidence=confidence[slot], divergence=divergence, **own
            )
        steps.append(step)
    counts = drafted, kept, len(pieces), bool(told["rejected"]), bool(unverified)
    return Round(tuple(steps), *counts, examined=examined, spent=told["spent"])


def _step(told: Mapping[str, Any], slot: int, piece: str | None, alone: bool) -> Step:
    """Makes a step without what was proposed there; `piece`: what it committed."""
    source, committed = "", None
    if piece is not None:
        source = "draft" if alone else SOURCES[told["origins"]["source"][slot]]
        committed = _candidate(told, "of_committed", slot, told["tokens"][slot], piece)
    entropy, stop = None if told["unverified"] else told["entropy_p"][slot], told["stop"][slot]
    return Step(slot, committed, source, entropy_p=entropy, stop=None if math.isnan(stop) else stop)


def _candidate(told: Mapping[str, Any], kind: str, slot: int, token: int, text: str) -> Candidate:
    """Makes a token with what the laws say of it, where they were drawn from and scored."""
    unknown = set() if slot < told["drafted"] else {"q", "q_tilde", "rank_q"}
    unknown |= {"p", "p_tilde", "pi", "rank_p"} if told["unverified"] else set()
    chances = {name: None if name in unknown else values[slot] for name, values in told[kind].items()}
    return Candidate(token, text, **chances)


def _short(value: Any) -> Any:
    """Numbers to five digits, whatever they are in."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
