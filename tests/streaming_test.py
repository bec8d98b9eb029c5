"""Tests of `stream`: the tokens, sources and errors of `decode`, one at a time, from one compilation."""

from itertools import groupby

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import streaming
from speccascade_jax.core.names import SOURCES
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.runtime import platforms
from tests.support import conformance, tiny_pair

VOCAB, LENGTH, STOP = 9, 14, 4
SETTINGS = {"rule": "token_v3", "alpha": 0.3, "block_size": 3, "max_new_tokens": LENGTH, "stop_ids": [STOP]}


@pytest.fixture(scope="module")
def pair():
    return conformance.tabular_pair(*conformance.tables(VOCAB, seed=0))


def streamed(pair, prompt=(2, 3), **changes):
    return list(sc.stream(pair, list(prompt), **(SETTINGS | changes)))


def what_happened(turn):
    return {"tokens": turn.tokens[0], "source": turn.source[0], "new": turn.num_new[0]}


def recorded(pair, method, rule, alpha, temperature, seed, bonus):
    """Returns `(round, token, source)` of every token, from the rounds that `generate` records."""
    engine, params = assemble(pair, rule=rule, block_size=3, method=method, stop_ids=[STOP], bonus=bonus)
    controls = conformance.controls(1, method=method, rule=rule, alpha=alpha, temperature=temperature)
    out = generate(
        engine, params, make_prompt(pair, [2, 3]), seed, controls=controls, max_new_tokens=LENGTH, record=what_happened
    )
    rounds = [jax.tree.map(lambda x, r=r: np.asarray(x)[r], out.record) for r in range(int(out.num_rounds))]
    return [(r, int(t["tokens"][i]), SOURCES[t["source"][i]]) for r, t in enumerate(rounds) for i in range(t["new"])]


WAYS = {
    "token_v3": ("speculative", "token_v3", 0.3, "rule"),
    "spec_decode": ("speculative", "spec_decode", None, "none"),
    "autoregressive": ("autoregressive", "spec_decode", None, "rule"),
}


@pytest.mark.parametrize("name", list(WAYS))
def test_tokens_rounds_and_sources_equal_those_of_generate(pair, name):
    method, rule, alpha, bonus = WAYS[name]
    settings = {"method": method, "rule": rule, "alpha": alpha, "bonus": bonus}
    seen = set()
    for temperature, seed in ((0.0, 0), (1.0, 0), (1.0, 1), (1.0, 2)):
        tokens = streamed(pair, **settings, temperature=temperature, seed=seed)
        expected = recorded(pair, method, rule, alpha, temperature, seed, bonus)
        assert [(t.round, t.id, t.source) for t in tokens] == expected
        assert [t.position for t in tokens] == list(range(len(tokens)))
        for _, members in groupby(tokens, key=lambda token: token.round):
            slots = [token.slot for token in members]
            assert slots == list(range(len(slots)))
        seen |= {t.source for t in tokens}
    assert seen == {"target"} if method == "autoregressive" else {"draft", "replaced"} <= seen
    assert ("bonus" in seen) == (method == "speculative" and bonus != "none")


@pytest.mark.parametrize("method", [
    "speculative",
    "autoregressive",
    "autoregressive_draft",
    pytest.param("stop_cumulative_confidence", marks=pytest.mark.laws),
])  # fmt: skip
def test_the_output_equals_decodes_with_the_same_seed_and_id(pair, method):
    ends, more = set(), {"method": method, "temperature": 1.0}
    if method.startswith("stop"):
        more["stop_threshold"] = 0.7
    for seed in range(12):
        out = sc.decode(pair, [2, 3], **SETTINGS, **more, seed=seed, example_ids=[7])
        tokens = streamed(pair, **more, seed=seed, example_id=7)
        assert [t.id for t in tokens] == out.tokens[0, : out.lengths[0]].tolist()
        ends.add(tokens[-1].id == STOP)
        assert all(t.id != STOP for t in tokens[:-1]) and (tokens[-1].id == STOP or len(tokens) == LENGTH)
        if method == "autoregressive_draft":
            assert {t.source for t in tokens} == {"draft"}
    assert True in ends


def test_numbers_seeds_and_prompts_of_one_bucket_share_a_program(pair):
    before = streaming.compilations()
    for n, alpha in enumerate((0.0, 0.3, 1)):
        numbers = {"temperature": [0, 1.0, 0.7][n], "top_p": [1, 0.9, 1.0][n], "top_k": [0, 3, 0][n]}
        # these lengths and seeds are new
        streamed(pair, range(1, 2 + n), block_size=2, alpha=alpha, seed=n, example_id=n, **numbers)
    assert streaming.compilations() == before + 2


def test_a_round_fetches_little_and_reuses_the_state(pair):
    engine, params = assemble(pair, rule="token_v3", block_size=3, stop_ids=[STOP])
    controls = conformance.controls(1, rule="token_v3", alpha=0.3)
    prompt = jax.device_put(make_prompt(pair, [1]))
    before = streaming._init(engine, params, prompt, np.uint32(0), np.zeros(1, np.int32), LENGTH)
    _, seen = streaming._step(engine, params, before, controls)
    assert seen.shape == (4 + 2 * (3 + 1),)
    assert before.tokens.is_deleted() and not prompt.tokens.is_deleted() and not prompt.length.is_deleted()


