"""Tests of the availability of the package's own matrix products, and of the warning if slower ones of XLA are used."""

import platform
import sys
import warnings

import jax
import pytest

from speccascade_jax.runtime.products import native
from tests.support import new_process, tiny_pair

ON_LINUX = jax.default_backend() == "cpu" and sys.platform.startswith("linux")
on_a_cpu = pytest.mark.skipif(not ON_LINUX, reason="for Linux's CPUs")


@on_a_cpu
def test_products_are_available_on_the_test_machine(monkeypatch):
    """Fails if all tests of products would be skipped without notice."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    if platform.machine() in ("x86_64", "aarch64"):
        assert native.unavailable.__wrapped__() is None


def test_products_are_unavailable_if_switched_off_or_untested(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.unavailable.__wrapped__() == "SPECCASCADE_PRODUCTS is 0"
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setattr(native.platform, "machine", lambda: "riscv64")
    assert "riscv64 was never tested" in native.unavailable.__wrapped__()


@on_a_cpu
def test_products_are_unavailable_without_a_known_interface(monkeypatch, tmp_path):
    pytest.importorskip("llvmlite", reason="the code is made with llvmlite")
    from speccascade_jax.runtime.products import handler

    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(handler, "interface", handler.interface.__wrapped__)
    assert "c_api.h does not describe version 0 of XLA" in native.unavailable.__wrapped__()


DECODE = """
import json, sys, warnings
if sys.argv[1] == "without":
    sys.modules["llvmlite"] = None  # as if it was not installed
import speccascade_jax as sc
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    written = [sc.decode(sc.load_pair(sys.argv[2]), "It is cold.", method="spec_decode", max_new_tokens=5).tokens
               for _ in range(2)]
said = [str(warning.message) for warning in caught if "llvmlite" in str(warning.message)]
print(json.dumps([written[0].tolist(), said, "llvmlite" in sys.modules and sys.modules["llvmlite"] is not None]))
"""


@pytest.mark.tools
@on_a_cpu
def test_decoding_without_llvmlite_gives_the_same_tokens_and_warns_once(tmp_path):
    pytest.importorskip("llvmlite", reason="compares with and without")
    # a program's output: tokens, its warning about llvmlite, and whether it was imported
    pair = tiny_pair.write(tmp_path, more=2**15)  # so many pieces that its last matrix is `LARGE`
    faster, said_with, imported = new_process.answer(DECODE, "with", pair)
    assert imported and not said_with
    tokens, said, imported = new_process.answer(DECODE, "without", pair)
    assert tokens == faster and not imported
    assert len(said) == 1 and said[0].endswith("pip install 'speccascade_jax[cpu]'") and "\n" not in said[0]


@pytest.mark.parametrize(("why", "size", "says"), [
    (native.NO_LLVMLITE, native.LARGE, True), (native.NO_LLVMLITE, native.LARGE - 1, False),
    ("programs run on tpu", native.LARGE, False), (None, native.LARGE, False),
])  # fmt: skip
def test_only_large_matrices_on_a_cpu_cause_the_warning(monkeypatch, why, size, says):
    monkeypatch.setattr(native, "unavailable", lambda: why)
    native._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native.suggest(size)
        native.suggest(size)
    assert len(caught) == says
