"""What `block_size="auto"` chooses by: seconds of a round for each number of drafts, and how often drafts are kept.

Both are measured with the caller's own prompts and numbers, in the generation's own program, which has to be compiled
anyway (`trials`). Seconds belong to an engine, its shapes, the kind of sampling and the device; acceptance to the
models, the rule and the numbers. Either is measured when it is first needed and kept: in this process, and for later
ones in `auto` in the compilation cache's folder, whose files may be deleted at any time. Other costs give other lengths
of blocks, never another law.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

import speccascade_jax
from speccascade_jax.core.flat_params import Flat
from speccascade_jax.core.types import Controls, Params, Prompt
from speccascade_jax.drafters.planned import PlannedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, generate
from speccascade_jax.methods.round_timing import SEED, Rounds, Run, Timed, Walked, costs_of
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.runtime import compilation_cache, hosts, products
from speccascade_jax.runtime.notices import said_if_long
from speccascade_jax.stopping.block_planner import Cheapest, Costs
from speccascade_jax.storage.files import point_key, write_atomically

TELLING = 200
"""Examined drafts from which on acceptance is kept for later processes."""
_KNOWN: dict[str, Any] = {}


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

    Where no draft pays before the first round, without those of the draft: `drafters.planned`.

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
    timed_key = _key("rounds", pair, engine, _kind(numbers), prompt.tokens.shape, _encoded(prompt), max_new_tokens)
    numbers_told = tuple(float(f"{np.mean(leaf):.2g}") for leaf in jax.tree.leaves(numbers))
    kept_key = _key("acceptance", pair, engine, numbers_told)
    if (both := timed_key + kept_key) not in _KNOWN:
        is_timed = functools.partial(_is_timed, len(rounds.lengths))
        told = (
            f"compiling and timing blocks of up to {rounds.lengths[-1]} drafts in a batch of {prompt.tokens.shape[0]}"
        )
        with said_if_long(lambda: told):
            timed = Timed(**_known(timed_key, lambda: asdict(rounds.timed()), is_timed))
        walked = Walked(**_known(kept_key, lambda: asdict(rounds.walked()), _is_telling))
        _KNOWN[both] = costs_of(timed.rounds, timed.prefill, walked.acceptance, walked.length(max_new_tokens))
    found: Costs = _KNOWN[both]
    return found


def described(costs: Costs, lengths: tuple[int, ...]) -> dict[str, Any]:
    """For records: milliseconds by length and of the draft's prefill, the acceptance that rows begin with, an output's
    tokens."""
    each = zip(lengths, np.asarray(costs.rounds).tolist(), strict=True)
    return {
        "round_ms": {str(length): seconds * 1e3 for length, seconds in each},
        "prefill_ms": float(costs.prefill) * 1e3,
        "acceptance": float(costs.acceptance),
        "length": float(costs.length),
    }


def planned(params: Params, engine: Engine, chosen: np.ndarray) -> dict[str, Any]:
    """Returns, for records of planned lengths, rounds by the length aimed at, and what it was chosen by.

    Args:
        params: `ready`; chosen: int `[B, N]`, the rounds of some rows, as a planned drafter counts them.
    """
    lengths = cast(PlannedDrafter, engine.drafter).lengths
    rounds = dict(zip(map(str, lengths), chosen.sum(0).tolist(), strict=True))
    return {"rounds": rounds, "rows": len(chosen), **described(params["drafter"]["costs"], lengths)}


def _encoded(prompt: Prompt) -> tuple[int, ...]:
    return () if prompt.encoder_tokens is None else prompt.encoder_tokens.shape


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
    """Whether this is a `Timed` of so many lengths, as a dictionary."""
    if not isinstance(held, dict) or set(held) != {"rounds", "prefill", "steady"} or held["steady"] is not True:
        return False
    return _positive(held["rounds"]) and len(held["rounds"]) == lengths and _positive([held["prefill"]])


def _is_telling(held: Any) -> bool:
    """Whether this is a `Walked`, as a dictionary, of enough drafts to say something of other prompts."""
    if not isinstance(held, dict) or set(held) != {field.name for field in fields(Walked)}:
        return False
    return _positive(list(held.values())) and held["kept"] <= held["examined"] >= TELLING


def _positive(held: Any) -> bool:
    numbers = isinstance(held, list | tuple) and all(type(each) in (int, float) for each in held)
    return numbers and bool(held) and all(0 <= each < np.inf for each in held)


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
