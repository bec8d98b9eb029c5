"""Methods that run whole generations: one model alone, or two generations in one compiled program.

In a *sequence cascade* the draft writes the whole output, and the target rewrites it if its score is too low
(docs/methods.md, section 4; Narasimhan et al., 2024, eq. 1). The second generation runs only if some row needs it.

The *oracle* is greedy speculative decoding that knows beforehand which drafts will be rejected (Huang et al., 2024
(SpecDec++), Lemma 2.1). First the target writes the output alone. Then one pass of the draft over this output finds the
set `S` of positions at which draft and target disagree. Finally the engine decodes with blocks that end exactly there.
So no draft token is discarded (`N_discarded = 0`). For `N` tokens the target is called `N_target = |S ∪ {N}|` times,
unless a block reaches the largest block size. No stop policy needs fewer calls. The oracle is an upper bound and not a
practical method. It is not timed, because it computes the output twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.sampling import argmax, expand
from speccascade_jax.core.types import Array, BoundModel, Controls, Params, Prompt, Round
from speccascade_jax.drafters.model import ExitDrafter, ModelDrafter, NoDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation, argument, generate, row_ids
from speccascade_jax.methods.method import Method, Program
from speccascade_jax.methods.settings import Settings, sampling_of
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.models.early_exit import HEAD, exit_params
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import Alpha, checked_alpha
from speccascade_jax.stopping.policies import Oracle

# --- one model alone: the target or the draft, the two extremes of every trade-off


def engine_of(model: LanguageModel, stop_ids: tuple[int, ...]) -> Engine:
    """Returns an engine in which one model writes alone, without a drafter.

    The engine's parameters are `{"target": …, "drafter": {}}`.
    """
    lossless = Speculative(RULES["spec_decode"])
    return Engine(target=model, drafter=NoDrafter(), verifier=lossless, stop_ids=stop_ids, bonus="target")


@dataclass(frozen=True, kw_only=True)
class Alone(Method):
    """A method in which one model decodes alone, in the engine's loop; rule, block size and bonus have no effect.

    Attributes:
        model: the name of one of the pair's models.

    Examples:
        >>> from speccascade_jax.extend import Alone, Settings
        >>> method = Alone(name="draft_only", model="draft")
        >>> settings = Settings(method=method, temperature=0.7, draft_temperature=1.0)
        >>> method.draft_alone, method.controls(settings, 2).target.temperature.tolist()
        (True, [1.0, 1.0])
    """

    model: str

    @property
    def draft_alone(self) -> bool:
        """Whether the model that writes is not the target."""
        return self.model != "target"

    def resolved(self, settings: Settings) -> Settings:
        """Removes rule, block size and bonus, which a sweep may set for all methods at once.

        Raises:
            ValueError: another setting of drafting or verification is set.
        """
        parts = ("accept", "verify", "stop", "stop_threshold", "tree", "drafters", "choose", "policy", "lossy_arms")
        self.refuse(settings, "only one model writes", *parts, "tail")
        return replace(settings, rule=None, block_size=None, bonus=None)

    def controls(self, settings: Settings, rows: int) -> Controls:
        """Returns the controls with the model's sampling; `draft_temperature` applies if the draft writes alone."""
        sampling = sampling_of(settings)
        if self.draft_alone and settings.draft_temperature is not None:
            sampling["temperature"] = settings.draft_temperature
        return make_controls(rows, **sampling)

    def program(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None
    ) -> tuple[Engine, Params]:
        """Returns an engine that runs the model in the target's place, without a drafter, and its parameters."""
        self.resolved(settings)
        bound = pair.model(self.model)
        return engine_of(bound.model, stop_ids), {"target": bound.params, "drafter": {}}


@dataclass(frozen=True)
class TwoGenerations:
    """The base class of programs that consist of two generations."""

    def generate(
        self, params: Params, prompt: Prompt, seed: int | Array = 0, *, example_ids: Any = None, **more: Any
    ) -> Generation:
        """Runs the program; takes the arguments of `engine.generate.generate`, except `engine` and `level`."""
        ids = row_ids(example_ids, prompt)
        generation: Generation = _jitted(self, params, prompt, argument(seed, np.uint32), example_ids=ids, **more)
        return generation

    def traced(self, params: Params, prompt: Prompt, seed: Array, *, controls: Controls, **more: Any) -> Generation:
        """Computes both generations; jit traces this method."""
        raise NotImplementedError


