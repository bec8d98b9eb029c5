"""Tests of a pool of two workers: after any process is killed, the records equal those of a plain sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from speccascade_jax.evaluation import experiment, pool
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.session import Identity
from speccascade_jax.results.store.record import Provenance
from speccascade_jax.results.store.result_store import ResultStore, read_records
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.files import plain
from tests.support import text_pair, tiny_pair

ROOT = repository_root()
POINTS = 2 + 1 + 3  # target and draft alone, spec_decode, and chow at three α's


def given(folder, output):
    """Returns the arguments of a small sweep."""
    return {
        "pair": ModelPair(name=str(folder)), "evaluation": text_pair.evaluation(), "methods": ["spec_decode", "chow"],
        "alphas": {"chow": (0.2, 0.5, 0.8)}, "block_sizes": (2,), "output": str(output), "cooler": (),
    }  # fmt: skip


def points(timed=0):
    return [text_pair.point("autoregressive", text_pair.evaluation(latency_examples=timed))]


class DiedError(Exception):
    """A fake of Ray's error for a dead actor."""


class RaisedError(Exception):
    """A fake of Ray's error for an exception in an actor."""

    cause = ValueError("of the worker")


class Scripted:
    """A fake of Ray: workers "measure" letters; for each letter, `script` lists the results, a record or an error."""

    exceptions = SimpleNamespace(RayError=DiedError, RayTaskError=RaisedError)

    def __init__(self, script=(), resources=None):
        self.script, self.asked, self.resources = dict(script), [], resources or {"CPU": 2}
        self.started = self.ended = 0

    def init(self, *, address, **_):
        self.address = address

    def shutdown(self):
        self.ended += 1

    def cluster_resources(self):
        return self.resources

    def remote(self, **needs):
        self.needs = needs
        return lambda worker: SimpleNamespace(remote=self.start)

    def start(self, letters, accelerated, files):
        assert files == []
        self.accelerated = accelerated
        self.started += 1
        code = Provenance(code=None, toolchain={})
        identities = [Identity(f"key {letter}", f"judged {letter}", code) for letter in letters]
        remote = {"identities": lambda letters: lambda: identities, "measure": self.measure}
        return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in remote.items()})

    def measure(self, letters, keys):
        self.asked.append("".join(letters))
        for letter, key in zip(letters, keys, strict=True):
            outcomes = self.script.get(letter, [])
            error = outcomes.pop(0) if outcomes else None

            def answer(key=key, error=error):
                if error:
                    raise error
                return {"key": key}

            yield answer
            if error:
                return

    def wait(self, asked, num_returns):
        return asked[-1:], asked[:-1]  # the fake answers the latest request first

    def get(self, answer):
        return answer()


class Letter(str):
    evaluation = SimpleNamespace(latency_examples=0)

    def label(self):
        return f"point {self}"


def filled(monkeypatch, tmp_path, script, *groups):
    """Fills a store with groups of letters; returns the fake Ray and the store's keys."""
    ray = Scripted(script)
    monkeypatch.setitem(sys.modules, "ray", ray)
    letters = [[Letter(letter) for letter in group] for group in groups]
    workers = pool.Pool([letter for group in letters for letter in group], 2)
    with ResultStore(tmp_path / "store.jsonl") as store:
        store.append({"key": "key b"})
        workers.fill(store, letters, {point: identity.key for point, identity in workers.identities().items()})
        return ray, [record["key"][-1] for record in store.records]


def test_workers_measure_missing_points_only_and_replace_dead_workers(monkeypatch, tmp_path):
    ray, stored = filled(monkeypatch, tmp_path, {"d": [DiedError()] * 2}, "abc", "b", "cde")
    assert sorted(stored) == list("abcde") and ray.started == 2 + 2
    assert sorted(ray.asked) == ["ac", "de", "de", "de"]


def test_a_point_that_repeatedly_kills_its_worker_ends_the_sweep(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="the worker of point d died 3 times: out of memory"):
        filled(monkeypatch, tmp_path, {"d": [DiedError("a\nout of memory\n")] * 3}, "ab", "cde")


def test_an_error_of_a_worker_is_raised_in_the_driver(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="of the worker"):
        filled(monkeypatch, tmp_path, {"d": [RaisedError()]}, "cde")


def without_clocks(path):
    """Returns a store's records by key, without the entries that depend on the clock."""
    by_key = {}
    for record in read_records(path):
        del record["started"], record["wall_seconds"]
        assert record["key"] not in by_key
        by_key[record["key"]] = record
    return by_key


def test_the_error_without_ray_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"a pool of workers needs Ray: pip install '\.\[pool\]'"):
        pool.Pool(points(), 2)


@pytest.mark.parametrize("device, message", [
    ("", r"workers=2 share the cores of a machine and would disturb each other's timings: give worker_device"),
    ("CPU", r"worker_device='CPU' is shared by the workers of a machine: name a resource"),
])  # fmt: skip
def test_workers_that_would_disturb_timings_are_refused(device, message):
    with pytest.raises(ValueError, match=message):
        pool.check(points(timed=2), 2, device)


def test_a_worker_on_another_kind_of_machine_measures_nothing(monkeypatch):
    monkeypatch.setattr(pool, "evaluate", lambda session, points: iter([{"key": "measured"}]))
    worker = pool.Worker([], accelerated=False)
    worker._session = SimpleNamespace(key=lambda point: f"here {point}")
    assert list(worker.measure(["a"], ["here a"])) == [{"key": "measured"}]
    with pytest.raises(ValueError, match="has another device, processor or package than the first"):
        list(worker.measure(["a"], ["there a"]))


