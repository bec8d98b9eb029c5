"""Tests of requests to a worker, whose fake library counts upwards, and fails, waits or ends on request."""

import sys

import pytest

from benchmarks.peers import protocol
from benchmarks.peers.protocol import Worker, WorkerError
from speccascade_jax.runtime.paths import repository_root

FAKE = """
import os, sys
from benchmarks.peers import protocol

assert "jax" not in sys.modules  # what workers import must run where only their own library is


class Counting:
    def versions(self):
        print("a library greets on stdout")
        return {"counting": "1.0"}

    def load(self, pair):
        self.first = pair["first"]

    def write(self, options, prompts, pair):
        if options.get("fails"):
            raise ValueError("it can't\\nand says so at length")
        if options.get("dies"):
            print("killed by itself", file=sys.stderr, flush=True)
            os._exit(3)
        return [list(range(prompt[-1] + 1, prompt[-1] + 1 + pair["new_tokens"])) for prompt in prompts]


protocol.serve(Counting(), {"double": lambda number: 2 * number})
"""


@pytest.fixture
def worker(tmp_path):
    """Returns the worker, with a pair that stops at 7."""
    (tmp_path / "fake.py").write_text(FAKE)
    environment = {"PYTHONPATH": str(repository_root()), "PYTHONUNBUFFERED": ""}  # the environment of a user's shell
    started = Worker([sys.executable, str(tmp_path / "fake.py")], tmp_path / "log", environment)
    started.ask("load", pair={"first": 1, "new_tokens": 4, "stop": [7]})
    yield started
    started.close()


def test_a_worker_answers_and_its_output_goes_to_the_log(worker):
    assert worker.ask("versions") == {"counting": "1.0"}
    assert "a library greets on stdout" in worker.log.read_text()
    assert worker.ask("double", given={"number": 21}) == 42


def test_outputs_of_all_batches_are_in_order_and_end_at_the_stop_id(worker):
    answer = worker.ask("run", options={}, batches=[[[1, 2], [4]], [[9]]])
    assert answer["tokens"] == [[3, 4, 5, 6], [5, 6, 7], [10, 11, 12, 13]]
    assert len(answer["seconds"]) == 2 and all(second >= 0 for second in answer["seconds"])


def test_only_the_library_is_timed():
    ticks = iter(range(100))

    class Peer:
        def write(self, options, prompts, pair):
            next(ticks), next(ticks)
            return prompts

    answer = protocol.timed(Peer(), {}, [[[1]], [[2]]], {"stop": []}, clock=lambda: next(ticks))
    assert answer == {"seconds": [3, 3], "tokens": [[1], [2]]}


def test_a_worker_reports_an_error_and_continues(worker):
    with pytest.raises(WorkerError, match="^ValueError: it can't$"):
        worker.ask("run", options={"fails": True}, batches=[[[1]]])
    assert worker.ask("run", options={}, batches=[[[1]]])["tokens"] == [[2, 3, 4, 5]]


def test_the_error_for_a_dead_worker_has_its_status_and_last_output(worker):
    with pytest.raises(WorkerError, match="the process ended with status 3: killed by itself"):
        worker.ask("run", options={"dies": True}, batches=[[[1]]])
    with pytest.raises(WorkerError, match="status 3"):
        worker.ask("versions")


def test_a_missing_interpreter_raises_an_error(tmp_path):
    with pytest.raises(WorkerError, match="nothing/python"):
        Worker([str(tmp_path / "nothing/python")], tmp_path / "log")


@pytest.mark.parametrize(("row", "wanted"), [([1, 2, 3], [1, 2]), ([3, 1], [3, 1]), ([2], [2]), ([], [])])
def test_a_row_ends_at_its_first_stop_id(row, wanted):
    assert protocol.cut(row, [2]) == wanted
