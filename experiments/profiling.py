r"""Measure, from a profiler trace, how the time of a round divides into drafting, scoring, verifying and committing.

    python -m experiments.profiling --gin_file=gin/profiling.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.method="'token_v3'" --gin.Settings.alpha=0.9

The command profiles one configuration. Choose it as for run.py, with gin/profiling.gin instead of gin/run.gin. A
record's `configuration`, saved as a gin file, can replace the files of model, task and method. The command prints the
time of each part of a round and of the prefill, the time of each part of the models, and the most expensive
instructions.

Settings, with their defaults:

    --gin.profile.batch=1           rows decoded together
    --gin.profile.generations=4     number of batches, each of different examples
    --gin.profile.trials=3          number of repetitions; the fastest one is reported
    --gin.profile.top=10            number of instructions to list
    --gin.profile.output="'profile.json'"     a file for all numbers (default: none)
    --gin.profile.keep="'folder'"             a folder for the traces, for XProf or Perfetto (default: none)
"""

from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.runtime import gin_flags, interrupts

EXAMPLE = (
    "python -m experiments.profiling --gin_file=gin/profiling.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)

if __name__ == "__main__":
    gin_flags.main(profiling.profile, EXAMPLE, interrupts.ANEW)
