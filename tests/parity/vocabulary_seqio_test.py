"""Our vocabulary and seqio's read one file the same way."""

import pytest

from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.vocabularies.load import Vocabulary
from speccascade_jax.pairs.pair import PAIRS_DIRECTORY

pytestmark = pytest.mark.parity


def test_ids_and_texts_agree_with_seqio():
    seqio = pytest.importorskip("seqio", reason="needs the parity extra: make parity")
    path = PAIRS_DIRECTORY / "tatoeba_en_de" / "vocabulary.model"
    ours, theirs = Vocabulary(path), seqio.SentencePieceVocabulary(str(path))
    assert (ours.vocab_size, ours.eos_id) == (theirs.vocab_size, theirs.eos_id)
    for example in get_task("tiny_translation").load():
        for text in (example.source, example.reference):
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.decode(ids) == theirs.decode(ids)
