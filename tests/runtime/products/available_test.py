"""Where products are the package's own, what leaves them to XLA, and what is said where that is slower."""

import json
import os
import platform
import subprocess
import sys
import tomllib
import warnings

import jax
import pytest

from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.runtime.products import native

ROOT = repository_root()
INSTALL = "pip install 'speccascade_jax[cpu]'"
on_a_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not sys.platform.startswith("linux"), reason="for Linux's CPUs"
)


@on_a_cpu
def test_the_usual_machine_has_them(monkeypatch):
    """Or all that is tested of them would be skipped, and nobody would know."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    if platform.machine() in ("x86_64", "aarch64"):
        assert native.unavailable.__wrapped__() is None


def test_it_is_left_out_where_it_is_switched_off(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.unavailable.__wrapped__() == "SPECCASCADE_PRODUCTS is 0"
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setattr(native.platform, "machine", lambda: "riscv64")
    assert "riscv64 was never tried" in native.unavailable.__wrapped__()


@on_a_cpu
def test_it_is_left_out_without_a_known_interface(monkeypatch, tmp_path):
    pytest.importorskip("llvmlite", reason="the code is made with llvmlite")
    from speccascade_jax.runtime.products import handler

    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(handler, "interface", handler.interface.__wrapped__)
    assert "c_api.h describes no foreign function interface of version 0" in native.unavailable.__wrapped__()


def test_only_the_extra_installs_what_makes_them_and_the_two_commands_take_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cpu"] == ["llvmlite>=0.45"]
    assert not any(name.startswith("llvmlite") for name in project["dependencies"])
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-e '.[cpu" in line]
    assert len(installs) == 3  # quickstart, test, newest


DECODE = """
import json, sys, warnings
if sys.argv[1] == "without":
    sys.modules["llvmlite"] = None  # as if it was not installed
import speccascade_jax as sc
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    written = [sc.decode(sc.load_pair("tatoeba_en_de"), "It is cold.", method="spec_decode", max_new_tokens=5).tokens
               for _ in range(2)]
said = [str(warning.message) for warning in caught if "llvmlite" in str(warning.message)]
print(json.dumps([written[0].tolist(), said, "llvmlite" in sys.modules and sys.modules["llvmlite"] is not None]))
"""


def decode(how):
    """Tokens, what was said of llvmlite, and whether it was imported."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DECODE, how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@on_a_cpu
def test_without_llvmlite_it_decodes_the_same_and_says_once_what_is_faster():
    pytest.importorskip("llvmlite", reason="compares with and without")
    faster, said_with, imported = decode("with")
    assert imported and not said_with
    tokens, said, imported = decode("without")
    assert tokens == faster and not imported
    assert len(said) == 1 and said[0].endswith(INSTALL) and "\n" not in said[0]


@pytest.mark.parametrize(("why", "size", "says"), [
    (native.NO_LLVMLITE, native.LARGE, True), (native.NO_LLVMLITE, native.LARGE - 1, False),
    ("programs run on tpu", native.LARGE, False), (None, native.LARGE, False),
])  # fmt: skip
def test_it_is_said_of_large_matrices_on_a_cpu_alone(monkeypatch, why, size, says):
    monkeypatch.setattr(native, "unavailable", lambda: why)
    native._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native.suggest(size)
        native.suggest(size)
    assert len(caught) == says
