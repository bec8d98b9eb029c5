"""Tests of planned epochs: no example is lost or doubled, whatever kills a run and however many hosts read."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.training.finetune import batches
from speccascade_jax.training.finetune.batches import Batching, Row, Shape
from speccascade_jax.training.finetune.corpus import TaskSource
from speccascade_jax.training.finetune.ragged import Ragged

EOS = 1
SHAPES = (Shape(8, 4, 3), Shape(8, 8, 6), Shape(4, 16, 6))


def source_of(lengths, encoder_decoder=True):
    """Returns examples whose tokens are all 10 + their index."""
    sides = [Ragged.of([10 + number] * pair[side] for number, pair in enumerate(lengths)) for side in (0, 1)]
    return TaskSource(*sides, encoder_decoder, (16, 6), {})


def data_of(lengths, short_first=0):
    return batches.PlannedData(source_of(lengths), SHAPES, EOS, short_first)


def seen(batch) -> list[int]:
    """Returns the indices of the examples in a batch, after checking that both sides belong together."""
    indices = []
    for tokens, length, encoder, encoder_length in zip(*(batch[n] for n in (0, 1, 3, 4)), strict=True):
        assert not tokens[length:].any() and not encoder[encoder_length:].any() and encoder_length
        if length:
            assert set(tokens[:length]) == set(encoder[:encoder_length])
            indices.append(int(tokens[0]) - 10)
        else:
            assert encoder[:encoder_length].tolist() == [EOS]
    return indices


def by_hosts(batch, hosts: int) -> list[int]:
    """Returns the examples of a batch that `hosts` hosts build, each its own rows."""
    share = batches.check_rows(batch.rows, hosts)
    return [index for host in range(hosts) for index in seen(batch.build(slice(host * share, (host + 1) * share)))]


def test_an_iterator_goes_from_one_epoch_to_the_next_from_any_position():
    data = data_of([(3, 3)] * 50)
    epochs = [data.epoch(7, number) for number in range(3)]
    assert len(epochs[0]) == 7
    places = [(epoch, index) for epoch, index, _ in itertools.islice(data.from_position(7, 1, 5), 10)]
    assert places == [(1, 5), (1, 6), *((2, index) for index in range(7)), (3, 0)]
    _, _, batch = next(data.from_position(7, 1, 5))
    assert np.array_equal(batch.build().tokens, epochs[1][5].build().tokens)


PAIRS = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 6)), min_size=1, max_size=70)


@settings(max_examples=60, deadline=None)
@given(lengths=PAIRS, seed=st.integers(0, 9), data=st.data(), hosts=st.tuples(*[st.sampled_from((1, 2, 4))] * 3))
def test_no_example_is_lost_or_doubled_over_two_epochs_two_kills_and_other_hosts(lengths, seed, data, hosts):
    steps = sum(len(data_of(lengths).epoch(seed, number)) for number in (0, 1))
    kills = [data.draw(st.integers(0, steps)) for _ in range(2)]
    trained, position = list[list[int]](), (0, 0)
    for kill, count in zip((*kills, None), hosts, strict=True):
        saved = data.draw(st.integers(0, kill)) if kill is not None else steps
        while len(trained) < steps and (kill is None or len(trained) < kill):
            epoch, index, batch = next(data_of(lengths).from_position(seed, *position))
            trained.append(by_hosts(batch, count))
            position = (epoch, index + 1)
        del trained[saved:]  # the steps since the last save are lost, and trained again
        position = (0, len(trained)) if len(trained) < (first := len(data_of(lengths).epoch(seed, 0))) else None
        position = position or (1, len(trained) - first)
    first = len(data_of(lengths).epoch(seed, 0))
    for epoch in (trained[:first], trained[first:]):
        assert Counter(itertools.chain(*epoch)) == Counter(range(len(lengths)))
    unbroken = itertools.islice(data_of(lengths).from_position(seed, 0, 0), steps)
    assert trained == [by_hosts(batch, 1) for _, _, batch in unbroken]


def test_epochs_differ_and_repeat_under_the_same_seed():
    data = data_of([(3, 3)] * 64)
    orders = [[seen(batch.build()) for batch in data.epoch(*place)] for place in ((3, 0), (3, 0), (3, 1), (4, 0))]
    assert orders[0] == orders[1] and orders[0] != orders[2] != orders[3] != orders[0]


def test_only_one_batch_of_an_epoch_has_rows_without_example():
    lengths = np.random.default_rng(0).integers(1, (17, 7), (500, 2)).tolist()
    epoch = data_of(lengths).epoch(0, 0)
    assert sum(len(batch.indices) < batch.rows for batch in epoch) <= 1
    assert {batch.shape for batch in epoch} == set(SHAPES)
    widths = [batch.shape.encoder for batch in epoch]
    assert widths != sorted(widths)
    # a batch holds at most one bucket's remainder of examples that a narrower shape would hold
    for shape, narrower in itertools.pairwise(reversed(SHAPES)):
        inside = [batch.indices for batch in epoch if batch.shape == shape]
        fits = [all(lengths[i][side] <= narrower[1 + side] for side in (0, 1)) for i in np.concatenate(inside)]
        assert sum(fits) < narrower.rows


def test_the_first_epochs_go_from_narrow_to_wide():
    lengths = np.random.default_rng(0).integers(1, (17, 7), (300, 2)).tolist()
    first, second = ([batch.shape.encoder for batch in data_of(lengths, 1).epoch(0, n)] for n in (0, 1))
    assert first == sorted(first) and second != sorted(second)


def test_a_host_touches_only_its_own_rows():
    touched = list[int]()

    class Watched:
        lengths = np.full((8, 2), 3)

        def row(self, index):
            touched.append(index)
            return Row(np.full(3, 5), 0, np.full(3, 6))

    (batch,) = batches.plan(Watched(), SHAPES, np.random.default_rng(0), EOS)
    part = batch.build(slice(2, 4))
    assert touched == batch.indices[2:4].tolist() and part.tokens.shape == (2, 3)


def test_padding_is_known_by_lengths_even_if_tokens_are_zero():
    batch = batches.Planned(Shape(2, 0, 4), source_of([(1, 2)], False), np.array([0]), EOS).build()
    assert batch.tokens.tolist() == [[10, 10, 10, 0], [0] * 4] and batch.lengths.tolist() == [3, 0]
    assert batch.answers.tolist() == [1, 0] and batch.encoder_tokens is batch.encoder_lengths is None


def test_shapes_come_from_widths_or_from_the_largest_lengths():
    assert Batching().shapes((80, 64)) == tuple(
        Shape(128, *widths) for widths in ((16, 8), (24, 16), (40, 32), (64, 48), (80, 64))
    )
    assert Batching(rows=4).shapes((0, 20)) == tuple(Shape(4, 0, width) for width in (8, 16, 20))
    joined = Batching(widths=(16, 32), tokens_per_batch=100, multiple=2)
    assert joined.shapes((32, 32)) == (Shape(6, 16, 16), Shape(2, 32, 32))
    assert Batching(widths=(16, 32)).shapes((32, 24)) == (Shape(128, 16, 16), Shape(128, 32, 24))
    assert Batching(widths=(16, 32, 64), target_widths=(8, 12)).shapes((64, 12))[1:] == (
        Shape(128, 32, 12), Shape(128, 64, 12))  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), [
    ({"widths": (8, 4)}, r"widths=\(8, 4\) must be positive numbers that increase"),
    ({"widths": (0, 4)}, "positive"), ({"target_widths": (4, 8)}, "more entries than widths"),
    ({"rows": 4, "tokens_per_batch": 64}, "rows=4 and tokens_per_batch=64: set one of them to 0"),
    ({"rows": -1}, "rows=-1"), ({"multiple": 0}, "multiple=0"), ({"short_first": -1}, "short_first=-1"),
])  # fmt: skip
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Batching(**settings)


def test_batches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tokens_per_batch=60 is too small for 8 rows of width 8: raise it"):
        Batching(widths=(8,), tokens_per_batch=60, multiple=8).shapes((8, 8))
    with pytest.raises(ValueError, match="an example has 9 encoder tokens and 2 tokens, but the widest bucket 8 and 8"):
        batches.first_shapes(np.array([(2, 2), (9, 2)]), Batching(widths=(8,)).shapes((8, 8)))
    with pytest.raises(ValueError, match=r"128 rows does not divide into 3 .*rows=126 or 129, or multiple=3"):
        batches.check_rows(128, 3)
    data = data_of([(1, 1)])
    batches.check_data(data, 4, 6)
    with pytest.raises(ValueError, match="up to 6 tokens, but the model has 5 positions: lower"):
        batches.check_data(data, 4, 5)
    with pytest.raises(ValueError, match="does not divide into 8"):
        batches.check_data(data, 8, None)
