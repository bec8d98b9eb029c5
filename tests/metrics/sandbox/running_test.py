"""Tests of ordinary programs in the sandbox, of what they see, and of the refusal to run without protection."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speccascade_jax.metrics import sandbox
from speccascade_jax.metrics.sandbox import inside, running

pytestmark = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))
LIMITS = running.Limits(timeout=5.0, memory=1 << 30, output_limit=1000, processes=4, file_size=1 << 20)


WITHOUT_ASSERTS = "import os, sys\nif __debug__:\n    {}\nassert False"


@pytest.mark.parametrize(("program", "kind"), [
    ("", "passed"),
    ("def double(x):\n    return 2 * x\nassert double(4) == 8", "passed"),
    ("import collections, heapq, itertools, math, re, functools, typing, datetime, decimal, hashlib", "passed"),
    ("import multiprocessing as m\nif __name__ == '__main__':\n    assert m.Pool(2).map(abs, [-1]) == [1]", "passed"),
    ("import threading\nthreading.Thread(target=print, args=('late',)).start()", "passed"),
    ("assert 2 + 2 == 5", "failed"), ("import os; os._exit(173)", "failed"), ("raise SystemExit(0)", "failed"),
    ("def broken(:", "failed"), ("text = '''open", "failed"), ("if True:", "failed"), ("null = '\0'", "failed"),
    ("lone = '\ud800'", "failed"), ("import numpy", "failed"),
    ("import sys; assert 'site' not in sys.modules", "passed"),
    ("import sys; sys.exit(3)", "failed"),
    ("import sys; sys.exit(0)\nassert False", "failed"),
    ("import os; os._exit(0)", "failed"), ("import os; os._exit(40)", "failed"), ("import os; os._exit(45)", "failed"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed"),
    ("import signal; assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()", "passed"),
    ("import os, signal; signal.signal(15, signal.SIG_IGN); os.kill(0, 15)", "passed"),
    ("raise MemoryError", "memory"),
    ("try:\n    bytearray(1 << 40)\nexcept MemoryError:\n    pass", "passed"),
    (WITHOUT_ASSERTS.format("os.execv(sys.executable, [sys.executable, '-O', '/program.py'])"), "failed"),
    (WITHOUT_ASSERTS.format("os.execve(sys.executable, [sys.executable, '/program.py'], {'PYTHONOPTIMIZE': '1'})"),
     "failed"),
    (WITHOUT_ASSERTS.format("exec(compile(open('/program.py').read(), 'a', 'exec', optimize=1))"), "failed"),
    ("print('MemoryError')", "passed"), ("import sys\nassert sys.stdin.read() == ''", "passed"),
])  # fmt: skip
def test_programs_end_with_the_expected_kind(program, kind):
    outcome = sandbox.run(program, timeout=5.0)
    assert outcome.kind == kind, outcome
    assert outcome.passed == (kind == "passed") and outcome.kind in running.KINDS


def test_the_exit_status_for_passed_differs_between_runs():
    ends = {sandbox.run("print(open(__file__).read().split('SystemExit')[-1])").output.strip() for _ in range(6)}
    assert len(ends) > 1 and all(192 <= int(end.strip("()")) < 256 for end in ends)


def test_output_holds_both_streams_up_to_the_limit():
    program = "import sys\nprint('é one', flush=True)\nprint('two', file=sys.stderr, flush=True)\nprint('three')"
    assert sandbox.run(program).output == "é one\ntwo\nthree\n"
    # line numbers are those of the program itself
    assert 'File "/program.py", line 2' in sandbox.run("x = 1\ny = x / 0").output
    assert sandbox.run("print('x' * 99)", output_limit=100).kind == "passed"
    over = sandbox.run("print('x' * 100 + 'end')", output_limit=100)
    assert over.kind == "output" and over.output.endswith("end\n") and len(over.output) == 100


def test_the_caller_sets_the_deadline():
    assert sandbox.run("import time; time.sleep(0.5)", timeout=2.0).kind == "passed"
    outcome = sandbox.run("print('begun', flush=True)\nimport time; time.sleep(60)", timeout=0.5)
    assert outcome.kind == "timeout" and 0.5 <= outcome.seconds < 1.5 and outcome.output == "begun\n"


def test_a_program_that_keeps_its_output_open_does_not_block_the_caller():
    outcome = sandbox.run("import os, time\nif os.fork() == 0: time.sleep(60)", timeout=5.0)
    assert outcome.kind == "passed" and outcome.seconds < 2.0


ORPHANS = """
import os, time
for _ in range(2):
    reader, writer = os.pipe()
    for _ in range(12):
        if os.fork() == 0:
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)
            os._exit(0)
        os.wait()
    os.close(writer)
    time.sleep(0.3)
"""


def test_orphans_are_reaped():
    """Checks that twelve orphans that end at the same moment make room for twelve more."""
    outcome = sandbox.run(ORPHANS, processes=16, timeout=5.0)
    assert outcome.kind == "passed", outcome.output


SECRETS = """
import os
import re
held = {paths}
for path in held + ["/proc/1" + kind + p for p in held for kind in ("/root", "/cwd/")]:
    try:
        open(path).close()
    except OSError:
        continue
    raise AssertionError(path)
