"""Measurements for `block_size="auto"`: seconds of a round for each number of drafts, and how often drafts are kept.

Both are measured with the caller's own prompts and numbers, in the generation's own program, which has to be compiled
anyway: the cost of a round includes the programs of all widths, sampling and verification. Seconds belong to an engine,
its shapes, the kind of sampling and the device; acceptance belongs to the models, the rule and the numbers. Each is
measured when it is first needed and kept: in this process, and for later processes in `auto` in the compilation cache's
folder, whose files may be deleted at any time. Other costs give other block lengths, never another distribution.
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
"""The least number of examined drafts for which a measured acceptance is stored for later processes."""
_KNOWN: dict[str, Any] = {}

SECONDS, PATIENCE = 0.8, 8
"""Seconds for which rounds are timed, compilation aside, and the factor by which they grow on a busy machine.

There are at least five turns; if these are not `STEADY` or not `PRECISE`, timing takes `PATIENCE` times as long.
"""
LEAST_TURNS, MOST_TURNS = 5, 100
STEADY = 1.25
"""The largest ratio of a usual turn's time to the sum of the least times of its calls."""
PRECISE = 0.01
"""The largest standard error of a length's share of a turn; lengths that differ by less are equally good."""

SEED = 2**32 - 1
"""The random seed of timed rounds. A generation may use the same bits without harm."""

WALKED = 16
"""The number of rounds in which acceptance is counted."""
USUAL, USUAL_TOKENS = 0.7, 10
"""The acceptance with which a measurement from few drafts is averaged, and its weight in drafts.

One prompt of one sentence must not decide that drafting never pays, because nothing is learnt without drafts.
"""

ALONE = -1
"""The index that stands for the program without a draft, where other indices stand for block lengths."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a round for each block length, and of the draft's prefill.

    Attributes:
        rounds: seconds by length.
        prefill: seconds in which the draft reads the prompts.
        steady: whether turns took similar times; timings of a busy machine are not kept for later processes.
    """

    rounds: tuple[float, ...]
    prefill: float
    steady: bool = True


@dataclass(frozen=True)
class Walked:
    """Counts of drafts, outputs and tokens over all rows, from which acceptance and output length are estimated.

    An output's end counts as an examined draft that was rejected, because drafts beyond it are in vain too.

    Attributes:
        kept: accepted drafts.
        examined: examined drafts.
        ended: outputs that ended.
        tokens: committed tokens.
    """

    kept: int
    examined: int
    ended: int
    tokens: int

    @property
    def acceptance(self) -> float:
        """The probability that a draft is kept."""
        return (self.kept + USUAL * USUAL_TOKENS) / (self.examined + USUAL_TOKENS)

    def length(self, room: int) -> float:
        """Returns the expected number of tokens of an output, at most `room`.

        One more output is counted, which ends half-way, because otherwise there may be none that has ended.
        """
        return min((self.tokens + room / 2) / (self.ended + 1), room)


