"""Training runs in a bucket: exact states, damage of every object, kills, other meshes, several processes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from speccascade_jax.runtime import hosts, interrupts
from speccascade_jax.storage import buckets
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.locks import LockedError
from speccascade_jax.training import bucket_states, runs
from speccascade_jax.training.bucket_states import BucketStates, open_states
from tests.support import new_process
from tests.training.states_test import STEPS, ended, make, same, start, unbroken  # noqa: F401 (a fixture)

RUN = BucketPath("gs://bucket/run")
STATES = RUN / "states"


def write(*steps):
    """Writes checkpoints of some steps; returns the objects of the last one by name."""
    states = open_states(RUN)
    for step in steps:
        states.save(step, make(step), {"epoch": step / 10})
    states.close()
    return sorted(name for name in STATES.below() if name.startswith(f"{steps[-1]}-"))


def saved_steps():
    return sorted({int(name.partition("-")[0]) for name in STATES.below() if name != "owner"})


def latest(like=None):
    """Returns the newest state, its position, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, position = open_states(RUN).latest(make() if like is None else like)
    return state, position, [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_states_are_exact_and_may_be_donated_while_they_are_written(bucket, monkeypatch):
    monkeypatch.setattr(bucket_states, "_LARGEST", 20)  # arrays are cut, and small ones share an object
    weak = {"number": jax.numpy.asarray(0.25), "list": jax.lax.full((3,), 0.5) * 1.5}
    state = {"train": make(7.0, width=5), "weak": weak, "empty": np.zeros((0, 3))}
    state = jax.tree.map(jax.numpy.asarray, state)
    like, exact = jax.eval_shape(lambda: state), jax.tree.map(lambda leaf: leaf + 0, state)
    states = open_states(RUN)
    assert isinstance(states, BucketStates) and states.latest(like) is None
    bucket.fault = lambda method, name: time.sleep(0.02)
    states.save(7, state, {"epoch": 2})
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(state)
    states.close()
    for wanted in (like, exact):
        loaded, position, said = latest(wanted)
        assert same(loaded, exact) and position == {"epoch": 2} and not said
    sizes = [(STATES / name).stat().st_size for name in STATES.below() if "/0-" in name]
    assert len(sizes) > 10 and max(sizes) <= 20


def test_the_last_two_are_kept(bucket):
    write(10, 11, 12, 13)
    assert saved_steps() == [12, 13]
    states = open_states(RUN)
    states.latest(make())
    states.save(13, make(99.0), {})
    states.close()
    assert same(latest()[0], make(13.0))
    with pytest.raises(ValueError, match="states/13 is the checkpoint of another run: move it away"):
        open_states(RUN).save(13, make(), {})
    with pytest.raises(ValueError, match=r"states/13 does not fit this configuration .*shape \(3, 4\), not"):
        latest(make(width=8))


def test_damage_of_any_object_is_found_and_the_checkpoint_before_is_used(bucket, monkeypatch):
    monkeypatch.setattr(bucket_states, "_LARGEST", 50)
    objects = write(10, 20)
    assert len(objects) > 4
    for name in objects:
        place, end = STATES / name, name.partition("/")[2]
        content = place.read_bytes()
        for damaged in (content[:-1], content[:9] + bytes([content[9] ^ 1]) + content[10:], b"", None):
            place.unlink() if damaged is None else place.write(damaged)
            state, position, said = latest()
            assert same(state, make(10.0)) and position == {"epoch": 1.0}
            if damaged is None and "index" in end:
                assert not said  # as after a kill while it was written
            else:
                assert said == [
                    f"{STATES}/20 is damaged ({end} has changed or is missing): training goes on from step 10"
                ]
            place.write(content)
    assert same(latest()[0], make(20.0))


def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(bucket):
    first = STATES / write(10, 20)[0]
    first.write(b"")
    states = open_states(RUN)
    with pytest.warns(UserWarning, match="20 is damaged"):
        states.latest(make())
    for step in (15, 20):
        states.save(step, make(step), {"epoch": step}, wait=True)
    state, position, said = latest()
    assert same(state, make(20.0)) and position == {"epoch": 20} and not said
    assert first.exists() and saved_steps() == [15, 20]
    for name in STATES.below():
        if name.endswith("0-0"):
            (STATES / name).write(b"")
    with pytest.raises(ValueError, match=r"only damaged checkpoints \(20: 0-0 has .*; 15: 0-0 has .*train again"):
        latest()


def test_what_was_not_finished_is_ignored_and_then_deleted(bucket):
    """One of two processes was killed before it wrote its index, or a deletion was killed."""
    objects = write(10, 20)
    index = next(STATES / name for name in objects if "index" in name)
    one_of_two = index.with_name("index-0-of-2.json")
    one_of_two.write(index.read_bytes())
    index.unlink()
    assert latest()[1:] == ({"epoch": 1.0}, [])
    states = open_states(RUN)
    states.latest(make())
    assert one_of_two.exists()  # another process may be writing it
    states.save(15, make(15.0), {}, wait=True)
    assert saved_steps() == [10, 15]


def test_indexes_that_lack_parts_are_damaged(bucket):
    index = next(STATES / name for name in write(10, 20) if "index" in name)
    content = json.loads(index.read_bytes().splitlines()[0])
    content["objects"]["0-0"]["parts"].pop(0)
    index.write(json.dumps(content).encode())
    assert "20 is damaged (its indexes lack parts of arrays)" in latest()[2][0]


def test_a_failed_write_is_one_line_and_the_checkpoint_before_stays(bucket, monkeypatch):
    write(10)
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    buckets._opened.cache_clear()
    states = open_states(RUN)
    states.latest(make())
    bucket.fault = lambda method, name: "503" if method == "POST" and "/20-" in name else None
    states.save(20, make(20.0), {})
    said = r"states/20 could not be written \(gs://bucket/run/states/20-.*; run the same command again\)"
    with pytest.raises(OSError, match=said) as raised:
        states.close()
    assert "\n" not in str(raised.value)
    bucket.fault = lambda method, name: None
    assert same(latest()[0], make(10.0))
    buckets._opened.cache_clear()


def resumed():
    states = open_states(RUN)
    states.latest(make())
    return states


@pytest.mark.parametrize("suspended_at", ["index-", "0-0"])
def test_a_suspended_process_leaves_no_checkpoint_that_counts(bucket, suspended_at):
    """It is suspended while it writes step 100; another process goes on from step 50."""
    write(50)
    first, reached, goes_on = resumed(), threading.Event(), threading.Event()

    def suspend(method, name):
        if method == "POST" and "/states/100-" in name and suspended_at in name and not reached.is_set():
            reached.set()
            goes_on.wait(20)

    bucket.fault = suspend
    first.save(100, make(100.0), {"epoch": 1})
    assert reached.wait(20)
    second = resumed()
    second.save(60, make(60.0), {}, wait=True)
    goes_on.set()
    with pytest.raises(LockedError, match="states has changed: another process continues this run"):
        first.close()
    assert any(name.startswith("100-") and "index" in name for name in STATES.below())
    for step in (70, 80):
        second.save(step, make(step), {}, wait=True)
    assert saved_steps() == [70, 80, 100] and same(latest()[0], make(80.0))
    second.save(100, make(1.0), {}, wait=True)
    assert same(latest()[0], make(1.0))
    resumed().save(101, make(), {}, wait=True)
    assert saved_steps() == [100, 101]


def test_a_process_that_read_the_run_before_another_went_on_is_refused(bucket):
    write(10)
    first, second = resumed(), resumed()
    (STATES / "30-0123abcd" / "index-0-of-1.json").write(b"{}")  # completed after both have read the run
    second.save(20, make(20.0), {}, wait=True)
    with pytest.raises(LockedError, match="another process continues this run"):
        first.save(40, make(40.0), {})
    assert saved_steps() == [10, 20] and same(latest()[0], make(20.0))
    (STATES / "owner").write(b"damaged")
    with pytest.raises(ValueError, match="states/owner is damaged: remove it"):
        latest()


def test_checkpoints_that_are_deleted_while_they_are_read_are_listed_again(bucket):
    write(10, 20)
    writer, reader = resumed(), open_states(RUN)
    steps, goes_on = reader._steps, iter([(30, 40), (50, 60)])

    def listed():
        before = steps()
        for step in next(goes_on, ()):
            writer.save(step, make(step), {}, wait=True)
        return before

    reader._steps = listed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(reader.latest(make())[0], make(60.0))


def test_runs_that_were_copied_between_disk_and_bucket_are_refused(bucket, tmp_path):
    name = write(10)[0]
    (tmp_path / "states" / name).parent.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"states/10-\w{8} was written in a bucket, .* copy the run back"):
        open_states(tmp_path).latest(make())
    (STATES / "20" / "record").write(b"{}")
    with pytest.raises(ValueError, match="gs://bucket/run: checkpoint states/20 was written on a disk"):
        latest()


