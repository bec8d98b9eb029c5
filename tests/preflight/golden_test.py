"""Golden figures of compiled programs, and planted regressions that they find."""

import json

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.core import sampling
from speccascade_jax.models.layers import Slots
from speccascade_jax.preflight import compiling as compiler
from tests.support import compiling, golden_programs
from tests.support.compiling import needs_tpu_compiler
from tests.support.golden_programs import LARGE, TINY, differences

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler]
GOLDEN = json.loads(golden_programs.FILE.read_text())
REMEDY = "if this change is meant, write the file anew: python -m tests.support.golden_programs"


@pytest.mark.parametrize("name", LARGE)
def test_published_sizes_cost_what_they_did(name):
    assert differences(golden_programs.large(name), GOLDEN[name]) == [], REMEDY


@pytest.mark.parametrize("name", TINY)
def test_tiny_programs_cost_what_they_did(name):
    assert differences(golden_programs.tiny(name), GOLDEN[name]) == [], REMEDY


@pytest.fixture
def anew(monkeypatch):
    """Returns a function that compiles a tiny program after a bug was planted."""

    def figures(name):
        jax.clear_caches()
        compiling._compiled.cache_clear()
        family, arguments = TINY[name]
        return compiling.compiled(family, **arguments)[1]

    yield figures
    monkeypatch.undo()
    jax.clear_caches()
    compiling._compiled.cache_clear()


def turned(x):
    """Returns `x` after two turns that XLA cannot undo: a copy of the whole array."""
    there = jax.lax.optimization_barrier(x[:, ::-1])
    return jax.lax.optimization_barrier(there[:, ::-1])


def test_a_cache_that_is_copied_in_every_step_is_found(monkeypatch, anew):
    write = Slots.write
    monkeypatch.setattr(Slots, "write", lambda self, block: tuple(map(turned, write(self, block))))
    report = anew("tiny T5, a round")
    assert {"ops", "hbm_bytes"} & set(differences(golden_programs.figures(report), GOLDEN["tiny T5, a round"]))


def test_a_second_pass_over_the_vocabulary_is_found(monkeypatch, anew):
    once = sampling._softmax_and_max

    def twice(logits):
        law, largest = once(jax.lax.optimization_barrier(jnp.flip(jax.lax.optimization_barrier(logits), -1)))
        again, _ = once(logits)
        return again + 0 * law, largest

    monkeypatch.setattr(sampling, "_softmax_and_max", twice)
    report = anew("tiny T5, a round")
    assert differences(golden_programs.figures(report), GOLDEN["tiny T5, a round"])


def test_a_program_is_read_under_stated_assumptions_only():
    _, report = compiling.compiled("t5", **golden_programs.SAMPLED)
    loops = [line for line in report.assumed if "×" in line]
    assert loops == ["1 × loop draft/catch_up", "5 × loop draft"]
    assert compiler.BISECTIONS == 31