Run = Callable[[Params, int], Generation]
"""A function of parameters and a number of rounds: it runs a generation for that many rounds and waits for it."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of one generation, in its own program; artificial costs make the planner choose a given block length."""

    engine: Engine
    params: Params
    program: Run

    @property
    def lengths(self) -> tuple[int, ...]:
        """The block lengths of the engine's planned drafter."""
        return cast(PlannedDrafter, self.engine.drafter).lengths

    def run(self, place: int, most_rounds: int) -> Generation:
        """Runs `most_rounds` rounds of block length `lengths[place]`, or without a draft (`ALONE`); awaits the end."""
        costs = costs_of([1.0 if n == place else 1e9 for n in range(len(self.lengths))], 0.0, 0.5, 1.0)
        drafter = {} if place == ALONE else self.params["drafter"]
        return self.program({**self.params, "drafter": {**drafter, "costs": costs}}, most_rounds)

    def walked(self) -> Walked:
        """Counts accepted drafts over some rounds with a block length of about 3."""
        place = min(range(len(self.lengths)), key=lambda n: abs(self.lengths[n] - 3))
        stats = self.run(place, WALKED).stats
        ended = int((np.asarray(stats.rounds) < WALKED).sum())
        kept, tried, tokens = (int(np.sum(counts)) for counts in (stats.kept, stats.tried, stats.committed))
        return Walked(kept, tried + ended, ended, tokens)

    def timed(self) -> Timed:
        """Times each block length in interleaved turns of whole generations."""
        places, drafting = range(len(self.lengths)), next(n for n, length in enumerate(self.lengths) if length)
        self.run(drafting, 1)  # compiles
        if self.lengths[0] == 0:
            self.run(ALONE, 1)  # compiles too
        first, five = (min(self._seconds(0, count)[0] for _ in range(3)) for count in (1, 5))
        # enough rounds to outweigh the prefill, which takes long in a large batch
        most = 1 + int(np.clip(max(0.02, first) / max((five - first) / 4, 1e-6), 4, 24))
        alone = [(ALONE, 1), (ALONE, most)] if self.lengths[0] == 0 else []
        calls, steady = self._usual([*alone, (0, 1), *((place, most) for place in places)])
        return told_from(calls, most, self.lengths, steady)

    def _seconds(self, place: int, most_rounds: int) -> tuple[float, int]:
        """Times a call; returns its seconds and its number of rounds."""
        begin = time.perf_counter()
        generation = self.run(place, most_rounds)
        return time.perf_counter() - begin, int(generation.num_rounds)

    def _usual(self, calls: list[tuple[int, int]]) -> tuple[dict[tuple[int, int], tuple[float, int]], bool]:
        """Times all calls in turns; returns each call's usual seconds and its rounds, and whether the turns agree.

        A call's usual time is the lower quartile of its shares of a turn. A shared machine that is slower for a while
        is slower for all lengths, and the choice depends on their ratios alone; a brief disturbance affects one call.
        From 20 turns on a busy machine these ratios are known to 5 to 7%, with medians to 6 to 10%.
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
        return {call: (float(share), rounds[call]) for call, share in zip(calls, usual, strict=True)}, agree(every)


def costs_of(rounds: Sequence[float], prefill: float, acceptance: float, length: float) -> Costs:
    """Returns `Costs` on the device, as a planner reads them."""
    numbers: Any = (np.asarray(value, np.float32) for value in (rounds, prefill, acceptance, length))
    return cast(Costs, jax.device_put(Costs(*numbers)))


def shares(every: np.ndarray) -> np.ndarray:
    """Returns seconds `[turns, calls]` as fractions of their turn's median."""
    return np.asarray(every / np.median(every, axis=1, keepdims=True))


def agree(every: np.ndarray) -> bool:
    """Returns whether usual turns take little longer than the sum of the least times, as they do on an idle machine."""
    return bool(np.median(every.sum(1)) < STEADY * every.min(0).sum())


def precise(every: np.ndarray) -> bool:
    """Returns whether the standard errors of all usual shares are small, from the spread of the turns' middle half."""
    parts = shares(every)
    low, high = np.quantile(parts, (0.25, 0.75), axis=0)
    # for a normal distribution the middle half is 1.35 standard deviations wide, and the standard error of a quartile
    # is 1.36 times that of the mean
    errors = 1.36 * (high - low) / 1.35 / np.sqrt(len(every))
    return bool(np.all(errors < PRECISE * np.median(parts, axis=0)))


def told_from(
    timings: Mapping[tuple[int, int], tuple[float, int]], most: int, lengths: Sequence[int], steady: bool
) -> Timed:
    """Computes the seconds of a round for each length from timed calls, keyed by (index of a length, most rounds).

    There are a call of one round and one of `most` rounds of the first length, one of `most` rounds of each other
    length, and, if the first length is 0, both calls without a draft. The time before the rounds is the same for all
    lengths, so one of them determines it. A call of a single round for each length would take half of the time and make
    the differences noisier.
    """
    first, before = line(timings[0, 1], timings[0, most])
    whole = [timings[place, most] for place in range(1, len(lengths))]
    rounds = [max(seconds - before, 1e-7) / n if n > 1 else np.nan for seconds, n in whole]
    prefill = 0.0  # if every round drafts, the draft's prefill is needed in any case
    if (ALONE, 1) in timings:
        without, reading = line(timings[ALONE, 1], timings[ALONE, most])
        # seconds of a round of length 0, timed with the draft's prefill and without
        single_rounds = [seconds for seconds in (first, without) if np.isfinite(seconds)]
        first, prefill = float(np.mean(single_rounds)) if single_rounds else np.nan, max(before - reading, 0.0)
    return Timed(rising([first, *rounds], lengths), prefill, steady)


