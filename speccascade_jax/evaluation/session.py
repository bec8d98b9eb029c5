"""Measuring points: quality and counts in batches, latency at batch 1 interleaved with the target alone.

An `Evaluator` keeps what the points of a process share: the pair, the examples as device arrays, the assembled engines.
All α's of a rule share one compilation and, since controls are per row, the same batches.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from speccascade_jax.api import make_prompt
from speccascade_jax.core.files import point_key
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.core.types import Controls, Params, Prompt
from speccascade_jax.data.tasks.table import Example, get_task
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.engine.generate import Generation, raise_on_failure
from speccascade_jax.engine.measures import per_example, summarise
from speccascade_jax.evaluation import latency as timing
from speccascade_jax.evaluation.assembling import point_controls, point_parts
from speccascade_jax.evaluation.environment import device, hardware, versions
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import Evaluation, Method, ModelPair, Point
from speccascade_jax.evaluation.validation import check_code
from speccascade_jax.methods import sequence
from speccascade_jax.methods.assemble import build
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair, load_pair
from speccascade_jax.pairs.prompts import decoder_context, stop_ids, text_ids
from speccascade_jax.results.store import Record
from speccascade_jax.runtime.program_memory import release_when_crowded

FORMAT = 1


class Evaluator:
    """Measures points of one pair and task.

    A point's own evaluation says which of the loaded examples it is judged and timed on, and how often: points on parts
    of the examples share everything else.

    Args:
        source: which pair; evaluation: on what; its examples are loaded, from the split's first one on.
        pair: an already loaded pair, instead of `source`'s weights.

    Raises:
        FileNotFoundError: no such pair, or the task's data are absent.
        ValueError: the split has too few examples, or the task too few exemplars.
    """

    def __init__(self, source: ModelPair, evaluation: Evaluation, pair: Pair | None = None):
        self.source, self.evaluation, self.task = source, evaluation.resolved(), get_task(evaluation.task)
        for name in self.task.metrics:
            quality.get_metric(name)  # a misspelt one should not show after the last example only
        self.examples = self._load_examples()  # before the weights, which take longer
        longest = max(Pair.max_prompt_length, self.task.max_input_length)  # the former is for prompts that nobody cuts
        self.pair = replace(load_source(source), max_prompt_length=longest) if pair is None else pair
        # One bucket for all examples, or every length would be a compilation of its own.
        prompts = [self._prompt_ids(example) for example in self.examples]
        self._prompts: Prompt = jax.device_get(
            make_prompt(self.pair, prompts, max_new_tokens=self.evaluation.max_new_tokens or 0)
        )
        self._ids = np.asarray([example.id for example in self.examples], np.int32)
        self.heads = Heads(self.pair)
        self._engines: dict[Method, tuple[sequence.Program, Params]] = {}
        self.fingerprints = {
            "weights": self.pair.fingerprint,
            "examples": point_key(examples=[(e.id, e.source, e.reference) for e in self.examples]),
        }
        self._stop_ids = stop_ids(self._vocabulary(), self.task.stop_strings)
        if self._stop_ids != list(self._vocabulary().stop_ids):  # else keys are those of before there were such
            self.fingerprints["stop_ids"] = point_key(stop_ids=self._stop_ids)

    def _load_examples(self) -> list[Example]:
        asked = self.evaluation
        wanted = asked.first_example + max(asked.quality_examples, asked.latency_examples)
        examples = self.task.load(asked.split, wanted)
        if len(examples) < wanted:
            raise ValueError(
                f"{self.task.name} has {len(examples)} examples in split {asked.split!r}, fewer than "
                f"the {wanted} asked for: lower quality_examples, latency_examples or first_example "
                f"(of a calibration: search_, test_ or held_out_examples)"
            )
        return examples

    def window(self, evaluation: Evaluation, count: int) -> np.ndarray:
        """Rows of `count` examples from the evaluation's `first_example` on, int `[count]`.

        Raises:
            ValueError: some of them are not loaded.
        """
        first, end = evaluation.first_example, evaluation.first_example + count
        if end > len(self.examples):
            raise ValueError(
                f"examples {first} to {end - 1} are asked for, but {len(self.examples)} are loaded: lower "
                f"first_example={first} or the {count} examples, or let the Evaluator's own evaluation load more"
            )
        return np.arange(first, end)

    def _prompt_ids(self, example: Example) -> list[int]:
        """The prompt's ids, cut to the task's longest input as the paper does."""
        self._vocabulary()
        return text_ids(self.pair, self.task.build_prompt(example), self.task.max_input_length, self.task.cut)

    def _vocabulary(self) -> TextVocabulary:
        if self.pair.vocabulary is None:
            raise ValueError(f"pair {self.source.name!r} has no vocabulary, but task {self.task.name} is text")
        return self.pair.vocabulary

    def key(self, point: Point) -> str:
        """The key of the point's record: hash of its configuration, the weights, the examples and the device."""
        return point_key(
            configuration=point.configuration(), device=hardware(), format=FORMAT, **self._fingerprints(point.method)
        )

    def _fingerprints(self, method: Method) -> dict[str, str]:
        return self.fingerprints | self.heads.fingerprint(method)

    def evaluate(self, points: Sequence[Point]) -> Iterator[Record]:
        """Measure points that differ in α only; yields one record each, as soon as it is there."""
        release_when_crowded()  # a long sweep compiles more programs than a process has room for
        begin = time.perf_counter()
        judged = self.judge(points)
        share = (time.perf_counter() - begin) / len(points)
        for first in range(0, len(points), 2):  # two methods can be neighbours of the same run of the target
            some = slice(first, first + 2)
            started, begin = datetime.datetime.now(datetime.UTC), time.perf_counter()
            timed = self.time(points[some])
            wall = (time.perf_counter() - begin) / len(timed) + share
            for point, result, latency in zip(points[some], judged[some], timed, strict=True):
                yield self._describe(point) | {"started": started.isoformat(), "wall_seconds": wall} | result | latency

    def judge(self, points: Sequence[Point]) -> list[Record]:
        """Quality, counts and measures of each point, all points in shared batches."""
        check_code(points[0].evaluation)
        examples = self.window(points[0].evaluation, points[0].evaluation.quality_examples)
        # Neighbours of similar length waste the least of a batch, which runs until its longest row is done.
        lengths = _prompt_lengths(self._prompts)[examples]
        rows = np.repeat(examples[np.argsort(lengths, kind="stable")], len(points))
        which = np.tile(np.arange(len(points)), len(examples))
        generations = []
        batch = min(self.evaluation.quality_batch, len(rows))
        for start in range(0, len(rows), batch):
            # The last batch is filled up with its own rows: another shape would be another compilation.
            chosen = np.resize(np.arange(start, min(start + batch, len(rows))), batch)
            alphas = [points[n].method.alpha or 0.0 for n in which[chosen]]
            generation = self._generate(points[0], rows[chosen], alphas, points[0].seed)
            raise_on_failure(generation)
            kept = min(batch, len(rows) - start)
            generations.append(jax.tree.map(lambda x, kept=kept: np.asarray(x)[:kept], _per_row(generation)))
        tokens, lengths, stats = jax.tree.map(lambda *parts: np.concatenate(parts), *generations)
        results = []
        for n in range(len(points)):
            mine = np.flatnonzero(which == n)
            measured = jax.tree.map(lambda x, mine=mine: x[mine], (tokens, lengths, stats))
            alone = points[0].method.name == DRAFT
            results.append(self._score(measured, rows[mine], alone))
        return results

    def _score(self, measured: tuple[np.ndarray, np.ndarray, Any], rows: np.ndarray, draft_alone: bool) -> Record:
        tokens, lengths, stats = measured
        decode = self._vocabulary().decode
        context = decoder_context(self._prompts)  # what outputs of decoder-only models continue, spaces included
        parts = zip(tokens, lengths, rows, strict=True)
        texts = [decode(ids[:length].tolist(), after=context[row]) for ids, length, row in parts]
        predictions = [self.task.postprocess(text) for text in texts]
        references = [self.examples[row].reference for row in rows]
        ids, samples = [self.examples[row].id for row in rows], self.evaluation.resamples
        scored = quality.measure(self.task.metrics, ids, predictions, references, samples=samples)
        return split_measures(summarise(stats, lengths, draft_alone=draft_alone)) | {
            "quality": scored | {"tokens_per_example": float(np.mean(lengths))},
            "per_example": {"ids": ids, **per_example(stats, draft_alone=draft_alone)},
        }

    def time(self, points: Sequence[Point]) -> list[Record]:
        """Latency of one or two points, absolute and relative to the target alone.

        Empty without latency examples, and for an oracle: what it knows beforehand cost time that no method has.
        """
        evaluation = points[0].evaluation
        examples, trials = evaluation.latency_examples, evaluation.latency_trials
        if not examples or points[0].method.recipe.oracle:
            return [{} for _ in points]
        baseline = self._runner(replace(points[0], method=Method(name=TARGET)))
        methods = [self._runner(point) for point in points]
        for run in (baseline, *methods):
            jax.block_until_ready(run(0, 0))  # compiles, or warms the caches
        alone, timings = timing.interleave(baseline, methods, examples=examples, trials=trials)
        return [
            {
                "latency": timing.latency(timed, draft_alone=point.method.name == DRAFT),
                "target_latency": timing.latency(alone),
                "relative_latency": timing.relative_latency(timed, alone),
            }
            for point, timed in zip(points, timings, strict=True)
        ]

    def _runner(self, point: Point) -> timing.Run:
        trials = point.evaluation.latency_trials
        rows = self.window(point.evaluation, point.evaluation.latency_examples)
        prepared = [self._prepare(point, np.asarray([row]), [point.method.alpha or 0.0]) for row in rows]

        def run(example: int, trial: int) -> Generation:
            return prepared[example]((point.seed * trials + trial) % 2**32)

        return run

    def _generate(self, point: Point, rows: np.ndarray, alphas: Sequence[float], seed: int) -> Generation:
        return self._prepare(point, rows, alphas)(seed)

    def _prepare(self, point: Point, rows: np.ndarray, alphas: Sequence[float]) -> Callable[[int], Generation]:
        """`seed -> generation` of some examples, with everything but the generation itself done beforehand."""
        given = self.arguments(point, rows, alphas)

        def run(seed: int) -> Generation:
            return sequence.run(**given, seed=seed)

        return run

    def arguments(self, point: Point, rows: np.ndarray, alphas: Sequence[float]) -> dict[str, Any]:
        """What `sequence.run` takes, but the seed, for the examples `rows` with one α each."""
        engine, params = self._engine(point.method)
        return {
            "engine": engine,
            "params": params,
            "prompt": jax.device_put(jax.tree.map(lambda x: x[rows], self._prompts)),
            "controls": self.controls(point, alphas),
            "max_new_tokens": self.evaluation.max_new_tokens,
            "example_ids": jax.device_put(self._ids[rows]),
        }

    def controls(self, point: Point, alphas: Sequence[float]) -> Controls:
        """The numbers of a point's method and sampling for rows with one α each."""
        return point_controls(point.method, point.sampling, alphas)

    def _engine(self, method: Method) -> tuple[sequence.Program, Params]:
        method = replace(method, alpha=None, stop_threshold=None)
        if method not in self._engines:
            self._engines[method] = build(self.pair, stop_ids=self._stop_ids, **point_parts(method, self.heads))
        return self._engines[method]

    def _describe(self, point: Point) -> Record:
        return {
            "key": self.key(point),
            "format": FORMAT,
            "point": point.coordinates(),
            "configuration": point.configuration(),
            "fingerprints": self._fingerprints(point.method),
            **self.heads.described(point.method),
            "versions": versions(),
            "device": device(),
        }


def load_source(source: ModelPair) -> Pair:
    """The models that a point names."""
    if source.target is None or source.draft is None:
        return load_pair(source.name, dtype=source.dtype)
    return Pair.load(source.target, source.draft, source.vocabulary, dtype=source.dtype, name=source.name)


def split_measures(summary: dict[str, Any]) -> Record:
    """A summary of METHODS section 9 as the record's `counts`, `measures` (ratios), `by_position`, `inconclusive`."""
    whole = {name: value for name, value in summary.items() if type(value) is int}
    apart = {name: summary[name] for name in ("by_position", "inconclusive")}
    return {
        "counts": whole,
        "measures": {name: value for name, value in summary.items() if name not in {*whole, *apart}},
        **apart,
    }


def _per_row(generation: Generation) -> tuple[Any, Any, Any]:
    return generation.tokens, generation.lengths, generation.stats


def _prompt_lengths(prompt: Prompt) -> np.ndarray:
    if prompt.encoder_tokens is not None:
        return np.count_nonzero(prompt.encoder_tokens, axis=1)
    return np.asarray(prompt.length)