@partial(jax.jit, static_argnames=("chain", "max_new_tokens", "record"))
def _jitted(chain: TwoGenerations, params: Params, prompt: Prompt, seed: Array, **arguments: Any) -> Generation:
    return chain.traced(params, prompt, seed, **arguments)


# --- sequence cascades

Score = Callable[[Array, Array], Array]
"""A function from `log q` of each token `[B, L]` and a mask of the tokens that count `[B, L]` to a score `[B]`."""


def total(logs: Array, counted: Array) -> Array:
    """Returns `Σ log q` of each row; the threshold of Narasimhan et al., 2024, eq. 1, is `log(1 − α)` for it."""
    return jnp.where(counted, logs, 0.0).sum(-1)


def mean(logs: Array, counted: Array) -> Array:
    """Returns the mean of `log q` over the tokens of each row."""
    return total(logs, counted) / jnp.maximum(counted.sum(-1), 1)


def lowest_tenth(logs: Array, counted: Array) -> Array:
    """Returns the 0.1-quantile of `log q` over the tokens of each row, interpolated linearly.

    The quantile depends on the tokens that the draft was least certain about.
    """
    ordered = jnp.sort(jnp.where(counted, logs, jnp.inf), axis=-1)
    rank = 0.1 * jnp.maximum(counted.sum(-1) - 1, 0)
    low = jnp.floor(rank).astype(jnp.int32)
    values = jnp.take_along_axis(ordered, jnp.stack([low, jnp.ceil(rank).astype(jnp.int32)], axis=-1), axis=-1)
    share = rank - low
    # This is a weighted sum and not `a + share * (b - a)`, because the difference of two infinities is NaN.
    return jnp.where(share > 0, (1.0 - share) * values[:, 0] + share * values[:, 1], values[:, 0])


SCORES: dict[str, Score | None] = {"sum": total, "mean": mean, "quantile": lowest_tenth, "random": None}
"""The scores of sequence cascades, by name.

"random" has no function: the target writes each output with probability α, and otherwise the draft writes it. The
choice is made before anything is written (the random allocation of Holsman et al., 2025).
"""


@dataclass(frozen=True, kw_only=True)
class SequenceMethod(Method):
    """A method in which the draft writes whole outputs, and the target rewrites the outputs whose score is below α.

    Source: docs/methods.md, section 4; Narasimhan et al., 2024, eq. 1.

    Attributes:
        score: a name in `SCORES`.
        trade_off: the domain of α, in the units of the score: nats for "sum", nats per token for "mean" and "quantile".

    Examples:
        >>> from speccascade_jax.extend import Alpha, SequenceMethod, Settings
        >>> mean = Alpha(grid=(-2.0, 0.0), typical=-0.4)
        >>> method = SequenceMethod(name="rewrite_unlikely", score="mean", trade_off=mean)
        >>> method.controls(Settings(method=method, alpha=-0.5), rows=2).alpha.tolist()
        [-0.5, -0.5]
    """

    score: str
    trade_off: Alpha

    def alpha(self, settings: Settings) -> Alpha | None:
        """Returns the domain of α, `trade_off`, which does not depend on the settings."""
        return self.trade_off

    def resolved(self, settings: Settings) -> Settings:
        """Returns the settings unchanged; raises a ValueError for settings of speculative decoding."""
        self.refuse(settings, "it decides by a score", "rule")
        parts = ("accept", "verify", "block_size", "bonus", "stop", "tree", "drafters", "choose", "policy")
        self.refuse(settings, "the draft writes whole outputs", *parts, "lossy_arms", "tail")
        return settings

    def controls(self, settings: Settings, rows: int) -> Controls:
        """Returns the controls: α, and the sampling settings of both models."""
        if settings.stop_threshold is not None:
            why = "the draft writes whole outputs"
            raise ValueError(f"{self.called} has no stop_threshold ({settings.stop_threshold}): {why}; leave it out")
        alpha = checked_alpha(self.trade_off, self.called, settings.alpha, rows)
        return make_controls(rows, alpha=alpha, **sampling_of(settings))

    def program(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None
    ) -> tuple[Program, Params]:
        """Returns the program, with one engine for the draft alone and one for the target alone, and its parameters."""
        self.resolved(settings)
        draft, target = (engine_of(bound.model, stop_ids) for bound in (pair.draft, pair.target))
        params = {name: {"target": pair.model(name).params, "drafter": {}} for name in ("draft", "target")}
        return SequenceCascade(draft=draft, target=target, score=self.score), params


