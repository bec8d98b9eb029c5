r"""Every rule's rejection and deferral rate from one pass over given outputs, without decoding with any of them.

    python -m experiments.survey --gin_file=gin/survey.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.temperature=1.0

The outputs are those of the target, of the draft, or (the default) of both mixed token by token. The numbers are
estimates: a rule that runs writes other prefixes. How far they are off:

    --gin.survey.check="(0.1, 0.5, 0.9)"    run each rule at these shares of its range, print the error, and that of a
                                            survey of the rule's own outputs, in which no prefix differs

How far fuzzy decoding goes from the target, each fuzzy rule among the rules really run at thresholds τ with a sampled
draft: the divergence incurred beside paper 2's bound N · share · τ, and what that is worth:

    --gin.survey.rules="('fuzzy_tv_scaled', 'fuzzy_js_scaled')" --gin.survey.bounds="(0.1, 0.3)"

How far apart draft and target are position by position is said in one line; `experiments/plots.py --histograms` draws
it from the output (paper 2's Figure 3).

Other settings, with their defaults:

    --gin.survey.rules="('chow', 'opt')"    (gin/survey.gin: all of paper 1's)
    --gin.survey.along="'mixed'"            or 'target', 'draft'
    --gin.survey.alphas=33                  size of each rule's grid
    --gin.survey.histogram="'js'"           the divergence that is counted over positions: 'tv', 'kl_scaled', ...
    --gin.survey.output="'survey.json'"     (not written) the printed rows, the bounds and the histogram
"""

from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.runtime import gin_flags, interrupts

EXAMPLE = (
    "python -m experiments.survey --gin_file=gin/survey.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin"
)

if __name__ == "__main__":
    gin_flags.main(surveying.survey, EXAMPLE, interrupts.ANEW)
