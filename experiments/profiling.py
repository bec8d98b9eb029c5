r"""Measure the parts of a round from a trace: draft, score, sampling, verify, commit, and the models' parts in them.

    python -m experiments.profiling --gin_file=gin/profiling.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.method="'token_v3'" --gin.Settings.alpha=0.9

The command profiles one configuration, chosen as for run.py, with gin/profiling.gin instead of gin/run.gin; a record's
`configuration` may follow gin/profiling.gin instead of the other two files. It prints the parts of a round, with the
prefill below them; the parts of the models; and the most expensive single instructions.

Settings, with their defaults:

    --gin.profile.batch=1           rows decoded together
    --gin.profile.generations=4     batches, each of different examples
    --gin.profile.trials=3          the fastest of these is reported
    --gin.profile.top=10            number of single instructions
    --gin.profile.output="'profile.json'"     (not written) all numbers
    --gin.profile.keep="'folder'"             (not kept) the traces, for XProf or Perfetto
"""

from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.runtime import gin_flags, interrupts

EXAMPLE = (
    "python -m experiments.profiling --gin_file=gin/profiling.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)

if __name__ == "__main__":
    gin_flags.main(profiling.profile, EXAMPLE, interrupts.ANEW)
