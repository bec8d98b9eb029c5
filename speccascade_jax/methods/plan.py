"""A call's plan: what `decode` and `stream` need beside prompts, length and seed, made once and kept with the pair."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.checks import MOST
from speccascade_jax.core.fetching import Layout, fetch, join
from speccascade_jax.core.types import Array, Controls, Params, Prompt
from speccascade_jax.drafters.planned import PlannedDrafter
from speccascade_jax.engine import tracing
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, Generator, argument
from speccascade_jax.methods import block_costs, table
from speccascade_jax.methods.assemble import build, check_pair, engine_of
from speccascade_jax.methods.method import Built, Recipe
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.models.sharding import by_rows, on_devices, replicate
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.rule import Rule
from speccascade_jax.runtime.notices import said_if_long
from speccascade_jax.runtime.program_memory import release_when_crowded

Shape = tuple[int, int, int]
"""Rows, tokens read, tokens written at most: what a program is compiled for beside its engine."""
_NOTHING_NEW = nullcontext()


def _shape(prompt: Prompt, max_new_tokens: int) -> Shape:
    read = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens
    return (*read.shape, max_new_tokens)  # type: ignore[return-value]


def _reason(shape: Shape, before: Collection[Shape]) -> str:
    """What a program is for, in words, and what of it is new."""
    names = ("a batch of {}", "prompts padded to {} tokens", "{} new tokens")
    parts = [name.format(size) for name, size in zip(names, shape, strict=True)]
    new = [part for n, part in enumerate(parts) if shape[n] not in {each[n] for each in before}]
    why = f"{' and '.join(new) or 'all three together'} for the first time" if before else "these settings are new"
    return f"{', '.join(parts)} ({why})"


@dataclass(frozen=True)
class Plan:
    """All of a call but its prompts, its length and its seed: made once for calls that are made again and again."""

    settings: Settings
    recipe: Recipe
    rule: Rule
    built: Built
    pair: Pair = field(repr=False, compare=False)
    _controls: dict[int, Controls] = field(default_factory=dict)
    _ran: dict[str, set[Shape]] = field(default_factory=dict)
    _layouts: dict[Shape, Layout] = field(default_factory=dict)
    _ready: dict[Shape, Params] = field(default_factory=dict)

    def controls(self, rows: int) -> Controls:
        """As `Recipe.controls`, on the device."""
        if rows not in self._controls:
            controls = self.recipe.controls(self.settings, rows)
            self._controls[rows] = on_devices(controls, self.pair.mesh)
        return self._controls[rows]

    def running(self, caller: str, prompt: Prompt, max_new_tokens: int) -> AbstractContextManager[None]:
        """Around the call that may compile: where that is a new program it says so, and why (`notices`)."""
        ran, shape = self._ran.setdefault(caller, set()), _shape(prompt, max_new_tokens)
        if shape in ran:
            return _NOTHING_NEW
        before = ran.copy()
        ran.add(shape)
        return said_if_long(lambda: f"compiling {self.settings.method!r} for {_reason(shape, before)}")

    def traced(self, prompt: Prompt, seed: int, example_ids: np.ndarray, max_new_tokens: int) -> Generation:
        """As `generate`, with what traces are made of in `record`: a program of its own.

        Raises:
            ValueError: a method that is more than one generation.
        """
        self.engine  # noqa: B018 (raises)
        prompt = by_rows(prompt, self.pair.mesh)
        given = self._given(example_ids, max_new_tokens) | {"record": tracing.facts}
        with self.running("decode with a trace", prompt, max_new_tokens):
            found = self.built.program.generate(self.ready(prompt, max_new_tokens), prompt, seed, **given)
        return fetch(replicate(found))

    def generate(self, prompt: Prompt, seed: int, example_ids: np.ndarray, max_new_tokens: int) -> Generation:
        """A generation, on the host: `Program.generate` and the fetching of its result as one program."""
        prompt = by_rows(prompt, self.pair.mesh)
        program, params = self.built.program, self.ready(prompt, max_new_tokens)
        given = self._given(example_ids, max_new_tokens)
        if not isinstance(program, Generator):  # others, one's own among them, need not be traceable
            with self.running("decode", prompt, max_new_tokens):
                generation = program.generate(params, prompt, seed, **given)
            return fetch(replicate(generation))
        if params is not self.built.params:
            given["most_rounds"] = np.int32(MOST)  # of the program that was timed, with fewer
        return self._joined(program, params, prompt, seed, given)

    def _given(self, example_ids: np.ndarray, max_new_tokens: int) -> dict[str, Any]:
        ids = by_rows(argument(example_ids, np.int32), self.pair.mesh)
        return {"controls": self.controls(len(example_ids)), "max_new_tokens": max_new_tokens, "example_ids": ids}

    def _joined(
        self, program: Generator, params: Params, prompt: Prompt, seed: int, given: dict[str, Any]
    ) -> Generation:
        told, shape = argument(seed, np.uint32), _shape(prompt, given["max_new_tokens"])
        if shape in self._layouts:
            joined = _joined(program, params, prompt, told, **given)
        else:
            with self.running("decode", prompt, given["max_new_tokens"]):
                joined = _joined(program, params, prompt, told, **given)
            self._layouts[shape] = Layout.of(jax.eval_shape(partial(program.generate, **given), params, prompt, told))
        return self._layouts[shape].fetch(replicate(joined))

    def ready(self, prompt: Prompt, max_new_tokens: int) -> Params:
        """The parameters, with what planned lengths are chosen by; measured where it is not known (`costs`)."""
        (program, params), shape = self.built, _shape(prompt, max_new_tokens)
        if shape not in self._ready:
            ids = np.arange(shape[0])

            def run(told: Params, most_rounds: int) -> Generation:
                assert isinstance(program, Generator)
                given = self._given(ids, max_new_tokens) | {"most_rounds": np.int32(most_rounds)}
                return self._joined(program, told, prompt, block_costs.SEED, given)

            if isinstance(program, Generator) and isinstance(program.engine.drafter, PlannedDrafter):
                self.running("decode", prompt, max_new_tokens)  # what compiles is said there
            controls = self.controls(shape[0])
            self._ready[shape] = block_costs.ready(
                self.pair, program, params, prompt, controls, max_new_tokens=max_new_tokens, run=run
            )
        return self._ready[shape]

    def check_programs(self) -> None:
        """As `build` does for every call: give programs back when there are too many; then all are new again."""
        if release_when_crowded():
            self._ran.clear()
            self._layouts.clear()

    @property
    def engine(self) -> tuple[Engine, Params]:
        """The engine and the parameters to pass beside it, where the method is one.

        Raises:
            ValueError: a method that is more than one generation.
        """
        return engine_of(self.recipe, self.built)

    @property
    def holds(self) -> bool:
        """Whether method and rule are what their names stand for still."""
        return table.get(self.settings.method) is self.recipe and self.recipe.rule(self.settings) is self.rule


@partial(jax.jit, static_argnames=("program", "max_new_tokens"))
def _joined(
    program: Generator,
    params: Params,
    prompt: Prompt,
    seed: Array,
    *,
    controls: Controls,
    max_new_tokens: int,
    example_ids: Array,
    most_rounds: Array | None = None,
) -> Array:
    """int32: all of a generation, joined."""
    given: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens, "example_ids": example_ids}
    given |= {} if most_rounds is None else {"most_rounds": most_rounds}
    return join(program.generate(params, prompt, seed, **given))


def plan(pair: Pair, caller: str, settings: Mapping[str, Any], stop_ids: Sequence[int] | None = None) -> Plan:
    """The checked settings of a call, and what they build for a pair.

    A call on the shipped pair takes some ten milliseconds, and checking and building one more: plans are kept with the
    pair. Those with an array among their settings, or with something of one's own that a name stands for, are not.

    Args:
        caller: for errors; settings: `Settings` by name; stop_ids: as of `build`.

    Raises:
        ValueError, TypeError: as `Settings.of` and `build`.
    """
    check_pair(pair)
    key = _key(settings, stop_ids)
    found: Plan | None = pair.plans.get(key)
    if found is not None and found.holds:
        found.check_programs()
        return found
    chosen = Settings.of(caller, dict(settings))
    recipe = table.get(chosen.method)
    made = Plan(chosen, recipe, recipe.rule(chosen), build(pair, chosen, stop_ids=stop_ids), pair)
    if key is not None:
        if len(pair.plans) >= _KEPT:
            del pair.plans[next(iter(pair.plans))]
        pair.plans[key] = made
    return made


_KEPT = 64
_PLAIN = (str, int, float, np.generic, Rule, type(None))


def _key(settings: Mapping[str, Any], stop_ids: Sequence[int] | None) -> Any:
    """What tells a call's plan from others, types included: `True` is no 1. `None`: it is not to be kept."""
    stops = tuple(stop_ids) if isinstance(stop_ids, (list, tuple)) else (stop_ids,)
    values = (*settings.values(), *stops)
    if settings.get("policy") is not None or not all(map(_plain, values)):  # a file may be another one next time
        return None
    return (*settings, stop_ids is None, *values, *map(_types, values))


def _types(value: Any) -> Any:
    """A value's type, and of what is made of parts those of its parts."""
    parts = vars(value).values() if isinstance(value, Level | Arm) else value if isinstance(value, tuple) else ()
    return (type(value), *map(_types, parts))


def _plain(value: Any) -> bool:
    """Whether a value stands for the same whenever it is equal; drafters do if all that they are made of does."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    if isinstance(value, Level | Arm):
        return all(map(_plain, vars(value).values()))
    return isinstance(value, _PLAIN) and not (isinstance(value, str) and "." in value)
