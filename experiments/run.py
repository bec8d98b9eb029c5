r"""One configuration, one record: quality, latency relative to the target alone, and the engine's counts.

A run is run.gin (the skeleton) with one model pair, one task and one method; no file overrides another's value:

    python -m experiments.run --gin_file=gin/run.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin \
        --gin.Method.alpha=0.9 --gin.Sampling.temperature=1.0

The record is printed and added to results/runs.jsonl (--gin.run.output="'other.jsonl'"); a point that is there already
is only printed. The `configuration` of any record is a gin file that runs it again. What can be set: the attributes of
ModelPair, Evaluation, Method and Sampling in speccascade_jax/evaluation/points.py, the arguments of run in
speccascade_jax/evaluation/experiment.py.
"""

from speccascade_jax.evaluation import experiment
from speccascade_jax.runtime import gin_flags, interrupts

EXAMPLE = (
    "python -m experiments.run --gin_file=gin/run.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)

if __name__ == "__main__":
    gin_flags.main(experiment.run, EXAMPLE, interrupts.ANEW, together=True)
