"""Sessions: the loaded models, the examples as arrays, and the decoders that the points of a process share.

All α's of a rule share one compiled program. They can also share a batch, because every row has its own α.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax.core.types import STORED, Controls, Prompt
from speccascade_jax.data.tasks import hub_data
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies import thinking
from speccascade_jax.data.vocabularies.chat_template import require_template
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary
from speccascade_jax.engine.generate import Generation
from speccascade_jax.evaluation import code_digests
from speccascade_jax.evaluation.environment import hardware, package, toolchain
from speccascade_jax.evaluation.heads import Heads, Policies
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, warn_of_ranges
from speccascade_jax.methods.build import build
from speccascade_jax.methods.build_drafter import models_of
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.methods.sharing import Serving, shared
from speccascade_jax.metrics import quality
from speccascade_jax.models import fingerprints
from speccascade_jax.pairs import chat
from speccascade_jax.pairs.derived import is_derived
from speccascade_jax.pairs.pair import DATA_PAIRS, Pair, find_data_pair, find_pair, load_pair, shared_vocabulary
from speccascade_jax.pairs.prompts import example_ids, make_prompt, stop_ids
from speccascade_jax.results.store.record import Provenance
from speccascade_jax.results.store.record_key import judged_key, timed_key
from speccascade_jax.runtime.mesh import fewest_rows
from speccascade_jax.runtime.progress import stage
from speccascade_jax.storage import hub
from speccascade_jax.storage.files import point_key


class Identity(NamedTuple):
    """Identity of a point's record: two keys, and the provenance of the code.

    `judged_key` identifies the point's quality and counts, and `key` also its latency. Provenance is not part of the
    keys and is compared separately.
    """

    key: str
    judged_key: str
    provenance: Provenance


class Session:
    """Loaded pair of models and loaded task, with the decoders built from them.

    The `evaluation` of a point decides which of the loaded examples are decoded for quality and timed, and how often.
    So points on different examples can share everything else.

    Args:
        source: names the pair; evaluation: names the examples, which are loaded from the start of the split.
        pair: an already loaded pair, instead of `source`'s weights.

    Raises:
        FileNotFoundError: the pair does not exist, or the task's data are missing.
        ValueError: the split has too few examples, or the task has too few exemplars.
    """

    def __init__(self, source: ModelPair, evaluation: Evaluation, pair: Pair | None = None):
        self.source, self.evaluation, self.task = source, evaluation.resolved(), get_task(evaluation.task)
        for name in self.task.metrics:
            # fails now, not after decoding, if a metric's name is misspelt or a package is missing
            quality.get_metric(name).signature()
        # load the examples before the weights, which take longer, so that missing data are noticed early
        with stage(f"loading examples of {self.task.name}"):
            examples = load_examples(self.task, self.evaluation)
        self.pair = load_source(source) if pair is None else pair
        # a task truncates its own prompts, so the pair accepts prompts up to its limit, even if the pair's is smaller
        if self.task.max_input_length > self.pair.max_prompt_length:
            self.pair = replace(self.pair, max_prompt_length=self.task.max_input_length)
        self.vocabulary  # noqa: B018 (raises ValueError if the pair has no vocabulary)
        self.pair = self.pair.for_chat if self.evaluation.chat else self.pair
        with stage("tokenizing the prompts"):
            self.fitted = fit_prompts(self.pair, self.task, self.evaluation, examples)
        self.examples = self.fitted.examples
        # All prompts are padded to one length, because each length would need a compiled program of its own.
        longest = self.evaluation.max_new_tokens or 0
        self.prompts: Prompt = make_prompt(self.pair, self.fitted.prompts, max_new_tokens=longest)
        self.heads, self.policies = Heads(self.pair), Policies(self.pair)
        package()  # caches the revision now, because files may change while the session runs
        self._ids = np.asarray([example.id for example in self.examples], np.int32)
        self._decoders: dict[Settings, Decoder] = {}
        self._serving: dict[Settings, Serving] = {}
        self._code: dict[Settings, str] = {}
        self._task_code = code_digests.task_digest(evaluation.task)
        self._stop_ids = stop_ids(self.vocabulary, () if self.evaluation.cut_thinking else self.task.stop_strings)
        self.loaded = {
            "weights": self.pair.fingerprint,
            "examples": point_key(examples=[(e.id, e.source, e.reference) for e in self.examples], **self.chat),
            "stop_ids": point_key(stop_ids=self._stop_ids),
        }

    @property
    def vocabulary(self) -> TextVocabulary:
        """The pair's vocabulary; ValueError if the pair has none."""
        if self.pair.vocabulary is None:
            raise _no_vocabulary(self.source, self.task)
        return self.pair.vocabulary

    @property
    def chat(self) -> dict[str, Any]:
        """The settings for chat models that the key of a record covers; empty if `chat` and `cut_thinking` are off."""
        asked = self.evaluation
        facts: dict[str, Any] = {"cut_thinking": True} if asked.cut_thinking else {}
        if asked.chat:
            facts |= {"chat": self.pair.chat_template.digest, "variables": dict(asked.template_variables)}
        return facts

    def text(self, ids: list[int], after: Ids) -> str:
        """Returns the text of an output that is scored; `after` holds the ids of its prompt."""
        if self.evaluation.cut_thinking:
            return thinking.answer(self.vocabulary, ids, after)
        return self.vocabulary.decode(ids, after=after)

    @property
    def prompt_length(self) -> int:
        """The number of tokens that all prompts are padded to."""
        encoded = self.prompts.encoder_tokens
        return int((self.prompts.tokens if encoded is None else encoded).shape[1])

    @property
    def revisions(self) -> dict[str, str]:
        """The commits of the models and of the data set that were fetched from the hub, by name."""
        source, path, split = self.source, getattr(self.task, "path", None), self.evaluation.split
        models = hub.commits([source.target, source.draft, source.vocabulary, *source.others.values()])
        return models | (hub_data.commits(path, split) if isinstance(path, str) and split is not None else {})

    def window(self, evaluation: Evaluation, count: int) -> np.ndarray:
        """Returns the row numbers of `count` examples from `first_example` on; ValueError if some are not loaded."""
        first, end = evaluation.first_example, evaluation.first_example + count
        if end > len(self.examples):
            raise ValueError(
                f"examples {first} to {end - 1} are requested, but only {len(self.examples)} are loaded: lower "
                f"first_example={first} or the number of examples, {count}, or open the Session for more examples"
            )
        return np.arange(first, end)

    def check(self, chosen: Iterable[Settings], *, warned: bool = False) -> None:
        """Refuses drafters that the pair lacks, with a ValueError; checks acceptance heads and selection policies.

        `warned` is that of `points.warn_of_ranges`.
        """
        chosen = list(chosen)
        for name in {name for settings in chosen for name in models_of(settings.drafters, settings.tail)}:
            self.pair.model(name)
        self.heads.check(chosen)
        self.policies.check(chosen)
        warn_of_ranges(chosen, self.pair.target.model.vocab_size, warned=warned)

    def identity(self, point: Point) -> Identity:
        """Returns the keys and the code provenance that the point's record has if it is measured now."""
        point = self.held(point)
        parts = {name: getattr(point, name) for name in ("pair", "evaluation", "settings", "seed")}
        judged = key = judged_key(parts, self.fingerprints(point.settings))
        if point.evaluation.latency_examples and point.method.timed:
            key = timed_key(judged, parts, hardware(self.pair.mesh))
        return Identity(key, judged, Provenance(code=self.code(point.settings), toolchain=toolchain()))

    def held(self, point: Point) -> Point:
        """Returns the point with the actual dtype of its drafts in place of `draft_dtype="stored"`.

        So a record of 8-bit drafts has the same key as with `draft_dtype="int8"`, and a record of float32 drafts the
        same key as with `draft_dtype=None`; these two never share a key. "stored" remains only if some of the drafts
        have 8 bits and others do not.
        """
        if point.pair.draft_dtype != STORED:
            return point
        paths = {"draft": point.pair.draft, **point.pair.others}
        drafts = [bound for name, bound in self.pair.drafts.items() if not is_derived(paths.get(name) or "")]
        narrow = {fingerprints.in_eight_bits(bound) for bound in drafts} if point.pair.dtype == "float32" else {False}
        dtype = STORED if len(narrow) == 2 else "int8" if True in narrow else None
        return replace(point, pair=replace(point.pair, draft_dtype=dtype))

    def key(self, point: Point) -> str:
        """Returns the key of the point's record (`results.store.record_key`)."""
        return self.identity(point).key

    def fingerprints(self, settings: Settings) -> dict[str, str]:
        """Returns hashes of weights, examples and stop ids, and of the head and the policy that `settings` need."""
        return self.loaded | self.heads.fingerprint(settings) | self.policies.fingerprint(settings)

    def code(self, settings: Settings) -> str:
        """Returns the digest of the code of a method and of a user's task (`code_digests`).

        Numbers such as α do not change the digest.
        """
        kind = without_numbers(settings)
        if kind not in self._code:
            decoder = self.decoder(settings)
            controls = partial(decoder.method.controls, settings, fewest_rows(self.pair.mesh))
            code, task = code_digests.digest(decoder, controls), self._task_code
            self._code[kind] = point_key(code=code, task=task) if task else code
        return self._code[kind]

    def decoder(self, settings: Settings) -> Decoder:
        """Returns the decoder for `settings`; settings that differ only in α, threshold or sampling share it."""
        kind = without_numbers(settings)
        if kind not in self._decoders:
            loaded, head = self.policies.loaded(settings), self.heads.of(settings)
            self._decoders[kind] = build(self.pair, loaded, stop_ids=self._stop_ids, head=head)
        return self._decoders[kind]

    def share(self, chosen: Iterable[Settings]) -> None:
        """Lets settings that differ only in their rules share a compiled program (`methods.sharing`).

        Settings that were passed to an earlier call keep their program, which may be compiled already.
        """
        kinds = [kind for kind in dict.fromkeys(map(without_numbers, chosen)) if kind not in self._serving]
        self._serving |= zip(kinds, shared([self.decoder(kind) for kind in kinds]), strict=True)

    def controls(self, point: Point, alphas: Sequence[float | None]) -> Controls:
        """Returns a point's controls (the arrays of α and sampling settings) for a batch with one row per entry.

        An entry of `alphas` is `None` if the rule has no α.
        """
        alpha = None if None in alphas else np.asarray(alphas, np.float32)
        return point.method.controls(replace(point.settings, alpha=alpha), len(alphas))

    def prepare(self, point: Point, rows: np.ndarray, alphas: Sequence[float | None] = ()) -> partial[Generation]:
        """Returns a function `seed -> generation` for the examples `rows`, whose other inputs are prepared in advance.

        Without `alphas`, all rows have the point's own α. The function also takes further arguments of `generate` after
        the seed.
        """
        prompt = jax.tree.map(lambda x: x[rows], self.prompts)
        serving = self._serving.get(without_numbers(point.settings)) or Serving(self.decoder(point.settings))
        controls = serving.controls(self.controls(point, alphas or [point.settings.alpha] * len(rows)))
        longest = self.evaluation.max_new_tokens or 0
        return serving.decoder.prepared(prompt, controls, self._ids[rows], longest)

    def batches(self, evaluation: Evaluation) -> list[tuple[np.ndarray, int]]:
        """Returns an evaluation's examples for quality in batches of equal size, each with its number of real rows.

        If the last batch is too small, it is filled up by repeating its rows, because another shape would need another
        compiled program.
        """
        return self.in_batches(self.window(evaluation, evaluation.quality_examples), evaluation.quality_batch)

    def in_batches(self, rows: np.ndarray, batch: int) -> list[tuple[np.ndarray, int]]:
        """Splits rows `[N]` into batches of equal size, and returns each batch with its number of real rows.

        If the last batch is too small, it is filled up by repeating its rows. The size is `batch` or N, whichever is
        smaller, rounded up to a multiple of `fewest_rows` of the pair's mesh.
        """
        parts = fewest_rows(self.pair.mesh)
        size = -(-min(batch, len(rows)) // parts) * parts
        starts = range(0, len(rows), size)
        return [(np.resize(rows[start : start + size], size), min(size, len(rows) - start)) for start in starts]


def without_numbers(settings: Settings) -> Settings:
    """Returns settings without the numbers that are inputs of a compiled program: α, thresholds and sampling."""
    return replace(settings, alpha=None, stop_threshold=None, **sampling_of(Settings()))


def open_session(points: Sequence[Point]) -> Session:
    """Opens a session for points with the same pair and evaluation, and checks their settings (`Session.check`)."""
    chosen = [point.settings for point in points]
    warn_of_ranges(chosen)  # before the models are loaded, which may take minutes
    session = Session(points[0].pair, points[0].evaluation)
    session.check(chosen, warned=True)
    return session


def load_source(source: ModelPair) -> Pair:
    """Loads the models that a `ModelPair` names."""
    more = {name: getattr(source, name) for name in ("others", "dtype", "draft_dtype", "mesh", "draft_whole")}
    with stage(f"loading the models of {source.name}"):
        if source.target is None or source.draft is None:
            return load_pair(source.name, **more)
        return Pair.load(source.target, source.draft, source.vocabulary, name=source.name, **more)


def rehearse(source: ModelPair, evaluation: Evaluation) -> None:
    """Checks that a `Session` would find the pair and the examples, without loading weights; raises the same errors."""
    task = get_task(evaluation.task)
    load_examples(task, evaluation.resolved())
    target, draft, vocabulary = _paths(source)
    for path in (source.target, source.draft, *source.others.values()):
        if path is not None and not is_derived(path):
            checkpoints.model_of(path)
    read = [hub.located(p, hub.DESCRIPTION) for p in (target, draft, *source.others.values()) if not is_derived(p)]
    text = shared_vocabulary(read, vocabulary)
    if text is None:
        raise _no_vocabulary(source, task)
    if evaluation.chat:
        require_template(text.of_target(read[0]))


def _no_vocabulary(source: ModelPair, task: Task) -> ValueError:
    return ValueError(
        f"pair {source.name!r} has no vocabulary, but task {task.name} is text: give the path of a vocabulary too "
        "(ModelPair.vocabulary, beside target and draft)"
    )


def _paths(source: ModelPair) -> tuple[str | Path, str | Path, str | Path | None]:
    """Returns the paths of target, draft and vocabulary; `None` if the vocabulary is in a model's folder."""
    if source.target is not None and source.draft is not None:
        return source.target, source.draft, source.vocabulary
    if source.name in DATA_PAIRS:
        return find_data_pair(source.name)
    folder, has_vocabulary = find_pair(source.name)
    return folder / "target", folder / "draft", folder if has_vocabulary else None


class Fitted(NamedTuple):
    """Examples with the token ids of their prompts, and the numbers of too long prompts that were cut or skipped."""

    examples: list[Example]
    prompts: list[list[int]]
    cut: int = 0
    skipped: int = 0

    def told(self) -> dict[str, int]:
        """Returns the nonzero counts of cut and skipped prompts, for records."""
        counts = {"prompts_cut": self.cut, "prompts_skipped": self.skipped}
        return {name: count for name, count in counts.items() if count}


def _wanted(asked: Evaluation) -> int:
    return asked.first_example + max(asked.quality_examples, asked.latency_examples)


def load_examples(task: Task, asked: Evaluation) -> list[Example]:
    """Returns all examples up to the last one that an evaluation needs.

    Returns the whole split if examples with too long prompts are skipped, because then more examples may be needed.

    Raises:
        ValueError: the split has fewer examples than the evaluation needs.
    """
    wanted = _wanted(asked)
    examples = task.load(asked.split, None if task.too_long == "skip" else wanted)
    _check_references(task, examples)
    if len(examples) < wanted:
        raise ValueError(
            f"{task.name} has {len(examples)} examples in split {asked.split!r}, fewer than "
            f"the {wanted} requested: lower quality_examples, latency_examples or first_example, for example "
            f"--gin.Evaluation.quality_examples={len(examples)} --gin.Evaluation.latency_examples={len(examples)} "
            f"(for a calibration: search_examples, test_examples or held_out_examples)"
        )
    return examples


def _check_references(task: Task, examples: Sequence[Example]) -> None:
    """Refuses empty references, and several references of one example if a metric accepts only one."""
    texts = ((case.reference,) if isinstance(case.reference, str) else case.reference for case in examples)
    if examples and not any(text.strip() for references in texts for text in references):
        raise ValueError(f"{task.name}: all references are empty, so every score would be 0: choose another column")
    alone = [name for name in task.metrics if not quality.get_metric(name).several]
    for case in examples if alone else ():
        if not isinstance(case.reference, str) and len(case.reference) > 1:
            raise ValueError(
                f"{task.name}: example {case.id} has {len(case.reference)} references, but {alone[0]} accepts one: "
                f"choose metrics that accept several references"
            )


def fit_prompts(pair: Pair, task: Task, asked: Evaluation, examples: Sequence[Example]) -> Fitted:
    """Returns examples with tokenized prompts; cuts or skips prompts above the task's length limit, and warns.

    Raises:
        ValueError: too few examples remain.
    """
    if pair.vocabulary is None:
        raise ValueError(f"pair {pair.name!r} has no vocabulary, but task {task.name} is text")
    kept, prompts, long, wanted = list[Example](), list[list[int]](), 0, _wanted(asked)
    skip, longest = task.too_long == "skip", task.max_input_length
    for example in examples:
        if len(kept) == wanted:
            break
        if asked.chat:
            ids, too_long = chat.example_ids(pair, task, example, asked.template_variables)
        else:
            ids, too_long = example_ids(pair.vocabulary, pair.encoder_decoder, task, example)
        long += too_long
        if not (skip and too_long):
            kept.append(example)
            prompts.append(ids)
    if len(kept) < wanted:
        raise ValueError(
            f"{task.name} has {len(kept)} examples of at most {longest} tokens, fewer than the {wanted} requested: "
            f"request fewer, raise max_input_length, or cut them (too_long='cut')"
        )
    fitted = Fitted(kept, prompts, 0 if skip else long, long if skip else 0)
    if long:
        done = "skipped" if skip else "cut"
        warnings.warn(f"{task.name}: {long} prompts of more than {longest} tokens were {done}", stacklevel=3)
    return fitted
