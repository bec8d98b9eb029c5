"""Tests of a run's checkpoints: exact states, damaged files, kills, signals, other meshes, several processes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speccascade_jax.runtime import compilation_cache, hosts, interrupts
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage import checksums
from speccascade_jax.training import runs
from speccascade_jax.training.states import FOLDER, RECORD, States, saved_on_stop
from tests.support import damage, new_process

ROOT = repository_root()
UNREAD = {"_CHECKPOINT_METADATA", "commit_success.txt"}
"""Files that only say that Orbax has finished: without them, the checkpoint is still whole."""
STEPS = 100


def make(factor: float = 1.0, width: int = 4, optimizer=None) -> runs.TrainState:
    kernel = factor * np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    params = {"kernel": jnp.asarray(kernel), "scale": jnp.ones(width, jnp.bfloat16) / 3, "codes": jnp.int8([[1, -2]])}
    return runs.TrainState.fresh(params, optimizer or optax.adam(1e-3)).replace(step=jnp.int32(factor))


def same(left, right) -> bool:
    """Returns whether two trees have the same structure, types (weak ones included) and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(jax.typeof(a) == jax.typeof(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the folder of a run with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("written")
    states = States(folder)
    for step in (10, 20):
        states.save(step, make(step), {"epoch": step / 10})
    states.close()
    return folder


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copied")


def names(folder):
    return sorted(entry.name for entry in (folder / FOLDER).iterdir())


def test_states_are_exact_and_may_be_donated_while_they_are_written(tmp_path):
    weak = {"number": jnp.asarray(0.25), "whole": jnp.asarray(3), "list": jax.lax.full((3,), 0.5) * 1.5}
    assert all(leaf.weak_type for leaf in weak.values())
    state = {"train": make(7.0), "weak": weak, "nothing": optax.EmptyState()}
    like, exact = jax.eval_shape(lambda: state), jax.tree.map(lambda leaf: leaf + 0, state)
    states, position = States(tmp_path), {"epoch": 2, "minutes": 0.1, "window": [{"loss": 1.5}], "logged": None}
    assert States(tmp_path).latest(like) is None
    states.save(7, state, position)
    position["epoch"] = 3
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(state)
    states.close()
    for wanted in (like, exact):
        loaded, loaded_position = States(tmp_path).latest(wanted)
        assert same(loaded, exact)
        assert loaded_position == {"epoch": 2, "minutes": 0.1, "window": [{"loss": 1.5}], "logged": None}


def test_the_last_two_are_kept_and_nothing_foreign_is_deleted(written, tmp_path):
    assert names(written) == ["10", "20"]
    states = tmp_path / FOLDER
    foreign = [states / "5" / "thesis.txt", states / "notes.txt", states / "best" / "10", states / "10.old" / "x"]
    leftovers = [states / "8.orbax-checkpoint-tmp", states / "9.orbax-checkpoint-tmp-17" / "d"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for path in leftovers:
        path.mkdir(parents=True)
    with pytest.raises(ValueError, match="only damaged checkpoints"):
        States(tmp_path).latest(make())
    assert all(path.exists() for path in leftovers)  # leftovers stay, because another process may be writing them
    writer = States(tmp_path)
    for step in range(10, 15):
        writer.save(step, make(step), {}, wait=True)
        assert len(names(tmp_path)) <= len(foreign) + 2
    assert names(tmp_path) == sorted(["13", "14", "10.old", "5", "best", "notes.txt"])
    assert all(path.read_text() == "mine" for path in foreign)


def damages(path):
    """Damages a file in several ways, one at a time, and restores it at the end."""
    content = path.read_bytes()
    for length in {0, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        yield f"{length} bytes of {path.name}"
    path.unlink()
    yield f"no {path.name}"
    path.write_bytes(content)
    yield from (f"bit {bit} of {path.name}" for bit in damage.flips(path, 3))


def test_damage_of_any_file_is_found_and_the_checkpoint_before_is_used(written, copied):
    files = [path for path in (copied / FOLDER / "20").rglob("*") if path.is_file()]
    assert len(files) >= 8
    older, newer, whole = make(10.0), make(20.0), UNREAD
    for path in files:
        for said in damages(path):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state, position = States(copied).latest(newer)
            ours = [str(warning.message) for warning in caught if warning.category is UserWarning]
            if path.name in whole:
                assert (same(state, newer), position, ours) == (True, {"epoch": 2.0}, []), said
                continue
            assert same(state, older) and position == {"epoch": 1.0}, said
            assert len(ours) == 1 and f"{FOLDER}/20 is damaged" in ours[0], said
            assert path.name in ours[0] and ours[0].endswith("training goes on from step 10"), said
    assert same(States(copied).latest(newer)[0], newer)


def test_training_goes_on_from_the_checkpoint_before_and_keeps_the_damaged_one_aside(copied):
    damage.flip(copied / FOLDER / "20" / RECORD, 5)
    states = States(copied)
    with pytest.warns(UserWarning, match="record has changed or is missing"):
        states.latest(make())
    assert names(copied) == ["10", "20"]
    for step in (15, 20):
        states.save(step, make(step), {"epoch": step}, wait=True)
    assert names(copied) == ["15", "20", "20.damaged"]
    state, position = States(copied).latest(make())
    assert same(state, make(20.0)) and position == {"epoch": 20}


def test_two_damaged_checkpoints_end_the_run_with_a_remedy(copied):
    for step in (10, 20):
        (copied / FOLDER / str(step) / "manifest.ocdbt").write_bytes(b"")
    reason = r"manifest.ocdbt has changed or is missing"
    expected = rf"holds only damaged checkpoints \(20: {reason}; 10: {reason}\): copy it .* and train again"
    with pytest.raises(ValueError, match=expected):
        States(copied).latest(make())
    assert names(copied) == ["10", "20"]


@pytest.mark.parametrize(("other", "difference"), [
    ({"width": 8}, r"opt_state/0/mu/kernel: float32 of shape \(3, 4\), not float32 of shape \(3, 8\)"),
    ({"optimizer": optax.sgd(1e-3)}, "it has the unexpected array opt_state/0/count"),
    ({"optimizer": optax.adam(1e-3, mu_dtype="bfloat16")}, "mu/codes: int8 .*, not bfloat16"),
    ({"optimizer": optax.chain(optax.trace(0.9), optax.adam(1e-3))}, "it has the unexpected array opt_state/0/count"),
])  # fmt: skip
def test_states_of_another_model_or_optimiser_are_refused(written, other, difference):
    with pytest.raises(ValueError, match=f"20 does not fit this configuration .*{difference}.*name another run_dir"):
        States(written).latest(make(**other))


def test_the_state_of_an_older_trainer_is_refused(copied):
    runs.save_state(copied, make(), {})
    with pytest.raises(ValueError, match=r"state.msgpack was written by an older version .*train again, or finish"):
        States(copied).latest(make())


def test_a_step_is_written_once(copied):
    states = States(copied)
    states.latest(make())
    states.save(20, make(30.0), {}, wait=True)
    assert same(States(copied).latest(make())[0], make(20.0))
    with pytest.raises(ValueError, match=r"20 is the checkpoint of another run: move it away"):
        States(copied).save(20, make(), {})


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(copied, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    states = States(copied)
    states.latest(make())
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "file_digest", full)
        states.save(30, make(30.0), {})
        with pytest.raises(OSError, match=r"30 could not be written .*No space left.*: free some space") as raised:
            states.close()
    assert "\n" not in str(raised.value)
    assert same(States(copied).latest(make())[0], make(20.0))
    again = States(copied)
    again.save(30, make(30.0), {}, wait=True)
    assert names(copied) == ["20", "30"]


@pytest.mark.parametrize(("number", "raised"), [
    (signal.SIGTERM, interrupts.Terminated), (signal.SIGINT, KeyboardInterrupt),
])  # fmt: skip
def test_a_signal_ends_the_loop_after_a_whole_step(number, raised, capfd):
    before, done, saved = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], [], []

    def save():
        saved.append(list(done))
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL

    with pytest.raises(raised), saved_on_stop(save) as stop_if_asked:
        for step in range(5):
            if step == 2:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
            done.append(step)
            stop_if_asked()
    assert saved == [[0, 1, 2]]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert capfd.readouterr().err.strip().startswith("stopping after this batch")


def test_a_signal_after_the_last_step_is_not_lost():
    saved = []
    with pytest.raises(interrupts.Terminated), saved_on_stop(lambda: saved.append(1)) as stop_if_asked:
        stop_if_asked()
        os.kill(os.getpid(), signal.SIGTERM)
    assert saved == [1]


def test_an_error_is_not_saved():
    with pytest.raises(FloatingPointError), saved_on_stop(lambda: pytest.fail("saved")) as stop_if_asked:
        stop_if_asked()
        raise FloatingPointError


def start(folder, count=1, steps=STEPS, every=10):
    """Starts the processes of a toy run; each has a device of its own."""
    command = [sys.executable, "-m", "tests.support.toy_run", str(folder), str(steps), str(every)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env[compilation_cache.VARIABLE] = "off"
    pipes = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if count == 1:
        return [subprocess.Popen(command, **pipes)]
    with socket.create_server(("localhost", 0)) as free:
        command += [f"localhost:{free.getsockname()[1]}", str(count)]
    return [subprocess.Popen([*command, str(index)], **pipes) for index in range(count)]


def ended(processes):
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def result(folder, output):
    """Returns the digest of the final state, and the losses of all steps."""
    records = [json.loads(line) for line in (folder / runs.METRICS_FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    return json.loads(output.splitlines()[-1]), [record["loss"] for record in records]


def stop(folder, processes, victim, number, after):
    """Sends a signal `after` seconds after the first step is logged; returns when it was sent."""
    log, began = folder / runs.METRICS_FILE, time.monotonic()
    before = log.stat().st_size if log.exists() else 0
    while time.monotonic() - began < 60 and all(process.poll() is None for process in processes):
        if log.exists() and log.stat().st_size > before:
            break
        time.sleep(0.01)
    time.sleep(after)
    processes[victim].send_signal(number)
    return time.monotonic()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    ((status, output, said),) = ended(start(folder))
    assert status == 0, said
    return result(folder, output)


@pytest.mark.laws
@pytest.mark.parametrize(("number", "seed"), [(signal.SIGKILL, 0), (signal.SIGTERM, 2)])
def test_a_run_that_is_killed_repeatedly_gives_the_result_of_an_uninterrupted_one(number, seed, unbroken, tmp_path):
    folder, draws, status = tmp_path / "run", random.Random(seed), 1
    for _ in range(3):
        running = start(folder, every=3)  # with so frequent saves, a write is under way at most times
        stop(folder, running, 0, number, draws.uniform(0, 0.3))
        ((status, output, said),) = ended(running)
        assert status in (0, -9, 143) and "damaged" not in said, said
        if status == 143:
            assert said.strip().endswith(f"stopped: {interrupts.SAVED}"), said
            assert max(map(int, names(folder))) == len((folder / runs.METRICS_FILE).read_text().splitlines())
    if status != 0:
        ((status, output, said),) = ended(start(folder, every=3))
    assert status == 0 and "damaged" not in said, said
    assert result(folder, output) == unbroken
    assert names(folder) == ["100", "99"]


@pytest.mark.laws
def test_a_second_sigterm_ends_at_once_and_ctrl_c_saves(tmp_path):
    folder = tmp_path / "run"
    running = start(folder, steps=100_000, every=100_000)
    stop(folder, running, 0, signal.SIGSTOP, 0)  # both signals wait for a process that cannot reach its next step
    running[0].send_signal(signal.SIGINT)
    running[0].send_signal(signal.SIGCONT)
    ((status, _, said),) = ended(running)
    assert status == 130 and said.strip().endswith(f"stopped: {interrupts.SAVED}"), said
    assert len(names(folder)) == 1
    program = (
        "import os, signal, sys, time\n"
        "from speccascade_jax.training.states import saved_on_stop\n"
        "with saved_on_stop(lambda: time.sleep(60)) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGTERM and done.stderr.count("stopping after this batch") == 1


@pytest.mark.laws
def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    running = start(folder, steps=100_000)
    stop(folder, running, 0, signal.SIGCONT, 0)
    for status, _, said in (*ended(start(folder)), *ended(start(folder, 2))):
        # the second process may hear of the first one's error before it meets the lock itself
        line = f"{folder} is being written by process {running[0].pid} "
        assert status == 1 and "error: " in said and line in said, said
    running[0].terminate()
    assert ended(running)[0][0] == 143


@pytest.mark.parity
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_two_processes_stop_together_and_any_number_resumes(victim, number, unbroken, tmp_path):
    folder = tmp_path / "run"
    running = start(folder, 2)
    sent = stop(folder, running, victim, number, 0.4)
    done = ended(running)
    assert time.monotonic() - sent < hosts.HEARTBEAT
    statuses = [status for status, *_ in done]
    if number == signal.SIGTERM:
        assert statuses == [143, 143], done
        assert max(map(int, names(folder))) == len((folder / runs.METRICS_FILE).read_text().splitlines())
    else:
        assert (statuses[victim], statuses[1 - victim]) == (-9, hosts.STATUS), done
    newest = max((int(name) for name in names(folder) if name.isdigit()), default=0)
    (copy,) = {shutil.copytree(folder, tmp_path / "copy")}
    for place, count in ((folder, 2), (copy, 1)):
        done = ended(start(place, count))
        assert [status for status, *_ in done] == [0] * count, done
        assert done[0][1].startswith(("begins at", "[Gloo]")) and f"begins at {newest}\n" in done[0][1]
        assert done[-1][1].count("digest") == (count == 1)
        assert result(place, done[0][1]) == unbroken


@pytest.mark.parity
def test_two_processes_agree_that_a_checkpoint_is_damaged(unbroken, tmp_path):
    """Each process reads half of the files: the one that finds the damage tells the other."""
    folder = tmp_path / "run"
    for status, _, said in ended(start(folder, 2, steps=40)):
        assert status == 0, said
    files = sorted(json.loads(checksums.unsealed(folder, (folder / FOLDER / "40" / RECORD).read_bytes(), ""))["bytes"])
    for file in (files[0], files[1]):
        place = tmp_path / file.replace("/", "_")
        shutil.copytree(folder, place)
        damage.flip(place / FOLDER / "40" / file, 0)
        done = ended(start(place, 2))
        assert [status for status, *_ in done] == [0, 0], done
        said = [line for line in done[0][2].splitlines() if line.startswith("warning:")]
        assert len(said) == 1 and f"({file} has changed or is missing): training goes on from step 30" in said[0]
        assert result(place, done[0][1]) == unbroken


MESHES = """
import json, pathlib, sys
import jax, numpy as np
from speccascade_jax.training.states import States
from tests.support import toy_run
folder, outcomes = pathlib.Path(sys.argv[1]), {}
small = jax.jit(toy_run.make)()
digest = toy_run.digest(small)
for number, (wrote, reads) in enumerate([((8, 1), (2, 4)), ((2, 4), (8, 1)), ((2, 4), (1, 1)), ((1, 1), (4, 2))]):
    like = toy_run.abstract(toy_run.mesh(wrote))
    states = States(folder / str(number))
    states.save(1, jax.device_put(small, jax.tree.map(lambda leaf: leaf.sharding, like)), {}, wait=True)
    wanted = toy_run.abstract(toy_run.mesh(reads))
    state, _ = States(folder / str(number)).latest(wanted)
    placed = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, wanted)
    parts = len({str(shard.index) for shard in state.params["kernel"].addressable_shards})
    outcomes[str((wrote, reads))] = [toy_run.digest(state) == digest, all(jax.tree.leaves(placed)), parts]
print(json.dumps(outcomes))
"""


@pytest.mark.parity
def test_another_mesh_resumes(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    outcomes = new_process.answer(MESHES, tmp_path, XLA_FLAGS=flags)
    assert [*outcomes.values()] == [[True, True, 8], [True, True, 8], [True, True, 1], [True, True, 8]]
