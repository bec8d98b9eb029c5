"""Settings, pair, prompts, engines and measured memory bandwidth, which all sections share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from benchmarks.loops import ORDERS, stream_loop
from benchmarks.random_models import SIZES
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import STORED, Controls, Params, Prompt
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.generate import Generation, generate
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.methods import block_costs
from speccascade_jax.methods.build import assemble
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES

Rows = dict[str, list[dict[str, Any]]]
Run = Callable[[int], Generation]

SPEC_DECODE = recorded(Settings(method="spec_decode"))
# The lossless rule, and three lossy rules with two α's each: one without a deferral decision, one that decides once per
# position, and one that decides for each token of the vocabulary.
METHODS = (
    SPEC_DECODE,
    recorded(Settings(method="lossy", alpha=0.4)),
    recorded(Settings(method="lossy", alpha=0.8)),
    recorded(Settings(method="opt", alpha=0.0)),
    recorded(Settings(method="opt", alpha=0.5)),
    recorded(Settings(method="token_v3", alpha=0.5)),
    recorded(Settings(method="token_v3", alpha=0.9)),
)
DECODED = (
    *(recorded(Settings(method="spec_decode", block_size=block)) for block in (3, 5, 7)),
    *(recorded(Settings(method="token_v3", alpha=alpha, block_size=5)) for alpha in (0.5, 0.65, 0.8)),
    *(recorded(Settings(method="diff", alpha=alpha, block_size=5)) for alpha in (0.0, 0.05)),
    recorded(Settings(method="diff", alpha=0.05, block_size=7)),
)
GROWTH: Mapping[str, tuple[int, ...]] = {
    "positions": (64, 256, 1024, 4096),
    "capacity": (64, 256, 1024, 4096),
    "batch": (1, 4, 16, 64),
    "vocabulary": (8_192, 32_768, 131_072, 262_144),
    "tokens": (1, 2, 4, 6, 8, 12, 16),
    "models": (1, 2, 3, 4, 5),
}
# Two of fuzzy decoding's twenty rules are enough: they differ only in the divergence.
VERIFIED = (*(name for name in RULES if not name.startswith("fuzzy_")), "fuzzy_js", "fuzzy_tv")


SHAPES = ((1,), (1, 1), (1, 1, 1), (1,) * 5, (2,), (3,), (2, 1), (2, 2), (3, 1), (2, 1, 1), (3, 2, 1), (4, 2, 1, 1))
"""Shapes of trees: the number of children per token at each depth. A shape of ones is a chain."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Settings of a benchmark run: what each section measures, and how often.

    Attributes:
        pair: a shipped pair's name, or a folder; task: the task whose prompts are used; max_new_tokens: longest output.
        examples: number of prompts that are timed one at a time; repeats: number of turns of every comparison
            (multiplied for short calls); loop_seconds: duration of a timed loop; calls: number of turns in `calls`.
        block_size: γ in sections with a single γ; block_sizes: γ's in sections that compare several;
            lossy_block_sizes: γ's of lossy rules in the same sections.
        capacity: largest block of the engines in `stopping`; head_depths: depths of the acceptance heads in `stopping`.
        temperatures: of draft and target; methods: rules with their α's.
        decoded, decoded_examples: methods and number of prompts in `decode`; draft_dtypes: dtypes of the draft's
            matrices in `decode`, timed in turns.
        engine_sizes: models of `random_models.SIZES` in `rounds`.
        sizes, size_widths: models of `random_models.SIZES`, and tokens per call, in `sizes`; the first width is 1.
        widths: tokens per call in `scoring`; vocab_sizes, rules: vocabulary sizes and rules in `verification`;
            either_way, whole_rounds: rules of the two tables of `block_wise`; shapes: children by depth, in `trees`;
            batches: batch sizes in `batches` and `auto`; beside_auto: fixed γ's in `auto`.
        large_vocab, large_rules, large_batches, large_blocks: vocabulary size, rules, batch sizes and γ's in
            `vocabulary`. Rules that read the same distributions need the same memory, so one of them is enough.
        working_set: bytes of a matrix that is far larger than any cache.
        growth: growing size (axis) in `growth` -> its values.
        candidates: numbers of models among which `hierarchy` chooses.
        acceptance_task, acceptance_examples, acceptance_tokens: task (`None`: see `acceptance.best_task`), number of
            examples and longest output in `acceptance`.
    """

    pair: str = "tatoeba_en_de_large"
    task: str = "tiny_translation"
    max_new_tokens: int = 64
    examples: int = 8
    repeats: int = 5
    loop_seconds: float = 0.02
    calls: int = 400
    block_size: int = 5
    capacity: int = 20
    head_depths: tuple[int, ...] = (0, 1, 2, 3, 4)
    block_sizes: tuple[int, ...] = (3, 5, 7)
    lossy_block_sizes: tuple[int, ...] = (5,)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    methods: tuple[Settings, ...] = METHODS
    decoded: tuple[Settings, ...] = DECODED
    decoded_examples: int = 64
    draft_dtypes: tuple[str, ...] = (STORED,)
    engine_sizes: tuple[str, ...] = ("T5 29 M", "T5 77 M")
    sizes: tuple[str, ...] = tuple(SIZES)
    size_widths: tuple[int, ...] = (1, 4, 6, 8)
    widths: tuple[int, ...] = tuple(range(1, 13))
    vocab_sizes: tuple[int, ...] = (8192, 32768, 262144)
    rules: tuple[str, ...] = VERIFIED
    either_way: tuple[str, ...] = ("spec_decode", "lossy_tuned", "diff", "opt", "token_v3")
    whole_rounds: tuple[str, ...] = ("spec_decode", "lossy_tuned", "token_v3")
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    batches: tuple[int, ...] = (1, 8, 32)
    beside_auto: tuple[int, ...] = (1, 2, 3, 5)
    large_vocab: int = 256_000
    large_rules: tuple[str, ...] = ("spec_decode", "lossy_tuned", "diff", "opt_log", "token_v3", "fuzzy_js")
    large_batches: tuple[int, ...] = (1, 8)
    large_blocks: tuple[int, ...] = (1, 3, 7, 10)
    working_set: int = 512_000_000
    growth: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: GROWTH)
    candidates: tuple[int, ...] = (5, 10, 20, 40, 80, 200)
    acceptance_task: str | None = None
    acceptance_examples: int = 200
    acceptance_tokens: int = 128

    def blocks(self, method: Settings) -> tuple[int, ...]:
        """Returns the γ's with which a method is measured."""
        return self.block_sizes if RULES[method.method].lossless else self.lossy_block_sizes


