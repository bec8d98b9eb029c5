r"""Find the fastest setting (method × α × γ) of a pair and task within a tolerance, by successive halving.

    python -m experiments.calibrate --gin_file=gin/calibrate.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tatoeba_joined.gin --gin.calibrate.max_loss=0.01

The result is the fastest setting that loses at most 1% of the target's quality. All candidates are measured on few
examples, the better half of them on twice as many, and so on. The remaining ones are tested on fresh examples, the
safest first, until one fails. The fastest one that passed and its runners-up are then measured on held-out examples,
with 95% intervals of quality, difference to the target and latency. The results are printed, and written beside the
store: the report (results/calibration.json), and gin (results/calibration.gin) that experiments/run.py reads instead of
a file of gin/methods. A killed calibration resumes where it stopped.

    --gin.calibrate.max_latency=0.6         the best setting no slower than 0.6 of the target; with max_loss: both hold
    --gin.calibrate.confidence=0.9          share of the resamples of the examples that must keep the tolerance
    --gin.calibrate.search_examples=200     examples of the search; then test_examples=400, held_out_examples=400
    --gin.calibrate.rules="('diff', 'opt')" --gin.calibrate.alphas="{'diff': (0.0, 0.1)}"
    --gin.calibrate.block_sizes="(3, 5)"    the candidates (gin/calibrate.gin); the draft alone is always a candidate
    --gin.Settings.temperature=1.0          (0)
    --gin.calibrate.seeds="(0, 1, 2)"       measure each setting with each seed
    --gin.calibrate.output="'results/calibration.jsonl'"

The procedure for fuzzy decoding of Holsman et al. (2025, Appendix D), which has its own candidates and bounds:

    python -m experiments.calibrate --gin_file=gin/calibrate_appendix_d.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tatoeba_joined.gin

    --gin.AppendixD.rule="'fuzzy_js'"       another divergence; baseline="'sd_reference'", lengths="(5, 10)", lost=0.2
"""

from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.runtime import gin_flags

EXAMPLE = (
    "python -m experiments.calibrate --gin_file=gin/calibrate.gin --gin_file=gin/models/tatoeba_en_de.gin "
    "--gin_file=gin/tasks/tatoeba_joined.gin --gin.calibrate.max_loss=0.01"
)

if __name__ == "__main__":
    gin_flags.main(calibrating.calibrate, EXAMPLE)
