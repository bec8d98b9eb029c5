"""Resumable state and the metrics log survive kills and refuse what does not fit."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import steps
from tests.support import damage


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


def test_no_flipped_bit_of_a_state_is_trained_on(tmp_path):
    state = _state()
    runs.save_state(tmp_path, state, {"epoch": 2})
    path = tmp_path / runs.STATE_FILE
    for _ in damage.flips(path, 300):
        with pytest.raises(ValueError, match=rf"{runs.STATE_FILE} is damaged.*(remove it and train again)"):
            runs.load_state(tmp_path, state)
    assert runs.load_state(tmp_path, state) is not None  # as it was


def test_a_state_of_an_earlier_version_loads(tmp_path):
    runs.save_state(tmp_path, _state().replace(step=jnp.int32(7)), {"epoch": 2})
    path = tmp_path / runs.STATE_FILE
    path.write_bytes(path.read_bytes().rpartition(b"\nblake2b-128:")[0])
    found, position = runs.load_state(tmp_path, _state())
    assert (int(found.step), position) == (7, {"epoch": 2})


@pytest.mark.parametrize("content", [b"", b"x", b"\x93\x01\x02\x03", b"\x81\xa5state\x01"])
def test_what_is_no_state_is_named(tmp_path, content):
    (tmp_path / runs.STATE_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{runs.STATE_FILE} is damaged, or no state of a run"):
        runs.load_state(tmp_path, _state())


def test_the_log_keeps_what_was_there_when_the_state_was_saved(tmp_path):
    """Two records of one step of which the second came after the state; lines that are no records."""
    path = tmp_path / runs.METRICS_FILE
    path.write_text('{"step": 4}\n[1]\n{"step": "x"}\n{"step": 8}\n{"step": 8, "bleu": 1}\n{"step": 9}\n')
    log = runs.MetricsLog(path, resume_step=8, logged=2)
    assert log.logged == 2 and path.read_text() == '{"step": 4}\n{"step": 8}\n'
    log.append({"step": 8, "bleu": 1})
    assert log.logged == 3


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = runs.MetricsLog(tmp_path / runs.METRICS_FILE, 0)
    log.append({"step": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"free some space.*metrics\.jsonl"):
        patch.setattr(os, "fsync", full)
        log.append({"step": 2})
    log.append({"step": 3})
    assert log.path.read_text() == '{"step": 1}\n{"step": 3}\n' and log.logged == 2
