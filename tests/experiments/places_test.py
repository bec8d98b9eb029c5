"""The table of commands and places in docs/pods.md says what the commands do."""

from __future__ import annotations

import re

import pytest

from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.buckets import BucketPath
from tests.experiments.command_line_test import FLAGS, TOGETHER, _call

ROOT = repository_root()
TESTS = {
    "sweep": "evaluation/session_test.py::test_a_sweep_into_a_bucket_gives_the_tables_of_a_local_one",
    "finetune": "experiments/finetune_test.py::test_killed_runs_give_the_result_of_uninterrupted_runs",
    "make_acceptance_data": "training/heads/make_data_test.py::test_a_folder_in_a_bucket_equals_a_local_one",
    "make_selection_data": "selection/make_data_test.py::test_a_folder_in_a_bucket_equals_a_local_one",
    "train_acceptance_head": "training/heads/train_test.py::test_a_run_in_a_bucket_equals_a_local_one",
    "train_exit_heads": "training/exits_test.py::test_heads_in_a_bucket_equal_local_ones",
    "train_policy": "selection/train_test.py::test_runs_and_studies_in_a_bucket_equal_local_ones",
    "serve_online": "selection/serving_test.py::test_a_stream_in_a_bucket_equals_a_local_one",
    "convert": "checkpoints/bucket_writing_test.py::test_conversions_to_from_and_in_a_bucket_equal_local_ones",
    "count_bigrams": "experiments/places_test.py::test_vocabularies_and_bigrams_are_written_in_a_bucket",
    "train_vocab": "experiments/places_test.py::test_vocabularies_and_bigrams_are_written_in_a_bucket",
    "recipe": "runtime/recipe_test.py::test_places_in_a_bucket_are_refused_before_anything_runs",
}
"""Command -> the test of what it does with an output in gs://."""
ONE_FILE = {"run", "survey", "profiling", "calibrate", "optimize_hierarchy", "tables", "plots", "report", "score"}
"""Commands whose output is a store, or files that are written whole, as tests of `storage` and `results` cover."""


def table():
    """Returns the table's columns by command."""
    text = (ROOT / "docs" / "pods.md").read_text(encoding="utf-8").split("| command | mesh |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_table_says_which_commands_several_processes_run_and_which_write_to_a_bucket():
    columns = table()
    assert set(columns) <= set(FLAGS)
    assert {name for name, (_, processes, _) in columns.items() if processes == "yes"} == TOGETHER
    assert set(columns) == TESTS.keys() | ONE_FILE
    assert [name for name, (*_, bucket) in columns.items() if bucket != "yes"] == ["recipe"]
    for test in TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


@pytest.mark.tools
def test_vocabularies_and_bigrams_are_written_in_a_bucket(bucket, tmp_path):
    lines = [f"number {n} of {n % 7} is {n * n}.\tNummer {n} von {n % 7} ist {n * n}.\n" for n in range(60)]
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    vocabulary, table = "gs://bucket/pair/vocabulary.model", "gs://bucket/pair/bigrams.npz"
    source = f"--input={tmp_path / 'pairs.tsv'}"
    for command in (["train_vocab", "--vocab_size=300", f"--output={vocabulary}"],
                    ["count_bigrams", "--vocabulary=gs://bucket/pair", f"--output={table}"]):  # fmt: skip
        done = _call("-m", f"experiments.{command[0]}", source, *command[1:], folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert BucketPath("gs://bucket/pair").below() == ["bigrams.npz", "checksums.json", "vocabulary.model"]
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]
