"""A calibration's points as records: one that failed on some example can be compared with none."""

import numpy as np
import pytest

from speccascade_jax.evaluation import session
from speccascade_jax.evaluation.studies.calibration.bench import Bench, Window
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import text_pair

SMALL = text_pair.evaluation(quality_examples=12, quality_batch=12, latency_examples=4, latency_trials=1)
TARGET = text_pair.point("autoregressive", SMALL)
SPECULATIVE = text_pair.point("spec_decode", SMALL, block_size=2)


@pytest.mark.parametrize("among_timed", [True, False])
def test_a_point_that_failed_on_some_example_ends_the_calibration_and_says_where(pair, tmp_path, among_timed):
    loaded = session.Session(text_pair.SOURCE, SMALL, pair)
    outputs = np.asarray(loaded.prepare(TARGET, np.arange(12))(0).tokens)
    broken, lost = text_pair.damaged(
        pair, outputs, wanted=lambda rows: (min(rows) < 4) is among_timed and max(rows) >= 4
    )
    well = next(n for n in range(4, 12) if n not in lost)
    opened = session.Session(text_pair.SOURCE, SMALL, broken)
    with ResultStore(tmp_path / "found.jsonl") as store:
        bench = Bench(store, opened)
        with pytest.raises(
            FloatingPointError,
            match=r"spec_decode .* has failed_examples and cannot be compared: example .*: NaN or infinite logits of",
        ):
            bench.measure([SPECULATIVE], Window(first=0, judged=12, timed=4))
        # examples on which nothing failed are a calibration's as ever
        (record,) = bench.measure([SPECULATIVE], Window(first=well, judged=1, timed=0))[SPECULATIVE]
    assert record["quality"]["examples"] == 1 and "failed_examples" not in record
