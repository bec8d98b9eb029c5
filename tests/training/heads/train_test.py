"""Tests of acceptance-head training on a micro draft: mixes, learning, and resumption bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax import load_pair
from speccascade_jax.core.types import Prompt
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.models import fingerprints, teacher_forcing
from speccascade_jax.pairs import head_files
from speccascade_jax.stopping import acceptance_head as heads
from speccascade_jax.training import runs as storage
from speccascade_jax.training.heads import calibration, mixing, shards
from speccascade_jax.training.heads import train as acceptance
from tests.support import tiny_pair
from tests.support.killing import KilledError, killed_at

PROMPTS, LENGTH = 60, 10
W_REJS = (("depth0_wrej1", 1.0), ("depth2_wrej6", 6.0))


def examples(seed=0, prompts=PROMPTS, shortest=9):
    """Returns random tokens and few distinct proposals; odd proposals are always kept, even ones rarely."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(min(shortest, 6), LENGTH + 1, prompts).astype(np.int32)
    inside = np.arange(LENGTH)[None] < lengths[:, None]
    shape = (prompts, LENGTH)
    tokens, proposals = (np.where(inside, draws.integers(3, n, shape), 0).astype(np.int32) for n in (300, 13))
    sources = np.arange(12)[None] < draws.integers(shortest, 13, (prompts, 1))
    encoder = np.where(sources, draws.integers(3, 300, (prompts, 12)), 0)
    certainty, drawn = (np.where(inside, draws.uniform(low, 1, shape), 0).astype(np.float32) for low in (0.5, 0.1))
    ids, starts, ones = np.arange(prompts, dtype=np.int32), np.zeros((prompts, 1), np.int32), np.ones(prompts, np.int32)
    kept = np.where(inside, np.where(proposals % 2, 1.0, 0.1), 0).astype(np.float32)
    law = (certainty, 1 - certainty, drawn)
    return shards.Examples(ids, starts, ones, encoder.astype(np.int32), tokens, lengths, proposals, kept, *law)


