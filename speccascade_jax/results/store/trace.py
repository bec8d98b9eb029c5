"""Traces of outputs: the proposed, kept and rejected tokens of every round, with their probabilities.

This module does not import JAX: a trace is built on the host from the facts that `engine.tracing.facts` recorded, or is
read from a file.
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
"""Function that returns the text that each token adds, from the tokens' ids and the ids of the output before them."""


@dataclass(frozen=True)
class Candidate:
    """A token at one position of a block, with its probabilities there.

    Attributes:
        id, text: the token's id and text.
        q, p: the token's raw probability by the draft and by the target.
        q_tilde, p_tilde: its probability in the distributions from which draft and target tokens are drawn.
        pi: its probability in the rule's distribution.
        rank_q, rank_p: the token's rank by `q` and `p`, 1 for the most likely token.

    `q`, `q_tilde` and `rank_q` are `None` if nothing was drafted at the position; `p`, `p_tilde`, `pi` and `rank_p` are
    `None` if the target did not score it.
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
    """One position of a block: the proposed and the committed token there, and measures of both models' distributions.

    Attributes:
        slot: the position's index in the block, from 0.
        committed: the token that became part of the output; `None` after the round's last committed token.
        source: "draft", "replaced", "bonus" or "target", if a token was committed.
        proposed: the drafted token; `None` after the block's end.
        fate: what happened to the proposed token: "kept", "rejected", "unread" (it comes after the output's end, or
            after a rejection in a block that is not examined as a whole) or "unverified" (committed before the target
            scored it); empty if nothing was proposed.
        entropy_q, entropy_p: entropies of the draft's and the target's distribution, in nats.
        max_q: the draft's largest probability; confidence: the product of `max_q` from the block's beginning to here.
        divergence: total variation of `q` and `p`.
        deferral: the rule's probability of deferring the proposed token to the target; 0 for a rule that never defers.
        stop: the value that the stop policy compared with its threshold, before the token was drawn or when the policy
            ended the block; `None` if the policy was not evaluated.

    The measures of `q` are `None` if nothing was drafted at the position.
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
    """One round of drafting and verification: its steps, and the numbers of drafted, kept and committed tokens.

    Attributes:
        rejected: whether a draft token was rejected.
        unverified: whether the tokens were committed before the target scored them.
        examined: number of examined draft tokens. In a block that is verified as a whole, the first rejection also
            rejects all later tokens.
        spent: number of all drafted tokens; for a tree, this includes tokens outside the path that was followed.
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
        # traces in older files have neither field
        if self.examined < 0:
            object.__setattr__(self, "examined", self.kept + self.rejected)
        if self.spent < 0:
            object.__setattr__(self, "spent", self.drafted)


@dataclass(frozen=True)
class Trace:
    """The trace of one output: the rounds that generated it.

    Attributes:
        rounds: the rounds, in order; prompt: the input of the models, or empty.
        threshold: description of the stop policy's threshold; empty if all blocks have the same length.
    """

    rounds: tuple[Round, ...]
    prompt: str = ""
    threshold: str = ""

    @property
    def text(self) -> str:
        """The output's text."""
        return "".join(step.committed.text for round_ in self.rounds for step in round_.steps if step.committed)

    def counts(self) -> dict[str, int]:
        """Returns the engine's counters (docs/methods.md, section 9), recomputed from the trace."""
        verified = [round_ for round_ in self.rounds if not round_.unverified]
        sources = [step.source for round_ in self.rounds for step in round_.steps if step.committed]
        return {
            "rounds": len(self.rounds),
            "target_calls": len(verified),
            "drafted": sum(round_.spent for round_ in self.rounds),
            "kept": sum(round_.kept for round_ in verified),
            "rejected": sum(round_.examined - round_.kept for round_ in verified),
            "examined": sum(round_.examined for round_ in verified),
            "committed": len(sources),
            **{source: sources.count(source) for source in SOURCES},
        }

    def at_positions(self) -> dict[str, list[int]]:
        """Returns how many proposals were examined and kept at each position of the block, as the engine counts."""
        verified = [round_ for round_ in self.rounds if not round_.unverified]
        places = range(max((round_.drafted for round_ in self.rounds), default=0))
        return {
            "examined_at": [sum(round_.examined > n for round_ in verified) for n in places],
            "kept_at": [sum(round_.kept > n for round_ in verified) for n in places],
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the trace as JSON values, with numbers rounded to five digits."""
        entry: dict[str, Any] = _short(dataclasses.asdict(self))
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Trace":
        """Returns the trace that JSON values from `to_json` describe."""

        def step(step_entry: Mapping[str, Any]) -> Step:
            candidates = {
                name: step_entry[name] and Candidate(**step_entry[name]) for name in ("committed", "proposed")
            }
            return Step(**{**step_entry, **candidates})

        rounds = ({**fields, "steps": tuple(map(step, fields["steps"]))} for fields in entry["rounds"])
        return cls(tuple(Round(**fields) for fields in rounds), entry.get("prompt", ""), entry.get("threshold", ""))

    def _repr_html_(self) -> str:
        return templates.traces([self])


class Traces(list[Trace]):
    """A list of traces, one per row of a batch, which notebooks display."""

    def __repr__(self) -> str:
        return f"<Traces of {len(self)} outputs: notebooks display them; trace[0].rounds holds the data>"

    def _repr_html_(self) -> str:
        return templates.traces(self)


def read(facts: Any, row: int, texts: Texts, *, prompt: str = "", threshold: str = "", alone: bool = False) -> Trace:
    """Builds the trace of one row from the facts that the engine recorded.

    Args:
        facts: `engine.tracing.RoundFacts` with NumPy arrays `[R, B, …]`.
        row: index of the row in the batch.
        texts: returns the text that each token adds (`Texts`).
        prompt: the row's input, which the trace holds.
        threshold: description of the stop policy's threshold, which the trace holds.
        alone: whether the draft generates alone, so that all tokens come from the draft.
    """
    counts = facts.origins.num_new[:, row].tolist()
    tokens = zip(counts, facts.tokens[:, row].tolist(), strict=True)
    committed = [token for count, block in tokens for token in block[:count]]
    pieces, rounds, begin = texts(committed, []), [], 0
    for number, count in enumerate(counts):
        if count:  # the count is 0 in rounds after this row was complete, while other rows were not
            round_facts, end = _facts_at(facts, number, row), begin + count
            shown = texts(round_facts["proposed"][: round_facts["drafted"]], committed[:begin])
            rounds.append(_round(round_facts, pieces[begin:end], shown, alone))
            begin = end
    return Trace(tuple(rounds), prompt, threshold)


def _facts_at(facts: Any, number: int, row: int) -> dict[str, Any]:
    """Returns the facts of one row in one round, by name, as plain numbers and lists `[G + 1]`."""
    fields = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return {
        name: _facts_at(value, number, row) if dataclasses.is_dataclass(value) else value[number, row].tolist()
        for name, value in fields.items()
    }


def _round(facts: Mapping[str, Any], pieces: Sequence[str], shown: Sequence[str], alone: bool) -> Round:
    """Builds a round from its facts, the texts of its committed tokens, and the texts of its proposed tokens."""
    drafted, kept, examined, unverified = (facts[name] for name in ("drafted", "num_kept", "examined", "unverified"))
    confidence = list(itertools.accumulate(facts["max_q"][:drafted], operator.mul))

    def fate(slot: int) -> str:
        if slot < kept:
            return "unverified" if unverified else "kept"
        return "rejected" if slot < examined else "unread"

    steps = []
    for slot in range(max(drafted, len(pieces))):
        step = _step(facts, slot, pieces[slot] if slot < len(pieces) else None, alone)
        if slot < drafted:
            proposed = _candidate(facts, "of_proposed", slot, facts["proposed"][slot], shown[slot])
            draft_measures = {name: facts[name][slot] for name in ("entropy_q", "max_q", "deferral")}
            divergence = None if unverified else facts["divergence"][slot]
            step = dataclasses.replace(
                step,
                proposed=proposed,
                fate=fate(slot),
                confidence=confidence[slot],
                divergence=divergence,
                **draft_measures,
            )
        steps.append(step)
    counts = drafted, kept, len(pieces), bool(facts["rejected"]), bool(unverified)
    return Round(tuple(steps), *counts, examined=examined, spent=facts["spent"])


def _step(facts: Mapping[str, Any], slot: int, piece: str | None, alone: bool) -> Step:
    """Builds a step without its proposed token; `piece` is the text of its committed token, or `None`."""
    source, committed = "", None
    if piece is not None:
        source = "draft" if alone else SOURCES[facts["origins"]["source"][slot]]
        committed = _candidate(facts, "of_committed", slot, facts["tokens"][slot], piece)
    entropy, stop = None if facts["unverified"] else facts["entropy_p"][slot], facts["stop"][slot]
    return Step(slot, committed, source, entropy_p=entropy, stop=None if math.isnan(stop) else stop)


def _candidate(facts: Mapping[str, Any], kind: str, slot: int, token: int, text: str) -> Candidate:
    """Returns a token with its probabilities, `None` for a model that did not draft or score the position."""
    unknown = set() if slot < facts["drafted"] else {"q", "q_tilde", "rank_q"}
    unknown |= {"p", "p_tilde", "pi", "rank_p"} if facts["unverified"] else set()
    chances = {name: None if name in unknown else values[slot] for name, values in facts[kind].items()}
    return Candidate(token, text, **chances)


def _short(value: Any) -> Any:
    """Returns a value with all numbers in it rounded to five digits; numbers that are not finite become `None`."""
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value
