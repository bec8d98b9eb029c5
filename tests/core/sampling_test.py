"""Tests of the sampling transform against a sorting reference, and of drawing against a plain inverse CDF."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from speccascade_jax.core import sampling
from speccascade_jax.core.controls import make_sampling
from tests.support import conformance, reference

transform = jax.jit(sampling.transform)
draw = jax.jit(sampling.sample)
keep_largest = jax.jit(sampling.keep_largest)

LAST_UNIFORM = np.float32(1 - 2**-24)


def scaled(logits, temperature=1.0, top_p=1.0, top_k=0):
    """Applies `S` to rows `[N, V]`."""
    return np.asarray(transform(jnp.asarray(logits), make_sampling(len(logits), temperature, top_p, top_k)))


def random_logits(seed=0, rows=12, vocab_size=37):
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * 2).astype(np.float32)


def far_from_edges(logits, temperature, top_p, top_k, margin=1e-5):
    """Returns whether float32 and float64 must agree on which tokens top-p keeps."""
    if temperature == 0 or top_p >= 1:
        return True
    law = np.sort(reference.scale(logits, temperature, 1.0, top_k))[::-1]
    return np.abs(np.cumsum(law) - top_p).min() > margin


# --- the transform


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_transform_equals_the_reference(temperature):
    logits = random_logits()
    compared = 0
    for top_p in (0.05, 0.5, 0.9, 1.0):
        for top_k in (0, 1, 5, 37, 100):
            laws = scaled(logits, temperature, top_p, top_k)
            for row, law in zip(logits, laws, strict=True):
                if far_from_edges(row, temperature, top_p, top_k):
                    compared += 1
                    np.testing.assert_allclose(law, reference.scale(row, temperature, top_p, top_k), atol=2e-6)
    assert compared > 200


@settings(max_examples=60, deadline=None)
@given(
    row=hnp.arrays(np.float32, 9, elements=st.floats(-10, 10, width=32)),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 12),
)
# logits that are not equal before the softmax, but equal after it
@example(row=np.float32([0] + 8 * [6e-8]), temperature=3.0, top_p=0.5, top_k=0)
def test_transform_of_random_logits_equals_the_reference(row, temperature, top_p, top_k):
    law = scaled(row[None], temperature, top_p, top_k)[0]
    np.testing.assert_allclose(law.sum(), 1.0, atol=1e-5)
    # logits closer than this are equal after the softmax
    assert law.min() >= 0 and row[law > 0].max() >= row.max() - 1e-4
    if top_k > 0:
        assert (law > 0).sum() <= top_k
    # logits that differ by less than float32 resolves after the softmax are ties here and none in the reference
    gaps = np.diff(np.sort(row))
    distinguishable = ((gaps == 0) | (gaps > 1e-4)).all() or (top_k == 0 and top_p >= 1)
    if distinguishable and far_from_edges(row, temperature, top_p, top_k):
        np.testing.assert_allclose(law, reference.scale(row, temperature, top_p, top_k), atol=1e-5)


def test_each_row_has_its_own_setting():
    logits = random_logits(1, rows=6)
    settings_ = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.7, 0), (2.0, 1.0, 4), (0.0, 0.3, 2), (1.0, 0.6, 3)]
    together = scaled(logits, *(np.array(column) for column in zip(*settings_, strict=True)))
    for row, law, setting in zip(logits, together, settings_, strict=True):
        np.testing.assert_array_equal(law, scaled(row[None].repeat(6, 0), *setting)[0])


def test_disabled_truncation_gives_the_softmax_bit_for_bit():
    logits = random_logits(2, rows=4, vocab_size=5000)
    plain = np.asarray(jax.jit(sampling.softmax)(logits))
    np.testing.assert_array_equal(scaled(logits), plain)
    # each row's result is independent of neighbours that truncate or are greedy
    mixed = scaled(logits, [1.0, 1.0, 0.0, 1.0], [1.0, 0.5, 1.0, 1.0], [0, 0, 0, 7])
    np.testing.assert_array_equal(mixed[0], plain[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_raw_distribution_and_its_maximum(temperature):
    logits = random_logits(3, rows=4, vocab_size=5000)
    laws = jax.jit(sampling.raw_and_scaled)(logits, make_sampling(4, temperature, 1.0, 0))
    np.testing.assert_array_equal(laws.raw, jax.jit(sampling.softmax)(logits))
    np.testing.assert_array_equal(laws.max_raw, np.asarray(laws.raw).max(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, [0.0, 1.0, 0.0, 0.7]])
def test_the_token_equals_a_draw_from_the_distribution(temperature):
    """Compares bit for bit; an all-greedy batch, which draws nothing, breaks ties as the distribution does."""
    logits = random_logits(3, rows=4, vocab_size=5000)
    logits[2, [7, 4000]] = 99.0
    uniform = np.float32([0.1, LAST_UNIFORM, 0.0, 0.6])
    laws, token = jax.jit(sampling.laws_and_token)(logits, make_sampling(4, temperature, 1.0, 0), uniform)
    np.testing.assert_array_equal(token, draw(laws.scaled, uniform))
    assert len(set(token.tolist())) == 4 and (np.asarray(laws.scaled)[np.arange(4), token] > 0).all()


def test_top_p_of_one_keeps_every_tail_token():
    """A float32 cumulative sum over a large vocabulary falls short of 1 and would cut the tail."""
    logits = np.zeros((1, 32_128), np.float32)
    logits[0, :7] = 9.0
    assert (scaled(logits) > 0).all()


def test_ties_go_to_the_lowest_index():
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 0.0]], np.float32)
    np.testing.assert_array_equal(scaled(logits, 0.0)[0], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(scaled(logits, 1.0, 1.0, 2)[0] > 0, [0, 1, 1, 0, 0])
    flat = np.zeros((1, 8), np.float32)
    np.testing.assert_array_equal(scaled(flat, 1.0, 0.5)[0], [0.25] * 4 + [0] * 4)  # four tokens reach the mass exactly
    # the token that crosses the threshold is included
    np.testing.assert_array_equal(scaled(flat, 1.0, 0.51)[0] > 0, [1] * 5 + [0] * 3)
    np.testing.assert_array_equal(scaled(flat, 1.0, 1e-6)[0], [1] + [0] * 7)


def test_top_k_comes_before_top_p():
    law = np.array([0.4, 0.3, 0.2, 0.1])
    # of 0.4, 0.3 renormalised the first alone has 4/7 >= 0.5; without top-k two are needed for 0.5
    logits = np.log(law)[None].astype(np.float32)
    np.testing.assert_allclose(scaled(logits, 1.0, 0.5, 2)[0], [1, 0, 0, 0])
    np.testing.assert_allclose(scaled(logits, 1.0, 0.5, 0)[0], [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_masked_entries_stay_at_zero():
    logits = random_logits(3, rows=2, vocab_size=10)
    logits[:, [0, 4, 9]] = -np.inf
    for setting in ((0.0,), (1.0,), (0.5, 0.9), (2.0, 1.0, 9), (1e-6,), (1.0, 0.99999)):
        law = scaled(logits, *setting)
        assert np.isfinite(law).all() and (law[:, [0, 4, 9]] == 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-37])
def test_tiny_temperatures_become_greedy_without_overflow(temperature):
    logits = random_logits(4, rows=3) * 30
    logits[0, :2] = 500.0  # two equal logits, at any temperature
    law = scaled(logits, temperature)
    np.testing.assert_allclose(law[0, :2], 0.5)
    np.testing.assert_array_equal(law[1:], scaled(logits, 0.0)[1:])


def test_further_axes_share_their_rows_setting():
    logits = random_logits(5, rows=6).reshape(2, 3, -1)
    controls = make_sampling(2, [0.5, 0.0], [0.8, 1.0])
    law = np.asarray(transform(jnp.asarray(logits), controls))
    np.testing.assert_allclose(law[0], scaled(logits[0], 0.5, 0.8), atol=1e-7)
    np.testing.assert_allclose(law[1], scaled(logits[1], 0.0))


# --- keep_largest


@settings(max_examples=60, deadline=None)
@given(values=hnp.arrays(np.float32, 11, elements=st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])), k=st.integers(1, 11))
def test_keep_largest_counts(values, k):
    mask = np.asarray(keep_largest(values, jnp.ones(11), jnp.full((1,), k, jnp.float32)))
    expected = np.zeros(11, bool)
    expected[np.argsort(-values, kind="stable")[:k]] = True
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("size", [128, 129, 300, 8192, 8200])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_ties_go_to_the_lowest_indices_across_blocks(size, share):
    """Larger vocabularies are counted in blocks of 64 and 256 entries; the last block may be short."""
    k, tied = int(share * size), np.arange(size) % 3 > 0
    mask = np.asarray(keep_largest(jnp.where(tied, 0.5, 0.25), jnp.ones(size), jnp.full((1,), k, jnp.float32)))
    first = np.concatenate([np.flatnonzero(tied), np.flatnonzero(~tied)])[:k]
    assert np.flatnonzero(mask).tolist() == sorted(first.tolist())


@settings(max_examples=60, deadline=None)
@given(eighths=hnp.arrays(np.int32, 7, elements=st.integers(0, 8)), need=st.integers(1, 40))
def test_keep_largest_reaches_the_mass_with_the_fewest(eighths, need):
    """Values are eighths, so every sum is exact."""
    need = min(need, max(int(eighths.sum()), 1))
    values = (eighths / 64).astype(np.float32)
    mask = np.asarray(keep_largest(values, values, jnp.full((1,), need / 64, jnp.float32)))
    order = np.argsort(-eighths, kind="stable")
    count = int(np.searchsorted(np.cumsum(eighths[order]), need)) + 1 if eighths.sum() >= need else 1
    expected = np.zeros(7, bool)
    expected[order[:count]] = True
    np.testing.assert_array_equal(mask, expected)


# --- argmax


def test_argmax_takes_the_lowest_index_and_stays_inside():
    values = np.array([[0, 2, 2, 1], [5, 5, 5, 5], [-np.inf, -np.inf, -3, -3], [np.nan, 1, 2, 0]], np.float32)
    indices = np.asarray(jax.jit(sampling.argmax)(values))
    np.testing.assert_array_equal(indices[:3], [1, 0, 2])
    assert 0 <= indices[3] < 4
    np.testing.assert_array_equal(sampling.one_hot(sampling.argmax(values[:3]), values.shape[-1]).sum(-1), 1.0)


# --- drawing


def sparse_laws(vocab_size, rows=64, seed=0):
    """Returns distributions with many and with few tokens, long gaps of mass 0, and some with empty ends."""
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.full(vocab_size, 0.3), size=rows)
    laws[rng.random(laws.shape) < rng.choice([0.0, 0.5, 0.99], size=(rows, 1))] = 0
    laws[: rows // 2, [0, -1]] = 0
    laws[:, vocab_size // 2] = 0.01
    return (laws / laws.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [3, 129, 8192, 32_128])
def test_sample_equals_the_inverse_cdf(vocab_size):
    laws = sparse_laws(vocab_size)
    exact = np.cumsum(laws.astype(np.float64), -1)
    exact /= exact[:, -1:]
    for u in (*np.random.default_rng(1).random((12, len(laws)), np.float32), *np.array([[0.0], [LAST_UNIFORM]])):
        u = np.broadcast_to(u, (len(laws),)).astype(np.float32)
        tokens = np.asarray(draw(laws, u))
        rows = np.arange(len(laws))
        assert (laws[rows, tokens] > 0).all()
        # float32 sums may shift an edge by a few units in the last place, never by more
        low = np.where(tokens > 0, exact[rows, tokens - 1], 0.0)
        assert (low - 1e-5 <= u).all() and (u <= exact[rows, tokens] + 1e-5).all()
        expected = np.array([np.searchsorted(c, x, side="right") for c, x in zip(exact, u, strict=True)])
        assert (tokens == expected).mean() > 0.9


@pytest.mark.parametrize("vocab_size", [5, 129, 1000, 8192])
def test_sample_never_draws_a_token_without_mass(vocab_size):
    """Uniforms lie at, just below and just above the edges of the CDF, where rounding decides."""
    laws = sparse_laws(vocab_size, seed=2)
    edges = np.cumsum(laws, -1) / laws.sum(-1, keepdims=True)
    rng, rows = np.random.default_rng(3), np.arange(len(laws))
    for _ in range(20):
        u = edges[rows, rng.integers(vocab_size, size=len(laws))].astype(np.float32)
        for shifted in (u, np.nextafter(u, np.float32(0)), np.nextafter(u, np.float32(2))):
            tokens = np.asarray(draw(laws, np.clip(shifted, 0, LAST_UNIFORM)))
            assert (laws[rows, tokens] > 0).all()


def test_sample_normalises_and_takes_further_axes():
    laws = sparse_laws(50, rows=6).reshape(2, 3, 50)
    u = np.random.default_rng(4).random((2, 3), np.float32)
    np.testing.assert_array_equal(draw(laws, u), draw(laws * 8, u))
    np.testing.assert_array_equal(np.asarray(draw(laws, u))[1], draw(laws[1], u[1]))


@pytest.mark.parametrize("vocab_size", [4, 300])
def test_sample_follows_the_distribution(vocab_size):
    law = np.random.default_rng(5).dirichlet(np.full(vocab_size, 0.7)).astype(np.float32)
    count = 60_000
    u = np.asarray(jax.random.uniform(jax.random.key(6), (count,)))
    tokens = np.asarray(draw(np.broadcast_to(law, (count, vocab_size)), u))
    expected = law.astype(np.float64) / law.sum(dtype=np.float64) * count
    assert conformance.pooled_p_value(np.bincount(tokens, minlength=vocab_size), expected) > 1e-3
