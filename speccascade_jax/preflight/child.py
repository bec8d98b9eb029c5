"""Child process that compiles for `preflight.report`: it reads a request from standard input and prints JSON."""

import json
import pickle
import sys

from speccascade_jax.preflight import compiling, executables
from speccascade_jax.runtime import own_files

if __name__ == "__main__":
    for path in pickle.load(sys.stdin.buffer):
        own_files.load(path)
    print(json.dumps(compiling.answer(pickle.load(sys.stdin.buffer), keep=executables.save)))
