"""Tests of notices about long operations, which are shown once, and only in a terminal or log."""

import logging
import sys
import threading
import warnings

import pytest

from speccascade_jax.runtime import notices
from tests.support.terminal import Terminal


def terminal(monkeypatch):
    """Sets the terminal in the test itself: pytest gives each phase a stderr of its own."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_a_long_operation_is_reported_while_it_runs_with_its_time_at_the_end(monkeypatch, caplog):
    stderr = terminal(monkeypatch)
    caplog.set_level(logging.INFO, logger="speccascade_jax")
    with notices.said_if_long(lambda: "compiling this", after=0.0):
        assert stderr.written.wait(60)
        assert stderr.getvalue() == "speccascade_jax: compiling this … "
    assert stderr.getvalue().startswith("speccascade_jax: compiling this … 0.") and stderr.getvalue().count("\n") == 1
    assert [record.getMessage() + "\n" for record in caplog.records] == [stderr.getvalue()]


def test_a_short_operation_is_not_reported(monkeypatch, caplog):
    stderr = terminal(monkeypatch)
    with caplog.at_level(logging.INFO, logger="speccascade_jax"), notices.said_if_long(pytest.fail, after=1e6):
        pass
    assert stderr.getvalue() == "" and not caplog.records
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_a_failure_ends_the_line(monkeypatch):
    stderr = terminal(monkeypatch)
    with pytest.raises(RuntimeError), notices.said_if_long(lambda: "this", after=0.0):
        stderr.written.wait(60)
        raise RuntimeError
    assert stderr.getvalue().endswith(" s\n")


def test_without_a_terminal_only_the_log_gets_the_notice(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal(isatty=False))
    monkeypatch.delattr(sys, "ps1", raising=False)
    asked = threading.Event()
    caplog.set_level(logging.INFO, logger="speccascade_jax")
    with notices.said_if_long(lambda: asked.set() or "this", after=0.0):
        assert asked.wait(60)
    assert sys.stderr.getvalue() == "" and len(caplog.records) == 1
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # a notebook sets this
    with notices.said_if_long(lambda: "this", after=0.0):
        assert sys.stderr.written.wait(60)
    assert sys.stderr.getvalue().startswith("speccascade_jax: this … ")


def test_a_warning_of_a_command_is_one_line_without_a_line_of_python(capsys):
    before = warnings.formatwarning
    with notices.one_line_warnings():
        print(warnings.formatwarning("alphas are not used", UserWarning, "file.py", 3, "call(x)"), end="")
        library = warnings.formatwarning("old name", DeprecationWarning, "file.py", 3, "call(x)")
    assert capsys.readouterr().out == "warning: alphas are not used\n"
    assert (
        library == before("old name", DeprecationWarning, "file.py", 3, "call(x)") and warnings.formatwarning is before
    )
