"""A model's own outputs as a training corpus: sequence-level distillation (Kim and Rush, 2016, section 3.2).

A draft is accepted where it agrees with the target on the *target's* tokens. So the file holds pieces, not text:
an output that is decoded to text and encoded again may be cut into other tokens than the target chose.
"""

import dataclasses
import gzip
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from speccascade_jax.core import files, locks
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.sentence_pairs import holds_pieces
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.models import fingerprints
from speccascade_jax.training.t5 import decoding, export, loop
from speccascade_jax.training.t5.corpus import JoinedCorpus

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
        part_size: sources per part; batch_size: rows decoded together.
    """

    trainer: loop.Trainer
    checkpoint: str = ""
    path: str
    examples: int
    temperature: float = 0.0
    part_size: int = 4096
    batch_size: int = 64

    def __post_init__(self) -> None:
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
        with locks.held(files.expanded(self.path + ".lock"), self.path):
            return self._write()

    def _write(self) -> dict[str, float]:
        began = time.monotonic()
        vocabulary, bound = Vocabulary(self.trainer.vocabulary), export.model_of(self.trainer, self.checkpoint)
        settings = _settings(self, vocabulary, bound)
        files.claim(self.parts / "settings.json", settings, "remove it, or name another file")
        sources = joined_sources(self.trainer.corpus, vocabulary, self.trainer.seed, self.examples)
        spans = [(at, min(at + self.part_size, len(sources))) for at in range(0, len(sources), self.part_size)]
        missing = [span for span in spans if not self._part(span).exists()]
        logging.info("%d examples, %d parts of %d left", len(sources), len(missing), len(spans))
        self._decode(bound, vocabulary, sources, missing)
        content = b"".join(self._part(span).read_bytes() for span in spans)
        packed = gzip.compress(content, mtime=0) if self.path.endswith(".gz") else content
        files.write_atomically(self.path, packed)
        shutil.rmtree(self.parts)
        return {**_counts(content, len(sources)), "minutes": round((time.monotonic() - began) / 60, 2)}

    def _decode(self, bound: BoundModel, vocabulary: Vocabulary, sources: list[list[int]], spans: list[Span]) -> None:
        """Write the parts of `spans`, and a line for each: how far, how long it still takes, how fast."""
        total, began = sum(end - start for start, end in spans), time.monotonic()
        done = tokens = 0
        width, rows, seed = self.trainer.corpus.widths[-1], self.batch_size, self.trainer.seed
        for start, end in spans:
            some = sources[start:end]
            found = decoding.decode(
                bound, vocabulary, some, width, batch_size=rows, temperature=self.temperature, seed=seed, first_id=start
            )
            files.write_atomically(self._part((start, end)), _lines(vocabulary, some, found))
            done, tokens, spent = done + len(some), tokens + sum(map(len, found)), time.monotonic() - began
            shown = (done, total, spent / 60 * (total - done) / done, tokens / spent)
            logging.info("%d of %d examples, %.1f min left  %d tokens/s", *shown)

    def _part(self, span: Span) -> Path:
        return self.parts / f"{span[0]}-{span[1]}.pieces"


def joined_sources(corpus: JoinedCorpus, vocabulary: Vocabulary, seed: int, count: int) -> list[list[int]]:
    """Token ids of the first `count` joined sources, epoch after epoch, as `JoinedCorpus.epoch` joins them."""
    pairs = corpus.tokens(vocabulary)
    found: list[list[int]] = []
    epoch = 0
    while len(found) < count:
        found += [pair.source for pair in corpus.examples(pairs, np.random.default_rng((seed, epoch)))]
        epoch += 1
    return found[:count]


def _settings(outputs: Outputs, vocabulary: Vocabulary, bound: BoundModel) -> dict[str, Any]:
    """What the outputs depend on, as JSON gives it back; not how many there are."""
    return {
        "weights": fingerprints.of_model(bound),
        "vocabulary": vocabulary.fingerprint,
        "corpus": files.plain(dataclasses.asdict(outputs.trainer.corpus)),
        "seed": outputs.trainer.seed,
        "temperature": outputs.temperature,
    }


def _lines(vocabulary: Vocabulary, sources: Sequence[list[int]], found: Sequence[list[int]]) -> bytes:
    """A line for every output that ended."""
    ended = [(source, ids[:-1]) for source, ids in zip(sources, found, strict=True) if ids[-1] == vocabulary.eos_id]
    return "".join(f"{vocabulary.pieces(source)}\t{vocabulary.pieces(ids)}\n" for source, ids in ended).encode()


def _counts(content: bytes, decoded: int) -> dict[str, int]:
    """Examples written and left out, and the tokens of the written outputs, EOS included."""
    outputs = [line.split(b"\t")[1] for line in content.splitlines()]
    tokens = sum(len(output.split()) + 1 for output in outputs)
    return {"examples": len(outputs), "left_out": decoded - len(outputs), "tokens": tokens}