def test_a_tpus_compiler_chooses_the_layout_of_the_state_between_rounds(pair, monkeypatch):
    """Runs the path of TPUs on this machine, whose compiler keeps the usual layout."""
    arguments = SETTINGS | {"block_size": 1, "temperature": 1.0}
    expected = streamed(pair, [4], **arguments)
    before = streaming._step._cache_size()
    monkeypatch.setenv(platforms.SWITCH, "0")
    with platforms.traced_for("tpu"):
        for _ in range(2):
            assert streamed(pair, [4], **arguments) == expected
    assert streaming._step._cache_size() == before


def test_a_stream_is_lazy_and_can_be_dropped(pair):
    before = streaming.compilations()
    tokens = sc.stream(pair, [5], **SETTINGS, accept="deferral")
    assert streaming.compilations() == before
    first = next(tokens)
    tokens.close()
    assert (first.round, first.slot, first.position) == (0, 0, 0)
    assert next(sc.stream(pair, [5], **SETTINGS, accept="deferral")) == first


def test_bad_input_is_refused_at_the_call(pair):
    before = streaming.compilations()
    for arguments, message in (
        ({"alpha": None}, "rule 'token_v3' needs alpha"),
        ({"temperature": -1}, r"temperature=-1 \(row 0\) is negative"),
        ({"seed": -1}, "seed=-1 is not a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not"),
        ({"example_id": -1}, r"example_ids=\[-1\]… must be whole numbers"),
        ({"alpha": [0.1, 0.2]}, r"alpha has shape \(2,\), but the batch has 1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.stream(pair, [1], **(SETTINGS | arguments))
    with pytest.raises(ValueError, match="stream takes one prompt, not 2: give one text or one list of ids"):
        sc.stream(pair, [[1], [2]], **SETTINGS)
    assert streaming.compilations() == before


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_nan_logits_raise_the_error_of_decode_after_the_earlier_tokens(broken):
    table = np.full((VOCAB, VOCAB), -20.0, np.float32)
    # in the table, each token is followed by the next one
    table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 20.0
    damaged = table.copy()
    damaged[8, 3] = np.nan
    models = {"target": sc.TableLM(table), "draft": sc.TableLM(table)} | {broken: sc.TableLM(damaged)}
    pair, settings = sc.Pair(**models), SETTINGS | {"temperature": 0.0}
    with pytest.raises(FloatingPointError) as expected:
        sc.decode(pair, [4], **settings)
    seen = []
    with pytest.raises(FloatingPointError) as raised:
        seen += [token.id for token in sc.stream(pair, [4], **settings)]
    assert str(raised.value) == str(expected.value) and broken in str(raised.value)
    tokens = sc.stream(pair, [4], **settings)
    assert [next(tokens).id for _ in range(3)] == [5, 6, 7]


# --- text


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Returns a pair whose vocabulary has all bytes."""
    return sc.load_pair(tiny_pair.write(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="module")
def vocabulary(words):
    return words.vocabulary


def shown(vocabulary, ids):
    """Returns the texts of `ids`, which come in rounds of up to three."""
    parts = [ids[n : n + 3] for n in range(0, len(ids), 3)]
    rounds = [streaming._Round(p, [0] * len(p), p is parts[-1], np.full((1, 2), -1)) for p in parts]
    return [token.text for token in streaming._tokens(iter(rounds), vocabulary, False)]


def test_joined_texts_equal_the_decoded_text(vocabulary):
    draws = np.random.default_rng(0)
    bytes_of = {n: f"<0x{n:02X}>" for n in range(256)}
    pieces = [vocabulary._pieces.piece_to_id(name) for name in ("▁", *bytes_of.values())]
    for _ in range(500):
        common = draws.integers(0, vocabulary.vocab_size, 12)
        ids = np.where(draws.random(12) < 0.5, common, draws.choice(pieces, 12)).tolist()
        assert "".join(shown(vocabulary, ids)) == vocabulary.decode(ids), ids


def test_a_character_appears_with_its_last_byte(vocabulary):
    ids = [*vocabulary.encode("is 雪"), *vocabulary.encode("ok")]
    texts = shown(vocabulary, ids)
    assert "".join(texts) == "is 雪 ok" and not any("\ufffd" in text for text in texts)
    snow = next(n for n, text in enumerate(texts) if "雪" in text)
    assert texts[snow - 2 : snow] == ["", ""]
    # these ids end in the middle of a character
    assert "".join(shown(vocabulary, ids[:snow])) == vocabulary.decode(ids[:snow])


def test_a_t5_pair_streams_the_decoded_text(words):
    settings = {"temperature": 1.0, "block_size": 2, "max_new_tokens": 12}
    out = sc.decode(words, ["A cold day."], **settings)
    assert "".join(token.text for token in sc.stream(words, "A cold day.", **settings)) == out.texts[0]
