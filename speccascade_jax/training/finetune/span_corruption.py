"""Further pre-training on plain text: T5's span corruption, or next-token prediction for decoder-only models.

Span corruption (Raffel et al. 2020, section 3.1.4): 15% of the tokens of a text, in random spans of 3 tokens on
average, are replaced by one sentinel per span. The target is every sentinel, followed by the tokens that it replaces.
The details are those of T5's code (`random_spans_noise_mask` in `t5.data.preprocessors`), which trained the public
checkpoints. A text begins with a kept span and ends with a replaced span, so there are equally many spans of both
kinds, and no sentinel ends the target. The numbers of replaced tokens and of spans depend only on the text's length, so
texts of the same length have the same encoded length. Neighbouring texts are joined without a token between them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from absl import logging

from speccascade_jax.core.checks import whole
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.file_task import is_file
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.readers import lines
from speccascade_jax.training.finetune.batches import Batching, PlannedData, Row
from speccascade_jax.training.finetune.ragged import Ragged

SIDES = ("source", "reference", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption(Batching):
    """Corpus of plain text for further pre-training.

    The texts are encoded, joined, and cut into chunks. The chunks are the same in every epoch, but their spans are
    drawn anew. The spans of a chunk depend only on the seed, the epoch and the number of the chunk.

    An encoder-decoder gets chunks that become `length` encoder tokens after corruption, EOS included (T5: 512, from 568
    tokens of text). A decoder-only model gets chunks of `length` tokens without corruption. They begin with the
    beginning-of-sequence token if the vocabulary has one, and EOS follows every text.

    Attributes:
        text: a text file with one text per line (`.txt`, `.txt.gz`, …), here or in the data directory; or a task as in
            `TaskCorpus`.
        split: the split of a task.
        side: which texts of a task are used: "source", "reference" or "both".
        length: number of encoder tokens of a chunk; for a decoder-only model, number of its tokens.
        noise_density: the share of the tokens that spans replace.
        mean_span: the mean number of tokens in a span.
        sentinels: ids of the sentinels, in order. If empty, the ids of the vocabulary's pieces `<extra_id_0>`,
            `<extra_id_1>`, …. If the embedding of a T5 has 100 rows more than the vocabulary's file has pieces,
            `SentencePieceVocabulary.with_sentinels` adds these pieces. A model without such rows can use ids of pieces
            that its texts never contain.
        limit: number of texts to use, from the first on; 0 uses all.
        Other attributes are those of `Batching`. By default there is one bucket, because all chunks but the last have
        the same length.

    Raises:
        ValueError: a value is invalid.
    """

    text: str | Task
    split: str = "train"
    side: Literal["source", "reference", "both"] = "both"
    length: int = 512
    noise_density: float = 0.15
    mean_span: float = 3.0
    sentinels: tuple[int, ...] = ()
    limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sentinels", tuple(self.sentinels))
        whole("length", self.length, 8)
        whole("limit", self.limit, 0)
        if not 0 < self.noise_density <= 0.5:
            raise ValueError(f"noise_density={self.noise_density} is not a share above 0 and up to 0.5: T5 has 0.15")
        if not self.mean_span >= 1:
            raise ValueError(f"mean_span={self.mean_span} is below 1 token: T5 has 3.0")
        if self.side not in SIDES:
            raise ValueError(f"side={self.side!r} is unknown: give one of {', '.join(SIDES)}")
        if not self.is_text_file and self.split not in (task := get_task(self.text)).splits:
            raise ValueError(f"task {task.name} has no split {self.split!r}; its splits: {', '.join(task.splits)}")

    @property
    def is_text_file(self) -> bool:
        """Whether `text` is a path of a file of lines, not a task."""
        return isinstance(self.text, str) and not is_file(self.text) and ("/" in self.text or "." in self.text)

    def texts(self) -> Iterator[str]:
        """Yields the texts that are not blank, at most `limit`."""
        texts = self._lines() if self.is_text_file else self._task_texts()
        for number, text in enumerate(text for text in texts if text.strip()):
            if self.limit and number == self.limit:
                return
            yield text

    def _lines(self) -> Iterator[str]:
        path = expanded(str(self.text))
        file = path if path.is_file() else directory.require(*Path(path).parts, instead="a text file of your own")
        return (line for _, line in lines(file))

    def _task_texts(self) -> Iterator[str]:
        for example in get_task(self.text).stream(self.split):
            if self.side != "reference":
                yield example.source
            if self.side != "source":
                yield example.best_answer

    def source(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> "SpanSource":
        """Reads and encodes the texts.

        Raises:
            ValueError: there is no text, or the vocabulary has too few sentinels.
            FileNotFoundError: the data are not on this machine.
        """
        bos = [] if encoder_decoder or vocabulary.bos_id is None else [vocabulary.bos_id]
        chunk = chunk_length(self.length, self.noise_density, self.mean_span) if encoder_decoder else self.length
        between = [] if encoder_decoder else [vocabulary.eos_id]
        ids = Ragged.of([*vocabulary.encode(text), *between] for text in self.texts()).flat
        size, least = chunk - len(bos), 2
        starts = np.arange(0, max(0, len(ids) - least + 1), size)
        if not len(starts):
            raise ValueError(f"{self.text} has {len(ids)} tokens of text: a chunk needs at least {least}")
        offsets = np.append(starts, min(starts[-1] + size, len(ids)))
        sentinels = self._sentinels(vocabulary, chunk) if encoder_decoder else np.zeros(0, np.int32)
        logging.info("%s: %d tokens of text in %d chunks", self.text, len(ids), len(starts))
        return SpanSource(self, Ragged(ids, offsets), np.array(bos, np.int32), sentinels, vocabulary.eos_id)

    def _sentinels(self, vocabulary: TextVocabulary, chunk: int) -> np.ndarray:
        """Returns the ids of all sentinels; raises ValueError if a chunk has more spans."""
        needed = noise_counts(chunk, self.noise_density, self.mean_span)[1]
        ids = self.sentinels or sentinel_ids(vocabulary)
        if len(ids) < needed:
            raise ValueError(
                f"{self.text} needs {needed} sentinels for length={self.length}, but the vocabulary has {len(ids)}: "
                f"use a model whose vocab_size is the number of pieces + 100 (T5's <extra_id_0> …), shorten length, or "
                f"set SpanCorruption.sentinels to ids that texts do not contain"
            )
        if wrong := [token for token in ids if not 0 <= token < vocabulary.vocab_size]:
            raise ValueError(f"sentinel {wrong[0]} is outside the vocabulary of {vocabulary.vocab_size} ids")
        return np.array(ids, np.int32)

    def tokens(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> PlannedData:
        """Reads and encodes the corpus; raises the errors of `source`."""
        source = self.source(vocabulary, encoder_decoder)
        encoder, width = source.limits
        if self.widths:
            return self.planned(source, vocabulary.eos_id)
        one_bucket = dataclasses.replace(self, widths=(encoder or width,), target_widths=(width,) if encoder else ())
        return one_bucket.planned(source, vocabulary.eos_id)


@dataclasses.dataclass(frozen=True, eq=False)
class SpanSource:
    """Chunks of encoded text.

    Attributes:
        corpus: the settings.
        chunks: the tokens of each chunk, without special ids.
        begin: the ids before each chunk; sentinels: the ids of the sentinels, or none without corruption.
        eos_id: id of the end of a sequence.
    """

    corpus: SpanCorruption
    chunks: Ragged
    begin: np.ndarray
    sentinels: np.ndarray
    eos_id: int

    @property
    def size(self) -> int:
        """The number of chunks."""
        return len(self.chunks)

    @property
    def counts(self) -> dict[str, int]:
        """The number of chunks, for reports."""
        return {"examples": len(self.chunks)}

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The lengths of all chunks, as in `Examples`; they are the same in every epoch."""
        chunks = self.chunks.lengths
        if not len(self.sentinels):
            return np.stack([np.zeros_like(chunks), chunks + len(self.begin)], axis=1)
        by_length = {length: self._encoded(length) for length in np.unique(chunks).tolist()}
        return np.array([by_length[length] for length in chunks.tolist()])

    def _encoded(self, length: int) -> tuple[int, int]:
        noise, spans = noise_counts(length, self.corpus.noise_density, self.corpus.mean_span)
        return length - noise + spans + 1, noise + spans + 1

    @property
    def longest(self) -> tuple[int, int]:
        """The largest lengths."""
        encoder, width = self.lengths.max(axis=0).tolist()
        return encoder, width

    @property
    def limits(self) -> tuple[int, int]:
        """The lengths of a full chunk, even if the text is shorter."""
        if not len(self.sentinels):
            return 0, self.corpus.length
        return self._encoded(chunk_length(self.corpus.length, self.corpus.noise_density, self.corpus.mean_span))

    def examples(self, seed: int, number: int) -> "SpanExamples":
        """Returns the examples of epoch `number`."""
        return SpanExamples(self, seed, number)


