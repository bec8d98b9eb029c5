"""What each id adds to a text: joined it is the text, also where characters are spelt in bytes, and it is linear."""

from __future__ import annotations

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.vocabularies import load
from speccascade_jax.data.vocabularies import vocabulary as module
from speccascade_jax.data.vocabularies.vocabulary import added_texts
from speccascade_jax.runtime.paths import shipped

TEXTS = ["Das Wetter war kalt.", "  two  spaces", "naïve 你好 🦊 ok", "a\nb", ""]


@pytest.fixture(scope="module", params=["tatoeba_en_de", "stories"])
def vocabulary(request):
    try:
        return sc.load_pair(request.param).vocabulary
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("before", ["", "Ein Satz davor."])
def test_joined_they_are_the_text(vocabulary, text, before):
    after = vocabulary.encode(before)
    ids = [*vocabulary.encode(text), vocabulary.eos_id]
    pieces = added_texts(vocabulary, ids, after)
    assert len(pieces) == len(ids) and "".join(pieces) == vocabulary.decode(ids, after=after)
    assert pieces == module._added(vocabulary, ids, after, None)


def test_of_any_ids_they_are_what_is_decoded(vocabulary):
    draws = np.random.default_rng(0)
    for _ in range(30):
        ids = draws.integers(3, vocabulary.vocab_size, size=25).tolist()
        assert "".join(added_texts(vocabulary, ids)) == vocabulary.decode(ids)


def test_it_decodes_each_id_once():
    class Counting:
        def __init__(self, held):
            self.held, self.lengths = held, []

        def decode(self, ids, after=()):
            self.lengths.append(len(ids))
            return self.held.decode(ids, after=after)

    held = load.Vocabulary(shipped("pairs", "tatoeba_en_de", "vocabulary.model"))
    counting = Counting(held)
    ids = held.encode("Das Wetter war kalt. " * 20)
    assert "".join(added_texts(counting, ids)) == held.decode(ids)
    assert sum(counting.lengths) <= 4 * len(ids)
