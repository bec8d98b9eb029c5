r"""Where a round's time goes: draft, score, sampling, rule, verify, commit, from a trace, as tables.

    python experiments/profile.py --gin_file=gin/profile.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin --gin.Sampling.temperature=1.0

One configuration, chosen as for run.py (gin/profile.gin takes the place of gin/run.gin). Further settings, with their
defaults: --gin.profile.batch=1, --gin.profile.generations=4, --gin.profile.top=10 (dearest single instructions),
--gin.profile.output="'profile.json'", --gin.profile.keep="'folder'" (the trace, for XProf or Perfetto).
"""

from speccascade_jax import gin_flags, profiling

EXAMPLE = (
    "python experiments/profile.py --gin_file=gin/profile.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin --gin_file=gin/methods/token_v3.gin"
)

if __name__ == "__main__":
    gin_flags.main(profiling.profile, EXAMPLE)
