"""`record`: reductions of every round, in buffers; and what the counters say against a recount of them."""

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import SOURCES
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from tests.support import conformance


def trace(turn):
    """Small things of a round, and one reduction over the vocabulary."""
    return {
        "start": turn.start,
        "new": turn.num_new,
        "tokens": turn.tokens,
        "source": turn.source,
        "drafted": turn.draft.length * turn.active,
        "rejected": turn.rejected,
        "entropy": -(turn.law * jnp.log(jnp.maximum(turn.law, 1e-30))).sum(-1),
    }


def test_record_replays_the_generation():
    engine, params = assemble(conformance.tabular_pair(*conformance.tables(6, seed=41)), rule="token_v2", block_size=3)
    prompt = Prompt(jnp.zeros((5, 1), jnp.int32), jnp.ones((5,), jnp.int32))
    controls = make_controls(5, alpha=0.4, temperature=1.0)
    out = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=20, record=trace)
    plain = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=20)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    record = {name: np.asarray(values)[: int(out.num_rounds)] for name, values in out.record.items()}
    for row in range(5):
        replayed, sources = [], []
        for turn in range(int(out.num_rounds)):
            new = record["new"][turn, row]
            assert record["start"][turn, row] == 1 + len(replayed) or new == 0
            replayed += record["tokens"][turn, row, :new].tolist()
            sources += record["source"][turn, row, :new].tolist()
        assert replayed == np.asarray(out.tokens)[row].tolist()
        stats = out.stats
        assert sources.count(SOURCES.index("draft")) == int(stats.kept[row])
        assert int(record["rejected"][:, row].sum()) == int(stats.rejected[row])
        assert int(record["drafted"][:, row].sum()) == int(stats.drafted[row])
    assert np.isfinite(record["entropy"]).all() and record["entropy"].max() <= np.log(6) + 1e-5
