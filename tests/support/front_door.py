"""Calls of the public functions with equal prompt lengths and settings, so that they share compiled programs."""

import numpy as np

import speccascade_jax as sc
from tests.support import conformance

# the sizes, the block and the stop id of tests/engine/rows_test.py, so that both files share their compiled programs
ROWS, VOCAB, LENGTH, STOP = 16, 9, 14, 4
PROMPTS = [[1], [2, 3], [0, 5, 6], [7, 1]] * 4


def tabular():
    """Returns a pair of models whose distributions are tables."""
    return conformance.tabular_pair(*conformance.tables(VOCAB, seed=0))


def run(pair, prompts=PROMPTS, **changes):
    """Decodes with fixed sizes, so that all calls share a compiled program unless `changes` need another one."""
    arguments = {"rule": "token_v3", "alpha": 0.3, "block_size": 3, "temperature": 1.0, "max_new_tokens": LENGTH}
    return sc.decode(pair, prompts, **(arguments | {"stop_ids": [STOP]} | changes))


class Words:
    """A vocabulary of one-letter words, just enough for the public functions."""

    vocab_size, bos_id, eos_id, stop_ids = VOCAB, None, STOP, (STOP,)

    def encode(self, text):
        return ["abcdefghi".index(letter) for letter in text]

    def decode(self, ids, after=()):
        return "".join("abcdefghi"[i] for i in ids if i != self.eos_id)


def chain(broken_after, value=np.nan):
    """Returns a table in which each token is followed by the next one, 0 by itself; row `broken_after` is damaged."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 20.0
    table[0] = np.eye(VOCAB)[0] * 20
    if broken_after is not None:
        table[broken_after, 3] = value
    return table
