"""The process that compiles for `preflight.report`: reads a request from standard input, prints an answer as JSON."""

import json
import sys

from speccascade_jax.preflight import compiling

if __name__ == "__main__":
    print(json.dumps(compiling.answer(json.load(sys.stdin))))
