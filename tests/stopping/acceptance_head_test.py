"""Tests of acceptance heads: the function, the loss, the file, and the pair that a head belongs to."""

import dataclasses

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.models import fingerprints
from speccascade_jax.pairs import head_files
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.storage import array_file, checksums
from speccascade_jax.storage.errors import CheckpointError
from tests.support import tiny_pair

CARD = head_files.Card(
    depth=2, features=16, w_rej=6.0, rule="spec_decode", alpha=None, temperature=1.0, top_p=1.0, top_k=0,
    draft_temperature=None, pair="tiny", pair_fingerprint="p", draft_fingerprint="d",
)  # fmt: skip


def random_params(depth, features=16, seed=0):
    """Returns a head without idle parameters."""
    draws = np.random.default_rng(seed)
    params = heads.initial(jax.random.key(0), features, depth)
    return jax.tree.map(lambda leaf: jnp.asarray(draws.normal(size=leaf.shape) / 2, jnp.float32), params)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return sc.load_pair(tiny_pair.write(tmp_path_factory.mktemp("pair")))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_logits_are_residual_blocks_and_a_linear_unit(depth):
    params, hidden = random_params(depth), np.random.default_rng(1).normal(size=(2, 3, 16))
    x = hidden
    for n in range(depth):
        block = jax.tree.map(np.asarray, params[f"block_{n}"])
        inside = x @ block["kernel"] + block["bias"]
        x = x + inside / (1 + np.exp(-inside))
    expected = x @ np.asarray(params["out"]["kernel"]) + float(params["out"]["bias"])
    outputs = heads.logits(params, jnp.asarray(hidden, jnp.bfloat16))
    assert (outputs.shape, outputs.dtype, heads.depth(params)) == ((2, 3), jnp.float32, depth)
    np.testing.assert_allclose(heads.logits(params, jnp.asarray(hidden)), expected, rtol=1e-4)


def test_fresh_blocks_change_nothing_but_can_learn():
    params = heads.initial(jax.random.key(3), 16, 2)
    hidden = jax.random.normal(jax.random.key(4), (5, 16))
    np.testing.assert_allclose(heads.logits(params, hidden), hidden @ params["out"]["kernel"], rtol=1e-6)
    assert np.abs(heads.logits(params, hidden)).max() < 1
    grads = jax.grad(lambda p: heads.logits(p, hidden).sum())(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    with pytest.raises(ValueError, match="depth=-1 is negative"):
        heads.initial(jax.random.key(0), 16, -1)


def test_the_loss_equals_the_formula_over_counted_positions():
    logits, kept = np.array([[0.3, -1.2, 2.0]]), np.array([[0.25, 1.0, 0.0]])
    p = 1 / (1 + np.exp(-logits))
    terms = -(2.0 * kept * np.log(p) + 6.0 * (1 - kept) * np.log(1 - p))
    counted = np.array([[True, False, True]])
    loss = heads.weighted_bce(*map(jnp.asarray, (logits, kept, counted)), 6.0, 2.0)
    assert loss == pytest.approx(terms[counted].mean(), rel=1e-5)
    slope = jax.grad(lambda z: heads.weighted_bce(z, jnp.asarray(kept), jnp.asarray(counted), 6.0))(jnp.asarray(logits))
    assert (np.asarray(slope) != 0).tolist() == counted.tolist()
    far = heads.weighted_bce(jnp.asarray([[200.0, -200.0]]), jnp.asarray([[0.0, 1.0]]), jnp.ones((1, 2), bool), 1.0)
    assert far == pytest.approx(200.0)  # the loss is computed from logits, so there is no log of 0
    assert heads.weighted_bce(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.zeros((1, 2), bool), 1.0) == 0


def test_a_file_returns_the_saved_head(tmp_path):
    head = head_files.Head(random_params(2), CARD)
    head_files.save(tmp_path / "new" / head_files.FILE, head)
    loaded = head_files.load(tmp_path / "new" / head_files.FILE)
    assert loaded.card == CARD
    assert jax.tree.structure(loaded.params) == jax.tree.structure(head.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, head.params)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [head_files.FILE]


def flip(payload):
    array = np.array(payload["arrays"]["block_1/kernel"])
    array[3, 4] += 1e-3
    payload["arrays"]["block_1/kernel"] = array


@pytest.mark.parametrize(("change", "message"), [
    (flip, "block_1/kernel: its bytes have changed"),
    (lambda payload: payload["arrays"].pop("out/bias"), "out/bias: it is missing"),
    (lambda payload: payload.update(card=payload["card"].replace("6.0", "1.0")), "card: its bytes have changed"),
    (lambda payload: payload.update(format=9), "has format 9, but this version reads 1: train one"),
    (lambda payload: payload.pop("digests"), "no acceptance head"),
    (None, "is damaged"),  # a file without its end
])  # fmt: skip
def test_an_error_names_the_damage_of_a_file(tmp_path, change, message):
    path = tmp_path / head_files.FILE
    with pytest.raises(FileNotFoundError, match="no acceptance head at"):
        head_files.load(path)
    head_files.save(path, head_files.Head(random_params(2), CARD))
    content = path.read_bytes()[:-20]
    if change is not None:
        payload = flax.serialization.msgpack_restore(checksums.unsealed(path, path.read_bytes(), ""))
        change(payload)  # files of earlier versions have no digest at their end
        content = flax.serialization.msgpack_serialize(payload)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        head_files.load(path)


def test_a_wrong_card_is_refused(tmp_path):
    array_file.save(tmp_path / head_files.FILE, {}, {"depth": 1})
    with pytest.raises(CheckpointError, match="the card\) lack an entry"):
        head_files.load(tmp_path / head_files.FILE)


def test_a_head_belongs_to_one_draft(pair):
    matching_card = dataclasses.replace(CARD, draft_fingerprint=fingerprints.of_model(pair.draft))
    head_files.Head({}, matching_card).check(pair.draft, pair.name)
    for card, draft, message in (
        (CARD, pair.draft, f"belongs to the draft d of pair 'tiny'.* is {matching_card.draft_fingerprint}.*train one"),
        (
            dataclasses.replace(matching_card, features=32),
            pair.draft,
            "reads 32 features, but the draft has 16 features",
        ),
        (CARD, sc.FakeLM(5), "but the draft has no hidden states: train one"),
    ):
        with pytest.raises(ValueError, match=message):
            head_files.Head({}, card).check(draft, pair.name)
