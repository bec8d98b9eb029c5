r"""Estimate the rejection and deferral rates of all rules from one pass of both models over given outputs.

    python -m experiments.survey --gin_file=gin/survey.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tiny_translation.gin --gin.Settings.temperature=1.0

No rule is run. The outputs are those of the target, of the draft, or (the default) of both mixed token by token. The
numbers are estimates, because decoding with a rule produces other prefixes. To measure the error of the estimates:

    --gin.survey.check="(0.1, 0.5, 0.9)"    run each rule with α at these fractions of its range; print the error, and
                                            the error of a survey of the rule's own outputs, whose prefixes are equal

To measure how far the outputs of fuzzy decoding diverge from the target's, run each fuzzy rule at thresholds τ with a
sampled draft. The command prints the measured divergence, the bound N · share · τ of Holsman et al. (2025), and whether
this bound is proven:

    --gin.survey.rules="('fuzzy_tv_scaled', 'fuzzy_js_scaled')" --gin.survey.bounds="(0.1, 0.3)"

One printed line summarises the divergence of draft and target over all positions. `experiments/plots.py --histograms`
draws its histogram from the output file (Holsman et al., 2025, Figure 3).

Other settings, with their defaults:

    --gin.survey.rules="('chow', 'opt')"    (gin/survey.gin: all rules of Narasimhan et al., 2024)
    --gin.survey.along="'mixed'"            writer of the outputs: 'mixed', 'target' or 'draft'
    --gin.survey.alphas=33                  number of α's per rule
    --gin.survey.histogram="'js'"           the divergence of the histogram: 'js', 'tv', 'kl_scaled', ...
    --gin.survey.output="'survey.json'"     a file for rows, bounds and histogram (default: none)
"""

from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.runtime import gin_flags, interrupts, short_flags

EXAMPLE = (
    "python -m experiments.survey --gin_file=gin/survey.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tiny_translation.gin"
)

if __name__ == "__main__":
    gin_flags.main(surveying.survey, EXAMPLE, interrupts.ANEW, sizes=short_flags.SIZES)
