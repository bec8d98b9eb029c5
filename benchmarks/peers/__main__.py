"""The entry point of `python -m benchmarks.peers`."""

import sys

from benchmarks.peers.command import main
from speccascade_jax.runtime import interrupts

if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
