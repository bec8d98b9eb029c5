"""Measurements for `block_size="auto"`: the time of a round for each block length, and how often drafts are accepted.

A round drafts some tokens and verifies them with one call of the target. The planner of block lengths
(`stopping.block_planner`) needs both quantities to minimise the time per token.

Both quantities are measured with the caller's own prompts and settings, in the program that generates the output, which
must be compiled anyway. So the measured time of a round includes drafting, the target's call at every width, sampling
and verification. The times depend on the engine, its shapes, the kind of sampling and the device. The acceptance rate
depends on the models, the rule and numbers such as α and temperature.

Each quantity is measured when it is first needed. It is then kept in this process, and for later processes in the
folder `auto` inside the compilation cache's folder. Files in `auto` may be deleted at any time. Measured costs
influence only the block lengths, never the distribution of the output.
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
"""The least number of examined draft tokens for which a measured acceptance rate is stored for later processes."""
_KNOWN: dict[str, Any] = {}

SECONDS, PATIENCE = 0.8, 8
"""The seconds that timing may take, without compilation, and the factor by which this limit grows on a busy machine.

A turn times every block length once (`Rounds.timed`). Timing takes at least `LEAST_TURNS` turns. As long as the turns
vary more than `STEADY` and `PRECISE` allow, the limit is `PATIENCE` times as long.
"""
LEAST_TURNS, MOST_TURNS = 5, 100
STEADY = 1.25
"""The ratio of a median turn's time to the sum of its calls' shortest times from which a machine counts as busy."""
PRECISE = 0.01
"""The largest relative standard error of a call's time; block lengths that differ by less are equally good."""

SEED = 2**32 - 1
"""The random seed of timed rounds. Timed outputs are discarded, so a generation may use the same random bits."""

WALKED = 16
"""The number of rounds over which accepted and rejected drafts are counted."""
USUAL, USUAL_TOKENS = 0.7, 10
"""The prior acceptance rate that is averaged with the measured rate, and its weight as a number of draft tokens.

Without the prior, a measurement on one short prompt could decide that drafting never pays. No later round would correct
this error, because acceptance can only be measured while drafting.
"""

ALONE = -1
"""The index of the program without a draft model; the indices 0, 1, … are those of the engine's block lengths."""


@dataclass(frozen=True)
class Timed:
    """Measured times: the seconds of a round for each block length, and the seconds of the draft model's prefill.

    Attributes:
        rounds: seconds of a round, one number for each block length.
        prefill: seconds of the draft model's pass over the prompts.
        steady: whether repeated measurements took similar times; only then are they stored for later processes.
    """

    rounds: tuple[float, ...]
    prefill: float
    steady: bool = True


@dataclass(frozen=True)
class Walked:
    """Counts of draft tokens, outputs and committed tokens over all rows, to estimate acceptance and output length.

    The end of an output counts as one rejected draft token, because draft tokens beyond the end are wasted too.

    Attributes:
        kept: accepted draft tokens.
        examined: draft tokens up to the first rejection of each block, and one for each output that ended.
        ended: outputs that ended.
        tokens: committed tokens.
    """

    kept: int
    examined: int
    ended: int
    tokens: int

    @property
    def acceptance(self) -> float:
        """The estimated probability that a draft token is accepted."""
        return (self.kept + USUAL * USUAL_TOKENS) / (self.examined + USUAL_TOKENS)

    def length(self, room: int) -> float:
        """Returns the expected number of tokens of an output, at most `room`.

        The estimate adds one fictitious output of `room / 2` tokens, because possibly no output has ended.
        """
        return min((self.tokens + room / 2) / (self.ended + 1), room)


Run = Callable[[Params, int], Generation]
"""A function `(parameters, number of rounds) -> Generation` that runs this many rounds and waits for the result."""