def quick(settings: Sizes) -> Sizes:
    """Returns settings that take a few seconds: everything runs once or twice, and the numbers mean nothing."""
    return replace(
        settings,
        max_new_tokens=8,
        examples=2,
        repeats=2,
        loop_seconds=1e-3,
        calls=4,
        block_size=2,
        capacity=4,
        head_depths=(1,),
        block_sizes=(2,),
        lossy_block_sizes=(2,),
        methods=(SPEC_DECODE, recorded(Settings(method="token_v3", alpha=0.5))),
        decoded=DECODED[:1],
        decoded_examples=2,
        engine_sizes=tuple(SIZES)[:1],
        sizes=tuple(SIZES)[:1],
        widths=(1, 3),
        vocab_sizes=(512,),
        batches=(2,),
        beside_auto=(2,),
        large_vocab=512,
        large_rules=("spec_decode",),
        large_batches=(1,),
        large_blocks=(1,),
        working_set=4_000_000,
        growth={"capacity": (16, 32), "models": (1, 2)},
        candidates=(4,),
        rules=("spec_decode", "token_v3"),
        either_way=("spec_decode",),
        whole_rounds=("spec_decode",),
        shapes=((1,), (2,)),
        acceptance_examples=4,
        acceptance_tokens=8,
    )


@dataclass(frozen=True)
class Stream:
    """A timed loop that multiplies a matrix of `size` bytes by vectors, to measure the bandwidth of memory or cache."""

    loop: measure.Loop
    size: int

    def bandwidth(self, seconds: np.ndarray) -> np.ndarray:
        """Returns the bytes per second that calls of the loop read if they took `seconds`."""
        return self.size * self.loop.count / seconds


