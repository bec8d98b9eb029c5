"""Tests of serving a stream with a shift on a tiny pair: the rows of each query, kills, refused input."""

import json
import re

import numpy as np
import pytest

from speccascade_jax.drafters import chooser
from speccascade_jax.evaluation.points import Evaluation, Point
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Settings
from speccascade_jax.selection import learners, serving
from speccascade_jax.storage.buckets import BucketPath
from tests.support.killing import killed_at

DRAFTERS = ("draft", "middle", "autoregressive")
LEARNING = ("thompson", "exp3", "random")


def ticks():
    """Returns a clock that advances by a second per reading."""
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    return clock


def stream(quality_examples=4):
    """Returns two phases of three queries each."""
    settings = {"max_new_tokens": 6, "quality_examples": quality_examples, "latency_examples": 3}
    return [Evaluation(task=task, **settings) for task in ("tiny_translation", "tiny_translation_de_en")]


def serve(pair, folder, **changed):
    settings = {"phases": stream(), "drafters": DRAFTERS, "learning": LEARNING, "block_size": 2}
    settings |= {"sample": 4, "output": str(folder), "clock": ticks(), "temperature": 1.0}
    return serving.serve(pair=pair, **settings | changed)


@pytest.fixture(scope="module")
def unbroken(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, serve(pair, folder)


@pytest.mark.tools
def test_every_learner_and_every_fixed_arm_serves_every_query(unbroken):
    folder, rows = unbroken
    assert [row["round"] for row in rows] == list(range(6)) and [row["phase"] for row in rows] == [0, 0, 0, 1, 1, 1]
    ways = [*LEARNING, "always draft", "always middle", "always autoregressive"]
    for row in rows:
        assert list(row["runs"]) == ways
        assert [row["runs"][way]["arm"] for way in ways[3:]] == [0, 1, 2]
        assert all(run["seconds"] == 1.0 and 1 <= run["tokens"] <= 6 for run in row["runs"].values())
        assert "features" in row["runs"]["thompson"] and "features" not in row["runs"]["exp3"]
    taken = {row["runs"]["random"]["arm"] for row in rows}
    assert len(taken) > 1, "every round has bits of its own"
    summary = json.loads((folder / "regret.json").read_text())
    assert [phase["queries"] for phase in summary["phases"]] == [3, 3] and set(summary["learners"]) == set(LEARNING)
    assert (folder / "regret.png").stat().st_size > 1000


def state(learner):
    """Returns everything that changes in a learner, as lists, so that states can be compared."""
    moving = ("inverse", "moment", "log_weights", "usual", "told")
    fields = vars(getattr(learner, "posterior", learner))
    return {name: np.asarray(fields[name]).tolist() for name in moving if name in fields}


@pytest.mark.tools
def test_a_killed_stream_gives_the_result_of_an_uninterrupted_one(pair, unbroken, tmp_path, monkeypatch):
    """Checks that learners learn from the file in order, and so choose as in an unbroken run."""
    tell, states = serving._tell, []
    with killed_at(serving, "_tell", 4):
        serve(pair, tmp_path)
    assert len((tmp_path / "queries.jsonl").read_text().splitlines()) == 4

    def watched(taught, row, rewards):
        tell(taught, row, rewards)
        states.append({name: state(learner) for name, learner in taught.items()})

    monkeypatch.setattr(serving, "_tell", watched)
    assert serve(pair, tmp_path) == unbroken[1]
    assert (tmp_path / "queries.jsonl").read_text() == (unbroken[0] / "queries.jsonl").read_text()
    assert len(states) == 6 and states[-1]["thompson"] != states[0]["thompson"]


@pytest.mark.laws
def test_a_stream_in_a_bucket_equals_a_local_one(pair, unbroken, bucket):
    folder, rows = unbroken
    place = BucketPath("gs://bucket/online")
    with killed_at(serving.Server, "_served", 3):
        serve(pair, place)
    assert serve(pair, place) == rows
    for name in (serving.QUERIES, "regret.json", "settings.json"):
        assert (place / name).read_bytes() == (folder / name).read_bytes()
    assert (place / "regret.png").stat().st_size > 1000


@pytest.mark.tools
def test_trained_policies_are_served(pair, write_policy, tmp_path):
    """Covers `thompson_prior`, which starts at the policy, and `greedy`, which stays there; both read features."""
    arms = build_selection.arms_of(Settings(drafters=DRAFTERS, choose="random"))
    policy = write_policy(tmp_path / "policy.msgpack", arms, best=1)
    settings = {"learning": ("thompson_prior", "greedy"), "policy": policy, "noise": 0.01}
    rows = serve(pair, tmp_path / "out", **settings)
    assert [row["runs"]["greedy"]["arm"] for row in rows] == [1] * 6
    assert [row["runs"]["thompson_prior"]["arm"] for row in rows][:3] == [1] * 3, "nothing speaks against the prior"
    assert all("features" in row["runs"][name] for row in rows for name in settings["learning"])
    with pytest.raises(ValueError, match="the selection policy chooses among draft, middle, autoregressive, but"):
        serve(pair, tmp_path / "other", drafters=("draft", "middle"), **settings)
    assert not (tmp_path / "other" / "settings.json").exists()


def run(arm, seconds):
    """Returns the entry of a row for a query of two tokens."""
    return {"arm": arm, "seconds": seconds, "tokens": 2}


def test_a_learner_observes_only_its_own_run():
    class Told:
        def learn(self, features, arm, reward):
            self.last = arm, reward

    taught, rewards = {name: Told() for name in "ab"}, {name: learners.Rewards() for name in "ab"}
    for a, b in ((4.0, 8.0), (1.0, 2.0), (1.0, 6.0)):
        runs = {"a": run(0, a), "b": run(1, b), "always x": run(2, 100.0)}
        serving._tell(taught, {"runs": runs}, rewards)
    assert taught["a"].last == (0, 0.0) and taught["b"].last == (
        1,
        0.0,
    )  # the last times equal the medians of 4, 1, 1 and of 8, 2, 6


def test_random_bits_depend_on_the_round_and_not_on_the_place(pair, monkeypatch):
    """Checks that queries at the same place of two phases do not share their random bits."""
    phases = [phase.resolved() for phase in stream()]
    settings = Settings(drafters=DRAFTERS, choose="random", block_size=2, temperature=1.0)
    point = Point(pair=pair, evaluation=phases[0], settings=settings)
    taught = {"learning": ("random",), "policy": None, "sample": 4, "noise": 0.3, "discount": 1.0}
    server = serving.Server(point=point, phases=tuple(phases), **taught)
    monkeypatch.setattr(serving, "generate", lambda *_, example_ids, **more: example_ids)
    for number, (phase, place) in enumerate([(0, 0), (0, 2), (1, 0)]):
        call = server._call(learners.Fixed(*chooser.always(0, 3)), phase, place, number)
        assert np.asarray(call(0)).tolist() == [number]


def test_regret_matches_values_computed_by_hand():
    rows = []
    for phase, (learner, always_a) in enumerate([(2, 1), (1, 4)]):
        runs = {"l": run(0, learner), "always a": run(0, always_a), "always b": run(1, 2)}
        rows.append({"phase": phase, "domain": f"d{phase}", "arms": ["a", "b"], "runs": runs})
    summary = serving.summary(rows)
    assert summary["best"] == "always b" and [phase["best"] for phase in summary["phases"]] == ["always a", "always b"]
    of_learner = summary["learners"]["l"]
    assert of_learner["regret"] == pytest.approx(1e3 * ((1 - 1) + (0.5 - 1)) / 2)
    assert of_learner["over_knowing"] == pytest.approx((1 + 0.5) / (0.5 + 1) - 1)


@pytest.mark.tools
def test_invalid_values_are_refused_in_one_line(pair, unbroken, tmp_path):
    for changed, words in (
        ({"learning": ("thomson",)}, "unknown learner 'thomson'; did you mean thompson"),
        ({"learning": ("exp3", "exp3")}, "names a learner twice"),
        ({"learning": ()}, "learning"),
        ({"phases": ()}, "phases"),
        ({"sample": 1}, "sample"),
        ({"drafters": ()}, "no drafters to choose from"),
        ({"learning": ("greedy",)}, "has no selection policy"),
        ({"noise": 0.0}, "noise=0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            serve(pair, tmp_path, **changed)
        assert not re.search("\n", str(caught.value))
    with pytest.raises(ValueError, match="was started with other values of block_size"):
        serve(pair, unbroken[0], block_size=3)
    phases = stream(quality_examples=3)  # the spread of the features depends on these examples
    with pytest.raises(ValueError, match="was started with other values of sampled"):
        serve(pair, unbroken[0], phases=phases)
