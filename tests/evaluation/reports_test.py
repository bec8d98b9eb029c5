"""Reports of a calibration, a survey and a profile take the place of their kind alone."""

import pytest

from speccascade_jax.evaluation.points import Evaluation, ModelPair, Settings
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.survey import surveying

SHARED = {
    "pair": ModelPair(name="nowhere"),
    "evaluation": Evaluation(task="tiny_translation", latency_examples=8),
    "settings": Settings(),
}


@pytest.mark.parametrize("suffix", [".json", ".gin"])
def test_a_calibration_does_not_write_over_the_file_that_asks_for_it(tmp_path, suffix):
    own = tmp_path / f"mine{suffix}"
    own.write_text("# a configuration\ncalibrating.calibrate.mode = 'halving'\n")
    with pytest.raises(ValueError, match=rf"mine\{suffix} is no report of an earlier run"):
        calibrating.calibrate(**SHARED, methods=("opt",), max_loss=1.0, output=str(tmp_path / "mine.jsonl"))
    assert own.read_text().startswith("# a configuration") and list(tmp_path.iterdir()) == [own]


def test_neither_survey_nor_profile_writes_over_a_store(tmp_path):
    store = tmp_path / "sweep.jsonl"
    store.write_text('{"key":"x","point":{}}\n')
    with pytest.raises(ValueError, match=r"sweep\.jsonl is no report"):
        surveying.survey(**SHARED, rules=("opt",), output=str(store))
    with pytest.raises(ValueError, match=r"sweep\.jsonl is no report"):
        profiling.profile(**SHARED, output=str(store))
    assert store.read_text() == '{"key":"x","point":{}}\n'
