"""Where products are the package's own, and what leaves them to XLA."""

import platform
import sys

import jax
import pytest

from speccascade_jax.runtime.products import native


@pytest.mark.skipif(jax.default_backend() != "cpu" or not sys.platform.startswith("linux"), reason="for Linux's CPUs")
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


def test_it_is_left_out_without_a_known_interface(monkeypatch, tmp_path):
    pytest.importorskip("llvmlite", reason="the code is made with llvmlite")
    from speccascade_jax.runtime.products import handler

    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(LookupError, match="c_api.h describes no foreign function interface of version 0"):
        handler.interface.__wrapped__()
    monkeypatch.setattr(handler, "interface", handler.interface.__wrapped__)
    assert "describes no foreign function interface" in native.unavailable.__wrapped__()
