"""Named methods, and the decoder that a method builds for a pair: `METHODS[name].build(pair, settings)`."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np

from speccascade_jax.core.checks import MOST
from speccascade_jax.core.transfers import Flat, Layout, fetch, join
from speccascade_jax.core.types import Array, Controls, Params, Prompt, count
from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.engine import tracing
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, argument, generate
from speccascade_jax.methods import block_costs
from speccascade_jax.methods.block_costs import SEED
from speccascade_jax.methods.settings import Settings, meant
from speccascade_jax.models.sharding import by_rows, on_devices, replicate, rest
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import BEYOND, Alpha, Rule, beyond
from speccascade_jax.runtime.notices import said_if_long
from speccascade_jax.runtime.program_memory import release_when_crowded

Shape = tuple[int, int, int]
"""The shape of a generation: the number of rows, the padded prompt length, and the largest number of new tokens.

Every combination of engine and shape needs its own compiled program.
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """The base class of all methods: a name, and the properties that sweeps, tables and plots need to know.

    Most properties depend on the settings.

    Attributes:
        name: the method's name in `decode`, gin files and records.
        title: the method's name in tables, by default `name`.
        detail: a text that distinguishes methods with the same title.
        symbol: the symbol of the stop threshold in tables.
        timed: whether the method's decoding time is meaningful.

    Examples:
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import Method, Settings
        >>> method, settings = sc.METHODS["chow"], Settings(method="chow")
        >>> isinstance(method, Method), method.heading(settings), method.details(settings)
        (True, 'SpecCascade', ('Chow',))
        >>> method.resolved(settings).block_size, method.resolved(settings).bonus
        (5, 'rule')
    """

    name: str
    title: str = ""
    detail: str = ""
    symbol: str = "h"
    timed: ClassVar[bool] = True

    @property
    def called(self) -> str:
        """The method's name in error messages."""
        return f"method {self.name!r}"

    @property
    def draft_alone(self) -> bool:
        """Whether the draft writes alone, in the target's place in the engine."""
        return False

    def rule(self, settings: Settings) -> Rule:
        """Returns the rule that decides about drafts; a method that has none returns the lossless rule.

        Raises:
            ValueError: the rule is unknown, or the method does not accept it.
        """
        return RULES["spec_decode"]

    def alpha(self, settings: Settings) -> Alpha | None:
        """Returns the domain of the trade-off parameter α, or `None` if the method has no such parameter."""
        return None

    def heading(self, settings: Settings) -> str:
        """Returns the method's name in tables under these settings."""
        return self.title or self.name

    def details(self, settings: Settings) -> tuple[str, ...]:
        """Returns the texts that tables print in brackets after the heading."""
        return (self.detail,) if self.detail else ()

    def sweeps_block(self, settings: Settings) -> bool:
        """Returns whether a sweep should vary the block size γ, which is useless if a stop policy ends the blocks."""
        return False

    def threshold(self, settings: Settings) -> str:
        """Describes how the method uses a stop threshold other than α; returns an empty text if it has none."""
        return ""

    def on_rejection(self, settings: Settings) -> bool:
        """Returns whether the stop threshold is compared with P(some token of the block is rejected)."""
        return False

    def needs_head(self, settings: Settings) -> bool:
        """Returns whether the method needs an acceptance head, which predicts whether drafts will be accepted."""
        return False

    def resolved(self, settings: Settings) -> Settings:
        """Returns the settings, with the method's default block size and bonus where the caller gave none.

        A method without a block size or a bonus sets the field to `None`.

        Raises:
            ValueError: a setting has no effect on the method.
        """
        return settings

    def refuse(self, settings: Settings, why: str, *names: str) -> None:
        """Raises a ValueError if the caller set any of the named settings, which have no effect on the method.

        Raises:
            ValueError: a named setting is set; the message names the first one and says `why` it has no effect.
        """
        for name, value in meant(settings, *names):
            raise ValueError(f"{self.called} has no {name}, got {value!r}: {why}; leave it out")

    def controls(self, settings: Settings, rows: int) -> Controls:
        """Checks the numbers of a generation, such as α and temperature, and returns them with one value per row.

        Nothing is compiled before this check.

        Raises:
            ValueError: a number is invalid, as in `rules.rule.checked_alpha` and `core.controls.make_controls`; a
                temperature or a stop threshold is missing, or the method cannot have it.
        """
        raise NotImplementedError

    def warn_of_alpha(self, settings: Settings, vocab_size: int) -> None:
        """Warns if α is beyond the values at which it changes anything, because such a value is usually a mistake."""
        trade_off = self.alpha(settings)
        if trade_off is None or settings.alpha is None:
            return
        decider = settings.method if settings.rule is None else self.rule(settings).name
        if message := beyond("alpha", repr(decider), settings.alpha, trade_off.useful_bounds(vocab_size)):
            warnings.warn(f"{message}: {BEYOND}", stacklevel=3)

    def build(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...] = (), head: Head | None = None
    ) -> Decoder:
        """Builds the decoder for a pair.

        Args:
            pair: the models.
            settings: the method's settings.
            stop_ids: token ids that end a row.
            head: an acceptance head that replaces the pair's own, if the method needs one.

        Raises:
            ValueError: a setting is invalid; the pair lacks a model or an acceptance head; the head belongs to another
                draft.
        """
        program, params = self.program(pair, settings, stop_ids, head)
        return Decoder(self, settings, pair, program, params)

    def program(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None
    ) -> tuple[Program, Params]:
        """Returns the method's program, which is an engine or a chain of generations, and the program's parameters.

        Arguments and errors are those of `build`.
        """
        raise NotImplementedError


