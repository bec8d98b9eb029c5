"""Tests of policy training on data with a known best arm: results, resumption after kills, refused input."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.drafters import chooser
from speccascade_jax.pairs import policy_files
from speccascade_jax.selection import data, train
from speccascade_jax.selection.train import PolicyTrainer
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.training import runs
from tests.support import selection_folders
from tests.support.killing import killed_at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return selection_folders.write(tmp_path_factory.mktemp("selection"), *selection_folders.clusters(6000))


def trainer(folder, run_dir, **changed):
    return PolicyTrainer(**{"run_dir": str(run_dir), "data": str(folder)} | changed)


@pytest.mark.parametrize("objective", ["reinforce", "expected", "best_arm", "linucb"])
def test_the_best_arm_is_found(folder, tmp_path, objective):
    """Uses the paper's numbers: three epochs in batches of 64 queries. All policies have the same held-out queries."""
    result = trainer(folder, tmp_path, objective=objective).run()
    assert result["judged"] == 600 and result["best"] >= 0.98, result
    assert result["reward"]["greedy"] > max(result["reward"][f"always {arm}"] for arm in selection_folders.ARMS) + 0.2
    assert result["reward"]["oracle"] >= result["reward"]["greedy"] > result["reward"]["random"]
    assert [result["choices"][f"task{n}"][arm] > 0.97 for n, arm in enumerate(selection_folders.ARMS)] == [True] * 3
    card = policy_files.load(tmp_path / train.FILE).card
    assert (card.trained, card.queries, card.arms) == (objective, 5400, selection_folders.ARMS)
    assert card.scores == ("ridge" if objective == "linucb" else "perceptron")
    assert json.loads((tmp_path / "judged.json").read_text()) == result


def test_wrong_rewards_teach_wrong_arms(folder, tmp_path):
    """Checks a negative control of the test above: rolled rewards must not give the best arms."""
    turned = trainer(folder, tmp_path, objective="expected", arms=("second", "third", "first"))
    run = train.Run(turned)
    run.rewards = np.roll(run.rewards, 1, axis=1)
    assert train.judged(run.policy(run.learn_by_gradient()), run.data, np.roll(run.rewards, -1, axis=1))["best"] < 0.1


def test_a_linear_policy_learns_with_fewer_arms(folder, tmp_path):
    result = trainer(folder, tmp_path, hidden=(), arms=("third", "first"), objective="expected", rate=1e-2).run()
    assert result["choices"]["task0"]["first"] > 0.9 and result["choices"]["task2"]["third"] > 0.9
    assert policy_files.load(tmp_path / train.FILE).card.prints == ("3", "1")


@pytest.mark.laws
def test_a_killed_run_gives_the_result_of_an_uninterrupted_one(folder, tmp_path, monkeypatch):
    """Kills a run in the second epoch, between two saves: parameters must be equal bit for bit, and the log too."""
    whole = trainer(folder, tmp_path / "whole")
    whole.run()
    broken, save = trainer(folder, tmp_path / "broken", save_every_seconds=0.0), runs.save_state

    def seldom(folder, state, position, place):
        if int(state.step) % 50 == 0:
            save(folder, state, position, place)

    monkeypatch.setattr(runs, "save_state", seldom)
    with killed_at(train, "train_step", 120):
        broken.run()
    assert not (tmp_path / "broken" / train.FILE).exists()
    assert int(train.Run(broken).state.step) == 100, "the last save"
    broken.run()
    unbroken, resumed = (policy_files.load(tmp_path / name / train.FILE) for name in ("whole", "broken"))
    jax.tree.map(np.testing.assert_array_equal, unbroken.params, resumed.params)
    assert unbroken.fingerprint == resumed.fingerprint
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "broken")]
    assert logs[0] == logs[1]