@dataclasses.dataclass(frozen=True, eq=False)
class SpanExamples:
    """The examples of one epoch; the spans of a chunk are drawn when it is built."""

    source: SpanSource
    seed: int
    number: int

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all examples, as in `Examples`."""
        return self.source.lengths

    def row(self, index: int) -> Row:
        """Returns one example."""
        tokens, begin = self.source.chunks[index], self.source.begin
        if not len(self.source.sentinels):
            # The first token has no context, so no model predicts it.
            return Row(np.concatenate([begin, tokens]), 1)
        rng = np.random.default_rng((self.seed, self.number, index, 3))
        noise = noise_mask(len(tokens), self.source.corpus.noise_density, self.source.corpus.mean_span, rng)
        eos = np.array([self.source.eos_id], np.int32)
        kept, replaced = (replace_spans(tokens, mask, self.source.sentinels) for mask in (noise, ~noise))
        return Row(np.concatenate([replaced, eos]), 0, np.concatenate([kept, eos]))


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Returns the number of replaced tokens, and the number of spans, in a text of `length` tokens (at least 2)."""
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def chunk_length(length: int, density: float, mean_span: float) -> int:
    """Returns the largest number of tokens whose corrupted text has at most `length` tokens, EOS included."""
    chunk = length
    while True:
        noise, spans = noise_counts(chunk + 1, density, mean_span)
        if chunk + 1 - noise + spans + 1 > length:
            return chunk
        chunk += 1


