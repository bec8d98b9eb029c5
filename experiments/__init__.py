"""The commands: `python -m experiments.NAME`."""

import sys

from speccascade_jax.runtime import progress

# Python sets this name while it looks for the module of `-m`: the modules of a command take seconds to import
if sys.argv[0] == "-m":
    progress.begin()
