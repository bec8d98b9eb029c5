"""Tests of acceptance along outputs, against distributions computed by hand, and of the order of models by cost."""

import sys

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import hierarchy
from speccascade_jax.core.types import Prompt
from speccascade_jax.hierarchy.measure import triangle_breach

# the module, because `hierarchy.measure` is the function of the same name
measure = sys.modules["speccascade_jax.hierarchy.measure"]
V = 4
TOKENS = np.array([[1, 3, 2, 0], [2, 2, 0, 0]], np.int32)
LENGTHS = np.array([4, 2], np.int32)
PROMPT = Prompt(np.array([[3], [1]], np.int32), np.ones(2, np.int32))
COSTS = {"target": 5.0, "small": 1.0, "tiny": 0.25, "slow": 6.0}


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(V, V)) * 2 for name in ("target", "small", "tiny", "slow")}


def measured(tables, **changes):
    models = {name: sc.TableLM(table) for name, table in tables.items()}
    settings = {"temperature": 1.0, "costs": COSTS} | changes
    return hierarchy.measure(models, [PROMPT], [(TOKENS, LENGTHS)], **settings)


def laws(table, temperature):
    """Returns the distribution at every position, after the prompt's token or the output's previous token."""
    read = [3, 1, 3, 2, 1, 2]
    logits = table[read]
    if temperature == 0:
        return np.eye(V)[logits.argmax(-1)]
    exp = np.exp(logits / temperature)
    return exp / exp.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_acceptance_is_one_minus_the_mean_total_variation(tables, temperature):
    result = measured(tables, temperature=temperature)
    assert result.names == ("tiny", "small", "target")  # models that cost more than the target are left out
    assert result.costs == (0.25, 1.0, 5.0) and result.positions == 6
    for i, first in enumerate(result.names):
        for j, second in enumerate(result.names):
            variations = 0.5 * np.abs(laws(tables[first], temperature) - laws(tables[second], temperature)).sum(-1)
            assert result.acceptance[i, j] == pytest.approx(1 - variations.mean(), abs=1e-6)
    assert result.breach < 1e-6


def test_each_model_has_its_own_temperature(tables):
    heat = {"target": 1.0, "small": 0.0, "tiny": 0.5, "slow": 1.0}
    result = measured(tables, temperature=heat)
    variations = 0.5 * np.abs(laws(tables["small"], 0.0) - laws(tables["target"], 1.0)).sum(-1)
    assert result.acceptance[1, 2] == pytest.approx(1 - variations.mean(), abs=1e-6)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.6}])
def test_distributions_are_cut_as_in_sampling(tables, cut):
    result = measured(tables, **cut)
    cut_laws = []
    for name in ("small", "target"):
        whole = laws(tables[name], 1.0)
        order = np.argsort(-whole, axis=-1)
        sizes = np.take_along_axis(whole, order, axis=-1)
        before = sizes.cumsum(-1) - sizes
        kept = np.arange(V) < 2 if "top_k" in cut else before < 0.6
        law = np.zeros_like(whole)
        np.put_along_axis(law, order, np.where(kept, sizes, 0.0), axis=-1)
        cut_laws.append(law / law.sum(-1, keepdims=True))
    assert result.acceptance[1, 2] == pytest.approx(np.minimum(*cut_laws).sum(-1).mean(), abs=1e-6)
    assert abs(result.acceptance[1, 2] - measured(tables).acceptance[1, 2]) > 1e-3


def test_models_with_one_distribution_accept_with_probability_one(tables):
    """Checks that acceptance stays a probability, although float32 distributions sum to 1 only up to rounding."""
    result = measured(tables | {"tiny": tables["small"]})
    assert result.acceptance[0, 1] == pytest.approx(1.0, abs=1e-6) and result.acceptance.max() <= 1.0


class Clock:
    """Fake `time.perf_counter`: a prefill takes a second, each call after it `cost` seconds more, both with noise."""

    def __init__(self, cost, noise):
        self.cost, self.noise, self.rng, self.turns = cost, noise, np.random.default_rng(0), 0

    def seconds(self, run):
        self.turns += 1
        steps = run.args[1] if run.func is measure._calls else 0
        return 1.0 + steps * self.cost + self.rng.normal(0, self.noise)


@pytest.mark.parametrize("noise", [1e-4, 0.05, 0.5])
def test_call_times_exclude_prefill(tables, monkeypatch, noise):
    clock = Clock(0.01, noise)
    monkeypatch.setattr(measure, "_seconds", clock.seconds)
    seconds = measure.call_seconds(sc.TableLM(tables["small"]), PROMPT)
    # the difference has the noise of two timings; more noise takes more turns, up to the limit
    error = 1.253 * 2**0.5 * noise / (clock.turns / 2) ** 0.5 / measure.STEPS
    assert abs(seconds - 0.01) < 3 * error and (error < 0.0004 or clock.turns >= 2 * measure.MOST_TURNS)
    assert (clock.turns == 2 * measure.TURNS) == (noise < 1e-3)


def test_call_times_within_the_noise_are_refused(tables, monkeypatch):
    monkeypatch.setattr(measure, "_seconds", Clock(0.0, 0.1).seconds)
    with pytest.raises(ValueError, match="which is within the noise: give costs="):
        measure.call_seconds(sc.TableLM(tables["small"]), PROMPT)


def test_calls_are_timed_if_no_costs_are_given(tables, monkeypatch):
    monkeypatch.setattr(measure, "call_seconds", lambda bound, prompt: {"target": 3.0, "small": 2.0}[known[id(bound)]])
    models = {name: sc.TableLM(tables[name]) for name in ("target", "small")}
    known = {id(bound): name for name, bound in models.items()}
    result = hierarchy.measure(models, [PROMPT], [(TOKENS, LENGTHS)])
    assert result.names == ("small", "target") and result.costs == (2.0, 3.0)


def test_a_breach_of_the_triangle_inequality_is_measured():
    assert triangle_breach(np.array([[1, 0.9, 0.2], [0.9, 1, 0.9], [0.2, 0.9, 1]])) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "large"}, "the target 'large' is not among the models target"),
        ({"temperature": {"target": 1.0}}, "temperature has no entry for slow, small, tiny"),
        ({"costs": {"target": 1.0}}, "costs has no entry for slow, small, tiny"),
    ],
)
def test_missing_entries_are_named(tables, changes, message):
    with pytest.raises(ValueError, match=message):
        measured(tables, **changes)


def test_an_error_names_a_model_with_nan_logits(tables):
    broken = tables | {"small": np.where(np.arange(V) == 2, np.nan, tables["small"])}
    with pytest.raises(ValueError, match="model 'small' gives NaN"):
        measured(broken)
