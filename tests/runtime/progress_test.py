"""Tests of signs of life: no command is silent for long, and no line disturbs its output."""

import re
import sys
import threading
import time

import pytest

from speccascade_jax.runtime import progress
from tests.support.terminal import Terminal


@pytest.fixture
def quick(monkeypatch):
    """Shows signs of life after a tenth of a second."""
    monkeypatch.setattr(progress, "EVERY", 0.1)
    monkeypatch.setattr(progress, "EARLIER", 0.05)


def streams(monkeypatch, isatty):
    """Sets both streams in the test itself: pytest gives each phase streams of its own."""
    monkeypatch.setattr(sys, "stdout", Terminal(isatty))
    monkeypatch.setattr(sys, "stderr", Terminal(isatty))
    return sys.stderr


@pytest.mark.parametrize("isatty", [True, False], ids=["terminal", "file"])
def test_a_long_stage_says_what_it_does_until_other_output_follows(quick, monkeypatch, isatty):
    stderr = streams(monkeypatch, isatty)
    with progress.shown(), progress.stage("measuring"), progress.stage(lambda: "timing"):
        assert stderr.written.wait(60)
        shown = stderr.getvalue()
        print("a result")
        assert sys.stdout.getvalue() == "a result\n"
        written = stderr.getvalue()
    line = r"… \d+ s: timing; measuring"
    if stderr.isatty():
        assert re.match(rf"\r\x1b\[K{line}", shown) and "\n" not in written
        assert shown.endswith("\r"), "what other code writes to the terminal does not continue the line"
        assert written.endswith("\r\x1b[K"), "the line makes room for the output"
    else:
        assert re.match(f"{line}\n", shown) and "\r" not in written
    assert "write" not in vars(sys.stdout) and "write" not in vars(stderr)
    assert not any(thread.name == "signs of life" for thread in threading.enumerate())


def test_output_delays_the_line(monkeypatch):
    streams(monkeypatch, False)
    now = [100.0]
    signs = progress.Signs(clock=lambda: now[0])
    signs.begin()
    now[0] = 103.9
    print("a result")
    now[0] = 107.8
    signs.beat()
    assert sys.stderr.getvalue() == ""
    now[0] = 107.9 + 1e-6
    signs.beat()
    signs.end()
    assert sys.stderr.getvalue().endswith(" s: working\n") and sys.stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize(("isatty", "times"), [
    (False, [4, 12, 28, 60, 120, 180]),
    (True, list(range(4, 201, 4))),
], ids=["file", "terminal"])  # fmt: skip
def test_lines_stay_frequent_on_a_terminal_and_become_rare_in_a_file(isatty, times, monkeypatch):
    streams(monkeypatch, isatty)
    monkeypatch.setattr(progress.Signs, "_watch", lambda self: None)
    now, printed = [0.0], []
    signs = progress.Signs(clock=lambda: now[0])
    for second in range(1, 201):
        now[0], before = float(second), sys.stderr.getvalue()
        signs.beat()
        printed += [second] * (sys.stderr.getvalue() != before)
    assert printed == times


@pytest.fixture
def nothing_prepared(monkeypatch):
    """Forgets the programs that earlier tests compiled."""
    monkeypatch.setattr(progress, "_PREPARED", [])


def test_counted_parts_have_a_remaining_time_without_the_first_part(nothing_prepared):
    entered = progress.Stage(lambda: "decoding", total=5, unit="batches", began=0.0)
    assert entered.text(30.0) == "0 of 5 batches, decoding"
    entered.count()
    entered.first = 40.0
    assert entered.text(41.0) == "1 of 5 batches, decoding"
    entered.count()
    assert entered.text(50.0) == "2 of 5 batches, about 0:30 left, decoding"
    progress.prepared(8.0, 60.0)
    assert entered.text(60.0) == "2 of 5 batches, about 0:36 left, decoding", "a compilation does not count"
    entered.total = 1
    assert entered.text(50.0) == "decoding"


def test_working_time_stands_still_during_compilations(nothing_prepared):
    progress.prepared(2.0, 12.0)
    progress.prepared(1.0, 14.0)
    assert progress.working_time(20.0) == 17.0
    progress.prepared(9.0, 15.0)  # it contains the two others
    assert progress.working_time(20.0) == 11.0
    progress.compiling(True)
    begun = progress.working_time(0.0)
    assert begun == progress.working_time(1000.0)
    progress.compiling(False)


def test_between_two_parts_the_working_thread_prints(quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    monkeypatch.setattr(progress.Signs, "_watch", lambda self: None)
    with progress.shown():
        for number in progress.counted([1, 2], "decoding", "batches"):
            time.sleep(0.06)
            assert sys.stderr.getvalue().count("\n") == number - 1, "no line during a part"
    assert "… 0 s: 1 of 2 batches, decoding" in sys.stderr.getvalue()


def test_a_stage_ends_with_an_error_and_with_the_loop():
    with pytest.raises(RuntimeError), progress.stage("failing"):
        raise RuntimeError
    for _ in progress.counted("ab", "counting", "letters"):
        break
    assert progress.described(0.0).endswith(" s: working")


def test_a_compilation_is_named_until_its_end():
    with progress.stage(lambda: "timing"):
        progress.compiling(True)
        assert progress.described(time.monotonic()) == "0 s: compiling a program; timing"
        progress.compiling(False)
        assert "compiling" not in progress.described(time.monotonic())
        progress.compiling(True)  # it fails, and JAX reports no end
    assert progress.described(0.0).endswith(" s: working")
