"""Tests that a user's faulty drafter raises an error that names the fault, before anything is compiled."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import jax.numpy as jnp
import pytest

import speccascade_jax as sc
from tests.support import conformance
from tests.support.drafters import Repeats

PAIR = conformance.tabular_pair(*conformance.tables(5, seed=3))


@dataclass(frozen=True)
class Faulty(Repeats):
    change: str = ""

    def propose(self, params, state, request):
        draft, *others = super().propose(params, state, request)
        changes = {
            "short": {"q": draft.q[:, :-1]}, "narrow": {"q_tilde": draft.q_tilde[..., :-1]},
            "floats": {"tokens": draft.tokens.astype(jnp.float32)}, "scalar": {"length": draft.length[0]},
            "whole": {"bad": draft.bad[:, :-1]}, "number": {"greedy": draft.length},
        }  # fmt: skip
        if self.change == "pair":
            return draft, state
        return replace(draft, **changes[self.change]), *others


class Bare:
    block, adaptive, reads_features = 3, False, False
    init = propose = commit = None


@dataclass
class Loose:
    block, adaptive, reads_features = 3, False, False
    init = propose = commit = stats = None


@pytest.fixture
def decode(monkeypatch):
    """Returns a function that decodes with a drafter made by a function of the module `bad`."""

    def call(make, **settings):
        monkeypatch.setitem(sys.modules, "bad", module := ModuleType("bad"))
        module.make = make
        return sc.decode(PAIR, [[0, 1]] * 2, drafters=("bad.make",), block_size=3, max_new_tokens=4, **settings)

    return call


@pytest.mark.parametrize(("change", "message"), [
    ("short", r"Draft.q has shape \(2, 3, 5\), expected \[B, block \+ 1, V\] = \(2, 4, 5\)"),
    ("narrow", r"Draft.q_tilde has shape \(2, 4, 4\), expected \[B, block \+ 1, V\] = \(2, 4, 5\)"),
    ("floats", "Draft.tokens is float32, expected int32"),
    ("scalar", r"Draft.length has shape \(\), expected \[B\] = \(2,\)"),
    ("whole", r"Draft.bad has shape \(2, 3\), expected \[B, block \+ 1\] = \(2, 4\)"),
    ("number", "Draft.greedy is int32, expected bool"),
    ("pair", r"propose must return \(Draft, state, request.target.cache\)"),
])  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"tail": "draft", "tail_size": 1}])
def test_a_wrong_draft_is_named(decode, change, message, settings):
    def make(pair, block_size):
        return Faulty(block_size, 5, change), {}

    with pytest.raises(ValueError, match=rf"^drafter '[\w.]*proposals_test.Faulty': {message}"):
        decode(make, **settings)


@pytest.mark.parametrize(("make", "message"), [
    (lambda pair, size: Repeats(size, 5), r"^'bad.make' must return \(drafter, params\), not Repeats"),
    (lambda pair: None, r"^'bad.make' must accept the arguments \(pair, block_size\): "),
    (lambda pair, size: (Bare(), {}), "^drafter 'bad.make': Bare has no stats; help"),
    (lambda pair, size: (Loose(), {}), "^drafter 'bad.make': Loose must be hashable"),
])  # fmt: skip
def test_a_function_that_returns_no_drafter_is_refused(decode, make, message):
    with pytest.raises(ValueError, match=message):
        decode(make)
