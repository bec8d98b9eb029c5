"""What the points of a process share: the pair, the examples as device arrays, the programs.

All α's of a rule share one program and, since controls are per row, the same batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from speccascade_jax.core.types import Controls, Prompt
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.engine.generate import Generation
from speccascade_jax.evaluation import code_digests, loading
from speccascade_jax.evaluation.environment import hardware, package, toolchain
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.policies import Policies
from speccascade_jax.evaluation.validation import warn_of_ranges
from speccascade_jax.methods.build import build
from speccascade_jax.methods.build_drafter import models_of
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair, load_pair
from speccascade_jax.pairs.prompts import make_prompt, stop_ids
from speccascade_jax.results.store.record import Provenance
from speccascade_jax.results.store.record_key import judged_key, timed_key
from speccascade_jax.runtime.mesh import fewest_rows
from speccascade_jax.storage.files import point_key


class Identity(NamedTuple):
    """What a point's record is found by: its key, the key of what is judged, and, compared apart, the code."""

    key: str
    judged_key: str
    provenance: Provenance


class Session:
    """A pair and a task, loaded, and what is assembled of them.

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
        examples = loading.load(self.task, self.evaluation)  # before the weights, which take longer
        self.pair = load_source(source) if pair is None else pair
        if self.task.max_input_length > self.pair.max_prompt_length:  # which is for prompts that nobody cuts
            self.pair = replace(self.pair, max_prompt_length=self.task.max_input_length)
        self.vocabulary  # noqa: B018 (raises where there is none)
        self.fitted = loading.fit(self.pair, self.task, self.evaluation, examples)
        self.examples = self.fitted.examples
        # One bucket for all examples, or every length would be a compilation of its own.
        self.prompts: Prompt = make_prompt(
            self.pair, self.fitted.prompts, max_new_tokens=self.evaluation.max_new_tokens or 0
        )
        self.heads, self.policies = Heads(self.pair), Policies(self.pair)
        package()  # as it was loaded: hours later its files may be others
        self._ids = np.asarray([example.id for example in self.examples], np.int32)
        self._decoders: dict[Settings, Decoder] = {}
        self._code: dict[Settings, str] = {}
        self._stop_ids = stop_ids(self.vocabulary, self.task.stop_strings)
        self.loaded = {
            "weights": self.pair.fingerprint,
            "examples": point_key(examples=[(e.id, e.source, e.reference) for e in self.examples]),
            "stop_ids": point_key(stop_ids=self._stop_ids),
        }

    @property
    def vocabulary(self) -> TextVocabulary:
        """The pair's; ValueError if it has none."""
        if self.pair.vocabulary is None:
            raise ValueError(f"pair {self.source.name!r} has no vocabulary, but task {self.task.name} is text")
        return self.pair.vocabulary

    def window(self, evaluation: Evaluation, count: int) -> np.ndarray:
        """Rows of `count` examples from `evaluation.first_example` on, int `[count]`; ValueError beyond the loaded."""
        first, end = evaluation.first_example, evaluation.first_example + count
        if end > len(self.examples):
            raise ValueError(
                f"examples {first} to {end - 1} are asked for, but {len(self.examples)} are loaded: lower "
                f"first_example={first} or the {count} examples, or let the Session's own evaluation load more"
            )
        return np.arange(first, end)

    def check(self, chosen: Iterable[Settings]) -> None:
        """Refuses drafters that the pair lacks, with a ValueError, and as `Heads.check` and `Policies.check`."""
        chosen = list(chosen)
        for name in {name for settings in chosen for name in models_of(settings.drafters, settings.tail)}:
            self.pair.model(name)
        self.heads.check(chosen)
        self.policies.check(chosen)
        warn_of_ranges(chosen, self.pair.target.model.vocab_size)

    def identity(self, point: Point) -> Identity:
        """Returns the keys of the point's record, and the code that would measure it."""
        parts = {name: getattr(point, name) for name in ("pair", "evaluation", "settings", "seed")}
        judged = key = judged_key(parts, self.fingerprints(point.settings))
        if point.evaluation.latency_examples and point.method.timed:
            key = timed_key(judged, parts, hardware(self.pair.mesh))
        return Identity(key, judged, Provenance(code=self.code(point.settings), toolchain=toolchain()))

    def key(self, point: Point) -> str:
        """Returns the key of the point's record (`results.store.record_key`)."""
        return self.identity(point).key

    def fingerprints(self, settings: Settings) -> dict[str, str]:
        """Returns hashes of what is `loaded`, and of the head and the policy that settings ask."""
        return self.loaded | self.heads.fingerprint(settings) | self.policies.fingerprint(settings)

    def code(self, settings: Settings) -> str:
        """Returns the digest of rule, stop policy and drafter (`code_digests`), taken once for all numbers."""
        kind = without_numbers(settings)
        if kind not in self._code:
            decoder = self.decoder(settings)
            controls = partial(decoder.method.controls, settings, fewest_rows(self.pair.mesh))
            self._code[kind] = code_digests.digest(decoder, controls)
        return self._code[kind]

    def decoder(self, settings: Settings) -> Decoder:
        """Returns the decoder of settings: one for all their numbers."""
        kind = without_numbers(settings)
        if kind not in self._decoders:
            loaded, head = self.policies.loaded(settings), self.heads.of(settings)
            self._decoders[kind] = build(self.pair, loaded, stop_ids=self._stop_ids, head=head)
        return self._decoders[kind]

    def controls(self, point: Point, alphas: Sequence[float | None]) -> Controls:
        """Returns the numbers of a point for rows with one α each, `None` where the rule has none."""
        alpha = None if None in alphas else np.asarray(alphas, np.float32)
        return point.method.controls(replace(point.settings, alpha=alpha), len(alphas))

    def prepare(self, point: Point, rows: np.ndarray, alphas: Sequence[float | None] = ()) -> partial[Generation]:
        """Returns `seed -> generation` of some examples, everything but the generation done beforehand.

        Without `alphas` all rows have the point's own; what else `generate` takes may stand behind the seed.
        """
        prompt = jax.tree.map(lambda x: x[rows], self.prompts)
        controls = self.controls(point, alphas or [point.settings.alpha] * len(rows))
        longest = self.evaluation.max_new_tokens or 0
        return self.decoder(point.settings).prepared(prompt, controls, self._ids[rows], longest)

    def batches(self, evaluation: Evaluation) -> list[tuple[np.ndarray, int]]:
        """The evaluation's examples for quality in batches of one size: rows, and how many of them count.

        The last batch is filled up with its own rows: another shape would be another compilation.
        """
        return self.in_batches(self.window(evaluation, evaluation.quality_examples), evaluation.quality_batch)

    def in_batches(self, rows: np.ndarray, batch: int) -> list[tuple[np.ndarray, int]]:
        """As `in_batches`, of a size that the pair's mesh divides."""
        return in_batches(rows, batch, fewest_rows(self.pair.mesh))


def without_numbers(settings: Settings) -> Settings:
    """Returns settings without the numbers that one program serves: α, thresholds, sampling."""
    return replace(settings, alpha=None, stop_threshold=None, **sampling_of(Settings()))


def in_batches(rows: np.ndarray, batch: int, parts: int = 1) -> list[tuple[np.ndarray, int]]:
    """`rows` `[N]` cut into batches of one size, the last one filled up with its own, and how many of each count.

    The size is a multiple of `parts`, `batch` or the next one above it.
    """
    size = -(-min(batch, len(rows)) // parts) * parts
    starts = range(0, len(rows), size)
    return [(np.resize(rows[start : start + size], size), min(size, len(rows) - start)) for start in starts]


def load_source(source: ModelPair) -> Pair:
    """The models that a point names."""
    more: dict[str, Any] = {"others": source.others, "dtype": source.dtype, "draft_dtype": source.draft_dtype}
    more |= {"mesh": source.mesh, "draft_whole": source.draft_whole}
    if source.target is None or source.draft is None:
        return load_pair(source.name, **more)
    return Pair.load(source.target, source.draft, source.vocabulary, name=source.name, **more)
