"""Tests that a drafter gets the target's hidden states at every position.

Drafting from these states must not change the output's distribution.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from benchmarks import random_models
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.drafters.chooser import Chooser
from speccascade_jax.drafters.model import BranchingDrafter, ModelDrafter
from speccascade_jax.drafters.nested import AppendedDrafter, NestedDrafter
from speccascade_jax.drafters.selected import SelectedDrafter
from speccascade_jax.engine import scoring
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.models import decoder, t5
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.models.teacher_forcing import layer_states, plain_params
from speccascade_jax.rules.branching import BranchWise
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Confidence, Fixed
from tests.support import conformance, engines, random_t5, tiny_decoders
from tests.support.drafters import RandomHead, Remembering, by_forward

LAYERS = (2, 0, 1)
TREE = Tree.of_branching((2, 2, 1))
WINDOWED = tiny("gemma2_2b", vocab_size=61, window=6)  # its cache is a ring buffer
T5_CONFIG = T5Config(61, 64, 16, 2, 8, 24, 1, 2)
TOKENS = np.random.default_rng(3).integers(2, 61, (4, 9)).astype(np.int32)
LENGTHS = np.array([9, 1, 4, 2], np.int32)
NEW = 22


def target_of(family, noise=0.0):
    if family == "decoder":
        return tiny_decoders.bound(WINDOWED, seed=1, noise=noise)
    return random_t5.bound(T5_CONFIG, seed=1, noise=noise)


def prompt_of(family):
    """Returns prompts of several lengths; for the family "t5" also the encoder's input."""
    encoded = TOKENS[:, :5] if family == "t5" else None
    return Prompt(np.where(np.arange(9) < LENGTHS[:, None], TOKENS, 0), LENGTHS, encoded)


def model_drafter(family, stop):
    """Returns a drafter and its parameters: the target with disturbed weights, so that some drafts are kept."""
    bound = target_of(family, noise=0.06 if family == "decoder" else 0.02)
    return ModelDrafter(bound.model, stop), {"model": bound.params}


def case(family, stop=Fixed(3)):  # noqa: B008 (frozen)
    """Returns the target, prompts, and a drafter that uses a model, with its parameters."""
    return target_of(family), prompt_of(family), *model_drafter(family, stop)


def run_tree(family, kind):
    """Returns the target, prompts and a generation with a tree drafter of class `kind`, which stores hidden states."""
    target, prompt, inside, params = case(family)
    drafter = kind(BranchingDrafter(inside.model, TREE), LAYERS)
    return target, prompt, run(target, drafter, params, prompt, verifier=BranchWise(RULES["spec_decode"], TREE))


def run(target, drafter, drafter_params, prompt, *, verifier=engines.LOSSLESS, length=NEW, temperature=0.7, **more):
    engine = Engine(target=target.model, drafter=drafter, verifier=verifier, **more)
    params = {"target": target.params, "drafter": drafter_params}
    # some tokens of the draft reach this threshold and others do not
    unsure = 0.969 if isinstance(target.model, DecoderLM) else 0.95
    controls = make_controls(len(prompt.length), temperature=temperature, stop_threshold=unsure)
    out = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=length)
    assert (np.asarray(out.failed_at) < 0).all()
    return out


def largest_error(target, prompt, out, layers=LAYERS, states=None, rows=slice(None)):
    """Returns the largest relative error of the stored states at committed positions, against a forward pass."""
    expected = by_forward(target, prompt, out.tokens, layers)
    remembered = np.asarray(out.inner["states"] if states is None else states)[:, : expected.shape[1]]
    # the last token is left out, because no model has read it yet
    read = np.arange(expected.shape[1])[None] < (np.asarray(prompt.length) + np.asarray(out.lengths) - 1)[:, None]
    assert read.sum() > 20
    errors = np.abs(remembered - expected).max((2, 3)) / np.abs(expected).max()
    return np.where(read, errors, 0.0)[rows].max()


STOPS = tuple(range(2, 61, 9))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "stop", "more"),
    [
        ("t5", Fixed(3), {"stop_ids": STOPS}),
        pytest.param("decoder", Fixed(3), {"stop_ids": STOPS}, marks=pytest.mark.laws),
        pytest.param("t5", Confidence(7), {}, marks=pytest.mark.laws),
        pytest.param("decoder", Confidence(7), {}, marks=pytest.mark.laws),  # target calls have several widths
        pytest.param("t5", Fixed(2), {"bonus": "none"}, marks=pytest.mark.laws),
    ],
)
def test_states_equal_a_forward_pass_at_every_committed_position(family, stop, more):
    target, prompt, inside, params = case(family, stop)
    out = run(target, Remembering(inside, LAYERS), params, prompt, **more)
    assert out.stats.kept.sum() > 0 and out.stats.rejected.sum() > 0
    assert (np.asarray(out.lengths) < NEW).any() == ("stop_ids" in more)
    assert largest_error(target, prompt, out) < 1e-5


