"""Matrix products of a few rows with large weight matrices on a CPU, compiled for the processor of this machine.

XLA:CPU multiplies a block of 4 to 8 rows at about half the bandwidth of one row, because it packs both operands first.
Here the weights are packed once, when they are loaded. The compiled code is a call for XLA's foreign function
interface, made with llvmlite (the extra `cpu`), so that no compiler needs to be installed. Without llvmlite XLA
multiplies.
"""

from speccascade_jax.runtime.products.native import KINDS, available, call, suggest, width

__all__ = ["KINDS", "available", "call", "suggest", "width"]
