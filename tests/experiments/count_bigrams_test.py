"""Counting bigrams from a file, as the command does."""

import subprocess
import sys

import numpy as np
import pytest

from speccascade_jax.data.vocabularies import load
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage import archives

ROOT = repository_root()
VOCABULARY = ROOT / "speccascade_jax" / "assets" / "pairs" / "tatoeba_two_ways" / "vocabulary.model"


@pytest.mark.parametrize("begin", [None, 7])
def test_outputs_are_counted_behind_the_id_that_decoding_begins_with(tmp_path, begin):
    pairs, table = tmp_path / "pairs.tsv", tmp_path / "bigrams.npz"
    pairs.write_text("Tom is here.\tTom ist hier.\nTom sleeps.\tTom schläft.\n", encoding="utf-8")
    flags = [f"--vocabulary={VOCABULARY}", f"--input={pairs}", f"--output={table}", "--most=3"]
    flags += [] if begin is None else [f"--begin={begin}"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.count_bigrams", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    vocabulary = load.load_vocabulary(VOCABULARY)
    key, arrays = archives.read(table)
    assert key == vocabulary.fingerprint and arrays["next"].shape == (vocabulary.vocab_size, 3)
    first = vocabulary.encode("Tom")[0]
    row = begin if begin is not None else vocabulary.bos_id or 0
    np.testing.assert_allclose(arrays["logits"][row], [np.log(2), -np.inf, -np.inf])
    assert arrays["next"][row, 0] == first
