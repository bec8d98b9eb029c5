r"""Measure all combinations of rules, α, γ, temperature, top-p and seeds; a killed sweep resumes.

    python -m experiments.sweep --gin_file=configs/quickstart.gin
    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.dry_run=True      only list the points
    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.seeds="(0, 1, 2)" \
        --gin.sweep.temperatures="(0.0, 1.0)" --gin.sweep.output="'results/seeds.jsonl'"

    python -m experiments.sweep --gin_file=configs/quickstart.gin --gin.sweep.plan=7 --gin.sweep.alphas="{}"
                                                            seven α's per rule, placed where an estimated curve changes

    python -m experiments.sweep --gin_file=configs/quickstart.gin --shard_id=0 --num_shards=4
                                                            a quarter of the points, on one of four machines

The output file holds one JSON line (a record) per point, a combination of settings. Target and draft alone are always
measured too. Every point is checked before anything is loaded or compiled. At the end the sweep makes the table and the
plot of its output file, as tables.py and plots.py do. The settings are the arguments of `sweep` in
speccascade_jax/evaluation/experiment.py, and of ModelPair and Evaluation in evaluation/points.py.
"""

from speccascade_jax.evaluation import experiment
from speccascade_jax.runtime import gin_flags

if __name__ == "__main__":
    example = "python -m experiments.sweep --gin_file=configs/quickstart.gin"
    shards = {"shard_id": "number of the part to measure, from 0", "num_shards": "number of parts"}
    gin_flags.main(experiment.sweep, example, numbers=shards, together=True)