@runtime_checkable
class Chain(Protocol):
    """A program of several generations, for a method whose program is not a single `Engine`.

    An object of this class is hashable, because it is a static argument of jit. JAX need not be able to trace its
    `generate`.
    """

    def generate(self, params: Params, prompt: Prompt, seed: int | Array = 0, **more: Any) -> Generation:
        """Runs the program; takes the arguments of `engine.generate.generate`, except `engine` and `level`."""


Program = Engine | Chain


def run(program: Program, params: Params, prompt: Prompt, seed: int | Array, **more: Any) -> Generation:
    """Runs a method's program on a prompt; `more` are further arguments of `engine.generate.generate`."""
    if isinstance(program, Engine):
        return generate(program, params, prompt, seed, **more)
    return program.generate(params, prompt, seed, **more)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A method with a pair's models: everything that a generation needs except its prompts, length and random seed.

    `sc.decode`, `sc.stream`, sessions of sweeps, Spec-Bench and serving all decode with it.

    Attributes:
        method, settings, pair: the arguments from which the decoder was built.
        program: an `Engine`, or the method's `Chain` of generations.
        params: the program's parameters.
        rule: the method's rule under these settings.
        rounds: programs of single rounds that `stream` has compiled for TPUs, by the shapes of the state.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import Settings, make_prompt
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> decoder = sc.METHODS["chow"].build(pair, Settings(method="chow", alpha=0.5, block_size=3))
        >>> decoder.rule.name, decoder.engine.bonus
        ('chow', 'rule')
        >>> decoder.fetch(make_prompt(pair, [[1, 2], [3]]), 0, np.arange(2), 6).tokens.tolist()
        [[1, 6, 3, 6, 0, 1], [0, 2, 6, 0, 7, 4]]
    """

    method: Method
    settings: Settings
    pair: Pair = field(repr=False)
    program: Program
    params: Params = field(repr=False)
    rule: Rule = field(init=False, repr=False)
    rounds: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    _controls: dict[int, Controls] = field(init=False, default_factory=dict, repr=False)
    _shapes: dict[str, set[Shape]] = field(init=False, default_factory=dict, repr=False)
    _layouts: dict[Shape, Layout] = field(init=False, default_factory=dict, repr=False)
    _ready: dict[Shape, Params] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self.method.rule(self.settings))
        object.__setattr__(self, "params", Flat(rest(self.params, self.pair.mesh)))

    def __repr__(self) -> str:
        """Returns the program and the number of its parameters, without their values."""
        return f"Decoder({self.program}, {count(self.params):,} parameters)"

    @property
    def engine(self) -> Engine | None:
        """The engine; `None` if the method runs more than one generation."""
        return self.program if isinstance(self.program, Engine) else None

    def require_engine(self) -> Engine:
        """Returns the engine.

        Raises:
            ValueError: the method runs more than one generation.
        """
        if self.engine is None:
            raise ValueError(f"{self.method.called} runs more than one generation, so it has no engine: call decode")
        return self.engine

    def controls(self, rows: int, **numbers: Any) -> Controls:
        """Returns the controls of `rows` rows on the device; `numbers` replace the settings of the same names.

        Raises:
            ValueError: as in `Method.controls`.
        """
        if numbers:
            changed = self.method.controls(replace(self.settings, **numbers), rows)
            return on_devices(changed, self.pair.mesh)
        if rows not in self._controls:
            self._controls[rows] = on_devices(self.method.controls(self.settings, rows), self.pair.mesh)
        return self._controls[rows]

    def prepared(
        self, prompt: Prompt, controls: Controls, example_ids: np.ndarray, max_new_tokens: int
    ) -> partial[Generation]:
        """Returns a function that generates from a random seed, `prepared(...)(seed) -> Generation`, on the device.

        For planned block lengths, costs that are not known yet are measured here, before the function is returned.
        """
        prompt, controls, ids = on_devices((prompt, controls, example_ids), self.pair.mesh)
        numbers: dict[str, Any] = {"controls": controls, "max_new_tokens": max_new_tokens}
        params = block_costs.ready(self.pair, self.program, self.params, prompt, **numbers)
        return partial(self.generate, prompt, params=params, example_ids=ids, **numbers)

    def generate(
        self, prompt: Prompt, seed: int | Array = 0, *, params: Params | None = None, **more: Any
    ) -> Generation:
        """Generates outputs and leaves the result on the device.

        Args:
            prompt: the prompts.
            seed: the random seed.
            params: parameters that replace the decoder's own.
            more: further arguments of `engine.generate.generate`.
        """
        return replicate(run(self.program, self.params if params is None else params, prompt, seed, **more))

    def fetch(self, prompt: Prompt, seed: int, example_ids: np.ndarray, max_new_tokens: int) -> Generation:
        """Generates outputs and copies the result to the host in one transfer."""
        prompt = by_rows(prompt, self.pair.mesh)
        params = self.ready(prompt, max_new_tokens)
        arguments = self._arguments(example_ids, max_new_tokens)
        if self.engine is None:  # JAX may be unable to trace a user's chain, so jit cannot join its arrays
            with self.compiling("decode", prompt, max_new_tokens):
                generation = self.generate(prompt, seed, params=params, **arguments)
            return fetch(generation)
        if params is not self.params:
            arguments["most_rounds"] = np.int32(MOST)  # as in timed runs, so that their compiled program is reused
        return self._fetch_joined(params, prompt, seed, arguments)

    def fetch_traced(self, prompt: Prompt, seed: int, example_ids: np.ndarray, max_new_tokens: int) -> Generation:
        """Generates as `fetch` does and also records what traces show, in `Generation.record`.

        Recording needs a compiled program of its own.

        Raises:
            ValueError: the method runs more than one generation.
        """
        self.require_engine()
        prompt = by_rows(prompt, self.pair.mesh)
        arguments = self._arguments(example_ids, max_new_tokens) | {"record": tracing.facts}
        with self.compiling("decode with a trace", prompt, max_new_tokens):
            generation = self.generate(prompt, seed, params=self.ready(prompt, max_new_tokens), **arguments)
        return fetch(generation)

    def ready(self, prompt: Prompt, max_new_tokens: int) -> Params:
        """Returns the parameters; with planned block lengths they include the costs, which are measured if unknown."""
        shape = _shape(prompt, max_new_tokens)
        if shape not in self._ready:
            arguments = self._arguments(np.arange(shape[0]), max_new_tokens)

            def time(params: Params, most_rounds: int) -> Generation:
                limited = arguments | {"most_rounds": np.int32(most_rounds)}
                return self._fetch_joined(params, prompt, SEED, limited)

            if self.engine is not None and isinstance(self.engine.drafter, PlannedDrafter):
                self.compiling("decode", prompt, max_new_tokens)  # without a notice, because timing prints one
            self._ready[shape] = block_costs.ready(
                self.pair, self.program, self.params, prompt, arguments["controls"],
                max_new_tokens=max_new_tokens, run=time,
            )  # fmt: skip
        return self._ready[shape]

    def _arguments(self, example_ids: np.ndarray, max_new_tokens: int) -> dict[str, Any]:
        ids = by_rows(argument(example_ids, np.int32), self.pair.mesh)
        return {"controls": self.controls(len(example_ids)), "max_new_tokens": max_new_tokens, "example_ids": ids}

    def _fetch_joined(self, params: Params, prompt: Prompt, seed: int, arguments: dict[str, Any]) -> Generation:
        seeded, shape = argument(seed, np.uint32), _shape(prompt, arguments["max_new_tokens"])
        call = partial(_joined, self.require_engine(), params, prompt, seeded, **arguments)
        if shape in self._layouts:
            joined = call()
        else:
            with self.compiling("decode", prompt, arguments["max_new_tokens"]):
                joined = call()
            result = jax.eval_shape(partial(run, self.program, **arguments), params, prompt, seeded)
            self._layouts[shape] = Layout.of(result)
        generation: Generation = self._layouts[shape].fetch(replicate(joined))
        return generation

    def compiling(self, caller: str, prompt: Prompt, max_new_tokens: int) -> AbstractContextManager[None]:
        """Returns a context manager for a call that may compile; if this takes long, a notice says what is compiled."""
        seen, shape = self._shapes.setdefault(caller, set()), _shape(prompt, max_new_tokens)
        if shape in seen:
            return nullcontext()
        before = seen.copy()
        seen.add(shape)
        return said_if_long(lambda: f"compiling {self.settings.method!r} for {_reason(shape, before)}")

    def drop_programs_when_crowded(self) -> None:
        """Drops compiled programs when too many are alive; every shape then counts as new."""
        if release_when_crowded():
            self._shapes.clear()
            self._layouts.clear()
            self.rounds.clear()


def _shape(prompt: Prompt, max_new_tokens: int) -> Shape:
    tokens = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens
    return (*tokens.shape, max_new_tokens)  # type: ignore[return-value]


def _reason(shape: Shape, before: Collection[Shape]) -> str:
    """Describes the shape that a program is compiled for, and which of its numbers are new."""
    names = ("a batch of {}", "prompts padded to {} tokens", "{} new tokens")
    parts = [name.format(size) for name, size in zip(names, shape, strict=True)]
    new = [part for n, part in enumerate(parts) if shape[n] not in {earlier[n] for earlier in before}]
    why = f"{' and '.join(new) or 'all three together'} for the first time" if before else "these settings are new"
    return f"{', '.join(parts)} ({why})"


@partial(jax.jit, static_argnames=("engine", "max_new_tokens"))
def _joined(engine: Engine, params: Params, prompt: Prompt, seed: Array, **arguments: Any) -> Array:
    """Generates outputs and joins all arrays of the result into one int32 array, which takes a single transfer."""
    return join(generate(engine, params, prompt, seed, **arguments))