@pytest.mark.laws
@pytest.mark.parametrize("family", ["t5", "decoder"])
def test_a_tree_drafter_gets_the_states_of_the_accepted_path(family):
    target, prompt, out = run_tree(family, Remembering)
    assert out.stats.kept.sum() > 0 and out.stats.rejected.sum() > 0
    assert largest_error(target, prompt, out) < 1e-5


@pytest.mark.laws
def test_each_arm_reads_its_own_layers():
    target, prompt, inside, params = case("t5")
    layers = ((2,), (1, 2))
    arms = (Remembering(inside, layers[0]), Remembering(inside, layers[1]), inside)
    arm_params = {"arms": (params,) * 3, "policy": {"scores": np.zeros(3, np.float32)}}
    drafter = SelectedDrafter(arms, Chooser(draws="dynamic"))
    assert drafter.reads_layers == (1, 2)
    out = run(target, drafter, arm_params, prompt)
    choice = np.asarray(out.inner["choice"])
    assert set(choice) >= {0, 1}
    for place in (0, 1):
        states = out.inner["arms"][place]["states"]
        assert largest_error(target, prompt, out, layers[place], states, choice == place) < 1e-5


def test_layer_states_equal_a_forward_pass():
    target = target_of("t5")
    prompt = Prompt(np.zeros((4, 1), np.int32), np.ones(4, np.int32), TOKENS[:, :5])
    states = layer_states(target, prompt, TOKENS, LAYERS)
    np.testing.assert_allclose(states, by_forward(target, prompt, TOKENS, LAYERS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["t5", "decoder", "table"])
def test_layer_0_is_the_embedding_and_the_last_layer_gives_the_logits(family):
    table = np.random.default_rng(0).normal(size=(61, 61))
    target = sc.TableLM(table) if family == "table" else target_of(family)
    fed = _fed_twice(target.model, target.params, prompt_of(family))
    np.testing.assert_array_equal(fed["states"][:, :, 0], fed["embedded"])
    np.testing.assert_allclose(fed["unembedded"], fed["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fed["plain"], fed["logits"], rtol=1e-5, atol=1e-5)


@partial(jax.jit, static_argnums=0)
def _fed_twice(model, params, prompt):
    """Feeds a block to a model twice, with and without its hidden states; returns the outputs by name."""
    cache, _ = model.prefill_layers(params, prompt, 20, (0, 2))
    out, _ = model.extend_layers(params, cache, TOKENS, (0, 2))
    plain, _ = model.extend(params, model.prefill(params, prompt, 20), TOKENS)
    return {
        "states": out.layer_states,
        "embedded": model.embed(params, TOKENS),
        "unembedded": model.unembed(params, out.layer_states[:, :, 1]),
        "logits": out.logits[..., : model.vocab_size],
        "plain": plain.logits[..., : model.vocab_size],
    }


def test_a_loss_can_be_differentiated_through_plain_parameters():
    target = random_models.random(T5_CONFIG)
    packed = BoundModel(target.model.prepare(target.params), target.model)
    states = np.ones((1, 1, T5_CONFIG.d_model), np.float32)
    run = jax.jit(target.model.unembed)
    np.testing.assert_allclose(
        run(plain_params(packed.params), states), run(target.params, states), rtol=1e-4, atol=1e-5
    )
    slope = jax.jit(jax.grad(lambda x, params: target.model.unembed(params, x).sum()))
    assert np.isfinite(slope(states, plain_params(packed.params))).all()


# --- exact distributions


SMALL, LENGTH = 4, 4


def random_target(family):
    if family == "t5":
        return random_t5.bound(T5Config(SMALL, SMALL, 8, 2, 4, 8, 1, 2), seed=4)
    return tiny_decoders.bound(dataclasses.replace(tiny("llama2_7b", vocab_size=SMALL), d_model=16), seed=2)


def sequence_law(target, prompt):
    """Returns the probabilities of all sequences of `LENGTH` tokens after a prompt, computed without a cache."""
    written = np.array(list(itertools.product(range(SMALL), repeat=LENGTH)), np.int32)
    length = int(prompt.length[0])
    whole = np.concatenate([np.tile(prompt.tokens[:1, :length], (len(written), 1)), written], axis=1)
    if prompt.encoder_tokens is None:
        logits = jax.jit(decoder.teacher_forced_logits, static_argnums=0)(target.model, target.params, whole)
    else:
        encoded = np.tile(prompt.encoder_tokens[:1], (len(written), 1))
        logits = jax.jit(t5.teacher_forced_logits, static_argnums=0)(target.model, target.params, encoded, whole)
    logs = np.asarray(jax.nn.log_softmax(logits[:, length - 1 : -1]), np.float64)
    return np.exp(np.take_along_axis(logs, written[..., None], axis=-1)[..., 0].sum(-1))


@pytest.mark.laws
@pytest.mark.parametrize("family", ["t5", "decoder"])
def test_a_head_that_reads_states_keeps_the_targets_distribution(family):
    """Compares sequences sampled at temperature 1 with the target's distribution by a chi-square test."""
    rows, target = 30_000, random_target(family)
    start = np.array([[0]] if family == "t5" else [[1, 3, 2]], np.int32)
    encoded = np.tile(np.array([[1, 3, 2]], np.int32), (rows, 1)) if family == "t5" else None
    prompt = Prompt(np.tile(start, (rows, 1)), np.full((rows,), start.shape[1], np.int32), encoded)
    size = target.model.config.d_model
    mix = (np.random.default_rng(0).normal(size=(2 * size, size)) / np.sqrt(2 * size)).astype(np.float32)
    out = run(target, RandomHead(target.model, (1, 2), 2), mix, prompt, length=LENGTH, temperature=1.0)
    kept, rejected = int(out.stats.kept.sum()), int(out.stats.rejected.sum())
    assert 0.1 < kept / (kept + rejected) < 0.9
    index = (np.asarray(out.tokens) * SMALL ** np.arange(LENGTH - 1, -1, -1)).sum(-1)
    law = sequence_law(target, prompt)
    assert law.max() < 0.5
    assert conformance.pooled_p_value(np.bincount(index, minlength=SMALL**LENGTH), law * rows) > 1e-3


# --- planted bugs


@dataclass(frozen=True)
class OffByOne(DecoderLM):
    """A planted bug: every hidden state of a block is the state of the position before."""

    def extend_layers(self, *args):
        out, cache = super().extend_layers(*args)
        return out._replace(layer_states=jnp.roll(out.layer_states, 1, axis=1)), cache


@dataclass(frozen=True)
class OffByOneInPrompts(DecoderLM):
    """A planted bug: every hidden state of a prompt is the state of the position before."""

    def prefill_layers(self, *args):
        cache, states = super().prefill_layers(*args)
        return cache, jnp.roll(states, 1, axis=1)


@dataclass(frozen=True)
class ForgetsLayers(DecoderLM):
    """A planted bug: layers come in the model's order, not in the order that the drafter names."""

    def extend_layers(self, params, cache, tokens, layers, branch=None):
        return super().extend_layers(params, cache, tokens, tuple(sorted(layers)), branch)


@pytest.mark.laws
@pytest.mark.parametrize("bug", [None, OffByOne, OffByOneInPrompts, ForgetsLayers, "states are not rolled back"])
def test_planted_bugs_in_states_are_found(bug):
    target, prompt, inside, params = case("decoder")
    drafter = Remembering(inside, LAYERS, rolls_back=bug != "states are not rolled back")
    model = bug(WINDOWED) if isinstance(bug, type) else target.model
    out = run(dataclasses.replace(target, model=model), drafter, params, prompt)
    error = largest_error(target, prompt, out)
    assert error < 1e-5 if bug is None else error > 1e-2


@dataclass(frozen=True)
class Unstraightened(Remembering):
    """A class for the planted bug below; a program of its own is compiled for it."""


@pytest.mark.laws
def test_states_of_a_trees_entries_instead_of_its_path_are_found(monkeypatch):
    straightened = scoring.straightened

    def whole(target, tree, start, scored, verdict):
        straight, verdict = straightened(target, tree, start, scored, verdict)
        return straight._replace(hidden=scored.hidden), verdict

    monkeypatch.setattr(scoring, "straightened", whole)
    assert largest_error(*run_tree("t5", Unstraightened)) > 1e-2


# --- refusals


def _in_a_level(drafter, model):
    NestedDrafter(Engine(target=model, drafter=drafter, verifier=engines.LOSSLESS), 3)


def _with_a_tail(drafter, model):
    AppendedDrafter(drafter, ModelDrafter(model, Fixed(1)))


def _of_a_fake(drafter, model):
    Engine(target=Fake(61), drafter=drafter, verifier=engines.LOSSLESS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_in_a_level, "^RandomHead reads the target's hidden states: use it to draft for the target only$"),
        (_with_a_tail, "^RandomHead reads the target's hidden states: leave its tail out$"),
        (_of_a_fake, r"^the drafter reads layers \(1, 2\) of the target, but Fake has no extend_layers: choose"),
    ],
)
def test_drafters_that_cannot_read_states_are_refused(make, message):
    model = T5(T5_CONFIG)
    with pytest.raises(ValueError, match=message):
        make(RandomHead(model, (1, 2), 2), model)


def test_a_missing_layer_is_refused():
    target, prompt, inside, _ = case("t5")
    with pytest.raises(ValueError, match=r"^there is no layer 3: the model's decoder has layers 0 to 2"):
        run(target, Remembering(inside, (3,)), {}, prompt)
