"""Fixtures: a micro corpus, and runs of a micro model on it."""

import dataclasses

import pytest

from speccascade_jax.data.vocabularies import load
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.training.finetune import trainer as trainers
from speccascade_jax.training.finetune.corpus import JoinedCorpus
from speccascade_jax.training.finetune.optimizers import ScaledAdam
from speccascade_jax.training.finetune.run import train
from speccascade_jax.training.finetune.schedule import Schedule

NAMES = {"Tom": "Tim", "Mary": "Maria", "Bob": "Robert", "Kim": "Karl"}
ACTIONS = {"sleeps": "schläft", "reads": "liest", "sings": "singt", "runs": "rennt"}
PAIRS = [(f"{name} {act}.", f"{NAMES[name]} {ACTIONS[act]}.") for name in NAMES for act in ACTIONS]
CONFIG = T5Config(290, 292, 16, 2, 8, 16, 1, 1)


def write_corpus(folder):
    """Writes 16 sentence pairs and their vocabulary to a folder."""
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")
    (folder / "vocabulary.model").write_bytes(load.train([text for pair in PAIRS for text in pair], 290))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Returns the folder of a corpus of 16 pairs and its vocabulary."""
    path = tmp_path_factory.mktemp("corpus")
    write_corpus(path)
    return path


@pytest.fixture(scope="session")
def finished(folder, tmp_path_factory):
    """Returns a finished run without dropout, its result, and the folder of its export."""
    path = tmp_path_factory.mktemp("finished")
    trainer = micro_trainer(folder, path / "run")
    result = train(trainer)
    trainers.export(trainer, path / "exported", "float32")
    return trainer, result, path / "exported"


@pytest.fixture
def trainer(folder, tmp_path):
    """Returns a trainer with dropout whose run has not started."""
    return micro_trainer(folder, tmp_path / "run", dropout=0.1)


def micro_trainer(folder, run_dir, **changes):
    """Returns the settings of a run of 12 steps of a micro T5 on the corpus of `write_corpus` in `folder`."""
    corpus = JoinedCorpus(path=str(folder / "pairs.tsv"), max_joined=2, widths=(64,), tokens_per_batch=256)
    model = {"config": CONFIG, "vocabulary": str(folder / "vocabulary.model"), "corpus": corpus, "validation": corpus}
    plan = {"schedule": Schedule(peak=1e-2, warmup_steps=5, max_steps=12), "log_every": 4, "evaluate_every": 1000}
    plan |= {"optimizer": ScaledAdam(), "task": "tiny_translation", "examples": 2, "shown": 1}
    return dataclasses.replace(trainers.Trainer(run_dir=str(run_dir), **model, **plan), **changes)
