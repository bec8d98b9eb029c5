"""Training corpora that consist of a model's own outputs, for sequence-level distillation.

Source: Kim and Rush (2016, sections 3.2 and 3.3). A drafted token is accepted if it agrees with the *target's* token.
So the file holds token pieces, not text: if the text of an output were encoded again, the tokens could differ from
those that the target chose.

If several outputs are drawn per source, the output nearest to the reference can be kept (Kim and Rush call this
interpolation, section 3.3). A target that is trained on such outputs is more consistent, and its greedy decoding finds
outputs that otherwise need beam search.
"""

import dataclasses
import gzip
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from absl import logging

from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.sentence_pairs import TokenPair, holds_pieces
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary
from speccascade_jax.metrics import quality
from speccascade_jax.models import fingerprints
from speccascade_jax.storage import files, locks
from speccascade_jax.training.finetune import decoding, evaluations
from speccascade_jax.training.finetune import trainer as trainers
from speccascade_jax.training.finetune.batches import PlannedData

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """File of a model's outputs for the sources of a training corpus: lines of `source<TAB>output` in token pieces.

    Sources are joined from sentences as in training, epoch after epoch with the trainer's seed, until there are
    `examples` sources; the same seed samples the outputs. Outputs that do not end within the corpus' widest bucket are
    left out. A killed `write` resumes after the last finished part; parts are stored in `<path>.parts` until the file
    is complete.

    Attributes:
        trainer: provides the corpus, the vocabulary and the seed, and also the model (its saved state) if `checkpoint`
            is empty.
        checkpoint: folder of the model's checkpoint, or empty.
        path: path of the file to write, `….pieces` or `….pieces.gz`.
        examples: number of sources to decode.
        temperature: 0 decodes greedily, 1 samples.
        candidates: number of outputs drawn for every source; the finished output with the highest sentence BLEU against
            the reference is kept, the first one in a tie.
        least: sentence BLEU below which the reference is written instead, because an output far from the reference is
            often wrong.
        part_size: number of sources per part; batch_size: number of rows decoded together.
    """

    trainer: trainers.Trainer
    checkpoint: str = ""
    path: str
    examples: int
    temperature: float = 0.0
    candidates: int = 1
    least: float = 0.0
    part_size: int = 4096
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.candidates < 1 or (self.candidates > 1 and self.temperature == 0):
            remedy = "give at least 1; more than 1 differ only at a temperature above 0"
            raise ValueError(f"{self.candidates} candidates at temperature {self.temperature}: {remedy}")
        if not holds_pieces(self.path):
            raise ValueError(f"{self.path!r}: a file of outputs holds pieces, so its name must say so: x.pieces.gz")
        if files.expanded(self.path).exists():
            raise ValueError(f"{self.path} exists already; remove it, or name another file")

    @property
    def parts(self) -> Path:
        """Folder of the finished parts."""
        return files.expanded(self.path + ".parts")

    def write(self) -> dict[str, float]:
        """Decodes the missing parts and writes the file; returns counts of examples and tokens, and the minutes taken.

        Raises:
            LockedError: another process writes the file.
        """
        began = time.monotonic()
        with locks.held(files.expanded(self.path + ".lock"), self.path):
            vocabulary, bound = self._vocabulary(), evaluations.model_of(self.trainer, self.checkpoint)
            claimed = self.parts / "settings.json"
            files.claim(claimed, self._settings(vocabulary, bound), "remove it, or name another file")
            data = self.trainer.corpus.tokens(vocabulary, True)
            examples = joined_examples(data, self.trainer.seed, self.examples)
            longest = data.shapes[-1].width
            spans = [
                (start, min(start + self.part_size, len(examples))) for start in range(0, len(examples), self.part_size)
            ]
            missing = [span for span in spans if not self._part(span).exists()]
            logging.info("%d examples, %d parts of %d left", len(examples), len(missing), len(spans))
            self._decode(bound, vocabulary, examples, missing, longest)
            content = b"".join(self._part(span).read_bytes() for span in spans)
            packed = gzip.compress(content, mtime=0) if self.path.endswith(".gz") else content
            files.write_atomically(self.path, packed)
            files.remove_folder(self.parts)
        return {**_counts(content, len(examples)), "minutes": round((time.monotonic() - began) / 60, 2)}

    def _vocabulary(self) -> SentencePieceVocabulary:
        vocabulary = self.trainer.text
        if not isinstance(vocabulary, SentencePieceVocabulary):
            raise ValueError(f"{vocabulary.path} has no sentencepiece pieces, in which outputs are written")
        return vocabulary

    def _settings(self, vocabulary: SentencePieceVocabulary, bound: BoundModel) -> dict[str, Any]:
        """Returns the settings that determine the outputs, as JSON values.

        The number of examples is not one of them, so a resumed `write` may decode more examples.
        """
        weights, corpus = fingerprints.of_model(bound), files.plain(dataclasses.asdict(cast(Any, self.trainer.corpus)))
        settings = {"weights": weights, "vocabulary": vocabulary.fingerprint, "corpus": corpus}
        drawn = {name: getattr(self, name) for name in ("temperature", "candidates", "least")}
        return settings | {"seed": self.trainer.seed} | drawn

    def _decode(
        self,
        bound: BoundModel,
        vocabulary: SentencePieceVocabulary,
        examples: list[TokenPair],
        spans: list[Span],
        longest: int,
    ) -> None:
        """Writes the parts of `spans`, and logs progress, remaining time and speed after each part."""
        total, began = sum(end - start for start, end in spans), time.monotonic()
        done = tokens = 0
        for start, end in spans:
            some = examples[start:end]
            drawn = self._draw(bound, vocabulary, some, start, longest)
            outputs = [
                _nearest(vocabulary, example.target, ids, self.least) for example, ids in zip(some, drawn, strict=True)
            ]
            files.write_atomically(self._part((start, end)), _lines(vocabulary, some, outputs))
            done, tokens = done + len(some), tokens + sum(len(ids) for candidates in drawn for ids in candidates)
            spent = time.monotonic() - began
            shown = (done, total, spent / 60 * (total - done) / done, tokens / spent)
            logging.info("%d of %d examples, %.1f min left  %d tokens/s", *shown)

    def _draw(
        self,
        bound: BoundModel,
        vocabulary: SentencePieceVocabulary,
        examples: list[TokenPair],
        start: int,
        longest: int,
    ) -> list[list[list[int]]]:
        """Returns the candidates of every example.

        `start` is the number of the first example, and `longest` the largest number of tokens of an output.
        """
        count = self.candidates
        sources = [[*example.source, vocabulary.eos_id] for example in examples for _ in range(count)]
        drawn: dict[str, Any] = {"temperature": self.temperature, "seed": self.trainer.seed, "first_id": start * count}
        outputs = decoding.decode(bound, vocabulary, sources, longest, batch_size=self.batch_size, **drawn)
        return [outputs[first : first + count] for first in range(0, len(outputs), count)]

    def _part(self, span: Span) -> Path:
        return self.parts / f"{span[0]}-{span[1]}.pieces"


