"""The entry point of `python -m benchmarks`."""

import sys

from benchmarks.command import main
from speccascade_jax.runtime import interrupts

if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
