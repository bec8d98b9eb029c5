"""A model's own outputs as a training corpus: sequence-level distillation (Kim and Rush, 2016, sections 3.2, 3.3).

A draft is accepted where it agrees with the target on the *target's* tokens. So the file holds pieces, not text:
an output that is decoded to text and encoded again may be cut into other tokens than the target chose.

Of several outputs for a source the one nearest to its reference can be kept (interpolation, section 3.3): what the
model could well have written and a person nearly wrote. A target that is trained on those agrees with itself more
often, and greedy decoding gets what it would have taken a beam to find.
"""

import dataclasses
import gzip
import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.sentence_pairs import TokenPair, holds_pieces
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.metrics import quality
from speccascade_jax.models import fingerprints
from speccascade_jax.storage import files, locks
from speccascade_jax.training.t5 import decoding, loop
from speccascade_jax.training.t5.corpus import Corpus

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model writes for a trainer's joined training sources, as a file of `source<TAB>output` in pieces.

    Sources are joined as training joins them, epoch after epoch of the trainer's seed, until there are `examples`;
    the same seed draws the outputs. Outputs that did not end within the corpus' widest bucket are left out.
    A killed `write` goes on after the last finished part: parts lie in `<path>.parts` until the file is whole.

    Attributes:
        trainer: its corpus, vocabulary and seed are used, and its run's saved state without a `checkpoint`.
        checkpoint: folder of the model that writes, or empty.
        path: the file to write, `….pieces` or `….pieces.gz`.
        examples: sources to decode.
        temperature: 0 is greedy, 1 samples.
        candidates: outputs drawn for every source; kept is the one with the highest sentence BLEU against the
            source's reference, the first of equals, among those that ended.
        least: the sentence BLEU below which the reference itself is written: what is far from it is often wrong.
        part_size: sources per part; batch_size: rows decoded together.
    """

    trainer: loop.Trainer
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
            remedy = "ask for at least one, and for more than one at a temperature above 0, where they can differ"
            raise ValueError(f"{self.candidates} candidates at temperature {self.temperature}: {remedy}")
        if not holds_pieces(self.path):
            raise ValueError(f"{self.path!r}: a file of outputs holds pieces, which its name must say: x.pieces.gz")
        if files.expanded(self.path).exists():
            raise ValueError(f"{self.path} exists already; remove it, or name another file")

    @property
    def parts(self) -> Path:
        """The folder of finished parts."""
        return files.expanded(self.path + ".parts")

    def write(self) -> dict[str, float]:
        """Decode what is not there yet and write the file; returns counts of examples and tokens, and minutes taken.

        Raises:
            LockedError: another process writes the file.
        """
        began = time.monotonic()
        with locks.held(files.expanded(self.path + ".lock"), self.path):
            vocabulary, bound = Vocabulary(self.trainer.vocabulary), loop.model_of(self.trainer, self.checkpoint)
            claimed = self.parts / "settings.json"
            files.claim(claimed, self._settings(vocabulary, bound), "remove it, or name another file")
            examples = joined_examples(self.trainer.corpus, vocabulary, self.trainer.seed, self.examples)
            spans = [(at, min(at + self.part_size, len(examples))) for at in range(0, len(examples), self.part_size)]
            missing = [span for span in spans if not self._part(span).exists()]
            logging.info("%d examples, %d parts of %d left", len(examples), len(missing), len(spans))
            self._decode(bound, vocabulary, examples, missing)
            content = b"".join(self._part(span).read_bytes() for span in spans)
            packed = gzip.compress(content, mtime=0) if self.path.endswith(".gz") else content
            files.write_atomically(self.path, packed)
            shutil.rmtree(self.parts)
        return {**_counts(content, len(examples)), "minutes": round((time.monotonic() - began) / 60, 2)}

    def _settings(self, vocabulary: Vocabulary, bound: BoundModel) -> dict[str, Any]:
        """Returns what the outputs depend on, as JSON gives it back; not how many there are."""
        weights, corpus = fingerprints.of_model(bound), files.plain(dataclasses.asdict(self.trainer.corpus))
        settings = {"weights": weights, "vocabulary": vocabulary.fingerprint, "corpus": corpus}
        drawn = {name: getattr(self, name) for name in ("temperature", "candidates", "least")}
        return settings | {"seed": self.trainer.seed} | drawn

    def _decode(self, bound: BoundModel, vocabulary: Vocabulary, examples: list[TokenPair], spans: list[Span]) -> None:
        """Write the parts of `spans`, and a line for each: how far, how long it still takes, how fast."""
        total, began = sum(end - start for start, end in spans), time.monotonic()
        done = tokens = 0
        for start, end in spans:
            some = examples[start:end]
            drawn = self._draw(bound, vocabulary, some, start)
            found = [_nearest(vocabulary, one.target, ids, self.least) for one, ids in zip(some, drawn, strict=True)]
            files.write_atomically(self._part((start, end)), _lines(vocabulary, some, found))
            done, tokens = done + len(some), tokens + sum(len(ids) for each in drawn for ids in each)
            spent = time.monotonic() - began
            shown = (done, total, spent / 60 * (total - done) / done, tokens / spent)
            logging.info("%d of %d examples, %.1f min left  %d tokens/s", *shown)

    def _draw(
        self, bound: BoundModel, vocabulary: Vocabulary, examples: list[TokenPair], start: int
    ) -> list[list[list[int]]]:
        """The candidates of every example; `start` is the number of the first."""
        width, count = self.trainer.corpus.widths[-1], self.candidates
        sources = [example.source for example in examples for _ in range(count)]
        drawn: dict[str, Any] = {"temperature": self.temperature, "seed": self.trainer.seed, "first_id": start * count}
        found = decoding.decode(bound, vocabulary, sources, width, batch_size=self.batch_size, **drawn)
        return [found[at : at + count] for at in range(0, len(found), count)]

    def _part(self, span: Span) -> Path:
        return self.parts / f"{span[0]}-{span[1]}.pieces"


def joined_examples(corpus: Corpus, vocabulary: Vocabulary, seed: int, count: int) -> list[TokenPair]:
    """The first `count` joined examples, epoch after epoch, as the corpus' `epoch` joins them."""
    pairs: Any = corpus.tokens(vocabulary)
    epochs = (corpus.examples(pairs, np.random.default_rng((seed, epoch))) for epoch in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(epochs), count))


