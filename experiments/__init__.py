"""The commands: `python -m experiments.NAME`."""

import sys

from speccascade_jax.runtime import progress

# `python -m` sets this name before it imports the command, whose modules take seconds to import: show progress already
if sys.argv[0] == "-m":
    progress.begin()