@dataclass(frozen=True, kw_only=True)
class SequenceCascade(TwoGenerations):
    """A program that runs the draft alone, then the target alone for outputs with `score < α`.

    With the score "random", only one of the two models runs for each output.

    The parameters are `{"target": …, "draft": …}`.

    Attributes:
        draft, target: engines in which one model writes alone.
        score: a name in `SCORES`.
    """

    draft: Engine
    target: Engine
    score: str

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}: choose one of {', '.join(SCORES)}")

    def traced(
        self, params: Params, prompt: Prompt, seed: Array, *, controls: Controls, record: Any = None, **more: Any
    ) -> Generation:
        """Generates all outputs with the draft, then generates those with too low a score again with the target.

        Raises:
            ValueError: `record` is set; it would mix rounds of both models.
        """
        if record is not None:
            raise ValueError("a sequence cascade has no rounds to record: record one of its models alone")
        # The draft has level 1, the target level 0 and the random choice level 2 (`rngs.STAGES`), because no two of
        # them may use the same random bits.
        key, ids = rngs.root(seed), more["example_ids"]
        zero = jnp.zeros(ids.shape, jnp.int32)
        uniform = rngs.RoundKeys(rngs.row_keys(key, ids, 2), zero, zero).uniform(zero, rngs.ACCEPT)
        # The draft takes the target's place in the engine, so its sampling settings are passed as the target's.
        inputs = {"controls": replace(controls, target=controls.draft), "record": log_likelihood, "level": 1, **more}
        write = partial(generate, self.draft, params["draft"], prompt, seed, **inputs)
        if (score := SCORES[self.score]) is None:
            anew = uniform < controls.alpha
            first = _only(~anew, write)
        else:
            first = write()
            counted = jnp.arange(more["max_new_tokens"])[None] < first.lengths[:, None]
            anew = (score(first.record.T, counted) < controls.alpha) & (first.failed_at < 0).all(-1)
        first = replace(first, record=None)

        def write_anew(_: Generation) -> Generation:
            again = generate(self.target, params["target"], prompt, seed, controls=controls, **more)
            return _chosen(anew, again, first)

        written: Generation = jax.lax.cond(anew.any(), write_anew, lambda first: _chosen(anew, first, first), first)
        return written


def _only(rows: Array, write: Callable[[], Generation]) -> Generation:
    """Returns the outputs of `write()` for `rows`, and empty outputs elsewhere; skips the call if no row is true."""
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(write))
    nothing = replace(nothing, failed_at=nothing.failed_at - 1)
    written = jax.lax.cond(rows.any(), write, lambda: nothing)
    aside = {"record": written.record, "num_rounds": written.num_rounds}  # these fields have no axis of rows
    generations = (replace(generation, record=None, num_rounds=None) for generation in (written, nothing))
    kept: Generation = jax.tree.map(lambda new, none: jnp.where(expand(rows, new.ndim), new, none), *generations)
    return replace(kept, **aside)


def log_likelihood(turn: Round) -> Array:
    """Returns `log p` of the token that was committed in a round of a model that decodes alone, float32 `[B]`."""
    chosen = jnp.take_along_axis(turn.pair.log("p")[:, 0], turn.tokens[:, :1], axis=-1)[:, 0]
    return jnp.where(turn.num_new > 0, chosen, 0.0)


def _chosen(anew: Array, target: Generation, draft: Generation) -> Generation:
    """Returns the target's output for rows in `anew`, else the draft's; the counts include the calls of both models."""

    def pick(ours: Array, theirs: Array) -> Array:
        return jnp.where(expand(anew, ours.ndim), ours, theirs)

    stats, written = jax.tree.map(pick, target.stats, draft.stats), draft.stats.committed
    none = jnp.zeros_like(written)
    counts: dict[str, Any] = {
        "target_calls": jnp.where(anew, target.stats.target_calls, 0),
        "drafted": written,
        "discarded": jnp.where(anew, written, 0),
        "draft_steps": draft.stats.target_calls,
        "unverified": (~anew).astype(jnp.int32),
        "unverified_tokens": jnp.where(anew, 0, written),
        "deferred": anew.astype(jnp.float32),
        "decided": none + 1,
    }
    return replace(
        draft,
        tokens=pick(target.tokens, draft.tokens),
        lengths=pick(target.lengths, draft.lengths),
        stats=replace(stats, **counts),
        # The draft ran in the target's place, so its failures are in the target's column: swap the two columns.
        failed_at=pick(target.failed_at, draft.failed_at[:, ::-1]),
        num_rounds=draft.num_rounds + jnp.where(anew.any(), target.num_rounds, 0),
    )


