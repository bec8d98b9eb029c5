r"""Measure all combinations of rules, α, γ, temperature, top-p and seeds; a killed sweep resumes.

    python -m experiments.sweep --gin_file=configs/quickstart.gin
    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.dry_run=True      only list the points
    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.seeds="(0, 1, 2)" \
        --gin.sweep.temperatures="(0.0, 1.0)" --gin.sweep.output="'results/seeds.jsonl'"

    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.plan=7 --gin.sweep.alphas="{}"
                                                            seven α's per rule, placed where an estimated curve changes

    python -m experiments.sweep --gin_file=configs/quickstart.gin --shard_id=0 --num_shards=4
                                                            a quarter of the points, on one of four machines

    python -m experiments.sweep --gin_file=configs/quickstart.gin --predict=v5e:2x4
                                                            at its end also predicts latencies on TPUs or GPUs that this
                                                            machine lacks, from counts of calls and compiled programs

    python -m experiments.sweep --gin_file=configs/quickstart.gin --profile_at=gs://my-bucket/traces
                                                            also traces the first point that it measures with xprof,
                                                            after its measurement; `run --from_record` traces any point

The output file holds one JSON line (a record) per point, a combination of settings. Target and draft alone are always
measured too. Every point is checked before anything is loaded or compiled. At the end the sweep makes the table and the
plot of its output file, as tables.py and plots.py do. The settings are the arguments of `sweep` in
speccascade_jax/evaluation/experiment.py, and of ModelPair and Evaluation in evaluation/points.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from speccascade_jax.evaluation import experiment
from speccascade_jax.preflight import costs
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.report import predicting, printing
from speccascade_jax.runtime import gin_flags, hosts, short_flags

for flag, meaning in predicting.FLAGS.items():
    flags.DEFINE_string(flag, None, meaning)


@flags.multi_flags_validator(list(predicting.FLAGS))
def _check(values: Mapping[str, str | None]) -> bool:
    """Refuses flags of predictions that have no meaning, before anything is measured."""
    try:
        for chosen in predicting.hardware(**values):
            chip_of(chosen.topology)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
    return True


def _predict(store: Path | None) -> None:
    """Prints the tables with predicted latencies, and draws the predicted figures beside the store."""
    chosen = predicting.hardware(**{name: flags.FLAGS[name].value for name in predicting.FLAGS})
    if store is None or not chosen or not hosts.first():
        return
    records = predicting.predicted(panels.read_points(store), store, chosen, costs.complete)
    shown = panels.panels(records)
    asked = [f"--{name}={shlex.quote(flags.FLAGS[name].value)}" for name in predicting.FLAGS if flags.FLAGS[name].value]
    printing.show(shown, more=None if flags.FLAGS.notes else printing.notes_command(store, *asked))
    if any(panel.curves for panel in shown):
        from speccascade_jax.results.report.figures import tradeoff

        for path in tradeoff.draw_predicted(shown, store.parent, store.stem):
            print(f"plot: {path}")


if __name__ == "__main__":
    example = "python -m experiments.sweep --gin_file=configs/quickstart.gin"
    shards = {"shard_id": "number of the part to measure, from 0", "num_shards": "number of parts"}
    traces = {"profile_at": "folder, local or gs://, for an xprof trace of the first point that is measured"}
    short: dict[str, Any] = {"sizes": short_flags.SIZES, "default": "configs/quickstart.gin"}
    flags_of_sweep: dict[str, Any] = {"numbers": shards, "texts": traces, "switches": printing.NOTES}
    gin_flags.main(experiment.sweep, example, together=True, after=_predict, **flags_of_sweep, **short)