def line(single: tuple[float, int], several: tuple[float, int]) -> tuple[float, float]:
    """Returns the seconds of a round, and the seconds before the first round; nan and 0 without a second round."""
    (early, once), (late, rounds) = single, several
    if rounds <= once:
        return np.nan, 0.0
    per_round = max(late - early, 1e-7) / (rounds - once)
    return per_round, max(early - once * per_round, 0.0)


def rising(rounds: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """Fills gaps in the seconds by length, and makes them rise with the length.

    There is a gap if outputs ended after one long round, which does not show its cost.

    More drafts never cost less: if they seem to, the shorter length was disturbed. Gaps are extrapolated along the line
    through the two lengths before. With fewer than two known lengths, a draft is assumed to cost as much as a round
    without any, so that nothing is drafted for such short outputs.
    """
    known = [(length, entry) for length, entry in zip(lengths, rounds, strict=True) if np.isfinite(entry)]
    if len(known) < 2:
        return tuple((known[0][1] if known else 1.0) * (1.0 + length) for length in lengths)
    known_lengths, seconds = (np.asarray(entry, float) for entry in zip(*known, strict=True))
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    slope = max((seconds[-1] - seconds[-2]) / (known_lengths[-1] - known_lengths[-2]), 0.0)
    beyond = np.maximum(np.asarray(lengths) - known_lengths[-1], 0.0)
    return tuple((np.interp(lengths, known_lengths, seconds) + slope * beyond).tolist())


# --- kept measurements


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
    """Returns the parameters with the costs that a planned drafter chooses by, measured if they are not known.

    Other programs' parameters are returned unchanged. If no draft pays before the first round, the draft's parameters
    are left out: `drafters.model`.

    Args:
        pair: the models.
        engine: the engine of a decoder; any other program has no planned lengths.
        params: its parameters.
        prompt: `[B, P]`, as in `generate`.
        controls: numbers per row, as in `generate`.
        max_new_tokens: as in `generate`.
        run: runs the program that is timed; by default `generate`.
    """
    if not isinstance(engine, Engine) or not isinstance(engine.drafter, PlannedDrafter) or "costs" in params["drafter"]:
        return params
    arguments: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens}

    def plain(timed_params: Params, most_rounds: int) -> Generation:
        generation = generate(engine, timed_params, prompt, SEED, most_rounds=most_rounds, **arguments)
        jax.block_until_ready(generation)
        return generation

    known = costs(pair, Rounds(engine, params, run or plain), prompt, controls, max_new_tokens)
    drafter = {**params["drafter"], "costs": known}
    if not _drafts(engine.drafter.plan, known, max_new_tokens):
        del drafter["model"]
    return Flat({**params, "drafter": drafter})


_drafts = jax.jit(Cheapest.drafts, static_argnums=0)


def costs(pair: Pair, rounds: Rounds, prompt: Prompt, controls: Controls, max_new_tokens: int) -> Costs:
    """Returns the costs of an engine with a planned drafter, on the device; measures them if they are not known."""
    if hosts.many():
        raise ValueError(
            "block_size='auto' needs a single process, because every process would time its own rounds: give a number"
        )
    numbers, engine = jax.device_get(controls), rounds.engine
    encoded = () if prompt.encoder_tokens is None else prompt.encoder_tokens.shape
    timed_key = _key("rounds", pair, engine, _kind(numbers), prompt.tokens.shape, encoded, max_new_tokens)
    numbers_told = tuple(float(f"{np.mean(leaf):.2g}") for leaf in jax.tree.leaves(numbers))
    kept_key = _key("acceptance", pair, engine, numbers_told)
    if (pair_key := timed_key + kept_key) not in _KNOWN:
        is_timed = functools.partial(_is_timed, len(rounds.lengths))
        sizes = f"blocks of up to {rounds.lengths[-1]} drafts in a batch of {prompt.tokens.shape[0]}"
        with said_if_long(lambda: f"compiling and timing {sizes}"):
            timed = Timed(**_known(timed_key, lambda: asdict(rounds.timed()), is_timed))
        walked = Walked(**_known(kept_key, lambda: asdict(rounds.walked()), _is_telling))
        _KNOWN[pair_key] = costs_of(timed.rounds, timed.prefill, walked.acceptance, walked.length(max_new_tokens))
    return cast(Costs, _KNOWN[pair_key])