def _nearest(vocabulary: Vocabulary, reference: list[int], candidates: list[list[int]], least: float) -> list[int]:
    """The candidate that ended with the highest sentence BLEU against `reference`; the first one if none ended.

    Where that BLEU is below `least` it is the reference.
    """
    ended = [ids for ids in candidates if ids[-1] == vocabulary.eos_id]
    if not least and len(ended) < 2:
        return (ended or candidates)[0]
    wanted = vocabulary.decode(reference)
    scores = [quality.sentence_bleu(vocabulary.decode(ids), wanted) for ids in ended]
    if max(scores, default=0.0) < least:
        return [*reference, vocabulary.eos_id]
    return ended[scores.index(max(scores))]


def _lines(vocabulary: Vocabulary, examples: Sequence[TokenPair], found: Sequence[list[int]]) -> bytes:
    """A line for every output that ended."""
    both = zip(examples, found, strict=True)
    ended = [(one.source, ids[:-1]) for one, ids in both if ids[-1] == vocabulary.eos_id]
    return "".join(f"{vocabulary.pieces(source)}\t{vocabulary.pieces(ids)}\n" for source, ids in ended).encode()


def _counts(content: bytes, decoded: int) -> dict[str, int]:
    """Examples written and left out, and the tokens of the written outputs, EOS included."""
    outputs = [line.split(b"\t")[1] for line in content.splitlines()]
    tokens = sum(len(output.split()) + 1 for output in outputs)
    return {"examples": len(outputs), "left_out": decoded - len(outputs), "tokens": tokens}