@pytest.mark.laws
def test_runs_and_studies_in_a_bucket_equal_local_ones(bucket, tmp_path, capsys):
    folder = selection_folders.write(tmp_path / "data", *selection_folders.clusters(300))
    results = []
    for place in ("gs://bucket/run", tmp_path / "run"):
        policy_trainer = trainer(folder, place, queries=100, epochs=1)
        results.append(
            (
                policy_trainer.run(),
                train.weights(policy_trainer, alignment_weights=(0.5,)),
                policy_files.load(f"{place}/{train.FILE}"),
            )
        )
    (run, rows, remote), (local_run, local_rows, here) = results
    assert (run, rows, remote.fingerprint) == (local_run, local_rows, here.fingerprint)
    names = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    remote_names = {name for name in BucketPath("gs://bucket/run").below() if not name.endswith(".writer")}
    assert remote_names == {name for name in names if not name.startswith("tensorboard")}


def test_a_run_begun_with_other_settings_is_not_resumed(folder, tmp_path):
    trainer(folder, tmp_path, queries=100).run()
    with pytest.raises(ValueError, match="was started with other values of alignment_weight"):
        trainer(folder, tmp_path, queries=100, alignment_weight=0.5).run()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"objective": "reinforced"}, "unknown objective 'reinforced'; did you mean reinforce"),
        ({"alignment_weight": 1.5}, "alignment_weight=1.5 is outside 0"),
        ({"held_out": 0.0}, "held_out=0.0 is outside"),
        ({"batch": 0}, "batch"),
        ({"hidden": (0,)}, "hidden"),
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
        ({"arms": ("first", "fourth")}, "the data lack the candidate 'fourth'"),
        ({"queries": 5401}, "queries=5401, but the data hold 6000, and 600 of them are held out"),
        ({"costs": {"first": 1.0}}, "must have a number for each of first, second, third"),
        ({"costs": {"first": float("nan"), "second": 0.0, "third": 0.0}, "alignment_weight": 0.5}, "'first' .* is nan"),
    ],
)
def test_invalid_values_are_refused_in_one_line(folder, tmp_path, changed, words):
    with pytest.raises(ValueError, match=words) as caught:
        trainer(folder, tmp_path, **changed).run()
    assert "\n" not in str(caught.value) and not (tmp_path / "settings.json").exists()


def test_rewards_that_are_not_finite_are_named(tmp_path):
    features, domain, alignment = selection_folders.clusters(300)
    alignment[7, 1] = np.inf
    selection_folders.write(tmp_path / "data", features, domain, alignment)
    with pytest.raises(ValueError, match="the reward of 'second' for query 7 is inf"):
        trainer(tmp_path / "data", tmp_path / "run").run()


def test_rewards_follow_equation_2(folder):
    """Checks costs by the paper's formula; the largest candidate has the highest cost and no cost reward."""
    dataset = data.read(folder)
    costs = 1 - np.exp([0.1 - 5, 0.2 - 5, 0.0])
    np.testing.assert_allclose(dataset.costs(), costs, rtol=1e-12)
    np.testing.assert_allclose(dataset.rewards(0.25), 0.25 * dataset.alignment + 0.75 * costs, rtol=1e-5)
    np.testing.assert_allclose(dataset.rewards(1.0), dataset.alignment)
    fewer = dataset.among(("second", "first"))
    np.testing.assert_allclose(fewer.costs(), 1 - np.exp([0.0, -0.1]))
    assert fewer.key != dataset.key and dataset.among(dataset.arms).key == dataset.key


@pytest.mark.laws
def test_curves_and_weights_are_printed_and_written(folder, tmp_path, capsys):
    """Checks that more queries give more reward, and that weight 0 on alignment always takes the smallest candidate."""
    base = trainer(folder, tmp_path)
    rows = train.curves(base, queries=(16, 512), objectives=("reinforce", "linear"), seeds=(0,))
    assert [row["queries"] for row in rows] == [16, 512, 5400] * 2
    assert rows[0]["reward"]["greedy"] < rows[2]["reward"]["greedy"]
    by_weight = train.weights(base, alignment_weights=(0.0, 1.0))
    assert all(arms["first"] > 0.95 for arms in by_weight[0]["choices"].values())
    assert by_weight[1]["choices"]["task2"]["third"] > 0.95
    for name in ("curves.json", "curves.png", "weights.json", "weights.png"):
        assert (tmp_path / name).stat().st_size > 100
    said = capsys.readouterr().out
    assert "held-out queries" in said and "reward" in said
    again = train.curves(base, queries=(16, 512), objectives=("reinforce", "linear"), seeds=(0,))
    assert again == rows