assert {secret!r} not in str(os.environ) and dict(os.environ) == {environment}
descriptors = [os.readlink("/proc/self/fd/" + n) for n in ("0", "1", "2")]
assert descriptors[0] == "/dev/null" and set(os.listdir("/proc/self/fd")) <= set("0123"), descriptors
assert [p for p in os.listdir("/proc") if p.isdigit()] == ["1", "2"]
assert os.getcwd() == "/tmp" and os.listdir() == [] and os.uname().nodename == "sandbox"
for folder, names in {folders}.items():
    assert set(os.listdir(folder)) <= set(names), (folder, os.listdir(folder))
"""


def test_files_and_environment_of_the_caller_cannot_be_read(tmp_path, monkeypatch):
    secret = "sbx-" + os.urandom(8).hex()
    monkeypatch.setenv("SBX_SECRET", secret)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "secret.txt"
    file.write_text(secret)
    descriptor = os.open(file, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    paths = [str(file), "secret.txt", "/etc/passwd", "/etc/hostname", __file__, running.__file__]
    folders = {"/": ["tmp", "proc", "program.py", "dev", "usr", "etc", "lib", "lib64", *python_s_own()]}
    folders |= {"/usr": ["lib", "lib64", "share", "bin", "local"], "/usr/share": ["zoneinfo"], "/etc": ["ld.so.cache"]}
    environment = {"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    program = SECRETS.format(paths=paths, secret=secret, environment=environment, folders=folders)
    outcome = sandbox.run(program, timeout=5.0)
    os.close(descriptor)
    assert outcome.kind == "passed", outcome.output


def python_s_own() -> list[str]:
    return [Path(path).parts[1] for path in (sys.base_prefix, os.__file__, running._interpreter())]


STRANGERS = """
import os
for folder, below, files in os.walk({home!r}):
    below[:] = [name for name in below if os.path.join(folder, name) not in {python}]
    for name in files:
        print(os.path.join(folder, name))
"""


def test_the_callers_home_shows_only_python():
    prefix = os.path.realpath(sys.base_prefix)
    outcome = sandbox.run(STRANGERS.format(home=str(Path.home()), python=[f"{prefix}/lib"]))
    assert (outcome.kind, outcome.output.split()) in [("passed", []), ("passed", [running._interpreter()])]


def test_the_callers_environment_does_not_reach_the_launcher(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/no/such/library.so")
    assert sandbox.run("").output == ""


def test_a_run_leaves_nothing_for_the_next_run():
    assert sandbox.run("open('left', 'w').write('x')\nopen('left').read()").passed
    assert not sandbox.run("open('left').read()").passed


def test_a_program_gives_the_same_output_in_every_run():
    program = "print(list({'one', 'two', 'three', 'four', 'five'}), hash('a'))"
    assert len({sandbox.run(program).output for _ in range(3)}) == 1


def test_two_concurrent_programs_do_not_share_time_processes_or_files():
    program = """
import os, time
open("mine", "x").write("{0}")
if os.fork() == 0:
    time.sleep(0.6)
    os._exit(0)
time.sleep(0.7)
print(open("mine").read())
"""
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda n: sandbox.run(program.format(n), processes=2), range(2)))
    assert [(outcome.kind, outcome.output) for outcome in outcomes] == [("passed", "0\n"), ("passed", "1\n")]
    assert time.monotonic() - began < 1.3


def changed(monkeypatch, tmp_path, old: str, new: str) -> None:
    """Replaces `inside.py` by a copy in which a pattern's match is changed."""
    text, changes = re.subn(old, new, Path(inside.__file__).read_text())
    assert changes == 1
    script = tmp_path / "inside.py"
    script.write_text(text)
    monkeypatch.setattr(inside, "__file__", str(script))


@pytest.mark.parametrize("step", ["leave_namespaces", "build_root", "close", "set_limits", "filter_calls", "map_user"])
def test_a_failed_setup_step_stops_the_run(step, monkeypatch, tmp_path):
    changed(monkeypatch, tmp_path, rf"(def {step}\(.*:\n)", r"\1    raise OSError('planted')\n")
    with pytest.raises(sandbox.SandboxUnavailable, match=r"not run: this system has no sandbox \(OSError: planted\)"):
        running._run("print('it ran')", LIMITS)
    reason = running.available.__wrapped__()
    assert "planted" in reason and ("CAP_SYS_ADMIN" in reason or "user namespaces" in reason)


@pytest.mark.parametrize(("old", "new", "told"), [
    ("    filter_calls()\n", "", "not filtered"),
    ('    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)\n', "", "Permission denied|not filtered"),
    ("CLONE_NEWPID | ", "", "other processes|cannot|No such process|not permitted"),
    (" | CLONE_NEWNET | ", " | ", "has a network"),
    ('    close("/", 0)\n', "", "can write to the root folder"),
    ('    os.symlink("/tmp", "/dev/shm")\n', '    Path("/tmp/left").touch()\n', "holds files of others"),
])  # fmt: skip
def test_the_probe_detects_missing_protection(old, new, told, monkeypatch, tmp_path):
    changed(monkeypatch, tmp_path, re.escape(old), new)
    reason = running.available.__wrapped__()
    assert reason is not None and re.search(told, reason), reason


def test_a_launcher_that_cannot_start_does_not_count_as_a_failed_program(monkeypatch, tmp_path):
    changed(monkeypatch, tmp_path, r"(?s)^.*$", "import no_such_module")
    with pytest.raises(sandbox.SandboxUnavailable, match="no_such_module"):
        running._run("print(1)", LIMITS)


def test_describe_names_the_mechanism():
    assert sandbox.available() is None
    assert "namespaces" in sandbox.describe() and "\n" not in sandbox.describe()