class Bench:
    """One run of the benchmarks, with its settings, models and prompts.

    Args:
        settings: what the run measures, and how often; pair: the loaded pair.
        track: returns an iterator over a section's items that also shows the progress.

    Raises:
        ValueError: the task does not exist, or the pair has no vocabulary.
    """

    def __init__(self, settings: Sizes, pair: Pair, track: Callable[[Sequence[Any]], Iterable[Any]] = iter):
        if pair.vocabulary is None:
            raise ValueError(f"pair {pair.name!r} has no vocabulary, but the prompts are texts")
        self.settings, self.track, self.pair = settings, track, pair
        task = get_task(settings.task)
        count = max(settings.examples, *settings.batches)
        texts = [task.build_prompt(example) for example in task.load(limit=max(count, settings.decoded_examples))]
        self.texts, self.decoded = texts[:count], texts[: settings.decoded_examples]
        # all prompts share one length, because every new length would compile again
        self._prompts = make_prompt(self.pair, self.texts)
        self._streams: dict[int, Stream] = {}

    def with_pair(self, pair: Pair, examples: int) -> Bench:
        """Returns a copy of this bench with at most `examples` examples and another pair with the same vocabulary."""
        bench = copy.copy(self)
        bench.pair, bench.settings = pair, replace(self.settings, examples=min(examples, self.settings.examples))
        bench._prompts = make_prompt(pair, self.texts)
        return bench

    @property
    def lossless(self) -> Settings:
        """The method `spec_decode` with the γ of sections that use a single γ."""
        return replace(SPEC_DECODE, block_size=self.settings.block_size)

    def prompt(self, rows: Sequence[int]) -> Prompt:
        """Returns the prompts of some examples, all padded to the same length, on the device."""
        return jax.device_put(jax.tree.map(lambda x: x[np.asarray(rows)], self._prompts))

    def slots(self, block: int) -> int:
        """Returns the number of cache slots of an engine that drafts blocks of `block` tokens."""
        return self._prompts.tokens.shape[1] + self.settings.max_new_tokens + block + 1

    def engine(self, method: Settings, stop_ids: Sequence[int] | None = None) -> tuple[Engine, Params]:
        """Returns a method's engine and parameters; the method's α is not part of them."""
        options: dict[str, Any] = {name: getattr(method, name) for name in ("block_size", "bonus", "tree", "verify")}
        return assemble(self.pair, method=method.method, stop_ids=stop_ids, **options)

    def generator(self, method: Settings, rows: Sequence[int], temperature: float = 0.0) -> Run:
        """Returns a function of a seed that generates outputs for the examples `rows`, with all preparation done."""
        engine, params = self.engine(method)
        return self.run(engine, params, rows, self.settings.max_new_tokens, method.alpha or 0.0, temperature)

    def run(
        self,
        engine: Engine,
        params: Params,
        rows: Sequence[int],
        max_new_tokens: int,
        alpha: float = 0.0,
        temperature: float = 0.0,
    ) -> Run:
        """Returns a function of a seed that generates outputs, as `generator` does, for any engine and length."""
        prompt = self.prompt(rows)
        controls = jax.device_put(make_controls(len(rows), alpha=alpha, temperature=temperature))
        ids = jax.device_put(np.asarray(rows, np.int32))
        params = block_costs.ready(self.pair, engine, params, prompt, controls, max_new_tokens=max_new_tokens)

        def run(seed: int) -> Generation:
            return generate(
                engine, params, prompt, seed, controls=controls, max_new_tokens=max_new_tokens, example_ids=ids
            )

        return run

    def program(self, method: Settings, batch: int) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        """Returns `generate` of a method as a program to trace, lower and compile by hand, and its arguments."""
        engine, params = self.engine(method)
        controls, ids = make_controls(batch, alpha=method.alpha or 0.0), np.arange(batch, dtype=np.int32)

        def whole(params: Params, prompt: Prompt, seed: Any, controls: Controls, ids: Any) -> Generation:
            longest = self.settings.max_new_tokens
            return generate(engine, params, prompt, seed, controls=controls, max_new_tokens=longest, example_ids=ids)

        return jax.jit(whole), (params, self.prompt(range(batch)), np.uint32(0), controls, ids)

    def prefill(self, engine: Engine, params: Params, rows: Sequence[int]) -> Callable[[], DecodeState]:
        """Returns a call that does only the work of `generate` before its first round."""
        # prefill does not depend on the rule; with one fixed verifier, all rules share one compiled program
        plain = replace(engine, verifier=Speculative(RULES["spec_decode"]))
        prompt, ids = self.prompt(rows), np.asarray(rows, np.int32)
        return functools.partial(_prefill, plain, params, prompt, ids, self.settings.max_new_tokens)

    def stream(self, working_set: int) -> Stream:
        """Returns the loop that measures bandwidth over a matrix of `working_set` bytes.

        Sections time this loop in the same turns as the calls that they compare with it. The loop uses the fastest
        implementation of `ORDERS`, chosen once per size, so that no measurement is faster than its floor.
        """
        if working_set not in self._streams:
            loops = {order: self._stream_loop(working_set, order) for order in ORDERS}
            seconds = measure.interleave(loops, self.settings.repeats)
            fastest = min(ORDERS, key=lambda order: np.median(seconds[order]) / loops[order].count)
            self._streams[working_set] = Stream(loops[fastest], working_set)
        return self._streams[working_set]

    def _stream_loop(self, working_set: int, order: str) -> measure.Loop:
        return measure.long_enough(stream_loop(working_set, order), self.settings.loop_seconds)


@functools.partial(jax.jit, static_argnames=("engine", "max_new_tokens"))
def _prefill(engine: Engine, params: Params, prompt: Prompt, ids: Any, max_new_tokens: int) -> DecodeState:
    return engine.init(params, prompt, jax.random.key(0, impl="threefry2x32"), ids, max_new_tokens)
