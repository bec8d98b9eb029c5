"""Resumable state and the metrics log survive kills and refuse what does not fit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import steps


def _state(d_model: int = 4) -> runs.TrainState:
    return steps.init_state(T5Config(10, 12, d_model, 1, 4, 4, 1, 1), steps.Optimizer(), jax.random.key(0))


def test_state_and_position_survive_a_round_trip(tmp_path):
    state = _state().replace(step=jnp.int32(7))
    runs.save_state(tmp_path, state, {"epoch": 2, "minutes": 0.1})
    found, position = runs.load_state(tmp_path, _state())
    assert position == {"epoch": 2, "minutes": 0.1}
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for wanted, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
    assert [path.name for path in tmp_path.iterdir()] == [runs.STATE_FILE]


def test_no_state_gives_none_and_another_model_is_refused(tmp_path):
    assert runs.load_state(tmp_path, _state()) is None
    runs.save_state(tmp_path, _state(), {})
    with pytest.raises(ValueError, match="does not fit this configuration .* name another run_dir"):
        runs.load_state(tmp_path, _state(d_model=8))


def test_the_log_drops_torn_lines_and_what_a_resumed_run_repeats(tmp_path):
    path = tmp_path / runs.METRICS_FILE
    path.write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"st')
    log = runs.MetricsLog(path, resume_step=20)
    log.append({"step": 25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 25]