def write_data(folder, pair, shard_size=PROMPTS, **more):
    """Writes a folder of `examples` for the pair; `more` updates its manifest."""
    manifest = dict.fromkeys(shards.MEANING) | {"format": 1, "rule": "spec_decode", "temperature": 1.0, "top_p": 1.0}
    manifest |= {"top_k": 0, "pair": "tiny", "prompts": PROMPTS, "shard_size": shard_size}
    manifest |= {"pair_fingerprint": pair.fingerprint, "draft_fingerprint": fingerprints.of_model(pair.draft)} | more
    shards.begin(folder, manifest)
    for number, first in enumerate(range(0, PROMPTS, shard_size)):
        rows = np.arange(first, min(first + shard_size, PROMPTS))
        shards.write_shard(folder, number, manifest, examples().rows(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a pair to `pair`, and data of its draft to `data`."""
    path = tmp_path_factory.mktemp("heads")
    (path / "pair").mkdir()
    tiny_pair.write(path / "pair")
    write_data(path / "data", load_pair(path / "pair"), shard_size=40)
    return path


def settings(folder, run_dir):
    """Returns the settings of every training on the folder's data."""
    base = {"run_dir": str(run_dir), "pair": ModelPair(name=str(folder / "pair")), "data": (str(folder / "data"),)}
    return base | {"batch_positions": 96, "epochs": 2, "held_out": 0.1, "save_every_seconds": 0.0, "log_every": 3}


def trainer(folder, run_dir, **changes):
    heads = {"depths": (0, 2), "w_rejs": (1.0, 6.0), "warmup_steps": 2}
    return acceptance.HeadTrainer(**settings(folder, run_dir) | heads | changes)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Returns a finished run and its result."""
    run = acceptance.Run(trainer(folder, tmp_path_factory.mktemp("finished") / "run"))
    return run, run.finish()


def batch_of(rows, positions=192):
    return mixing.Batches(examples(), positions).batch(np.asarray(rows))


def test_a_mix_takes_some_target_tokens_and_counts_the_others():
    batch, key = batch_of(range(12)), mixing.mix_key(0, 3)
    z, counted = (np.asarray(x) for x in mixing.mix(key, batch, 0.15))
    inside = np.arange(12)[None] < batch.lengths[:, None]
    assert (z == np.where(counted, batch.proposals, z)).all() and not counted[~inside].any()
    assert (z[inside & ~counted] == batch.tokens[inside & ~counted]).all()
    assert 0.03 < (inside & ~counted).sum() / inside.sum() < 0.35
    assert mixing.mix(key, batch, 0.0)[1].sum() == inside.sum()
    other_epoch = np.asarray(mixing.mix(mixing.mix_key(0, 4), batch, 0.15)[1])
    assert (other_epoch != counted).any()
    again = np.asarray(mixing.mix(key, batch_of([7, 3]), 0.15)[1])
    np.testing.assert_array_equal(again, counted[[7, 3]])  # rows do not depend on the rest of the batch


def test_an_epoch_has_every_prompt_once_in_an_order_set_by_seed_and_epoch():
    various = examples(shortest=3)
    batches = mixing.Batches(various, 96)
    rows = np.arange(5, PROMPTS)
    epoch = batches.epoch(rows, 0, 1)
    seen = np.concatenate([batch.rows for batch in epoch])
    assert sorted(seen[seen >= 0]) == rows.tolist() and (seen < 0).any()
    assert all(batch.lengths[batch.rows < 0].sum() == 0 for batch in epoch)
    assert len({batch.tokens.shape[1] for batch in epoch}) > 1
    for batch in epoch:
        real = batch.rows[batch.rows >= 0]
        width = batch.tokens.shape[1]
        np.testing.assert_array_equal(batch.lengths[batch.rows >= 0], various.lengths[real])
        assert batch.lengths.max() <= width and np.count_nonzero(various.encoder_tokens[real], axis=1).max() <= width
    same, next_epoch = batches.epoch(rows, 0, 1), batches.epoch(rows, 0, 2)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(epoch, same, strict=True))
    assert not all(np.array_equal(a.rows, b.rows) for a, b in zip(epoch, next_epoch, strict=True))
    with pytest.raises(ValueError, match="batch_positions=8 is too small for a row of width"):
        mixing.Batches(examples(), 8)


def test_the_split_holds_out_prompts():
    prompts = [b"%d" % n for n in range(100)]
    train, held_out = mixing.split(prompts, 0.1, 0)
    assert sorted([*train, *held_out]) == list(range(100))
    # the training data of the shipped head depend on these numbers
    assert held_out.tolist() == [5, 19, 24, 47, 55, 65, 67, 80, 90, 91]
    assert mixing.split(prompts, 0.1, 1)[1].tolist() != held_out.tolist()
    assert [len(x) for x in mixing.split(prompts[:2], 0.01, 0)] == [1, 1]
    for few in (prompts[:1], prompts[:1] * 2):
        with pytest.raises(ValueError, match="1 prompts are too few"):
            mixing.split(few, 0.1, 0)


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), min_size=2), st.floats(0.01, 0.99), st.integers(0, 9))
def test_no_prompt_is_both_trained_on_and_held_out(prompts, held_out, seed):
    try:
        train, aside = mixing.split(prompts, held_out, seed)
    except ValueError as error:
        assert "too few" in str(error) or "no prompts" in str(error)
        return
    assert len(train) and len(aside)
    sides = [{prompts[row] for row in rows} for rows in (train, aside)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(prompts)


def test_the_same_prompts_under_two_seeds_are_held_out_together(folder, tmp_path):
    write_data(tmp_path / "data", load_pair(folder / "pair"), seed=1)
    folders = (str(folder / "data"), str(tmp_path / "data"))
    run = acceptance.Run(trainer(folder, tmp_path / "run", data=folders, held_out=0.3))
    assert len(run.data.examples.ids) == 2 * PROMPTS and len(run.held_out_rows)
    assert not {row % PROMPTS for row in run.train_rows} & {row % PROMPTS for row in run.held_out_rows}


def test_prompt_keys_depend_on_context_and_encoder_but_not_on_padding():
    def keys(tokens, lengths, encoder=None):
        return shards.prompt_keys(Prompt(np.array(tokens), np.array(lengths), encoder))

    narrow, wide = keys([[5, 6], [5, 0]], [2, 1]), keys([[5, 6, 9], [5, 7, 9]], [2, 1])
    assert narrow == wide and len(set(narrow)) == 2
    first, second = keys([[0], [0]], [1, 1], np.array([[7, 8, 0], [7, 0, 8]]))
    assert first != second and [first] == keys([[0]], [1], np.array([[7, 8]]))
    assert keys([[5]], [1], np.array([[6]])) != keys([[5, 6]], [2])


def test_the_loss_does_not_see_the_targets_tokens(finished):
    run, _ = finished
    batch = run.batches(0)[0]
    hidden, kept, counted = run.states(batch, 0)
    assert hidden.shape == (96, 18) and 0 < counted.sum() < counted.size

    def loss(hidden, kept):
        return acceptance.total_loss(run.state.params, hidden, kept, counted, W_REJS)[0]

    to_hidden, to_kept = jax.grad(loss, argnums=(0, 1))(hidden, kept)
    np.testing.assert_array_equal(np.abs(to_kept) > 0, counted)
    np.testing.assert_array_equal(np.abs(to_hidden).sum(-1) > 0, counted)


def test_states_are_the_drafts_states_over_the_mix(finished):
    run, _ = finished
    batch = run.batches(0)[0]
    z, _ = mixing.mix(mixing.mix_key(0, 5), batch, 0.15)
    draft = run.pair.draft
    states = jax.jit(teacher_forcing.states, static_argnums=0)
    expected = states(draft.model, draft.params, batch.prompt, z).reshape(-1, 16)
    inputs = run.states(batch, 5)[0][: z.size]
    np.testing.assert_allclose(inputs[:, :16], expected, rtol=1e-4, atol=1e-5)
    law = np.stack([batch.max_q.ravel(), batch.drawn.ravel()], axis=-1)
    np.testing.assert_allclose(inputs[:, 16:], np.log(np.maximum(law, 1e-6)), rtol=1e-5)


def test_heads_learn_which_tokens_are_accepted(folder, tmp_path):
    run = acceptance.Run(trainer(folder, tmp_path / "run", epochs=60, peak=3e-2, depths=(2,), save_every_seconds=60.0))
    run.finish()
    logits, kept = run.judge(run.held_out_rows)
    plain = acceptance.probability(logits["depth2_wrej1"], 1.0)
    undone = acceptance.probability(logits["depth2_wrej6"], 6.0)
    weighted = acceptance.probability(logits["depth2_wrej6"], 1.0)
    assert calibration.auc(plain, kept) > 0.9 and calibration.auc(undone, kept) > 0.9
    assert abs(plain.mean() - kept.mean()) < 0.08 and abs(undone.mean() - kept.mean()) < 0.08
    assert weighted.mean() < kept.mean() - 0.02


def test_heads_of_a_grid_train_as_if_alone(finished, folder, tmp_path):
    run, _ = finished
    alone = acceptance.Run(trainer(folder, tmp_path / "alone", depths=(2,), w_rejs=(6.0,)))
    alone.finish()
    for ours, theirs in zip(*(jax.tree.leaves(r.state.params["depth2_wrej6"]) for r in (run, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_killed_run_resumes_bit_for_bit(finished, folder, tmp_path):
    whole, result = finished
    # the run breaks in the second epoch
    broken, saved = trainer(folder, tmp_path / "broken"), whole.steps_per_epoch + 1
    with killed_at(storage, "save_state", saved + 1):
        acceptance.Run(broken).finish()
    resumed = acceptance.Run(broken)
    assert int(resumed.state.step) == saved
    assert resumed.finish() == result
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    for path in sorted((whole.directory / "heads").iterdir()):
        assert (resumed.directory / "heads" / path.name).read_bytes() == path.read_bytes()
    assert metrics(resumed) == metrics(whole)


@pytest.mark.laws
def test_a_run_in_a_bucket_equals_a_local_one(finished, folder, bucket):
    whole, result = finished
    broken = trainer(folder, "gs://bucket/run")
    with killed_at(storage, "save_state", 3):
        broken.run()
    assert broken.run() == result
    remote = acceptance.Run(broken)
    jax.tree.map(np.testing.assert_array_equal, remote.state, whole.state)
    for path in sorted((whole.directory / "heads").iterdir()):
        assert (remote.directory / "heads" / path.name).read_bytes() == path.read_bytes()
    assert metrics(remote) == metrics(whole) and not (remote.directory / "lock").exists()


def metrics(run):
    """Returns the stored log, and checks that every epoch ends with an evaluation on the held-out prompts."""
    content = (run.directory / storage.METRICS_FILE).read_bytes()
    records = [json.loads(line) for line in content.splitlines()]
    judged = [record["step"] for record in records if "held_out" in record]
    assert judged == [run.steps_per_epoch * (n + 1) for n in range(run.trainer.epochs)] and "held_out" in records[-1]
    return content


@pytest.mark.parametrize(
    ("where", "name"), [(acceptance.Run, "judge"), (storage.MetricsLog, "append"), (storage, "save_state")]
)
def test_a_run_killed_at_the_end_of_an_epoch_logs_the_same_metrics(
    finished, folder, tmp_path, monkeypatch, where, name
):
    whole, result = finished
    plain, broken = getattr(where, name), trainer(folder, tmp_path / "broken")

    def at_the_end_of_the_first_epoch(*args):
        if runs[0].state.step == whole.steps_per_epoch:
            raise KilledError
        return plain(*args)

    runs = [acceptance.Run(broken)]
    monkeypatch.setattr(where, name, at_the_end_of_the_first_epoch)
    with pytest.raises(KilledError):
        runs[0].finish()
    monkeypatch.setattr(where, name, plain)
    resumed = acceptance.Run(broken)
    assert resumed.finish() == result and metrics(resumed) == metrics(whole)


def test_restarting_a_finished_run_changes_nothing(finished):
    run, result = finished
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    assert acceptance.Run(run.trainer).finish() == result
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
    metrics(run)


def test_every_head_of_the_grid_is_written_with_its_card(finished, folder):
    run, result = finished
    paths = sorted((run.directory / "heads").iterdir())
    assert [path.stem for path in paths] == sorted(result) == sorted(run.trainer.grid)
    head = head_files.load(run.directory / "heads" / "depth2_wrej6.msgpack")
    head.check(load_pair(folder / "pair").draft, "pair")
    assert (head.card.depth, head.card.features, head.card.w_rej) == (2, 16, 6.0)
    assert (head.card.rule, head.card.temperature, head.card.prompts) == ("spec_decode", 1.0, 54)
    assert head.card.positions == run.data.examples.lengths[run.train_rows].sum() and head.card.steps == run.total
    jax.tree.map(np.testing.assert_array_equal, head.params, run.state.params["depth2_wrej6"])
    with_law = head_files.load(run.directory / "heads" / "depth2_wrej6_law.msgpack")
    with_law.check(load_pair(folder / "pair").draft, "pair")
    assert with_law.card.law and not head.card.law
    assert [h.params["out"]["kernel"].shape for h in (head, with_law)] == [(16,), (18,)]


def test_runs_with_other_settings_or_drafts_are_refused(finished, folder):
    run, _ = finished
    with pytest.raises(ValueError, match="was started with other values of epochs, from_target: name another run_dir"):
        acceptance.Run(dataclasses.replace(run.trainer, epochs=5, from_target=0.3))
    data = dataclasses.replace(run.data, manifest=run.data.manifest | {"draft_fingerprint": "another"})
    with pytest.raises(ValueError, match="made with the draft another of pair 'tiny', but the draft of pair 'x' is"):
        shards.check_draft(data, "mine", "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "one"}, "data='one' is one value where a tuple is meant"),
        ({"depths": ()}, "depths=.. is empty"),
        ({"depths": (-1,)}, "depths=-1 is not a whole number"),
        ({"w_rejs": (0.0,)}, "must be positive weights"),
        ({"from_target": 1.0}, "from_target=1.0 is outside"),
        ({"held_out": 0.0}, "held_out=0.0 is outside"),
        ({"epochs": 0}, "epochs=0 is not a whole number"),
        ({"log_every": 0}, "log_every=0 is not a whole number >= 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is not a whole number >= 0"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5 is not a whole number"),
        ({"seed": -1}, "seed=-1 is not a whole number"),
        ({"seed": 2**32}, "seed=4294967296 does not fit into 32 bits"),
        ({"peak": 0.0}, "peak=0.0 must be above 0"),
        ({"peak": float("nan")}, "peak=nan is not finite"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be 0"),
        ({"weight_decay": "a"}, "weight_decay='a' is not a number"),
        ({"w_rejs": (1.0, float("inf"))}, "w_rejs=inf is not finite"),
        ({"save_every_seconds": float("nan")}, "save_every_seconds=nan is not a time"),
    ],
)
def test_invalid_settings_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, tmp_path, **changes)


def test_the_rejection_weight_only_shifts_the_logit():
    kept, w_rej = 0.8, 6.0
    z = jnp.linspace(-4, 4, 4001)
    losses = jax.vmap(lambda logit: heads.weighted_bce(logit[None], jnp.full(1, kept), jnp.ones(1, bool), w_rej))(z)
    best = float(z[jnp.argmin(losses)])
    assert acceptance.probability(np.asarray(best), w_rej) == pytest.approx(kept, abs=2e-3)
