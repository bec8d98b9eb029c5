"""A real sweep into a bucket by four writers, each killed at random: no record is lost, doubled or different.

SPECCASCADE_KILLS is the number of kills of all writers together.
"""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments import tables
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.result_store import read_records
from speccascade_jax.storage.buckets import BucketPath
from tests.support import tiny_pair
from tests.support.bucket_writers import Writers
from tests.support.killed_jobs import UNEQUAL

PARTS = ((0, 2), (1, 2), (0, 3), (2, 3))
"""The part of each writer and the number of parts: every point belongs to one writer at least, most to two."""
KILLS = max(1, int(os.environ.get("SPECCASCADE_KILLS", "4")) // len(PARTS))
"""Kills of each writer."""
SEEDS = 2 * KILLS
POINTS = 2 * SEEDS + SEEDS * (1 + 3)
STORE = "gs://bucket/runs/four.jsonl"


def settings(folder, output):
    bindings = {
        "sweep.methods": "('spec_decode', 'chow')", "sweep.alphas": "{'chow': (0.2, 0.5, 0.8)}",
        "sweep.block_sizes": "(2,)", "sweep.seeds": repr(tuple(range(SEEDS))), "sweep.temperatures": "(1.0,)",
        "sweep.cooler": "()", "sweep.output": repr(str(output)), "ModelPair.name": repr(str(folder / "pair")),
        "ModelPair.draft_dtype": "None", "Evaluation.max_new_tokens": "6", "Evaluation.quality_examples": "3",
        "Evaluation.latency_examples": "0", "Evaluation.resamples": "10",
    }  # fmt: skip
    return ["--gin_file=configs/quickstart.gin", *(f"--gin.{name}={value}" for name, value in bindings.items())]


def plain(store):
    """Returns the records of a store by key, without entries that depend on the clock, and with their outputs."""
    stored = read_records(store)
    unequal = UNEQUAL | {"outputs_file", "configuration"}  # the configuration names the output
    records = [{name: value for name, value in record.items() if name not in unequal} for record in stored]
    return {record["key"]: [new, outputs.read(store, record)] for record, new in zip(stored, records, strict=True)}


def table(store, capsys, *flags):
    assert tables.main([str(store), *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.laws
def test_four_writers_that_are_killed_make_the_store_of_a_local_run(bucket, tmp_path, capsys):
    (tmp_path / "pair").mkdir()
    tiny_pair.write(tmp_path / "pair")
    writers, local = Writers(bucket, "experiments.sweep", tmp_path / "log"), tmp_path / "local.jsonl"
    assert writers.finish(*settings(tmp_path, local)) == 0, (tmp_path / "log").read_text()
    with writers.watching(), ThreadPoolExecutor(len(PARTS)) as threads:
        waiting = []
        for part, parts in PARTS:
            flags = [*settings(tmp_path, STORE), f"--shard_id={part}", f"--num_shards={parts}"]
            waiting.append(threads.submit(writers.write, KILLS, random.Random(str(flags[-2:])), 12.0, *flags))
        statuses = [writer.result() for writer in waiting]
    (tmp_path / "counts.json").write_text(json.dumps(writers.counts))
    assert statuses == [0] * len(PARTS), (tmp_path / "log").read_text()
    names = BucketPath(STORE).below()
    kept = {f"bucket/runs/four.jsonl/{name}" for name in names if name.startswith("records/")}
    assert dict(writers.created) == dict.fromkeys(kept, 1) and len(kept) == POINTS
    assert not [name for name in names if name.startswith("leases/")]
    assert plain(STORE) == plain(local) and len(plain(STORE)) == POINTS
    for flags in (["--points"], ["--points", "--format", "markdown"]):
        assert table(STORE, capsys, *flags) == table(local, capsys, *flags)
