"""A pair on disk in the form that `sc.load_pair` reads: two random, very small T5s over a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.t5 import T5, T5Config

PIECES = 340  # number of pieces, including one for each byte


def write(
    folder: Path, vocabulary: Path | None = None, *, middle: bool = False, more: int = 0, draft_dtype: str = "float32"
) -> Path:
    """Writes a pair into `folder`: `vocabulary.model` (a copy of `vocabulary`, or a new one), `target/` and `draft/`.

    `middle`: adds a further draft named "middle". `more`: number of ids by which the models' vocabulary is larger than
    the file's, and number of padding rows in the embedding. `draft_dtype`: dtype in which the draft is stored.
    """
    path = folder / "vocabulary.model"
    path.write_bytes(_trained() if vocabulary is None else vocabulary.read_bytes())
    pieces = load.Vocabulary(path).vocab_size + more
    config = T5Config(pieces, pieces + more, 16, 2, 8, 16, 1, 1)
    draws = np.random.default_rng(0)
    for part in ("target", "draft", *(["drafts/middle"] if middle else [])):
        flat = {name: draws.normal(size=shape) / 4 for name, shape in expected_shapes(config).items()}
        stored = draft_dtype if part == "draft" else "float32"
        checkpoints.save(folder / part, T5(config), unflatten_dict(flat, sep="/"), dtype=stored)
    return folder


def _trained() -> bytes:
    examples = get_task("tiny_translation").load(limit=40)
    return load.train([text for example in examples for text in (example.source, example.reference)], PIECES)