# --- the oracle


@dataclass(frozen=True, kw_only=True)
class OracleMethod(Speculation):
    """A method of greedy, lossless speculative decoding in which the oracle ends the drafts; it is not timed."""

    timed: ClassVar[bool] = False

    def resolved(self, settings: Settings) -> Settings:
        """Resolves the settings as `Speculation` does; raises a ValueError for a tail, which the oracle cannot end."""
        if settings.tail is not None:
            raise ValueError(f"{self.called} cannot end the blocks of a tail: leave tail={settings.tail!r} out")
        return super().resolved(settings)

    def controls(self, settings: Settings, rows: int) -> Controls:
        """Returns the same controls as `Speculation`; raises a ValueError for temperatures above 0."""
        for name in ("temperature", "draft_temperature"):
            value = getattr(settings, name)
            if value is not None and np.max(np.asarray(value)) > 0:
                raise ValueError(f"{self.called} is an oracle of greedy decoding, got {name}={value}: set it to 0")
        return super().controls(settings, rows)

    def program(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...], head: Head | None = None
    ) -> tuple[Program, Params]:
        """Returns the program, which finds the oracle's stops before it decodes, and its parameters."""
        engine, params = super().program(pair, settings, stop_ids)
        assert isinstance(engine, Engine)
        return OracleStopping(engine), params


@dataclass(frozen=True)
class OracleStopping(TwoGenerations):
    """A program that computes where the oracle stops, then runs `engine`, whose stop policy is `Oracle`.

    Its parameters are those of the engine.
    """

    engine: Engine

    def __post_init__(self) -> None:
        drafter = self.engine.drafter
        if not (isinstance(drafter, ModelDrafter | ExitDrafter) and isinstance(drafter.stop, Oracle)):
            kind = type(drafter).__name__
            raise ValueError(
                f"the oracle needs a model that drafts under stop policy Oracle, got {kind}: use method 'stop_oracle'"
            )

    def traced(
        self, params: Params, prompt: Prompt, seed: Array, *, controls: Controls, record: Any = None, **more: Any
    ) -> Generation:
        """Decodes with the target alone to find the oracle's stops, then decodes with them; `controls` are greedy."""
        alone, more = engine_of(self.engine.target, self.engine.stop_ids), {"controls": controls, **more}
        first = generate(alone, {"target": params["target"], "drafter": {}}, prompt, seed, **more)
        stops = stop_positions(_draft(self.engine.drafter, params), prompt, first.tokens, first.lengths)
        params = {**params, "drafter": {**params["drafter"], "stop": stops}}
        return generate(self.engine, params, prompt, seed, record=record, **more)


def _draft(drafter: Any, params: Params) -> BoundModel:
    """Returns the draft model and its parameters; an early exit takes its parameters from the target."""
    if isinstance(drafter, ModelDrafter):
        return BoundModel(params=params["drafter"]["model"], model=drafter.model)
    shared = exit_params(params["target"], drafter.exit.layer, params["drafter"].get(HEAD))
    return BoundModel(params=shared, model=drafter.exit)


def stop_positions(draft: BoundModel, prompt: Prompt, tokens: Array, lengths: Array) -> Array:
    """Returns the positions before which the oracle ends a block: bool `[B, P + L + 1]`, over prompt and output.

    An entry is true before every token of `tokens` `[B, L]` that is not the draft's most probable token. It is also
    true before the last token of each output (`lengths` `[B]`). The target writes this token itself, because a bonus
    token after it would be discarded.
    """
    place = jnp.arange(tokens.shape[1])[None]
    disagree = argmax(along(draft, prompt, tokens)) != tokens
    before = disagree | (place >= lengths[:, None] - 1)
    everywhere = jnp.ones((tokens.shape[0], prompt.tokens.shape[1] + tokens.shape[1] + 1), bool)
    return write_slots(everywhere, before, prompt.length, axis=1)
