"""Tests of compiled programs against golden figures, which also find planted regressions."""

import json

import jax
import pytest

from speccascade_jax import preflight
from speccascade_jax.models.layers import Slots
from speccascade_jax.models.t5 import T5Module
from speccascade_jax.preflight import compiling as compiler
from speccascade_jax.runtime import platforms
from tests.support import compiling, golden_programs
from tests.support.compiling import needs_tpu_compiler
from tests.support.golden_programs import LARGE, TINY, differences

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler, pytest.mark.xdist_group("golden")]
GOLDEN = json.loads(golden_programs.FILE.read_text())
REMEDY = "if this change is meant, write the file anew: python -m tests.support.golden_programs"


@pytest.mark.parametrize("name", LARGE)
def test_costs_of_published_sizes_are_unchanged(name):
    assert differences(golden_programs.large(name), GOLDEN[name]) == [], REMEDY


@pytest.mark.parametrize("name", TINY)
def test_costs_of_tiny_programs_are_unchanged(name):
    assert differences(golden_programs.tiny(name), GOLDEN[name]) == [], REMEDY


@pytest.fixture
def anew(monkeypatch):
    """Forgets programs that were traced before a bug was planted, and those with the bug."""

    def forget():
        jax.clear_caches()
        compiling._compiled.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


def turned(x):
    """Returns `x` after two reversals that XLA cannot cancel, so that each is a pass over the whole array."""
    reversed_once = jax.lax.optimization_barrier(x[:, ::-1])
    return jax.lax.optimization_barrier(reversed_once[:, ::-1])


@pytest.mark.usefixtures("anew")
def test_a_cache_that_is_copied_in_every_step_is_found(monkeypatch):
    write = Slots.write
    monkeypatch.setenv(platforms.SWITCH, "0")
    monkeypatch.setattr(Slots, "write", lambda self, block: tuple(map(turned, write(self, block))))
    family, arguments = TINY["tiny T5, a round"]
    assert compiling.compiled(family, **arguments)[1].cache_copies >= arguments["block_size"]


@pytest.mark.usefixtures("anew")
def test_a_second_pass_over_the_vocabulary_is_found(monkeypatch):
    once, name = T5Module.logits, "T5 1.1 small alone"
    monkeypatch.setattr(T5Module, "logits", lambda self, x: once(self, x) + 1e-9 * self.token_embedder.attend(x))
    target, draft, arguments = LARGE[name]
    job = preflight.job_of(target, draft, **arguments)
    assert "hbm_bytes" in differences(golden_programs.figures(compiling._compiled(job)[1]), GOLDEN[name])


def test_a_program_is_read_under_stated_assumptions_only():
    _, report = compiling.compiled("t5", **golden_programs.SAMPLED)
    loops = [line for line in report.assumed if "×" in line]
    assert loops == ["1 × loop draft/catch_up", "5 × loop draft"]
    assert compiler.BISECTIONS == 31
