"""Compilation of the LLVM code for this processor, its registration with XLA, and the call from a traced program."""

import ctypes
import os
import platform
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.runtime import platforms

KINDS = ("float32", "float16", "bfloat16", "int8")
"""Weight dtypes that the compiled code can multiply."""
SWITCH = "SPECCASCADE_PRODUCTS"
"""Environment variable that makes XLA compute all products if its value is `0`."""
LARGE = 2**20
"""Number of elements from which on this package's code multiplies a matrix noticeably faster than XLA."""
NO_LLVMLITE = "llvmlite is not installed: pip install 'speccascade_jax[cpu]'"
_KEPT: list[Any] = []  # keeps the compiled code alive until the process ends


@cache
def unavailable() -> str | None:
    """Returns the reason why XLA computes the products, or `None` if this package's own code does."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH} is 0"
    if jax.default_backend() != "cpu":
        return f"programs run on {jax.default_backend()}"
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64") or os.name != "posix":
        return f"{platform.system()} on {platform.machine()} was never tested"
    if find_spec("llvmlite") is None:
        return NO_LLVMLITE
    try:
        from speccascade_jax.runtime.products.handler import interface

        interface()
    except (ImportError, LookupError, OSError) as error:
        return str(error)
    return None


def available() -> bool:
    """Returns whether this process multiplies packed weights with this package's own code."""
    return platforms.platform() == "cpu" and unavailable() is None


def suggest(size: int) -> None:
    """Warns once per process if llvmlite is missing and would make products with a matrix of `size` elements faster."""
    if size >= LARGE and unavailable() == NO_LLVMLITE:
        _warn()


@cache
def _warn() -> None:
    warnings.warn(f"decoding on this CPU is faster with code that llvmlite compiles, but {NO_LLVMLITE}", stacklevel=3)


@cache
def width() -> int:
    """Returns the number of columns per panel (a block of weight columns): as many sums as fit the CPU's registers."""
    import llvmlite.binding as llvm

    return 64 if llvm.get_host_cpu_features().get("avx512f") else 16


def call(x: jax.Array, panels: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Multiplies `x` by packed weights, in a traced program.

    Args:
        x: float32 `[rows, K]`.
        panels: `[n, K, P]`, `n` blocks of `P` columns each of the weight matrix.
        scales: float32 `[n * P]`, one factor per column of int8 weights; `None` for other dtypes.

    Returns:
        The product, float32 `[rows, n * P]`.
    """
    kind = panels.dtype.name
    _register(kind)
    result = jax.ShapeDtypeStruct((x.shape[0], panels.shape[0] * panels.shape[2]), jnp.float32)
    factors = jnp.ones((1,), jnp.float32) if scales is None else scales
    product: jax.Array = jax.ffi.ffi_call(_name(kind), result)(x, panels, factors)
    return product


def _name(kind: str) -> str:
    return f"speccascade_product_{kind}"


@cache
def _register(kind: str) -> None:
    """Compiles the product for one weight dtype (0.1 s) and registers it with XLA."""
    import llvmlite.binding as llvm
    import llvmlite.ir as ir

    from speccascade_jax.runtime.products.handler import handler

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module(_name(kind))
    module.triple = llvm.get_process_triple()
    function = handler(module, kind, width())
    features, processor = llvm.get_host_cpu_features().flatten(), llvm.get_host_cpu_name()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(processor, features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _KEPT.append(engine)
    capsule = _capsule(engine.get_function_address(function))
    jax.ffi.register_ffi_target(_name(kind), capsule, platform="cpu")


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
