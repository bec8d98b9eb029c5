"""Tests of several drafters by name: errors before anything is loaded, and policies of other pairs."""

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import BoundModel
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.pairs import policy_files
from speccascade_jax.pairs.policy_files import Card, Policy
from speccascade_jax.storage.errors import CheckpointError
from tests.support import random_t5

V = 12
ARMS = ("draft", "other", "autoregressive")


def t5(seed, layers=1):
    return random_t5.bound(T5Config(V, V, 16, 2, 8, 16, 1, layers), seed)


@pytest.fixture(scope="module")
def pair():
    return sc.Pair(target=t5(0, 2), draft=t5(1), others={"other": t5(2)}, name="tiny")


def random_policy(pair, arms=ARMS, seed=0, **changed):
    """Returns a policy of three random layers: the arm depends on the prompt."""
    rng = np.random.default_rng(seed)
    sizes = {"layers_0": (16, 8), "layers_1": (8, 8), "layers_2": (8, len(arms))}
    layers = {name: {"kernel": rng.normal(size=s), "bias": rng.normal(size=s[1])} for name, s in sizes.items()}
    prints = build_selection.prints(pair, tuple(Arm(drafter=name) for name in arms))
    target, features = build_selection.target_of(pair)
    card = {"scores": "perceptron", "features": features, "arms": tuple(prints), "prints": tuple(prints.values())}
    return Policy(jax.tree.map(np.float32, layers), Card(**card | {"target": target} | changed))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafters": ()}, "no drafters to choose from: name at least one"),
        ({"drafters": ARMS}, "has 3 drafters .* set choose to one of greedy, .*, random, draft, other, autoregressive"),
        ({"drafters": ARMS, "choose": "draught"}, "choose='draught' is unknown"),
        ({"drafters": ("draft", "draft"), "choose": "random"}, "two drafters named 'draft': rename one with Arm"),
        ({"drafters": (Arm(drafter="draft", name="greedy"),), "choose": "greedy"}, "'greedy', which is a value of"),
        ({"drafters": ARMS * 3, "choose": "random"}, "among 9 drafters: give at most 8"),
        ({"drafters": ARMS, "choose": "random", "policy": "p.msgpack"}, "uses no policy: leave policy='p.msgpack' out"),
        ({"drafters": ARMS, "choose": "random", "tail": "draft"}, "tail='draft' .* needs a single drafter"),
        ({"drafters": ARMS, "choose": "random", "block_size": "auto"}, "block_size='auto'"),
        ({"drafters": (Arm(drafter="draft", block_size=0),), "choose": "random"}, "block_size of arm 'draft 0'"),
        ({"drafters": (Arm(drafter="autoregressive", block_size=3),), "choose": "random"}, "=3 .* has no effect"),
        ({"drafters": (Arm(drafter="draft", rule="opt"), "other"), "choose": "random"}, "'opt', which is lossy"),
        ({"drafters": ARMS, "choose": "random", "method": "token_v3", "alpha": 0.2}, "'token_v3', which is lossy"),
        ({"drafters": ARMS, "choose": "greedy"}, "the pair 'tiny' has no selection policy: train one"),
        ({"drafters": ("draft", "none"), "choose": "random"}, "unknown drafter 'none'|no drafter 'none'|'none'"),
        ({"method": "autoregressive", "lossy_arms": True}, "'autoregressive' has no lossy_arms, got True: only one"),
        ({"method": "seq_cascade", "alpha": -3.0, "lossy_arms": True}, "'seq_cascade' has no lossy_arms, got True"),
        ({"lossy_arms": True}, "has one drafter: leave policy and lossy_arms out"),
        ({"drafters": (Level(model="other", budget=2, drafters=("draft",) * 2),)}, "'other' takes one drafter"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_impossible_selections_are_refused_in_one_line(pair, settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        assemble(pair, **settings)
    assert "\n" not in str(caught.value)


def test_arms_of_another_vocabulary_are_refused():
    wide = T5Config(V + 1, V + 1, 16, 2, 8, 16, 1, 1)
    with pytest.raises(ValueError, match=f"vocabulary has {V + 1} entries and the target's {V}"):
        sc.Pair(target=t5(0, 2), draft=t5(1), others={"other": BoundModel({}, T5(wide))})


def test_a_policy_of_other_drafters_is_refused(pair):
    def refused(policy, **settings):
        with pytest.raises(ValueError) as caught:
            assemble(pair, **{"drafters": ARMS, "choose": "greedy", "policy": policy} | settings)
        assert "\n" not in str(caught.value) and "train one" in str(caught.value)
        return str(caught.value)

    fits = random_policy(pair)
    assemble(pair, drafters=ARMS, choose="greedy", policy=fits)
    assert "chooses among draft, other, autoregressive" in refused(fits, drafters=("draft", "autoregressive"))
    prints = (fits.card.prints[0], "0", fits.card.prints[2])
    assert "another drafter 'other'" in refused(random_policy(pair, prints=prints))
    assert "the target 00" in refused(random_policy(pair, target="00"))
    assert "(17 features)" in refused(random_policy(pair, features=17))
    with pytest.raises(ValueError, match="needs the policy's certainty"):
        assemble(pair, drafters=ARMS, choose="thompson", policy=fits)


@pytest.mark.laws
def test_the_chosen_arm_does_not_depend_on_the_order_of_the_arms(pair):
    policy, prompts = random_policy(pair, seed=3), [[n, 5, 1] for n in range(2, 12)]
    chosen = []
    for arms in (ARMS, ARMS[::-1], (ARMS[1], ARMS[2], ARMS[0])):
        output = sc.decode(pair, prompts, drafters=arms, choose="greedy", policy=policy, max_new_tokens=6)
        chosen.append([arms[place] for place in output.generation.inner["choice"]])
    assert chosen[0] == chosen[1] == chosen[2] and len(set(chosen[0])) > 1


def test_a_policy_file_round_trips_and_names_its_damage(pair, tmp_path):
    policy, path = random_policy(pair), tmp_path / "selection_policy.msgpack"
    policy_files.save(path, policy)
    read = policy_files.load(path)
    assert read.card == policy.card and read.fingerprint == policy.fingerprint and "parameters" in repr(read)
    jax.tree.map(np.testing.assert_array_equal, read.params, policy.params)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="selection_policy"):
        policy_files.load(path)
    with pytest.raises(FileNotFoundError, match="no selection policy at"):
        policy_files.load(tmp_path / "nowhere")


@pytest.mark.laws
def test_greedy_outputs_equal_the_targets_under_every_choice(pair):
    prompts = [[n, 5, 1] for n in range(2, 12)]
    alone = sc.decode(pair, prompts, method="autoregressive", max_new_tokens=12)
    level = Level(model="other", budget=3, drafters=("draft",))
    arms = (Arm(drafter="draft", block_size=2), "other", "autoregressive", level)
    for choose in ("random", "draft 2"):
        output = sc.decode(pair, prompts, drafters=arms, choose=choose, max_new_tokens=12)
        np.testing.assert_array_equal(output.tokens, alone.tokens, choose)


def test_lossy_arms_are_reported(pair):
    settings = Settings(drafters=(Arm(drafter="draft", rule="opt"), "other"), choose="random", lossy_arms=True)
    assert build_selection.lossy_arms(settings)
    assert not build_selection.lossy_arms(Settings(drafters=ARMS, choose="random"))
    engine, _ = assemble(pair, drafters=settings.drafters, choose="random", lossy_arms=True, alpha=0.2)
    assert engine.verifier.name == "opt | spec_decode" and not engine.verifier.lossless


@pytest.mark.parametrize("name", ["autoregressive", "autoregressive_draft", "a.b"])
def test_an_arm_cannot_have_a_reserved_name(name):
    with pytest.raises(ValueError, match=f"an Arm has the name '{name}', but .*: rename it"):
        Arm(drafter="draft", name=name)
    assert Arm(drafter="autoregressive", name="autoregressive").called == "autoregressive"