def test_the_log_of_a_run_that_another_process_goes_on_with_is_not_replaced(bucket):
    place = RUN / runs.METRICS_FILE
    log = runs.MetricsLog(place, 0)
    log.append({"step": 1})
    log.append({"step": 2})
    assert place.read_text() == ""  # written a moment ago
    log.flush()
    assert place.read_text() == '{"step": 1}\n{"step": 2}\n' and log.logged == 2
    again = runs.MetricsLog(place, 1, 1)
    assert place.read_text() == '{"step": 1}\n' and again.logged == 1
    log.append({"step": 3})
    with pytest.raises(LockedError, match=r"metrics.jsonl has changed .* another process continues this run"):
        log.flush()
    assert place.read_text() == '{"step": 1}\n'


def test_equal_content_of_another_process_is_no_permission_to_go_on(bucket):
    place = RUN / runs.METRICS_FILE
    log = runs.MetricsLog(place, 0)
    log.append({"step": 1})
    lost = iter(["lost"])
    bucket.fault = lambda method, name: next(lost, None) if (method, name[-13:]) == ("POST", "metrics.jsonl") else None
    log.flush()  # the answer is lost, and the repeated request finds the process's own content
    assert next(lost, None) is None
    runs.MetricsLog(place, 1, 1)  # writes the same content
    with pytest.raises(LockedError, match=r"metrics.jsonl has changed .* another process continues this run"):
        log.flush()


