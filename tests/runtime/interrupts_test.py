"""Tests of Ctrl-C and SIGTERM: one line says how to continue, with the usual exit status and no traceback."""

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
NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Restores SIGINT: a shell starts background processes with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def test_other_errors_propagate():
    with pytest.raises(ValueError, match="wrong"), interrupts.told(interrupts.SAME):
        raise ValueError("wrong")


def test_every_experiment_handles_interrupts():
    ways = ("gin_flags.main(", "gin_flags.run_app(", "with interrupts.told(")
    scripts = {path.name: path.read_text() for path in (ROOT / "experiments").glob("*.py")}
    assert scripts and all(any(way in text for way in ways) for text in scripts.values())


@pytest.mark.laws
@pytest.mark.parametrize("number", NUMBERS)
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
    assert error.strip() == f"stopped: {said}"


def test_an_output_without_greek_letters_does_not_end_the_run(monkeypatch):
    bytes_written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_written, encoding="ascii"))
    with interrupts.told(interrupts.ANEW):
        print("γ = 5, 1.4×", flush=True)
    assert bytes_written.getvalue() == b"? = 5, 1.4?\n"
