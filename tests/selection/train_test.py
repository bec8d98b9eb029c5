"""Training policies on data with known answers: what is found, what a kill leaves, what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from speccascade_jax.pairs import policy_files
from speccascade_jax.selection import comparing, data, train
from speccascade_jax.selection.train import PolicyTrainer
from speccascade_jax.training import runs
from tests.support import selection_folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return selection_folders.write(tmp_path_factory.mktemp("selection"), *selection_folders.clusters(6000))


def trainer(folder, run_dir, **changed):
    return PolicyTrainer(**{"run_dir": str(run_dir), "data": str(folder)} | changed)


@pytest.mark.parametrize("objective", ["reinforce", "expected", "best_arm", "linucb"])
def test_the_best_arm_is_found(folder, tmp_path, objective):
    """By the paper's numbers: three epochs of 64 queries. The same queries judge every policy."""
    found = trainer(folder, tmp_path, objective=objective).run()
    assert found["judged"] == 600 and found["best"] >= 0.98, found
    assert found["reward"]["greedy"] > max(found["reward"][f"always {arm}"] for arm in selection_folders.ARMS) + 0.2
    assert found["reward"]["oracle"] >= found["reward"]["greedy"] > found["reward"]["random"]
    assert [found["choices"][f"task{n}"][arm] > 0.97 for n, arm in enumerate(selection_folders.ARMS)] == [True] * 3
    policy = policy_files.load(tmp_path / train.FILE)
    assert (
        policy.card.trained == objective and policy.card.queries == 5400 and policy.card.arms == selection_folders.ARMS
    )
    assert policy.card.scores == ("ridge" if objective == "linucb" else "perceptron")
    assert json.loads((tmp_path / "judged.json").read_text()) == found


def test_wrong_rewards_teach_wrong_arms(folder, tmp_path):
    """Negative control of the test above: arms that are rewarded for others' queries are not the best."""
    turned = trainer(folder, tmp_path, objective="expected", arms=("second", "third", "first"))
    run = train.Run(turned)
    run.rewards = np.roll(run.rewards, 1, axis=1)
    assert train.judged(run.policy(run.learn_by_gradient()), run.data, np.roll(run.rewards, -1, axis=1))["best"] < 0.1


def test_a_linear_policy_and_fewer_arms(folder, tmp_path):
    found = trainer(folder, tmp_path, hidden=(), arms=("third", "first"), objective="expected", rate=1e-2).run()
    assert found["choices"]["task0"]["first"] > 0.9 and found["choices"]["task2"]["third"] > 0.9
    assert policy_files.load(tmp_path / train.FILE).card.prints == ("3", "1")


def test_a_killed_run_ends_as_an_unbroken_one(folder, tmp_path, monkeypatch):
    """Killed in the middle of the second epoch, between two saves: parameters bit for bit, and the same log."""
    whole = trainer(folder, tmp_path / "whole")
    whole.run()
    broken, steps = trainer(folder, tmp_path / "broken", save_every_seconds=0.0), []
    step, save = train.train_step, runs.save_state

    def seldom(folder, state, position):
        if int(state.step) % 50 == 0:
            save(folder, state, position)

    def dies(*arguments):
        steps.append(1)
        if len(steps) == 120:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", dies)
    monkeypatch.setattr(runs, "save_state", seldom)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    assert not (tmp_path / "broken" / train.FILE).exists()
    broken.run()
    assert len(steps) == 120 + 3 * 85 - 100, "begun again at the last save"
    one, other = (policy_files.load(tmp_path / name / train.FILE) for name in ("whole", "broken"))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.fingerprint == other.fingerprint
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "broken")]
    assert logs[0] == logs[1]


def test_a_run_begun_with_other_settings_is_not_gone_on_with(folder, tmp_path):
    trainer(folder, tmp_path, queries=100).run()
    with pytest.raises(ValueError, match="was begun with another alignment_weight"):
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
        ({"queries": 5401}, "queries=5401, and the data have 6000, of which 600 are held out"),
        ({"costs": {"first": 1.0}}, "must have a number for each of first, second, third"),
        ({"costs": {"first": float("nan"), "second": 0.0, "third": 0.0}, "alignment_weight": 0.5}, "'first' .* is nan"),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_line(folder, tmp_path, changed, words):
    with pytest.raises(ValueError, match=words) as caught:
        trainer(folder, tmp_path, **changed).run()
    assert "\n" not in str(caught.value) and not (tmp_path / "settings.json").exists()


def test_rewards_that_are_not_finite_are_named(tmp_path):
    features, domain, alignment = selection_folders.clusters(300)
    alignment[7, 1] = np.inf
    selection_folders.write(tmp_path / "data", features, domain, alignment)
    with pytest.raises(ValueError, match="the reward of 'second' for query 7 is inf"):
        trainer(tmp_path / "data", tmp_path / "run").run()


def test_rewards_are_equation_2(folder):
    """Costs by the paper's formula; the largest candidate costs most and gets nothing."""
    found = data.read(folder)
    costs = 1 - np.exp([0.1 - 5, 0.2 - 5, 0.0])
    np.testing.assert_allclose(found.costs(), costs, rtol=1e-12)
    np.testing.assert_allclose(found.rewards(0.25), 0.25 * found.alignment + 0.75 * costs, rtol=1e-5)
    np.testing.assert_allclose(found.rewards(1.0), found.alignment)
    fewer = found.among(("second", "first"))
    np.testing.assert_allclose(fewer.costs(), 1 - np.exp([0.0, -0.1]))
    assert fewer.key != found.key and found.among(found.arms).key == found.key


@pytest.mark.laws
def test_curves_and_weights(folder, tmp_path, capsys):
    """More queries, more reward; with no weight on alignment the smallest candidate is always taken."""
    base = trainer(folder, tmp_path)
    rows = comparing.curves(base, queries=(16, 512), objectives=("reinforce", "linear"), seeds=(0,))
    assert [row["queries"] for row in rows] == [16, 512, 5400] * 2
    assert rows[0]["reward"]["greedy"] < rows[2]["reward"]["greedy"]
    found = comparing.weights(base, alignment_weights=(0.0, 1.0))
    assert all(arms["first"] > 0.95 for arms in found[0]["choices"].values())
    assert found[1]["choices"]["task2"]["third"] > 0.95
    for name in ("curves.json", "curves.png", "weights.json", "weights.png"):
        assert (tmp_path / name).stat().st_size > 100
    said = capsys.readouterr().out
    assert "held-out queries" in said and "reward" in said
    again = comparing.curves(base, queries=(16, 512), objectives=("reinforce", "linear"), seeds=(0,))
    assert again == rows


def test_damage_is_named(folder, tmp_path):
    made = selection_folders.write(tmp_path / "data", *selection_folders.clusters(300))
    file = made / "task1" / "second.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"task1/second.npz is damaged or missing"):
        data.read(made)
    with pytest.raises(FileNotFoundError, match="holds no selection data"):
        data.read(tmp_path)
    assert dataclasses.replace(data.read(folder), pair="other").arms == selection_folders.ARMS
