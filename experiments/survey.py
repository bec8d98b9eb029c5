r"""Estimate every rule's rejection and deferral rate from one pass over stored outputs, without decoding by any rule.

    python -m experiments.survey --gin_file=gin/survey.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.temperature=1.0

The outputs are those of the target, of the draft, or (the default) of both mixed token by token. The numbers are
estimates: a running rule produces other prefixes. The error of the estimates:

    --gin.survey.check="(0.1, 0.5, 0.9)"    run each rule at these shares of its range; print the error, and that of a
                                            survey of the rule's own outputs, in which no prefix differs

The divergence of fuzzy decoding from the target, with each fuzzy rule run at thresholds τ with a sampled draft: the
measured divergence beside the bound N · share · τ of Holsman et al. (2025), and whether that bound is proven:

    --gin.survey.rules="('fuzzy_tv_scaled', 'fuzzy_js_scaled')" --gin.survey.bounds="(0.1, 0.3)"

The divergence of draft and target at each position is summarised in one line; `experiments/plots.py --histograms` draws
it from the output (Holsman et al., 2025, Figure 3).

Other settings, with their defaults:

    --gin.survey.rules="('chow', 'opt')"    (gin/survey.gin: all rules of Narasimhan et al., 2024)
    --gin.survey.along="'mixed'"            or 'target', 'draft'
    --gin.survey.alphas=33                  size of each rule's grid
    --gin.survey.histogram="'js'"           the divergence of the histogram over positions: 'tv', 'kl_scaled', ...
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