def joined_examples(data: PlannedData, seed: int, count: int) -> list[TokenPair]:
    """Returns the first `count` examples of a corpus, joined epoch after epoch as in training."""
    epochs = (data.source.examples(seed, epoch) for epoch in itertools.count())
    rows = (examples.row(index) for examples in epochs for index in range(len(examples.lengths)))
    chosen = itertools.islice(rows, count)
    return [TokenPair(cast(Any, row.encoder)[:-1].tolist(), row.tokens[:-1].tolist()) for row in chosen]


def _nearest(
    vocabulary: SentencePieceVocabulary, reference: list[int], candidates: list[list[int]], least: float
) -> list[int]:
    """Returns the candidate nearest to the reference, among those that end with EOS; the first one if none does.

    Nearest means the highest sentence BLEU against `reference`. If it is below `least`, the reference is returned.
    """
    ended = [ids for ids in candidates if ids[-1] == vocabulary.eos_id]
    if not least and len(ended) < 2:
        return (ended or candidates)[0]
    wanted = vocabulary.decode(reference)
    scores = [quality.sentence_bleu(vocabulary.decode(ids), wanted) for ids in ended]
    if max(scores, default=0.0) < least:
        return [*reference, vocabulary.eos_id]
    return ended[scores.index(max(scores))]


def _lines(vocabulary: SentencePieceVocabulary, examples: Sequence[TokenPair], outputs: Sequence[list[int]]) -> bytes:
    """Returns the content of the file: one line for every output that ends with EOS."""
    example_outputs = zip(examples, outputs, strict=True)
    ended = [(example.source, ids[:-1]) for example, ids in example_outputs if ids[-1] == vocabulary.eos_id]
    return "".join(f"{vocabulary.pieces(source)}\t{vocabulary.pieces(ids)}\n" for source, ids in ended).encode()


def _counts(content: bytes, decoded: int) -> dict[str, int]:
    """Returns the numbers of written and omitted examples, and of tokens in the written outputs, EOS included."""
    outputs = [line.split(b"\t")[1] for line in content.splitlines()]
    tokens = sum(len(output.split()) + 1 for output in outputs)
    return {"examples": len(outputs), "left_out": decoded - len(outputs), "tokens": tokens}
