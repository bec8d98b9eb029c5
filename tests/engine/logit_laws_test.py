"""Engines whose blocks stay logits, as on a TPU: they write the tokens of engines that store distributions."""

import contextlib
import dataclasses
from functools import cache

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import logit_laws
from speccascade_jax.core.types import BoundModel, LMOutput, LogitLaws
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.fake import Table
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.runtime import platforms
from tests.support import conformance

VOCAB, PADDING, ROWS, LENGTH = 20, 12, 300, 9
SAMPLINGS = [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, 0.8)]


@dataclasses.dataclass(frozen=True)
class Padded(Table):
    """A table whose logits have padding, as a T5's do."""

    def extend(self, params, cache, tokens):
        out, cache = super().extend(params, cache, tokens)
        return LMOutput(jnp.pad(out.logits, [(0, 0), (0, 0), (0, PADDING)], constant_values=-jnp.inf)), cache


@contextlib.contextmanager
def on_a_tpu():
    """Traces programs as for a TPU; tables have no kernels, so nothing is interpreted."""
    jax.clear_caches()
    with platforms.interpreted(True):
        yield
    jax.clear_caches()


def built(rule, **more):
    q, p = conformance.tables(VOCAB, seed=3)
    draft, target = (BoundModel(jnp.asarray(x), Padded(VOCAB)) for x in (q, p))
    return assemble(Pair(target=target, draft=draft), rule=rule, block_size=3, **more)


def written(rule, samplings=SAMPLINGS, **more):
    engine, params = built(rule, **more)
    return conformance.run_rows(engine, params, ROWS, 0.3, samplings, length=LENGTH, conclusive=True)


@cache
def expected(rule, **more):
    return written(rule, **more)


CASES = [
    ("spec_decode", {}),
    ("token_v3", {}),
    ("chow", {"accept": "deferral"}),
    ("bild_star", {"bonus": "target"}),
    ("lossy", {"verify": "block"}),
]


@pytest.mark.parametrize(("rule", "more"), CASES)
def test_tokens_do_not_depend_on_how_distributions_are_stored(rule, more):
    tokens = expected(rule, **more)
    with on_a_tpu():
        assert isinstance(built(rule, **more)[0].blank_laws(2), LogitLaws)
        np.testing.assert_array_equal(written(rule, **more), tokens)


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]])
def test_batches_of_one_setting_write_the_same_tokens(sampling):
    tokens = written("spec_decode", [sampling])
    with on_a_tpu():
        np.testing.assert_array_equal(written("spec_decode", [sampling]), tokens)


@flax.struct.dataclass
class LatePair(logit_laws.LogitPair):
    """A planted bug: replacements come from the next position."""

    def at_position(self, positions):
        return super().at_position(jnp.minimum(positions + 1, self.greedy.shape[1] - 1))


BUGS = {
    "the next position": ("LogitPair", LatePair),
    "raw probabilities": ("_weights", lambda logits, peak, cool: jnp.exp(logits - peak)),
    "all ties are kept": ("_kept", lambda logits, lowest, last, indices: logits > lowest),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    tokens = expected("spec_decode")
    monkeypatch.setattr(logit_laws, *BUGS[bug])
    if bug == "the next position":
        monkeypatch.setattr("speccascade_jax.engine.engine.LogitPair", LatePair)
    with on_a_tpu():
        assert (written("spec_decode") != tokens).any()


@dataclasses.dataclass(frozen=True)
class Reading(Speculative):
    """A user's verifier, which reads the distributions of all tokens."""

    def kept_at(self, pair, alpha, tokens):
        assert pair.p.shape[-1] == VOCAB
        return super().kept_at(pair, alpha, tokens)


def test_a_users_verifier_reads_distributions():
    tokens = expected("spec_decode")
    with on_a_tpu():
        engine, params = built("spec_decode")
        engine = dataclasses.replace(engine, verifier=Reading(engine.verifier.rule))
        again = conformance.run_rows(engine, params, ROWS, 0.3, SAMPLINGS, length=LENGTH)
    np.testing.assert_array_equal(again, tokens)