def planned(params: Params, engine: Engine, chosen: np.ndarray) -> dict[str, Any]:
    """Returns, for records, the number of rounds by block length, and the costs by which lengths were chosen.

    These are milliseconds by length and of the draft's prefill, the prior acceptance of a row, and the tokens of an
    output.

    Args:
        params: the output of `ready`.
        engine: its engine.
        chosen: int `[B, N]`, the rounds of some rows, as a planned drafter counts them.
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
    """Returns which parts of sampling take time: temperatures, top-k and top-p, of draft and target."""
    samplings = (numbers.draft, numbers.target)
    return [bool(np.any(on)) for s in samplings for on in (s.temperature > 0, s.top_k > 0, s.top_p < 1)]


def _key(quantity: str, pair: Pair, engine: Engine, *more: Any) -> str:
    first, verifier = jax.devices()[0], engine.verifier
    flags = os.environ.get("XLA_FLAGS", ""), products.available()
    machine = (first.platform, first.device_kind, os.cpu_count(), flags, jax.__version__)
    drafter: Any = engine.drafter
    models = (pair.fingerprint, repr(engine.target), repr(drafter.model), drafter.plan.lengths)
    rule = (type(verifier).__name__, verifier.name, engine.bonus)
    return f"{quantity}-{point_key(machine=machine, code=_code(), models=models, rule=rule, more=more)}"


@functools.cache
def _code() -> int:
    """Returns the time of the last change to this package's code, because other code takes other times."""
    folder = Path(speccascade_jax.__file__).parent
    return max(path.stat().st_mtime_ns for path in folder.rglob("*.py"))


def _known(key: str, measure: Callable[[], Any], sound: Callable[[Any], bool]) -> Any:
    """Returns a value that this process knows or an earlier one stored, or else measures it; stores sound values."""
    if key not in _KNOWN:
        value = _read(key)
        if not sound(value):
            value = measure()
            if sound(value):
                _write(key, value)
        _KNOWN[key] = value
    return _KNOWN[key]


def _is_timed(lengths: int, content: Any) -> bool:
    """Returns whether a dictionary is a steady `Timed` of that many lengths."""
    if not _has_fields(Timed, content) or content["steady"] is not True:
        return False
    return _positive(content["rounds"]) and len(content["rounds"]) == lengths and _positive([content["prefill"]])


def _is_telling(content: Any) -> bool:
    """Returns whether a dictionary is a `Walked` of enough drafts to hold for other prompts."""
    positive = _has_fields(Walked, content) and _positive([*content.values()])
    return positive and bool(content["kept"] <= content["examined"] >= TELLING)


def _has_fields(kind: Any, content: Any) -> bool:
    return isinstance(content, dict) and set(content) == {field.name for field in fields(kind)}


def _positive(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and all(type(value) in (int, float) for value in values)
    return numbers and bool(values) and all(0 <= value < np.inf for value in values)


def _file(key: str) -> Any:
    folder = compilation_cache.folder()
    return None if folder is None else folder / "auto" / f"{key}.json"


def _read(key: str) -> Any:
    """Returns the content of a file; `None` if there is none, or it is not JSON."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if (path := _file(key)) is not None:
            return json.loads(path.read_text())
    return None


def _write(key: str, value: Any) -> None:
    # a cache: without it the next process measures again, and compilation_cache has warned already
    with contextlib.suppress(OSError, RuntimeError):
        if (path := _file(key)) is not None:
            write_atomically(path, json.dumps(value))
