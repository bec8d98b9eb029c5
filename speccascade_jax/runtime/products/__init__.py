"""Products of a few rows with large weight matrices on a CPU, in code compiled for the processor of this machine.

XLA:CPU multiplies a block of 4 to 8 rows at about half the memory bandwidth of one row, because it packs both operands
before every product. Here, the weights are packed only once, when they are loaded. The code is compiled with llvmlite
(the extra `cpu`), so that no compiler needs to be installed, and is called through XLA's foreign function interface.
Without llvmlite, XLA computes the products.
"""

from speccascade_jax.runtime.products.native import KINDS, available, call, suggest, width

__all__ = ["KINDS", "available", "call", "suggest", "width"]