def noise_mask(length: int, density: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """Returns a random mask of the replaced tokens, bool `[length]`.

    Kept and replaced spans alternate, beginning with a kept span. All masks with these numbers of tokens and spans have
    the same probability.
    """
    noise, spans = noise_counts(length, density, mean_span)
    kept, replaced = (_segments(tokens, spans, rng) for tokens in (length - noise, noise))
    pieces = np.stack([kept, replaced], axis=1).ravel()
    return np.repeat(np.tile([False, True], spans), pieces)


def _segments(tokens: int, segments: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the lengths of a random division of `tokens` into non-empty segments; all are equally likely."""
    borders = np.sort(rng.choice(tokens - 1, segments - 1, replace=False)) + 1
    return np.diff(borders, prepend=0, append=tokens)


def replace_spans(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Returns `tokens` with every run of masked tokens replaced by one sentinel, in order of the sentinels."""
    first = mask & ~np.append(False, mask[:-1])
    marked = np.where(first, sentinels[np.cumsum(first) - 1], tokens)
    return marked[first | ~mask]


def sentinel_ids(vocabulary: TextVocabulary) -> list[int]:
    """Returns the ids of the pieces `<extra_id_0>`, `<extra_id_1>`, … of a vocabulary, up to the first missing one."""
    ids = {piece: token for token, piece in enumerate(vocabulary.piece_table())}
    names = (f"<extra_id_{number}>" for number in itertools.count())
    return [ids[name] for name in itertools.takewhile(ids.__contains__, names)]
