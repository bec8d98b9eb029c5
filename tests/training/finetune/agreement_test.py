"""Tests that a process with other data or another model than the first one's is refused; the first one is simulated."""

import dataclasses

import numpy as np
import pytest

from speccascade_jax.runtime import hosts
from speccascade_jax.training.finetune import agreement
from speccascade_jax.training.finetune.corpus import JoinedCorpus, TaskCorpus
from speccascade_jax.training.finetune.run import Run


@pytest.fixture
def first(monkeypatch):
    """Returns the texts of the first process, by name; those of a test's first comparison, if it sets no others."""
    texts = {}
    monkeypatch.setattr(hosts, "many", lambda: True)
    monkeypatch.setattr(hosts, "agreed", lambda value: {name: texts.setdefault(name, value[name]) for name in value})
    return texts


def _corpus(kind, path, rows):
    """Returns a corpus of a new file with these rows."""
    path.parent.mkdir()
    path.write_text("".join(f"{row}\n" for row in ["source\treference", *rows]), encoding="utf-8")
    return kind(task=str(path), split="all") if kind is TaskCorpus else kind(path=str(path))


@pytest.mark.parametrize("kind", [TaskCorpus, JoinedCorpus])
def test_a_file_of_the_same_name_with_another_row_is_refused(kind, trainer, folder, tmp_path, first):
    rows = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    changed = [*rows[:-1], rows[-1].replace("rennt", "singt")]
    here, copy, other, fewer = (
        _corpus(kind, tmp_path / str(number) / "mine.tsv", lines)
        for number, lines in enumerate((rows, rows, changed, rows[:-1]))
    )

    def compare(corpus, validation, task=here):
        scored = task.path if kind is JoinedCorpus else task.task
        run = dataclasses.replace(trainer, corpus=corpus, validation=validation, task=scored, examples=16)
        data, checked = (part.tokens(run.text, True) for part in (corpus, validation))
        agreement.check_data(run, data, checked.epoch(0, 0))

    compare(here, here)
    compare(copy, copy)
    for corpus in (other, fewer):
        with pytest.raises(ValueError, match="^the task is .* examples, digest"):
            compare(here, here, task=corpus)
        with pytest.raises(ValueError, match="^the corpus is .* examples, digest .*: give all hosts the files of"):
            compare(corpus, here)
        with pytest.raises(ValueError, match="^the validation corpus is .* batches, digest"):
            compare(here, corpus)


@pytest.mark.parametrize("name", ["the model's configuration", "the vocabulary", "the corpus"])
def test_a_run_compares_its_files_before_it_draws_parameters(name, trainer, first, monkeypatch):
    monkeypatch.setattr(type(trainer), "initial", lambda _: pytest.fail("too late"))
    first[name] = ["another", "another"]
    with pytest.raises(ValueError, match=f"^{name} is .* in process 0 and another in process 0: give all hosts the"):
        Run(trainer)


def test_other_weights_to_begin_with_are_refused(trainer, first):
    params = {"scale": np.ones(3, np.float32), "kernel": np.arange(20_000, dtype=np.float32).reshape(100, 200)}
    run = dataclasses.replace(trainer, init_from="a/model")
    agreement.check_weights(run, params)
    agreement.check_weights(trainer, params | {"scale": params["scale"] * 2})
    for name, array in params.items():
        with pytest.raises(ValueError, match=r"^the content of init_from is \w+ in process 0"):
            agreement.check_weights(run, params | {name: array * 1.5})
