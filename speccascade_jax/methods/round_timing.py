"""Trials of a planned drafter: rounds of one generation with the length of their blocks forced.

What a round costs is all of it, the widths' programs, sampling and verification included, so it is timed in the
generation's own program, with the caller's own prompts; and what is kept of drafts is counted there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation
from speccascade_jax.stopping.block_planner import Costs

SECONDS, PATIENCE = 0.8, 8
"""How long rounds are timed, compilation aside: at least five turns, and, where these are not `STEADY` or not
`PRECISE`, as many times as long."""
LEAST_TURNS, MOST_TURNS = 5, 100
STEADY = 1.25
"""How much longer than the least of everything a usual turn may take."""
PRECISE = 0.01
"""The standard error of a length's share of a turn: lengths that differ by less are as good as each other."""

SEED = 2**32 - 1
"""Of the bits of these rounds. Nothing would be wrong if a generation used them too."""

WALKED = 16
"""Rounds in which acceptance is counted."""
USUAL, USUAL_TOKENS = 0.7, 10
"""The acceptance that few drafts are mixed with, and as how many: one prompt of one sentence must not say that drafting
never pays, for where nothing is drafted nothing corrects it."""

ALONE = -1
"""In place of a length's place: the program without a draft."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a round that aims at each length, and of the draft's prefill.

    Attributes:
        steady: whether turns took alike: of a busy machine nothing is kept for later processes.
    """

    rounds: tuple[float, ...]
    prefill: float
    steady: bool = True


@dataclass(frozen=True)
class Walked:
    """Over all rows: drafts kept and examined, outputs that ended, and tokens.

    An output's end counts as an examined draft that was not kept: what is drafted beyond it is in vain too.
    """

    kept: int
    examined: int
    ended: int
    tokens: int

    @property
    def acceptance(self) -> float:
        """The chance that a draft is kept."""
        return (self.kept + USUAL * USUAL_TOKENS) / (self.examined + USUAL_TOKENS)

    def length(self, room: int) -> float:
        """Tokens of an output of at most `room`: those that had no end yet count too, and one that ends half-way."""
        return min((self.tokens + room / 2) / (self.ended + 1), room)


Run = Callable[[Params, int], Generation]
"""So many rounds of a generation with these parameters, waited for."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of one generation, that very program, with lengths that the costs force."""

    engine: Engine
    params: Params
    program: Run

    @property
    def lengths(self) -> tuple[int, ...]:
        drafter: Any = self.engine.drafter
        lengths: tuple[int, ...] = drafter.plan.lengths
        return lengths

    def run(self, place: int, most_rounds: int) -> Generation:
        """So many rounds that aim at the length in that place, or that never could (`ALONE`); waited for."""
        held = costs_of(tuple(1.0 if n == place else 1e9 for n in range(len(self.lengths))), 0.0, 0.5, 1.0)
        drafter = {"costs": held} if place == ALONE else {**self.params["drafter"], "costs": held}
        return self.program({**self.params, "drafter": drafter}, most_rounds)

    def walked(self) -> Walked:
        """What became of some rounds of blocks of middling length."""
        place = min(range(len(self.lengths)), key=lambda n: abs(self.lengths[n] - 3))
        stats = self.run(place, WALKED).stats
        ended = int((np.asarray(stats.rounds) < WALKED).sum())
        kept, tried, tokens = (int(np.sum(each)) for each in (stats.kept, stats.tried, stats.committed))
        return Walked(kept, tried + ended, ended, tokens)

    def timed(self) -> Timed:
        """Of `Timed`, by several turns of whole generations with the length forced."""
        places, drafting = range(len(self.lengths)), next(n for n, length in enumerate(self.lengths) if length)
        self.run(drafting, 1)  # compiles
        if self.lengths[0] == 0:
            self.run(ALONE, 1)  # this too
        first, five = (min(self._seconds(0, count)[0] for _ in range(3)) for count in (1, 5))
        # rounds are to outweigh what comes before them, which in a large batch takes long
        most = 1 + int(np.clip(max(0.02, first) / max((five - first) / 4, 1e-6), 4, 24))
        alone = [(ALONE, 1), (ALONE, most)] if self.lengths[0] == 0 else []
        found, steady = self._usual([*alone, (0, 1), *((place, most) for place in places)])
        return told_from(found, most, self.lengths, steady)

    def _seconds(self, place: int, most_rounds: int) -> tuple[float, int]:
        """How long it took, and how many rounds there were."""
        begin = time.perf_counter()
        generation = self.run(place, most_rounds)
        return time.perf_counter() - begin, int(generation.num_rounds)

    def _usual(self, calls: list[tuple[int, int]]) -> tuple[dict[tuple[int, int], tuple[float, int]], bool]:
        """The usual seconds of each call and its rounds, and whether turns, to and fro, agree.

        Of each call the lower quartile of its shares: a machine that is slower for a while, as shared ones are, is so
        for all lengths, and it is their ratios that a choice hangs on; one that is disturbed for an instant is so for
        one call. By 20 turns of a busy machine these ratios are known to 5 to 7%, by medians to 6 to 10%.
        """
        turns, begin = list[list[float]](), time.monotonic()
        rounds = dict[tuple[int, int], int]()

        def wanted() -> float:
            every = np.asarray(turns)
            return SECONDS * (1 if agree(every) and precise(every) else PATIENCE)

        while len(turns) < LEAST_TURNS or (len(turns) < MOST_TURNS and time.monotonic() - begin < wanted()):
            seconds = dict[tuple[int, int], float]()
            for call in calls if len(turns) % 2 == 0 else calls[::-1]:
                seconds[call], rounds[call] = self._seconds(*call)
            turns.append([seconds[call] for call in calls])
        every = np.asarray(turns)
        usual = np.quantile(shares(every), 0.25, axis=0) * np.median(every)
        return {call: (float(each), rounds[call]) for call, each in zip(calls, usual, strict=True)}, agree(every)


