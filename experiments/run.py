r"""Measure one configuration: its quality, its latency relative to the target alone, and the engine's counts.

Combine gin/run.gin with one file each for the model pair, the task and the method. No file overrides a value of another
one:

    python -m experiments.run --gin_file=gin/run.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin \
        --gin.Settings.alpha=0.9 --gin.Settings.temperature=1.0

Or repeat the measurement of a record, with the files of your own that it imported, and compare the outputs:

    python -m experiments.run --from_record=KEY --store=results/quickstart.jsonl

Or trace it with xprof too, after its measurement, into a folder or a bucket, one folder for each host:

    python -m experiments.run --from_record=KEY --store=results/quickstart.jsonl --profile_at=gs://my-bucket/traces

The command prints the record and adds it to results/runs.jsonl (--gin.run.output="'other.jsonl'"). If that file already
has the record of this configuration, the command only prints it. The `configuration` of any record is a gin file that
repeats its measurement. The settings are the attributes of ModelPair and Evaluation in
speccascade_jax/evaluation/points.py, those of Settings in speccascade_jax/methods/settings.py, and the arguments of run
in speccascade_jax/evaluation/experiment.py.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from speccascade_jax.evaluation import experiment
from speccascade_jax.results.store.result_store import Record
from speccascade_jax.runtime import gin_flags, hosts, interrupts, own_files

FROM_RECORD = flags.DEFINE_string(
    "from_record", None, "Run the point of a record again: its key, or the first digits of it."
)
STORE = flags.DEFINE_string("store", None, "The store that the record is in; without it, any results/*.jsonl.")

EXAMPLE = (
    "python -m experiments.run --gin_file=gin/run.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)

_FOUND: list[tuple[Record, Path, str]] = []


def _recorded() -> str:
    """Returns the gin text of the record that --from_record names, or "" if the flag is not set."""
    if FROM_RECORD.value is None:
        return ""
    record, store = experiment.find_record(FROM_RECORD.value, STORE.value)
    _FOUND.append((record, store, experiment.rerun_store(record)))
    own_files.load_again(record.get("imports", {}))
    return f"{record['configuration']}\nexperiment.run.output = {_FOUND[0][2]!r}\n"


def _compared(new: Record) -> None:
    """Prints whether the repeated measurement has the same outputs as the record that --from_record names."""
    for old, store, output in _FOUND if new and hosts.first() else ():
        print(f"{old['key']} of {store}, run again: {experiment.compare_rerun(old, store, new, output)}")


if __name__ == "__main__":
    traces = {"profile_at": "folder, local or gs://, for an xprof trace of one batch and of one example alone"}
    how = {"texts": traces, "together": True, "recorded": _recorded, "after": _compared}
    gin_flags.main(experiment.run, EXAMPLE, interrupts.ANEW, **how)
