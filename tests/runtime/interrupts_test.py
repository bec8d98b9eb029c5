"""Tests of Ctrl-C and SIGTERM: one line says how to continue, with the usual exit status and no traceback."""

import gc
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from speccascade_jax.runtime import interrupts
from speccascade_jax.runtime.paths import repository_root

ROOT = repository_root()
NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


@pytest.fixture(autouse=True)
def signals_are_heard():
    """Restores SIGINT and SIGHUP: shells and nohup start background processes without, and children inherit that."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_print_one_line_and_set_the_exit_status(number, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, interrupts.told("do that"):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except Exception:
            raise AssertionError("what catches errors caught the signal") from None
    assert ended.value.code == NUMBERS[number]
    assert capsys.readouterr().err.split("\n") == ["", "stopped: do that", ""]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_inside_a_callback_of_the_garbage_collector_is_not_lost(number):
    def callback(phase, info):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), number)
        time.sleep(0.01)

    gc.callbacks.append(callback)
    with pytest.raises(SystemExit) as ended, interrupts.told("do that"):
        gc.collect()
        time.sleep(10)
    assert ended.value.code == NUMBERS[number]


def test_nohup_switches_a_closed_terminal_off():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts.told("do that"):
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)


def test_other_errors_propagate():
    with pytest.raises(ValueError, match="wrong"), interrupts.told(interrupts.SAME):
        raise ValueError("wrong")


def test_every_experiment_handles_interrupts():
    ways = ("gin_flags.main(", "gin_flags.run_app(", "with interrupts.told(")
    scripts = {path.name: path.read_text() for path in (ROOT / "experiments").glob("[!_]*.py")}
    assert scripts and all(any(way in text for way in ways) for text in scripts.values())


@pytest.mark.laws
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("script", "said"), [("sweep", interrupts.SAME), ("run", interrupts.ANEW)])
def test_a_stopped_script_says_how_to_continue(script, said, number, tmp_path):
    (tmp_path / "sleeper.py").write_text("import pathlib, time\npathlib.Path('asleep').touch()\ntime.sleep(60)\n")
    (tmp_path / "long.gin").write_text("import sleeper\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"experiments.{script}", "--gin_file=long.gin"]
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "asleep").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(number)
    error = running.communicate(timeout=30)[1]
    assert running.returncode == NUMBERS[number], error
    # on a busy machine the import takes long enough for lines of progress, which begin with "…"
    assert [line for line in error.splitlines() if line and line[0] != "…"] == [f"stopped: {said}"]


def test_an_output_without_greek_letters_does_not_end_the_run(monkeypatch):
    bytes_written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_written, encoding="ascii"))
    with interrupts.told(interrupts.ANEW):
        print("γ = 5, 1.4×", flush=True)
    assert bytes_written.getvalue() == b"? = 5, 1.4?\n"
