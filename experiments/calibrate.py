r"""Find the fastest setting (method × α × γ) of a pair and task within a tolerance, by successive halving.

    python -m experiments.calibrate --gin_file=gin/calibrate.gin --gin_file=gin/models/tatoeba_en_de.gin \
        --gin_file=gin/tasks/tatoeba_joined.gin --gin.calibrate.max_loss=0.01

The example finds the fastest setting that loses at most 1% of the target's quality. All candidates are measured on a
few examples, then the better half on twice as many, and so on. The remaining candidates are tested on fresh examples,
the safest first, until one fails. The fastest candidate that passed and its runners-up are measured on held-out
examples, with 95% intervals of quality, of the difference to the target, and of latency. The command prints the results
and writes two files: a report (results/calibration.json), and gin bindings (results/calibration.gin) that
experiments/run.py accepts instead of a file of gin/methods. A killed calibration resumes where it stopped.

    --gin.calibrate.max_latency=0.6         limit of the latency over the target's; may be combined with max_loss
    --gin.calibrate.confidence=0.9          share of the bootstrap resamples in which a setting must keep the limits
    --gin.calibrate.search_examples=200     number of examples; also test_examples=400, held_out_examples=400
    --gin.calibrate.rules="('diff', 'opt')" --gin.calibrate.alphas="{'diff': (0.0, 0.1)}"
    --gin.calibrate.block_sizes="(3, 5)"    the candidates (gin/calibrate.gin); the draft alone is always a candidate
    --gin.Settings.temperature=1.0          the default is 0
    --gin.calibrate.seeds="(0, 1, 2)"       measure each setting with each seed
    --gin.calibrate.output="'results/calibration.jsonl'"

The next command runs the procedure of Holsman et al. (2025, Appendix D) for fuzzy decoding, which has its own
candidates and bounds:

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