def costs_of(rounds: Sequence[float], prefill: float, acceptance: float, length: float) -> Costs:
    """On the device, as a plan reads them."""
    numbers: list[Any] = [np.asarray(each, np.float32) for each in (rounds, prefill, acceptance, length)]
    costs: Costs = jax.device_put(Costs(*numbers))
    return costs


def shares(every: np.ndarray) -> np.ndarray:
    """Seconds `[turns, calls]` as parts of their turn's median."""
    return np.asarray(every / np.median(every, axis=1, keepdims=True))


def agree(every: np.ndarray) -> bool:
    """Whether usual turns take little longer than the least of everything: on a busy machine they do."""
    return bool(np.median(every.sum(1)) < STEADY * every.min(0).sum())


def precise(every: np.ndarray) -> bool:
    """Whether the standard errors of all usual shares are small, by the spread of the middle half of the turns."""
    parts = shares(every)
    low, high = np.quantile(parts, (0.25, 0.75), axis=0)
    # of a normal law the middle half is 1.35 standard deviations wide, and a quartile's error 1.36 times a mean's
    errors = 1.36 * (high - low) / 1.35 / np.sqrt(len(every))
    return bool(np.all(errors < PRECISE * np.median(parts, axis=0)))


def told_from(
    found: Mapping[tuple[int, int], tuple[float, int]], most: int, lengths: Sequence[int], steady: bool
) -> Timed:
    """From seconds and rounds of calls by (place, most rounds).

    There are a call of one round and one of `most` of the first length, of `most` of the others, and, where the first
    length is 0, both without a draft. What comes before the rounds is the same for all lengths, so one of them tells
    it: a call of a single round beside each would take half of the time and make each difference the noisier.
    """
    first, before = line(found[0, 1], found[0, most])
    rounds = [
        max(seconds - before, 1e-7) / n if n > 1 else np.nan
        for seconds, n in (found[p, most] for p in range(len(lengths)))
    ]
    if (ALONE, 1) not in found:  # where every round drafts it is never a choice what the draft's reading costs
        return Timed(rising([first, *rounds[1:]], lengths), 0.0, steady)
    without, reading = line(found[ALONE, 1], found[ALONE, most])
    both = [each for each in (first, without) if np.isfinite(each)]  # the same rounds, beside a draft and without one
    first = float(np.mean(both)) if both else np.nan
    return Timed(rising([first, *rounds[1:]], lengths), max(before - reading, 0.0), steady)


def line(one: tuple[float, int], several: tuple[float, int]) -> tuple[float, float]:
    """Seconds of a round, and before the first; nan and 0 where there was no second round."""
    (early, once), (late, rounds) = one, several
    if rounds <= once:
        return np.nan, 0.0
    each = max(late - early, 1e-7) / (rounds - once)
    return each, max(early - once * each, 0.0)


def rising(rounds: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """Seconds by length with gaps filled: outputs that were over after one long round say nothing of it.

    More drafts cost no less: where they seem to, the shorter one was disturbed. Gaps go on as the line through the two
    lengths before does; where not two are known, a draft is taken to cost as much as a round without any, so that
    nothing is drafted for outputs as short as these.
    """
    known = [(length, each) for length, each in zip(lengths, rounds, strict=True) if np.isfinite(each)]
    if len(known) < 2:
        return tuple((known[0][1] if known else 1.0) * (1.0 + length) for length in lengths)
    at, seconds = (np.asarray(each, float) for each in zip(*known, strict=True))
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    slope = max((seconds[-1] - seconds[-2]) / (at[-1] - at[-2]), 0.0)
    beyond = np.maximum(np.asarray(lengths) - at[-1], 0.0)
    return tuple((np.interp(lengths, at, seconds) + slope * beyond).tolist())
