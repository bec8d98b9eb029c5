"""Tests of drafts that copy text or count bigrams: logits against a search in plain Python, and decoding."""

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import Prompt
from speccascade_jax.models import ngrams
from speccascade_jax.models.fake import FakeLM
from speccascade_jax.models.teacher_forcing import continued
from speccascade_jax.pairs.pair import Pair

V, LONGEST = 5, 3
run = jax.jit(continued, static_argnums=0)


def searched(source, tokens):
    """Returns the token after the longest (then latest) earlier match of the last tokens, or `None`."""
    best, token = (0, -1), None
    for place, text in [(i, source) for i in range(len(source))] + [
        (len(source) + i, tokens) for i in range(len(tokens))
    ]:
        i = place if text is source else place - len(source)
        length = 0
        while length < min(LONGEST, i + 1, len(tokens)) and text[i - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length and i + 1 < len(text) and (length, place) > best:
            best, token = (length, place), text[i + 1]
    return token


@pytest.mark.parametrize("encoder", [False, True])
def test_logits_equal_a_search_in_plain_python(encoder):
    rng = np.random.default_rng(0)
    rows, context, width = 6, 4, 12
    source = rng.integers(1, V, (rows, 7)).astype(np.int32)
    source[::2, 5:] = 0
    tokens = rng.integers(1, V, (rows, context + width)).astype(np.int32)
    prompt = Prompt(tokens[:, :context], np.full(rows, context, np.int32), source if encoder else None)
    bound = ngrams.prompt_lookup(V, LONGEST, encoder_decoder=encoder)
    logits = np.asarray(run(bound.model, bound.params, prompt, tokens[:, context:]).logits)
    copies = 0
    for row in range(rows):
        for t in range(width + 1):
            known = [i for i in source[row].tolist() if i] if encoder else []
            token = searched(known, tokens[row, : context + t].tolist())
            expected = np.zeros(V) if token is None else np.where(np.arange(V) == token, 0.0, -np.inf)
            np.testing.assert_array_equal(logits[row, t], expected)
            copies += token is not None
    assert 0 < copies < rows * (width + 1)


def test_a_table_of_counts_drafts_if_no_earlier_text_matches():
    table = ngrams.count_bigrams([[0, 3, 2, 1], [0, 3, 3, 1], [0, 2, 1]], V, most=2)
    bound = ngrams.bigrams(table, V)
    prompt = Prompt(np.array([[0]], np.int32), np.array([1], np.int32))
    logits = run(bound.model, bound.params, prompt, np.array([[3, 2, 4]], np.int32)).logits[0]
    law = np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(law[0], [0, 0, 1 / 3, 2 / 3, 0], atol=1e-6)  # the distribution after token 0
    # After 3 come 2, 3 and 1; two of them are kept.
    np.testing.assert_allclose(law[1], [0, 1 / 2, 1 / 2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law[2], [0, 1, 0, 0, 0], atol=1e-6)
    assert law[3].argmax() in (1, 3) and np.isfinite(logits).sum() == 2 + 2 + 1 + 2  # token 4 never occurred
    combined = ngrams.max_gram(table, V, LONGEST)
    combined_logits = run(combined.model, combined.params, prompt, np.array([[3, 2, 3]], np.int32)).logits[0]
    np.testing.assert_array_equal(combined_logits[:3], logits[:3])  # at these positions no token has occurred twice
    # token 2 followed token 3
    np.testing.assert_array_equal(combined_logits[3], [-np.inf, -np.inf, 0, -np.inf, -np.inf])


def test_rolled_back_tokens_are_forgotten():
    bound = ngrams.prompt_lookup(V, LONGEST)
    model = bound.model

    @jax.jit
    def there_and_back(prompt, once, far):
        cache = model.prefill({}, prompt, 16)
        _, ahead = model.extend({}, cache, far)
        back = model.rollback(ahead, model.consumed(cache))
        return [model.extend({}, state, once)[0].logits for state in (cache, back)]

    prompt = Prompt(np.array([[1, 2, 3, 1]]), np.array([4]))
    fresh, again = there_and_back(prompt, np.array([[1]]), np.array([[4, 1, 4]]))
    np.testing.assert_array_equal(fresh, again)
    assert int(fresh[0, 0].argmax()) == 2


@pytest.mark.laws
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompt_lookup_keeps_the_targets_output(temperature):
    """Checks that greedy output is the target's, and that sampling accepts copied tokens (one-hot distributions)."""
    target = FakeLM(V)
    pair = Pair(target, ngrams.prompt_lookup(V, LONGEST))
    settings = {"temperature": temperature, "max_new_tokens": 24, "seed": 3}
    prompts = [[1, 2, 3, 1, 2], [4, 4, 1]]
    out = sc.decode(pair, prompts, stop="confidence", stop_threshold=0.5, block_size=4, **settings)
    assert out.stats["draft_share"] > 0
    if temperature == 0:
        alone = sc.decode(pair, prompts, method="autoregressive", **settings)
        np.testing.assert_array_equal(out.tokens, alone.tokens)


def test_counting_allocates_no_table_of_all_bigrams():
    table = ngrams.count_bigrams([[0, 250_000, 1], [0, 250_000, 2]], 256_000, most=2)
    assert table["next"].shape == (256_000, 2)
    assert table["next"][0, 0] == 250_000 and set(table["next"][250_000]) == {1, 2}


def test_ids_beyond_the_vocabulary_are_never_drafted_and_precede_common_tokens():
    """Checks that the added rows equal the rows of ids without successors: the same counts in the same order."""
    table = ngrams.count_bigrams([[0, 3, 2, 1], [0, 3, 3, 1], [0, 2, 1]], V, most=4)
    wide = ngrams.widened(table, V, V + 2)
    law = {size: np.asarray(jax.nn.softmax(wide["logits"][size])) for size in (4, V, V + 1)}
    for row in (V, V + 1):
        np.testing.assert_array_equal(wide["next"][row], table["next"][4])
        np.testing.assert_allclose(law[row], law[4], atol=1e-6)
    prompt = Prompt(np.array([[0]], np.int32), np.array([1], np.int32))
    bound = ngrams.bigrams(wide, V + 2)
    logits = run(bound.model, bound.params, prompt, np.array([[3, 6]], np.int32)).logits[0]
    assert np.isneginf(logits[:, V:]).all() and np.isfinite(logits.max(-1)).all()
    np.testing.assert_array_equal(ngrams.widened(table, V, V)["logits"], table["logits"])


def _with(**changed):
    return {"next": np.ones((V + 1, 2), np.int32), "logits": np.zeros((V + 1, 2), np.float32)} | changed


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ngrams.count_bigrams([[0, 7]], V), "token 7 is outside"),
    (lambda: ngrams.count_bigrams([[3, -1]], V), "token -1 is outside a vocabulary of 5"),
    (lambda: ngrams.count_bigrams([[1], []], V), "no bigrams to count"),
    (lambda: ngrams.count_bigrams([[0, 3]], V, most=0), "most=0 is not a whole number >= 1"),
    (lambda: ngrams.count_bigrams([[0, 3]], V), r"must be \[6, K\]"),
    (lambda: _with(next=np.zeros((V + 1, 0)), logits=np.zeros((V + 1, 0))), r"shapes .*\(6, 0\).* must be \[6, K\]"),
    (lambda: _with(next=np.zeros(V + 1), logits=np.zeros(V + 1)), r"must be \[6, K\]"),
    (lambda: {}, r"must be \[6, K\]"),
    (lambda: _with(next=np.array([[1, -1]] * (V + 1))), "has token -1, outside a vocabulary of 6"),
    (lambda: _with(next=np.array([[1, 6]] * (V + 1))), "has token 6, outside a vocabulary of 6"),
    (lambda: _with(logits=np.array([[0, 0], [0, np.nan], *[[0, 0]] * 4])), "infinite or no logits after token 1"),
    (lambda: _with(logits=np.array([*[[0, 0]] * 5, [-np.inf] * 2])), "infinite or no logits after token 5"),
])  # fmt: skip
def test_invalid_sequences_and_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        ngrams.bigrams(make(), V + 1)