def test_workers_need_a_single_driver_process(monkeypatch, tmp_path):
    monkeypatch.setattr(experiment.hosts, "many", lambda: True)
    with pytest.raises(ValueError, match="workers=2 needs a single driver process"):
        experiment.sweep(**given(tmp_path, tmp_path / "none.jsonl"), workers=2)


@pytest.mark.parametrize("device, needs, accelerated", [
    ("GPU", {"num_cpus": 1, "num_gpus": 1}, True),
    ("TPU", {"num_cpus": 1, "resources": {"TPU": 1}}, True),
    ("machine", {"num_cpus": 1, "resources": {"machine": 1}}, False),
])  # fmt: skip
def test_each_worker_reserves_a_device(monkeypatch, device, needs, accelerated):
    ray = Scripted(resources={"CPU": 2, device: 2})
    monkeypatch.setitem(sys.modules, "ray", ray)
    pool.Pool(points(timed=2), 2, device=device)
    assert (ray.needs, ray.accelerated, ray.started, ray.address) == (needs, accelerated, 2, "local")


@pytest.mark.parametrize("resources, device, message", [
    ({"CPU": 8, "GPU": 1}, "GPU", "workers=2 need one GPU each, but Ray has 1: lower workers"),
    ({"CPU": 8, "GPU": 2}, "gpu", "need one gpu each, but Ray has 0: .* to another of CPU, GPU"),
    ({"CPU": 8, "TPU": 4}, None, "workers=2 would all open the same TPUs: give worker_device='TPU'"),
])  # fmt: skip
def test_a_cluster_without_enough_devices_is_refused_and_shut_down(monkeypatch, resources, device, message):
    ray = Scripted(resources=resources)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ValueError, match=message):
        pool.Pool(points(), 2, device=device)
    assert ray.ended == 1 and not ray.started


@pytest.mark.parametrize("wrong, message", [
    ({"workers": -1}, "workers=-1 is not a whole number >= 0"),
    ({"workers": 2, "pair": ModelPair(name="x", mesh=(1, 4))}, r"mesh=\(1, 4\) needs several devices"),
    ({"worker_device": "TPU"}, "worker_device='TPU' needs workers: give workers too"),
    ({"workers": 2, "plan": 3}, "plan=3 needs a single process without workers: leave plan out"),
    ({"workers": 2, "profile_at": "t"}, "profile_at=t traces this process, and workers=2 measure: leave one out"),
    ({"profile_at": "s3://t"}, "addresses of s3: can.t be read or written"),
])  # fmt: skip
def test_invalid_pool_settings_are_refused_before_anything_is_loaded(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        experiment.sweep(**given(tmp_path, tmp_path / "none.jsonl") | wrong)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns a pair, and the records that one process measures."""
    pytest.importorskip("ray", reason="needs the extra pool: make parity")
    folder = tiny_pair.write(tmp_path_factory.mktemp("pair"))
    experiment.sweep(**given(folder, folder / "alone.jsonl"))
    return folder, without_clocks(folder / "alone.jsonl")


@pytest.mark.parity
def test_another_worker_measures_the_points_of_a_killed_one(alone, tmp_path, monkeypatch):
    folder, expected = alone
    append, killed, fill = ResultStore.append, [], pool.Pool.fill
    pids = list[int]()

    def told(own, *args):
        pids.extend(own.ray.get([worker.pid.remote() for worker in own.workers]))
        fill(own, *args)

    def append_and_kill(store, record):
        append(store, record)
        if not killed:  # the other worker is busy, or will be asked next
            killed.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

    deaths, count = [], pool.Pool._count_death
    monkeypatch.setattr(pool.Pool, "_count_death", staticmethod(lambda *args: deaths.append(args) or count(*args)))
    monkeypatch.setattr(pool.Pool, "fill", told)
    monkeypatch.setattr(ResultStore, "append", append_and_kill)
    experiment.sweep(**given(folder, tmp_path / "pool.jsonl"), workers=2)
    assert len(set(pids)) == 2 and killed and deaths
    assert plain(without_clocks(tmp_path / "pool.jsonl")) == plain(expected)


@pytest.mark.parity
def test_a_killed_driver_resumes(alone, tmp_path):
    folder, expected = alone
    output = tmp_path / "driver.jsonl"
    code = (
        "import sys; from tests.evaluation.pool_test import experiment, given; "
        "experiment.sweep(**given(sys.argv[1], sys.argv[2]), workers=2)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([sys.executable, "-c", code, str(folder), str(output)], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and driver.poll() is None:
        if output.exists() and output.read_bytes().count(b"\n") >= 1:
            break
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    begun = output.read_bytes()
    assert 1 <= begun.count(b"\n") < POINTS
    experiment.sweep(**given(folder, output), workers=2)
    assert output.read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])
    assert plain(without_clocks(output)) == plain(expected)
    assert len(json.loads(output.read_bytes().splitlines()[0])) > 5


@pytest.mark.parity
def test_a_loading_error_of_a_worker_reads_as_in_the_driver(alone, tmp_path):
    with pytest.raises(ValueError, match="^no pair .*nowhere"):
        experiment.sweep(**given(tmp_path / "nowhere", tmp_path / "none.jsonl"), workers=1)


@pytest.mark.parity
def test_more_workers_than_devices_are_refused(alone, tmp_path):
    folder, _ = alone
    with pytest.raises(ValueError, match="workers=2 need one TPU each, but Ray has 0: lower workers"):
        experiment.sweep(**given(folder, tmp_path / "none.jsonl"), workers=2, worker_device="TPU")
