"""Fixtures: a micro corpus, and runs of a micro model on it."""

import pytest

from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training.t5 import loop
from speccascade_jax.training.t5.corpus import JoinedCorpus
from speccascade_jax.training.t5.steps import Schedule

NAMES = {"Tom": "Tim", "Mary": "Maria", "Bob": "Robert", "Kim": "Karl"}
ACTIONS = {"sleeps": "schläft", "reads": "liest", "sings": "singt", "runs": "rennt"}
PAIRS = [(f"{name} {act}.", f"{NAMES[name]} {ACTIONS[act]}.") for name in NAMES for act in ACTIONS]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Returns the folder of a corpus of 16 pairs and its vocabulary."""
    path = tmp_path_factory.mktemp("corpus")
    (path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")
    (path / "vocabulary.model").write_bytes(load.train([text for pair in PAIRS for text in pair], 290))
    return path


@pytest.fixture(scope="session")
def finished(folder, tmp_path_factory):
    """Returns a finished run without dropout, its result, and the folder of its export."""
    path = tmp_path_factory.mktemp("finished")
    trainer = _trainer(folder, path / "run", dropout_rate=0.0)
    result = trainer.run()
    loop.export(trainer, path / "exported", "float32")
    return trainer, result, path / "exported"


@pytest.fixture
def trainer(folder, tmp_path):
    """Returns a trainer with dropout whose run has not started."""
    return _trainer(folder, tmp_path / "run", dropout_rate=0.1)


def _trainer(folder, run_dir, dropout_rate):
    corpus = JoinedCorpus(str(folder / "pairs.tsv"), max_joined=2, widths=(64,), tokens_per_batch=256)
    model = {"config": T5Config(290, 292, 16, 2, 8, 16, 1, 1, dropout_rate=dropout_rate)}
    model |= {"vocabulary": str(folder / "vocabulary.model"), "corpus": corpus, "validation": corpus}
    plan = {"schedule": Schedule(peak=1e-2, warmup_steps=5, max_steps=12), "log_every": 4, "evaluate_every": 1000}
    return loop.Trainer(run_dir=str(run_dir), **model, **plan, bleu_task="tiny_translation", bleu_examples=2)
