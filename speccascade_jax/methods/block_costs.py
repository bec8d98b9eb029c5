"""What `block_size="auto"` chooses by: seconds of a round for each number of drafts, and how often drafts are kept.

Both are measured with the caller's own prompts and numbers, in the generation's own program, which has to be compiled
anyway: what a round costs is all of it, the widths' programs, sampling and verification included. Seconds belong to an
engine, its shapes, the kind of sampling and the device; acceptance to the models, the rule and the numbers. Either is
measured when it is first needed and kept: in this process, and for later ones in `auto` in the compilation cache's
folder, whose files may be deleted at any time. Other costs give other lengths of blocks, never another law.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

import speccascade_jax
from speccascade_jax.core.transfers import Flat
from speccascade_jax.core.types import Controls, Params, Prompt
from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, generate
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.runtime import compilation_cache, hosts, products
from speccascade_jax.runtime.notices import said_if_long
from speccascade_jax.stopping.block_planner import Cheapest, Costs
from speccascade_jax.storage.files import point_key, write_atomically

TELLING = 200
"""Examined drafts from which on acceptance is kept for later processes."""
_KNOWN: dict[str, Any] = {}

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
        return cast(PlannedDrafter, self.engine.drafter).lengths

    def run(self, place: int, most_rounds: int) -> Generation:
        """So many rounds that aim at the length in that place, or that never could (`ALONE`); waited for."""
        costs = costs_of([1.0 if n == place else 1e9 for n in range(len(self.lengths))], 0.0, 0.5, 1.0)
        drafter = {} if place == ALONE else self.params["drafter"]
        return self.program({**self.params, "drafter": {**drafter, "costs": costs}}, most_rounds)

    def walked(self) -> Walked:
        """What became of some rounds of blocks of middling length."""
        place = min(range(len(self.lengths)), key=lambda n: abs(self.lengths[n] - 3))
        stats = self.run(place, WALKED).stats
        ended = int((np.asarray(stats.rounds) < WALKED).sum())
        kept, tried, tokens = (int(np.sum(each)) for each in (stats.kept, stats.tried, stats.committed))
        return Walked(kept, tried + ended, ended, tokens)

    def timed(self) -> Timed:
        """Times each block length in interleaved turns of whole generations."""
        places, drafting = range(len(self.lengths)), next(n for n, length in enumerate(self.lengths) if length)
        self.run(drafting, 1)  # compiles
        if self.lengths[0] == 0:
            self.run(ALONE, 1)  # this too
        first, five = (min(self._seconds(0, count)[0] for _ in range(3)) for count in (1, 5))
        # rounds are to outweigh what comes before them, which in a large batch takes long
        most = 1 + int(np.clip(max(0.02, first) / max((five - first) / 4, 1e-6), 4, 24))
        alone = [(ALONE, 1), (ALONE, most)] if self.lengths[0] == 0 else []
        calls, steady = self._usual([*alone, (0, 1), *((place, most) for place in places)])
        return told_from(calls, most, self.lengths, steady)

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
    numbers: Any = (np.asarray(value, np.float32) for value in (rounds, prefill, acceptance, length))
    return cast(Costs, jax.device_put(Costs(*numbers)))


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
    """Computes seconds of a round from seconds and rounds of calls by (place, most rounds).

    There are a call of one round and one of `most` of the first length, of `most` of the others, and, where the first
    length is 0, both without a draft. What comes before the rounds is the same for all lengths, so one of them tells
    it: a call of a single round beside each would take half of the time and make each difference the noisier.
    """
    first, before = line(found[0, 1], found[0, most])
    whole = [found[place, most] for place in range(1, len(lengths))]
    rounds = [max(seconds - before, 1e-7) / n if n > 1 else np.nan for seconds, n in whole]
    prefill = 0.0  # where every round drafts it is never a choice what the draft's reading costs
    if (ALONE, 1) in found:
        without, reading = line(found[ALONE, 1], found[ALONE, most])
        both = [seconds for seconds in (first, without) if np.isfinite(seconds)]  # one round, with a draft and without
        first, prefill = float(np.mean(both)) if both else np.nan, max(before - reading, 0.0)
    return Timed(rising([first, *rounds], lengths), prefill, steady)


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


# --- what is known of them, and for how long


def ready(
    pair: Pair,
    engine: Any,
    params: Params,
    prompt: Prompt,
    controls: Controls,
    *,
    max_new_tokens: int,
    run: Run | None = None,
) -> Params:
    """The parameters with what a planned drafter chooses by, measured where it is not known; others as they are.

    Where no draft pays before the first round, without those of the draft: `drafters.model`.

    Args:
        engine: of a decoder; any other program has no planned lengths. params: beside it; the rest as of `generate`.
        run: runs the program that is to be timed; by default `generate`.
    """
    if not isinstance(engine, Engine) or not isinstance(engine.drafter, PlannedDrafter) or "costs" in params["drafter"]:
        return params
    given: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens}

    def plain(told: Params, most_rounds: int) -> Generation:
        generation = generate(engine, told, prompt, SEED, most_rounds=most_rounds, **given)
        jax.block_until_ready(generation)
        return generation

    known = costs(pair, Rounds(engine, params, run or plain), prompt, controls, max_new_tokens)
    drafter = {**params["drafter"], "costs": known}
    if not _drafts(engine.drafter.plan, known, max_new_tokens):
        del drafter["model"]
    return Flat({**params, "drafter": drafter})


_drafts = jax.jit(Cheapest.drafts, static_argnums=0)


def costs(pair: Pair, rounds: Rounds, prompt: Prompt, controls: Controls, max_new_tokens: int) -> Costs:
    """Those of an engine with a planned drafter, on the device."""
    if hosts.many():
        raise ValueError(
            "block_size='auto' times its rounds, which each of several processes would do for itself: give a number"
        )
    numbers, engine = jax.device_get(controls), rounds.engine
    encoded = () if prompt.encoder_tokens is None else prompt.encoder_tokens.shape
    timed_key = _key("rounds", pair, engine, _kind(numbers), prompt.tokens.shape, encoded, max_new_tokens)
    numbers_told = tuple(float(f"{np.mean(leaf):.2g}") for leaf in jax.tree.leaves(numbers))
    kept_key = _key("acceptance", pair, engine, numbers_told)
    if (both := timed_key + kept_key) not in _KNOWN:
        is_timed = functools.partial(_is_timed, len(rounds.lengths))
        sizes = f"blocks of up to {rounds.lengths[-1]} drafts in a batch of {prompt.tokens.shape[0]}"
        with said_if_long(lambda: f"compiling and timing {sizes}"):
            timed = Timed(**_known(timed_key, lambda: asdict(rounds.timed()), is_timed))
        walked = Walked(**_known(kept_key, lambda: asdict(rounds.walked()), _is_telling))
        _KNOWN[both] = costs_of(timed.rounds, timed.prefill, walked.acceptance, walked.length(max_new_tokens))
    return cast(Costs, _KNOWN[both])


def planned(params: Params, engine: Engine, chosen: np.ndarray) -> dict[str, Any]:
    """Returns, for records of planned lengths, rounds by the length aimed at, and what it was chosen by.

    That is milliseconds by length and of the draft's prefill, the acceptance that rows begin with, and an
    output's tokens.

    Args:
        params: `ready`; chosen: int `[B, N]`, the rounds of some rows, as a planned drafter counts them.
    """
    names, costs = [*map(str, cast(PlannedDrafter, engine.drafter).lengths)], params["drafter"]["costs"]
    milliseconds = (seconds * 1e3 for seconds in np.asarray(costs.rounds).tolist())
    return {
        "rounds": dict(zip(names, chosen.sum(0).tolist(), strict=True)),
        "rows": len(chosen),
        "round_ms": dict(zip(names, milliseconds, strict=True)),
        "prefill_ms": float(costs.prefill) * 1e3,
        "acceptance": float(costs.acceptance),
        "length": float(costs.length),
    }


def _kind(numbers: Controls) -> list[bool]:
    """What of sampling takes time: temperatures, top-k and top-p, of draft and target."""
    each = (numbers.draft, numbers.target)
    return [bool(np.any(on)) for s in each for on in (s.temperature > 0, s.top_k > 0, s.top_p < 1)]


def _key(what: str, pair: Pair, engine: Engine, *more: Any) -> str:
    first, verifier = jax.devices()[0], engine.verifier
    flags = os.environ.get("XLA_FLAGS", ""), products.available()
    machine = (first.platform, first.device_kind, os.cpu_count(), flags, jax.__version__)
    drafter: Any = engine.drafter
    models = (pair.fingerprint, repr(engine.target), repr(drafter.model), drafter.plan.lengths)
    rule = (type(verifier).__name__, verifier.name, engine.bonus)
    return f"{what}-{point_key(machine=machine, code=_code(), models=models, rule=rule, more=more)}"


@functools.cache
def _code() -> int:
    """When this package was last changed: other code takes other times."""
    folder = Path(speccascade_jax.__file__).parent
    return max(path.stat().st_mtime_ns for path in folder.rglob("*.py"))


def _known(key: str, measure: Callable[[], Any], sound: Callable[[Any], bool]) -> Any:
    """A value of this process, a sound one of an earlier process, or the measured one, kept for later ones if sound."""
    if key not in _KNOWN:
        found = _read(key)
        if not sound(found):
            found = measure()
            if sound(found):
                _write(key, found)
        _KNOWN[key] = found
    return _KNOWN[key]


def _is_timed(lengths: int, held: Any) -> bool:
    """Whether this is a steady `Timed` of so many lengths, as a dictionary."""
    if not _has_fields(Timed, held) or held["steady"] is not True:
        return False
    return _positive(held["rounds"]) and len(held["rounds"]) == lengths and _positive([held["prefill"]])


def _is_telling(held: Any) -> bool:
    """Whether this is a `Walked`, as a dictionary, of enough drafts to say something of other prompts."""
    positive = _has_fields(Walked, held) and _positive([*held.values()])
    return positive and bool(held["kept"] <= held["examined"] >= TELLING)


def _has_fields(kind: Any, held: Any) -> bool:
    return isinstance(held, dict) and set(held) == {field.name for field in fields(kind)}


def _positive(held: Any) -> bool:
    numbers = isinstance(held, list | tuple) and all(type(value) in (int, float) for value in held)
    return numbers and bool(held) and all(0 <= value < np.inf for value in held)


def _file(key: str) -> Any:
    folder = compilation_cache.folder()
    return None if folder is None else folder / "auto" / f"{key}.json"


def _read(key: str) -> Any:
    """What a file holds; `None` where there is none, or it is no JSON."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if (path := _file(key)) is not None:
            return json.loads(path.read_text())
    return None


def _write(key: str, value: Any) -> None:
    # a cache: who cannot write it measures again, and was warned when programs could not be kept
    with contextlib.suppress(OSError, RuntimeError):
        if (path := _file(key)) is not None:
            write_atomically(path, json.dumps(value))
