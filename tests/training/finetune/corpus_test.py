"""Tests of training batches: every pair once, both sides aligned, a fixed number of shapes."""

import gzip
from collections import Counter

import numpy as np
import pytest

from speccascade_jax.data import sentence_pairs
from speccascade_jax.training.t5 import corpus as batching

WIDTHS = (4, 8, 16)


def _pairs(count: int = 200) -> list[sentence_pairs.TokenPair]:
    """Returns pairs; pair `i` has source tokens 10 + i and target tokens 1000 + i, so members can be read back."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size=(count, 2)).tolist()
    rows = enumerate(lengths)
    return [sentence_pairs.TokenPair([10 + i] * source, [1000 + i] * target) for i, (source, target) in rows]


def _corpus(**changes) -> batching.JoinedCorpus:
    return batching.JoinedCorpus(**{"path": "unused", "widths": WIDTHS, "tokens_per_batch": 64, **changes})


def _tokens(batches: list[batching.Batch], side: str) -> Counter:
    values = np.concatenate([getattr(batch, side).ravel() for batch in batches])
    return Counter(values[values > 1].tolist())


@pytest.mark.parametrize("max_joined", [1, 4])
def test_every_pair_occurs_exactly_once_in_an_epoch(max_joined):
    pairs = _pairs()
    batches = _corpus(max_joined=max_joined).epoch(pairs, seed=0, epoch=0)
    assert _tokens(batches, "source") == Counter(token for pair in pairs for token in pair.source)
    assert _tokens(batches, "target") == Counter(token for pair in pairs for token in pair.target)


def test_rows_keep_both_sides_in_the_same_order_and_end_in_eos():
    seen = 0
    for batch in _corpus().epoch(_pairs(), seed=0, epoch=0):
        for source, target in zip(batch.source, batch.target, strict=True):
            if not target.any():
                continue
            seen += 1
            ids = list(dict.fromkeys(source[source > 1].tolist()))
            assert [token + 990 for token in ids] == list(dict.fromkeys(target[target > 1].tolist()))
            assert source[source > 0][-1] == target[target > 0][-1] == 1
    assert seen > 10


def test_shapes_are_one_per_width_and_rows_fit_the_narrowest():
    batches = _corpus().epoch(_pairs(), seed=0, epoch=0)
    assert {batch.source.shape for batch in batches} <= {(64 // width, width) for width in WIDTHS}
    for batch in batches:
        used = np.maximum((batch.source > 0).sum(1), (batch.target > 0).sum(1))[batch.target.any(1)]
        narrower = max([width for width in WIDTHS if width < batch.source.shape[1]], default=0)
        assert (used > narrower).all()


def test_epochs_differ_and_repeat_under_the_same_seed():
    pairs, corpus = _pairs(), _corpus()
    first, again, next_epoch = (corpus.epoch(pairs, 3, 0), corpus.epoch(pairs, 3, 0), corpus.epoch(pairs, 3, 1))
    assert all(np.array_equal(a.source, b.source) for a, b in zip(first, again, strict=True))
    pairs_of_batches = zip(first, next_epoch, strict=False)
    assert len(first) != len(next_epoch) or any(not np.array_equal(a.source, b.source) for a, b in pairs_of_batches)


def test_the_first_epochs_go_from_short_to_long_and_lose_nothing():
    pairs = _pairs()
    batches = _corpus(short_first=1).epoch(pairs, seed=0, epoch=0)
    widths = [batch.source.shape[1] for batch in batches]
    assert widths == sorted(widths)
    assert _tokens(batches, "source") == Counter(token for pair in pairs for token in pair.source)
    later = [batch.source.shape[1] for batch in _corpus(short_first=1).epoch(pairs, seed=0, epoch=1)]
    assert later != sorted(later)


def test_group_sizes_are_spread_over_the_whole_range():
    groups = sentence_pairs.group(_pairs(400), 4, np.random.default_rng(0))
    assert set(map(len, groups)) == {1, 2, 3, 4}
    assert min(Counter(map(len, groups)).values()) > 20


def test_texts_are_grouped_and_joined_in_step():
    pairs = [(f"a{i}", f"b{i}") for i in range(101)]
    groups = sentence_pairs.group(pairs, 4, np.random.default_rng(3))
    joined = [sentence_pairs.join_texts(pairs, members) for members in groups]
    assert [source.replace("a", "b") for source, _ in joined] == [target for _, target in joined]
    assert sorted(word for source, _ in joined for word in source.split()) == sorted(a for a, _ in pairs)
    same, other_seed = (sentence_pairs.group(pairs, 4, np.random.default_rng(seed)) for seed in (3, 4))
    assert groups == same != other_seed


def test_join_tokens_keeps_the_order():
    pairs = [sentence_pairs.TokenPair([5], [50, 51]), sentence_pairs.TokenPair([6, 7], [60])]
    assert sentence_pairs.join_tokens(pairs, [1, 0]) == sentence_pairs.TokenPair([6, 7, 5], [60, 50, 51])


def test_filler_rows_carry_no_target():
    batch = batching.bucketed([sentence_pairs.TokenPair([7], [8])], (4,), 12)[0]
    assert batch.source.tolist() == [[7, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert batch.target.tolist() == [[8, 1, 0, 0], [0] * 4, [0] * 4]


def test_examples_that_do_not_fit_are_refused():
    long = sentence_pairs.TokenPair([5] * 9, [5])
    with pytest.raises(ValueError, match="needs 10 slots, but the widest bucket has 8"):
        batching.bucketed([long], (4, 8), 64)
    with pytest.raises(ValueError, match="is too small for a row of width 8"):
        batching.bucketed([], (4, 8), 6)
    with pytest.raises(ValueError, match="9 tokens; at most 7 fit"):
        sentence_pairs.group([long], 4, np.random.default_rng(0), 7)


def test_targets_are_padded_to_their_own_widths():
    pairs = [sentence_pairs.TokenPair([7] * 6, [8] * length) for length in (1, 2, 3)]
    cases = (((), 3, 8), ((4,), 3, 4), ((2, 4), 1, 2), ((2,), 2, 8))  # the source's width if no target width fits
    for widths, count, width in cases:
        assert batching.bucketed(pairs[:count], (8,), 32, widths)[0].target.shape == (4, width)


class Numbers:
    """Vocabulary of numbers, which are their own ids."""

    def encode(self, text):
        return [int(word) for word in text.split()]


def test_a_corpus_reads_some_of_the_lines_and_cuts_sources(tmp_path):
    lines = "".join(f"{i} {' '.join(['5'] * (i % 7))}\t{i + 100}\n" for i in range(10, 40))
    (tmp_path / "a.tsv").write_text(lines, encoding="utf-8")
    path = str(tmp_path / "a.tsv")
    tokens = _corpus(path=path, widths=(5,), limit=20, every=3, cut=2).tokens(Numbers())
    assert [pair.source[0] for pair in tokens] == list(range(10, 30, 3))
    assert [len(pair.source) for pair in tokens] == [1 if i % 7 == 0 else 2 for i in range(10, 30, 3)]
    whole = _corpus(path=path, widths=(5,), limit=20).tokens(Numbers())
    assert [pair.source[0] for pair in whole] == [i for i in range(10, 30) if i % 7 < 4]  # longer ones are left out
    swapped = _corpus(path=path, widths=(5,), columns=(1, 0), cut=2).tokens(Numbers())
    assert swapped[0] == sentence_pairs.TokenPair([110], [10, 5, 5, 5])


def test_a_mixture_holds_all_parts_and_never_joins_two():
    parts = tuple(_corpus(max_joined=most) for most in (1, 3))
    mixed = batching.MixedCorpus(parts, widths=WIDTHS, tokens_per_batch=64)
    first = _pairs(60)
    second = [sentence_pairs.TokenPair([t + 3000 for t in p.source], [t + 3000 for t in p.target]) for p in _pairs(60)]
    batches = mixed.epoch([first, second], seed=0, epoch=0)
    assert _tokens(batches, "source") == Counter(token for pair in [*first, *second] for token in pair.source)
    rows = [row[row > 1] for batch in batches for row in batch.target]
    assert all((row > 3000).all() or (row < 3000).all() for row in rows)


def test_the_first_examples_of_a_mixture_come_from_every_part():
    mixed = batching.MixedCorpus((_corpus(max_joined=1), _corpus(max_joined=1)), widths=WIDTHS)
    second_part = [sentence_pairs.TokenPair([3000], [3000])] * 200
    first = mixed.examples([_pairs(200), second_part], np.random.default_rng(0))[:100]
    assert 30 < sum(example.source == [3000] for example in first) < 70


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _corpus(widths=(8, 4)), "must increase"),
        (lambda: _corpus(max_joined=0), "at least 1"),
        (lambda: _corpus(every=0), "every=0"),
        (lambda: _corpus(cut=-1), "cut=-1"),
        (lambda: batching.MixedCorpus(()), "needs parts"),
        (lambda: batching.MixedCorpus((_corpus(),), widths=(4, 8)), "a part has a wider bucket"),
    ],
)
def test_bad_corpora_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_read_pairs_reads_plain_and_gzipped_files(tmp_path):
    text = "One.\tEins.\nTwo.\tZwei.\n"
    (tmp_path / "a.tsv").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "a.tsv.gz", "wt", encoding="utf-8") as out:
        out.write(text)
    wanted = [("One.", "Eins."), ("Two.", "Zwei.")]
    assert sentence_pairs.read_pairs(tmp_path / "a.tsv") == sentence_pairs.read_pairs(tmp_path / "a.tsv.gz") == wanted


def test_read_pairs_takes_either_side_and_fields_of_json_lines(tmp_path):
    (tmp_path / "broken.tsv").write_text("One.\tEins.\nTwo.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken.tsv:2 has 1 columns"):
        sentence_pairs.read_pairs(tmp_path / "broken.tsv")
    (tmp_path / "a.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    assert sentence_pairs.read_pairs(tmp_path / "a.tsv", (1, 0)) == [("Eins.", "One.")]
    with pytest.raises(ValueError, match=r"a.tsv is tab-separated and cannot have columns=\(0, 2\)"):
        sentence_pairs.read_pairs(tmp_path / "a.tsv", (0, 2))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as out:
        out.write('{"id": 3, "long": "A b c.", "short": "B."}\n')
    assert sentence_pairs.read_pairs(tmp_path / "b.jsonl.gz", ("long", "short")) == [("A b c.", "B.")]
    with pytest.raises(
        ValueError, match=r"b.jsonl.gz:1 has no field 'brief'; columns must name two of id, long, short"
    ):
        sentence_pairs.read_pairs(tmp_path / "b.jsonl.gz", ("long", "brief"))
