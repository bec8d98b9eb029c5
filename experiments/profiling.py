r"""Where a round's time goes: draft, score, sampling, verify, commit, and the models' parts in them, from a trace.

    python -m experiments.profiling --gin_file=gin/profiling.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.method="'token_v3'" --gin.Settings.alpha=0.9

One configuration, chosen as for run.py, with gin/profiling.gin in place of gin/run.gin; a record's `configuration` goes
behind gin/profiling.gin in place of the other two. What is printed: the parts of a round, with the prefill below them;
the parts of the models; the dearest single instructions.

Settings, with their defaults:

    --gin.profile.batch=1           rows decoded together
    --gin.profile.generations=4     batches, each of other examples
    --gin.profile.trials=3          the quickest of these counts
    --gin.profile.top=10            how many single instructions
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