def test_damaged_files_are_named(folder, tmp_path):
    data_folder = selection_folders.write(tmp_path / "data", *selection_folders.clusters(300))
    file = data_folder / "task1" / "second.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"task1/second.npz is damaged or missing"):
        data.read(data_folder)
    with pytest.raises(FileNotFoundError, match="holds no selection data"):
        data.read(tmp_path)
    assert dataclasses.replace(data.read(folder), pair="other").arms == selection_folders.ARMS


QUERIES, ARMS, DRAWS = 8, 4, 20_000
RNG = np.random.default_rng(0)
FEATURES = jnp.asarray(RNG.normal(size=(QUERIES, 6)), jnp.float32)
REWARDS = jnp.asarray(RNG.uniform(size=(QUERIES, ARMS)), jnp.float32)
PARAMS = jax.tree.map(lambda x: 2 * x, train.initial(6, (5, 5), ARMS, 1))


@partial(jax.jit, static_argnums=0)
def gradient(objective, uniforms):
    def loss(params):
        scores = chooser.perceptron(params, FEATURES)
        return objective(scores.mean, REWARDS, chooser.dynamic(scores, uniforms)).mean()

    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(loss)(PARAMS))])


def test_reinforce_is_the_exact_gradient_within_sampling_error():
    """Checks every parameter; a wrong reward, that of the arm next to the drawn one, must be detected."""
    uniforms = jax.random.uniform(jax.random.key(3), (DRAWS, QUERIES, ARMS))
    exact = np.asarray(gradient(train.expected, uniforms[0]))

    def wrong(scores, rewards, drawn):
        columns = drawn[:, None]
        log_policy = jax.nn.log_softmax(scores, -1)
        wrong_rewards = jnp.take_along_axis(jnp.roll(rewards, 1, axis=1), columns, axis=1)
        return -(wrong_rewards * jnp.take_along_axis(log_policy, columns, axis=1))[:, 0]

    def largest(objective):
        sample = np.asarray(jax.lax.map(lambda bits: gradient(objective, bits), uniforms, batch_size=500), np.float64)
        error = sample.std(0) / np.sqrt(DRAWS)
        return (np.abs(sample.mean(0) - exact) / np.maximum(error, 1e-9)).max()

    assert np.abs(exact).max() > 1e-2
    assert largest(train.reinforce) < 4.5  # in standard errors: the largest deviation of about 90 coordinates
    assert largest(wrong) > 20


def test_losses_match_values_computed_by_hand():
    scores, rewards = jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([[1.0, 0.2, 1.0]])
    drawn = jnp.array([1])
    np.testing.assert_allclose(train.reinforce(scores, rewards, drawn), [-0.2 * np.log(0.25)], rtol=1e-6)
    np.testing.assert_allclose(train.expected(scores, rewards, drawn), [-(0.5 + 0.05 + 0.25)], rtol=1e-6)
    mean_loss = -(np.log(0.5) + np.log(0.25)) / 2  # two equally good arms share the weight
    np.testing.assert_allclose(train.best_arm(scores, rewards, drawn), [mean_loss], rtol=1e-6)


def test_initial_scores_are_small_and_every_arm_is_likely():
    law = jax.nn.softmax(chooser.perceptron(train.initial(6, (512, 512), ARMS, 0), FEATURES).mean, -1)
    assert float(law.min()) > 0.1


@pytest.mark.laws
@pytest.mark.parametrize(("task", "right"), [("tiny_translation", 0), ("tiny_translation_de_en", 1)])
def test_the_shipped_policy_recognises_the_direction_of_translation(task, right):
    texts = [get_task(task).build_prompt(example) for example in get_task(task).load(limit=200)]
    drafters = (sc.Arm(drafter="draft", name="en_de"), "de_en")
    out = sc.decode(sc.load_pair("tatoeba_two_ways"), texts, drafters=drafters, choose="greedy", max_new_tokens=1)
    assert np.mean(np.asarray(out.generation.inner["choice"]) == right) >= 0.95