@dataclass(frozen=True)
class Rounds:
    """A program whose rounds can be run with a chosen block length, to time them and to count accepted drafts.

    It is the program of the generation itself. Artificial costs, which make all other lengths seem expensive, let the
    planner choose the wanted block length.
    """

    engine: Engine
    params: Params
    program: Run

    @property
    def lengths(self) -> tuple[int, ...]:
        """The block lengths of the engine's planned drafter."""
        return cast(PlannedDrafter, self.engine.drafter).lengths

    def run(self, place: int, most_rounds: int) -> Generation:
        """Runs `most_rounds` rounds with block length `lengths[place]`, or without a draft model if it is `ALONE`."""
        costs = costs_of([1.0 if n == place else 1e9 for n in range(len(self.lengths))], 0.0, 0.5, 1.0)
        drafter = {} if place == ALONE else self.params["drafter"]
        return self.program({**self.params, "drafter": {**drafter, "costs": costs}}, most_rounds)

    def walked(self) -> Walked:
        """Counts accepted and rejected drafts over `WALKED` rounds with the block length nearest to 3."""
        place = min(range(len(self.lengths)), key=lambda n: abs(self.lengths[n] - 3))
        stats = self.run(place, WALKED).stats
        ended = int((np.asarray(stats.rounds) < WALKED).sum())
        kept, tried, tokens = (int(np.sum(counts)) for counts in (stats.kept, stats.tried, stats.committed))
        return Walked(kept, tried + ended, ended, tokens)

    def timed(self) -> Timed:
        """Times each block length in interleaved turns; every turn runs a short generation with each length."""
        places, drafting = range(len(self.lengths)), next(n for n, length in enumerate(self.lengths) if length)
        self.run(drafting, 1)  # compiles the program before it is timed
        if self.lengths[0] == 0:
            self.run(ALONE, 1)  # compiles the program without a draft model
        first, five = (min(self._seconds(0, count)[0] for _ in range(3)) for count in (1, 5))
        # The rounds of a call must take longer than its prefill, which takes long in a large batch.
        most = 1 + int(np.clip(max(0.02, first) / max((five - first) / 4, 1e-6), 4, 24))
        alone = [(ALONE, 1), (ALONE, most)] if self.lengths[0] == 0 else []
        calls, steady = self._usual([*alone, (0, 1), *((place, most) for place in places)])
        return told_from(calls, most, self.lengths, steady)

    def _seconds(self, place: int, most_rounds: int) -> tuple[float, int]:
        """Times one generation; returns its seconds and its number of rounds."""
        begin = time.perf_counter()
        generation = self.run(place, most_rounds)
        return time.perf_counter() - begin, int(generation.num_rounds)

    def _usual(self, calls: list[tuple[int, int]]) -> tuple[dict[tuple[int, int], tuple[float, int]], bool]:
        """Times all calls in turns; returns each call's typical seconds and rounds, and whether the turns are similar.

        A turn runs every call once. A call's share is its time divided by the median time of its turn, and its typical
        share is the lower quartile over the turns. A machine that is slow for a while slows down all calls of a turn,
        so shares hardly change, and the choice of a block length depends only on ratios of times. A brief disturbance
        affects one call of one turn, which the lower quartile ignores. After 20 turns on a busy machine the ratios have
        errors of 5 to 7%; with medians they would have 6 to 10%.
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
    """Converts numbers to the planner's `Costs` on the device."""
    numbers: Any = (np.asarray(value, np.float32) for value in (rounds, prefill, acceptance, length))
    return cast(Costs, jax.device_put(Costs(*numbers)))


def shares(every: np.ndarray) -> np.ndarray:
    """Returns the seconds `[turns, calls]` divided by the median of their turn."""
    return np.asarray(every / np.median(every, axis=1, keepdims=True))


def agree(every: np.ndarray) -> bool:
    """Returns whether the median turn takes little longer than its calls' shortest times together (an idle machine)."""
    return bool(np.median(every.sum(1)) < STEADY * every.min(0).sum())


def precise(every: np.ndarray) -> bool:
    """Returns whether every call's typical share has a small standard error, estimated from the interquartile range."""
    parts = shares(every)
    low, high = np.quantile(parts, (0.25, 0.75), axis=0)
    # For a normal distribution the interquartile range is 1.35 standard deviations, and the standard error of a
    # quartile is 1.36 times the standard error of the mean.
    errors = 1.36 * (high - low) / 1.35 / np.sqrt(len(every))
    return bool(np.all(errors < PRECISE * np.median(parts, axis=0)))


def told_from(
    timings: Mapping[tuple[int, int], tuple[float, int]], most: int, lengths: Sequence[int], steady: bool
) -> Timed:
    """Computes the seconds of a round for each block length from timed calls.

    `timings` maps (index of a block length, largest number of rounds) to (seconds, rounds). It holds a call of one
    round and a call of `most` rounds for the first length, and a call of `most` rounds for each other length. If the
    first length is 0, it also holds a call of one round and a call of `most` rounds without a draft model. The time
    before the first round is the same for all lengths, so it is computed from the first length only. Calls of a single
    round for all lengths would take up half of the measuring time and make the differences noisier.
    """
    first, before = line(timings[0, 1], timings[0, most])
    whole = [timings[place, most] for place in range(1, len(lengths))]
    rounds = [max(seconds - before, 1e-7) / n if n > 1 else np.nan for seconds, n in whole]
    prefill = 0.0  # if every round drafts, the draft's prefill is always needed and cannot be saved
    if (ALONE, 1) in timings:
        without, reading = line(timings[ALONE, 1], timings[ALONE, most])
        # a round of length 0 was timed twice: after the draft's prefill, and without a draft model
        single_rounds = [seconds for seconds in (first, without) if np.isfinite(seconds)]
        first, prefill = float(np.mean(single_rounds)) if single_rounds else np.nan, max(before - reading, 0.0)
    return Timed(rising([first, *rounds], lengths), prefill, steady)