def test_a_suspended_process_does_not_replace_a_head_s_newer_state(bucket):
    def run():
        return runs.Run(SimpleNamespace(run_dir=str(RUN)), runs.TrainState({}, {}, jax.numpy.int32(0)))

    run().save()
    first = run()
    second = run()
    with pytest.raises(LockedError, match=r"state.msgpack has changed .* another process continues"):
        runs.save_state(RUN, first.state, {"logged": 0}, first._object)
    second.save()
    assert run().resumed_from == {"logged": 0}


def result(output):
    """Returns the digest of the final state, and the losses of all steps."""
    records = [json.loads(line) for line in (RUN / runs.METRICS_FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    return json.loads(output.splitlines()[-1]), [record["loss"] for record in records]


def stop(processes, victim, number, after):
    """Sends a signal `after` seconds after the run has begun to take steps, and has saved a state."""
    began = time.monotonic()
    before = (RUN / runs.METRICS_FILE).read()[1]
    while time.monotonic() - began < 60 and all(process.poll() is None for process in processes):
        if (RUN / runs.METRICS_FILE).read()[1] != before and open_states(RUN)._steps():
            break
        time.sleep(0.02)
    time.sleep(after)
    processes[victim].send_signal(number)


@pytest.mark.laws
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_again_and_again_ends_as_without(number, bucket, unbroken, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LEASE", "1")
    draws, status, stopped = random.Random(number), 1, 0
    for _ in range(int(os.environ.get("SPECCASCADE_KILLS", "2"))):
        running = start(RUN, every=3)  # a write is under way at most times
        stop(running, 0, number, draws.uniform(0, 0.5) if stopped else 0)
        ((status, output, said),) = ended(running)
        assert status in (0, -9, 143) and "damaged" not in said, said
        stopped += status != 0
        if status == 143:
            assert said.strip().endswith(f"stopped: {interrupts.SAVED}"), said
            assert saved_steps()[-1] == len((RUN / runs.METRICS_FILE).read_text().splitlines())
    if status != 0:
        ((status, output, said),) = ended(start(RUN, every=3))
    assert status == 0 and "damaged" not in said, said
    assert result(output) == unbroken
    assert saved_steps() == [99, 100] and not (RUN / "lock").exists() and stopped


@pytest.mark.laws
def test_a_run_goes_on_while_the_process_that_it_replaces_wakes_up(bucket, unbroken, monkeypatch):  # noqa: F811
    """The first process is suspended while it completes the checkpoint of step 6; the second goes on from step 3."""
    monkeypatch.setenv("TOY_LEASE", "1")
    suspended, goes_on = threading.Event(), threading.Event()

    def suspend(method, name):
        if method == "POST" and "/states/6-" in name and "index" in name and not suspended.is_set():
            first[0].send_signal(signal.SIGSTOP)
            suspended.set()
            goes_on.wait(60)

    bucket.fault = suspend
    first = start(RUN, every=3)
    assert suspended.wait(60)
    log = (RUN / runs.METRICS_FILE).read()
    second = start(RUN, every=3)
    while (RUN / runs.METRICS_FILE).read() == log and second[0].poll() is None:
        time.sleep(0.02)
    goes_on.set()
    first[0].send_signal(signal.SIGCONT)
    ((status, _, said),) = ended(first)
    assert status == 1 and "another process continues this run" in said, said
    ((status, output, said),) = ended(second)
    assert status == 0 and "damaged" not in said, said
    assert result(output) == unbroken and saved_steps()[-2:] == [99, 100]


@pytest.mark.laws
def test_two_runs_in_one_folder_are_refused(bucket, monkeypatch):
    monkeypatch.setenv("TOY_LEASE", "1.5")
    running = start(RUN, steps=100_000)
    stop(running, 0, signal.SIGCONT, 0)
    ((status, _, said),) = ended(start(RUN))
    assert status == 1 and f"error: {RUN} is being written by process {running[0].pid} " in said, said
    running[0].terminate()
    assert ended(running)[0][0] == 143


@pytest.mark.parity
@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (1, signal.SIGTERM)])
def test_two_processes_stop_together_and_any_number_resumes(victim, number, bucket, unbroken, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LEASE", "1")
    running = start(RUN, 2)
    stop(running, victim, number, 0)
    done = ended(running)
    expected = (hosts.STATUS, -9) if number == signal.SIGKILL else (143, 143)
    assert tuple(status for status, *_ in done) == expected, done
    newest = max(open_states(RUN)._steps(), default=0)
    assert newest > 0
    copy = dict(bucket.objects)
    for count in (2, 1):
        bucket.objects = dict(copy)
        done = ended(start(RUN, count))
        assert [status for status, *_ in done] == [0] * count, done
        assert f"begins at {newest}\n" in done[0][1] and "damaged" not in done[0][2]
        assert result(done[0][1]) == unbroken


MESHES = """
import json
import jax
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.training.bucket_states import open_states
from tests.support import toy_run
outcomes, small = [], jax.jit(toy_run.make)()
for number, (wrote, reads) in enumerate([((8, 1), (2, 4)), ((2, 4), (8, 1)), ((2, 4), (1, 1)), ((1, 1), (4, 2))]):
    folder = BucketPath(f"gs://bucket/{number}")
    like = toy_run.abstract(toy_run.mesh(wrote))
    open_states(folder).save(1, jax.device_put(small, jax.tree.map(lambda leaf: leaf.sharding, like)), {}, wait=True)
    wanted = toy_run.abstract(toy_run.mesh(reads))
    state, _ = open_states(folder).latest(wanted)
    placed = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, wanted)
    outcomes.append([toy_run.digest(state) == toy_run.digest(small), all(jax.tree.leaves(placed))])
print(json.dumps(outcomes))
"""


@pytest.mark.parity
def test_another_mesh_resumes(bucket):
    flags = "--xla_force_host_platform_device_count=8"
    assert new_process.answer(MESHES, XLA_FLAGS=flags) == [[True, True]] * 4
