"""Tasks: the shipped data set, the readers of the data directory, errors."""

from __future__ import annotations

import collections
import hashlib
import re

import numpy as np
import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.tasks import table
from speccascade_jax.metrics.quality import METRICS
from tests.support.data_sets import load_or_skip


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def test_tiny_translation_keeps_its_promises():
    examples = table.get_task("tiny_translation").load()
    assert [example.id for example in examples] == list(range(200))
    for example in examples:
        assert 2 <= len(sentences(example.source)) <= 4, example
        assert len(sentences(example.source)) == len(sentences(example.reference)), example
        assert 15 <= len(example.source.split()) <= 40, example
        assert 9 <= len(example.reference.split()) <= 45, example


@pytest.mark.parametrize("side", ["source", "reference"])
def test_tiny_translation_repeats_no_sentence(side):
    texts = [getattr(example, side) for example in table.get_task("tiny_translation").load()]
    counts = collections.Counter(sentence for text in texts for sentence in sentences(text))
    assert [sentence for sentence, count in counts.items() if count > 1] == []


def test_tiny_translation_is_not_in_the_training_data():
    known = {example.source.lower() for split in ("train", "validation") for example in load_or_skip("tatoeba", split)}
    ours = [s for example in table.get_task("tiny_translation").load() for s in sentences(example.source)]
    assert [sentence for sentence in ours if sentence.lower() in known] == []


@pytest.mark.parametrize("name", table.TASKS)
def test_every_task_is_whole(name):
    task = table.TASKS[name]
    assert task.name == name and task.main_metric in task.metrics
    assert all(metric in METRICS for metric in task.metrics)


@pytest.mark.parametrize(
    ("name", "split", "count"),
    [
        ("tatoeba", "validation", 2486),
        ("multi30k", "validation", 1014),
        ("multi30k", "test", 1000),
        ("multi30k", "train", 29000),
        ("wmt22", "test", 1037),
    ],
)
def test_sizes_and_ids(name, split, count):
    examples = load_or_skip(name, split)
    assert len(examples) == len({example.id for example in examples}) == count
    assert all(example.source and example.reference for example in examples)


@pytest.mark.parametrize("name", ["tatoeba", "tatoeba_joined", "wmt22"])
def test_a_limit_is_the_beginning_of_one_fixed_order(name):
    split = table.get_task(name).splits[0]
    assert load_or_skip(name, split, 20) == load_or_skip(name, split)[:20]


def test_the_beginning_of_tatoeba_is_not_its_shortest_sentences():
    first = [len(example.source) for example in load_or_skip("tatoeba", "validation", 200)]
    everything = [len(example.source) for example in load_or_skip("tatoeba", "validation")]
    assert abs(np.mean(first) - np.mean(everything)) < 0.1 * np.mean(everything)


def test_joined_tatoeba_uses_every_pair_once():
    joined = " ".join(example.reference for example in load_or_skip("tatoeba_joined", "validation"))
    pairs = " ".join(example.reference for example in load_or_skip("tatoeba", "validation"))
    assert collections.Counter(joined.split()) == collections.Counter(pairs.split())


def test_the_joined_validation_examples_are_the_ones_of_every_record():
    """Which sentences are joined is part of the task: another order of draws would make old results incomparable."""
    examples = load_or_skip("tatoeba_joined", "validation")
    text = "\n".join(f"{example.source}\t{example.reference}" for example in examples)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "17960177ca8dc8c4"


def test_prompt_and_postprocessing():
    example = table.Example(0, "Hello.", "Hallo.")
    for prefix in ("", "translate: "):
        task = table.Task(name="x", splits=("test",), read=lambda _: [example], prefix=prefix)
        assert task.build_prompt(example) == f"{prefix}Hello." and task.postprocess(" Hallo. \n") == "Hallo."


def test_a_limit_beyond_the_end_gives_everything():
    assert len(table.get_task("tiny_translation").load("test", 1000)) == 200


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("tiny_translation", ("test", 0), "limit=0: give at least 1"),
        ("tiny_translation", ("test", -3), "limit=-3: give at least 1"),
        ("tatoeba", ("dev",), "task tatoeba has no split 'dev'; its splits: validation, train"),
        ("multi30", (), "unknown task 'multi30': did you mean multi30k.*speccascade_jax.data.tasks.table.TASKS"),
    ],
)
def test_what_a_task_does_not_have_is_refused(name, asked, said):
    with pytest.raises(ValueError, match=said):
        table.get_task(name).load(*asked)


def test_missing_data_names_the_path_and_the_setting(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"wmt22_en_de.*{directory.VARIABLE}"):
        table.get_task("wmt22").load("test")