def line(single: tuple[float, int], several: tuple[float, int]) -> tuple[float, float]:
    """Returns the seconds per round and the seconds before the first round; nan and 0 if there was only one round."""
    (early, once), (late, rounds) = single, several
    if rounds <= once:
        return np.nan, 0.0
    per_round = max(late - early, 1e-7) / (rounds - once)
    return per_round, max(early - once * per_round, 0.0)


def rising(rounds: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """Fills gaps in the seconds of a round by block length, and makes the seconds never fall as the length grows.

    There is a gap (nan) if the outputs ended after a single long round, whose time cannot be separated from the
    prefill.

    A longer block never costs less: if it seems to, the measurement of the shorter length was disturbed. Gaps beyond
    the longest measured length are extrapolated along the line through the two longest ones. With fewer than two
    measured lengths, each draft token is assumed to cost as much as a round without drafts. Then nothing is drafted for
    such short outputs.
    """
    known = [(length, entry) for length, entry in zip(lengths, rounds, strict=True) if np.isfinite(entry)]
    if len(known) < 2:
        return tuple((known[0][1] if known else 1.0) * (1.0 + length) for length in lengths)
    known_lengths, seconds = (np.asarray(entry, float) for entry in zip(*known, strict=True))
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    slope = max((seconds[-1] - seconds[-2]) / (known_lengths[-1] - known_lengths[-2]), 0.0)
    beyond = np.maximum(np.asarray(lengths) - known_lengths[-1], 0.0)
    return tuple((np.interp(lengths, known_lengths, seconds) + slope * beyond).tolist())


# --- measurements that are kept for later calls and processes


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
    """Returns the parameters with the costs that a planner needs to choose block lengths; measures unknown costs.

    The parameters of a program without planned block lengths are returned unchanged. If drafting is not expected to
    save time, the draft model's parameters are left out, so that its prefill is not computed (`drafters.model`).

    Args:
        pair: the models.
        engine: the program of a decoder; only an `Engine` can have planned block lengths.
        params: the program's parameters.
        prompt: `[B, P]`, as in `generate`.
        controls: the numbers of each row, as in `generate`.
        max_new_tokens: as in `generate`.
        run: a function that runs the timed program; by default it calls `generate`.
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
    """Returns the costs that a planner needs to choose block lengths, on the device; measures them if unknown."""
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
    """Returns a record's entry about planned block lengths: rounds by length, and the costs that decided the choice.

    The costs are the milliseconds of a round by length, the milliseconds of the draft's prefill, the prior acceptance
    rate, and the expected number of tokens of an output.

    Args:
        params: the output of `ready`.
        engine: the engine that the parameters belong to.
        chosen: int `[B, N]`, the number of rounds of each row with each block length.
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
    """Returns which slow steps of sampling are used: temperature above 0, top-k and top-p, for draft and target."""
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
    """Returns the time of the last change to the package's code.

    It belongs to the keys of stored measurements, because they are valid only for the code that was measured.
    """
    folder = Path(speccascade_jax.__file__).parent
    return max(path.stat().st_mtime_ns for path in folder.rglob("*.py"))


def _known(key: str, measure: Callable[[], Any], sound: Callable[[Any], bool]) -> Any:
    """Returns the measurement `key` from this process's memory or from a file; measures if neither has it.

    A measurement is read from a file, or written to one, only if `sound` accepts it.
    """
    if key not in _KNOWN:
        value = _read(key)
        if not sound(value):
            value = measure()
            if sound(value):
                _write(key, value)
        _KNOWN[key] = value
    return _KNOWN[key]


def _is_timed(lengths: int, content: Any) -> bool:
    """Returns whether a dictionary from a file has the fields of a steady `Timed` for `lengths` block lengths."""
    if not _has_fields(Timed, content) or content["steady"] is not True:
        return False
    return _positive(content["rounds"]) and len(content["rounds"]) == lengths and _positive([content["prefill"]])


def _is_telling(content: Any) -> bool:
    """Returns whether a dictionary has the fields of a `Walked` that examined at least `TELLING` drafted tokens."""
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
    """Returns the stored measurement with this key; `None` if there is no file, or the file is not JSON."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if (path := _file(key)) is not None:
            return json.loads(path.read_text())
    return None


def _write(key: str, value: Any) -> None:
    # A failed write is harmless: the next process measures again, and `compilation_cache` has already warned.
    with contextlib.suppress(OSError, RuntimeError):
        if (path := _file(key)) is not None:
            write_atomically(path, json.dumps(value))
