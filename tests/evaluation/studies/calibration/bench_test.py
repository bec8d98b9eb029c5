"""A calibration's points as records: one that failed on some example can be compared with none."""

import numpy as np
import pytest

from speccascade_jax.evaluation import session
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.studies.calibration.bench import Bench, Window
from speccascade_jax.results.store.result_store import ResultStore
from tests.support import text_pair

SOURCE = ModelPair(name="tabular")
SMALL = Evaluation(
    task="tiny_translation", keep_outputs=False, keep_traces=0, max_new_tokens=6, quality_examples=12,
    quality_batch=12, latency_examples=4, latency_trials=1, resamples=10,
)  # fmt: skip


def _point(**settings) -> Point:
    return Point(pair=SOURCE, evaluation=SMALL.resolved(), settings=Settings(**settings))


TARGET, SPECULATIVE = _point(method="autoregressive"), _point(method="spec_decode", block_size=2)


@pytest.mark.parametrize("among_timed", [True, False])
def test_a_point_that_failed_on_some_example_ends_the_calibration_and_says_where(tmp_path, among_timed):
    loaded = session.Session(SOURCE, SMALL, text_pair.make(tmp_path))
    outputs = np.asarray(loaded.prepare(TARGET, np.arange(12))(0).tokens)
    pair, lost = text_pair.damaged(
        loaded.pair, outputs, wanted=lambda rows: (min(rows) < 4) is among_timed and max(rows) >= 4
    )
    well = next(n for n in range(4, 12) if n not in lost)
    opened = session.Session(SOURCE, SMALL, pair)
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
