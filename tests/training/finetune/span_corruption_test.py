"""Tests of span corruption: T5's counts, no token lost, every mask equally likely, and plain text for decoders."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.training.finetune import span_corruption
from speccascade_jax.training.finetune.span_corruption import SpanCorruption
from tests.support import tokenizer_files

SHIPPED = Path(sc.__file__).parent / "assets/pairs/tatoeba_en_de/vocabulary.model"
LINES = [f"Once upon a time there were {number} kings in a small country." for number in range(200)]


@pytest.fixture(scope="module")
def plain():
    return load_vocabulary(SHIPPED)


@pytest.fixture(scope="module")
def vocabulary(plain):
    return plain.with_sentinels(plain.vocab_size + 100)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(LINES), encoding="utf-8")
    return str(path)


def rows_of(data, number=0, seed=0):
    rows = []
    for batch in data.epoch(seed, number):
        built = batch.build()
        for place in np.flatnonzero(built.lengths):
            sides = ((built.encoder_tokens, built.encoder_lengths), (built.tokens, built.lengths))
            rows.append([ids[place, : n[place]].tolist() for ids, n in sides if ids is not None])
    return rows


def restored(encoder, target, first):
    """Returns the text of a corrupted example; sentinels are the ids from `first` on."""
    spans, ids = {}, list[int]()
    for token in target[:-1]:
        spans.setdefault(token, []) if token >= first else spans[next(reversed(spans))].append(token)
    assert all(spans.values()), "a sentinel replaces at least one token"
    for token in encoder[:-1]:
        ids += spans.pop(token) if token >= first else [token]
    assert not spans
    return ids


def test_counts_are_those_of_t5():
    # t5.data.preprocessors.random_spans_helper: 568 tokens give 512 inputs and 114 targets
    assert span_corruption.chunk_length(512, 0.15, 3.0) == 568
    assert span_corruption.noise_counts(568, 0.15, 3.0) == (85, 28)
    assert span_corruption.noise_counts(2, 0.15, 3.0) == (1, 1)


def test_no_token_is_lost_and_spans_differ_between_epochs(text, vocabulary, plain):
    data = SpanCorruption(text=text, length=64, rows=4).tokens(vocabulary, True)
    wanted = [token for line in LINES for token in plain.encode(line)]
    epochs = []
    for number in (0, 1, 0):
        rows = rows_of(data, number)
        chunks = [restored(encoder, target, plain.vocab_size) for encoder, target in rows]
        assert sum(map(len, chunks)) in (len(wanted), len(wanted) - 1)  # a single last token is too few for a chunk
        assert Counter(token for ids in chunks for token in ids) - Counter(wanted) == Counter()
        text_of = {tuple(wanted[start : start + 70]) for start in range(0, len(wanted), 70)}
        assert span_corruption.chunk_length(64, 0.15, 3.0) == 70 and set(map(tuple, chunks)) <= text_of
        assert all(ids[-1] == plain.eos_id for row in rows for ids in row)
        assert [token for token in rows[0][1] if token >= plain.vocab_size] == [
            plain.vocab_size + 99 - n for n in range(sum(token >= plain.vocab_size for token in rows[0][1]))
        ]
        epochs.append(rows)
    assert epochs[0] == epochs[2] and sorted(epochs[0]) != sorted(epochs[1])
    (shape,) = {batch.shape for batch in data.epoch(0, 0)}
    assert (shape.encoder, shape.width) == (64, len(max(epochs[0], key=lambda row: len(row[1]))[1]))


def test_all_masks_are_equally_likely():
    rng, draws = np.random.default_rng(0), 9000
    masks = Counter(tuple(span_corruption.noise_mask(10, 0.5, 1.7, rng).tolist()) for _ in range(draws))
    # 5 kept and 5 replaced tokens in 3 spans each: 6 x 6 divisions
    assert len(masks) == 36 and all(sum(mask) == 5 and not mask[0] and mask[-1] for mask in masks)
    deviation = math.sqrt(draws / 36 * 35 / 36)
    assert all(abs(count - draws / 36) < 4.5 * deviation for count in masks.values())


def test_spans_become_sentinels():
    tokens, mask = np.arange(10, 18), np.array([0, 1, 1, 0, 0, 1, 0, 1], bool)
    sentinels = np.array([99, 98, 97, 96])
    assert span_corruption.replace_spans(tokens, mask, sentinels).tolist() == [10, 99, 13, 14, 98, 16, 97]
    assert span_corruption.replace_spans(tokens, ~mask, sentinels).tolist() == [99, 11, 12, 98, 15, 97, 17]


def test_decoders_read_plain_text_with_eos_after_every_text(text, tmp_path):
    llama = load_vocabulary(tokenizer_files.llama2c(tmp_path / "tok.bin"))
    data = SpanCorruption(text=text, length=32, limit=9, rows=4).tokens(llama, False)
    rows = [ids for (ids,) in rows_of(data)]
    wanted = [token for line in LINES[:9] for token in [*llama.encode(line), llama.eos_id]]
    assert all(ids[0] == llama.bos_id and len(ids) <= 32 for ids in rows)
    assert sorted(token for ids in rows for token in ids[1:]) in (sorted(wanted), sorted(wanted[:-1]))
    assert data.epoch(0, 0)[0].build().answers[0] == 1


@pytest.mark.parametrize(("words", "last"), [(20, 10), (21, 10), (22, 2), (29, 9)])
def test_only_a_single_last_token_is_left_out(words, last, tmp_path):
    task = Task(name="own", splits=("train",), read=lambda _: [Example(0, "a " * words, "")])
    letters = SimpleNamespace(encode=lambda text: [7] * text.count("a"), bos_id=None, eos_id=1, vocab_size=20)
    corpus = SpanCorruption(text=task, side="source", length=10, sentinels=(8, 9, 10))
    assert corpus.source(letters, True).chunks.lengths.tolist() == [10, 10, *([last] if last < 10 else [])]


def test_texts_of_a_task_can_be_sources_references_or_both(vocabulary, plain):
    task = Task(name="own", splits=("train",), read=lambda _: [Example(n, "a b c", "d e") for n in range(30)])
    counts = {}
    for side in span_corruption.SIDES:
        source = SpanCorruption(text=task, side=side, length=32).source(vocabulary, True)
        counts[side] = len(source.chunks.flat)
    assert (
        counts["both"]
        == counts["source"] + counts["reference"]
        == 30 * len([*plain.encode("a b c"), *plain.encode("d e")])
    )


def test_a_vocabulary_without_sentinels_needs_ids_for_them(text, plain):
    with pytest.raises(ValueError, match=r"needs 28 sentinels for length=512, but the vocabulary has 0: use a model"):
        SpanCorruption(text=text).tokens(plain, True)
    with pytest.raises(ValueError, match="sentinel 4096 is outside the vocabulary of 4096 ids"):
        SpanCorruption(text=text, length=16, sentinels=(4096,)).tokens(plain, True)
    rare = tuple(range(4090, 4096))
    rows = rows_of(SpanCorruption(text=text, length=64, sentinels=rare).tokens(plain, True))
    assert rows[0][1][0] == 4090 and set(rows[0][0]) & set(rare)


@pytest.mark.parametrize(("changes", "said"), [
    ({"noise_density": 0.0}, "noise_density=0.0"), ({"noise_density": 0.6}, "noise_density=0.6"),
    ({"mean_span": 0.5}, "mean_span=0.5 is below 1"), ({"side": "target"}, "side='target' is unknown"),
    ({"length": 4}, "length=4"), ({"text": "wmt22"}, "task wmt22 has no split 'train'; its splits: test"),
])  # fmt: skip
def test_bad_settings_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        SpanCorruption(**{"text": "a.txt", **changes})


def test_missing_or_empty_texts_are_refused(tmp_path, vocabulary):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="has 0 tokens of text: a chunk needs at least 2"):
        SpanCorruption(text=str(tmp_path / "empty.txt")).tokens(vocabulary, True)
    with pytest.raises(FileNotFoundError, match=r"none.txt does not exist.*a text file of your own"):
        SpanCorruption(text="none.txt").tokens(vocabulary, True)
