r"""From a pair, a task and a tolerance to a setting: method × α × γ, by successive halving.

    python -m experiments.calibrate --gin_file=gin/calibrate.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tatoeba_joined.gin --gin.calibrate.max_loss=0.01

The fastest setting that loses at most 1% of the target's quality. All candidates are measured on few examples, the
better half of them on twice as many, and so on; those that are left are tested on fresh examples, the safest first, up
to the first that fails. The fastest that passed and its runners-up are then measured on examples that nothing was
chosen by, with 95% intervals of quality, difference to the target and latency. Printed, and written beside the store:
the report (results/calibration.json) and gin to paste (results/calibration.gin, for experiments/run.py in place of a
file of gin/methods). A killed calibration goes on where it stopped.

    --gin.calibrate.max_latency=0.6         the best setting no slower than 0.6 of the target; with max_loss: both hold
    --gin.calibrate.confidence=0.9          in how many of the resamples of the examples the tolerance must be kept
    --gin.calibrate.search_examples=200     searched on; then test_examples=400, held_out_examples=400 for the report
    --gin.calibrate.rules="('diff', 'opt')" --gin.calibrate.alphas="{'diff': (0.0, 0.1)}"
    --gin.calibrate.block_sizes="(3, 5)"    the candidates (gin/calibrate.gin); the draft alone is always one
    --gin.Settings.temperature=1.0          (0)
    --gin.calibrate.seeds="(0, 1, 2)"       measure each setting with each seed
    --gin.calibrate.output="'results/calibration.jsonl'"

Paper 2's procedure for fuzzy decoding (Appendix D), which has candidates and bounds of its own:

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
