r"""Train SpecDec++'s acceptance heads on a pair's frozen draft, and report how well they predict acceptance.

    python -m experiments.train_acceptance_head --gin_file=gin/train_acceptance_head.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin.HeadTrainer.data="('runs/acceptance/train',)"
    python -m experiments.train_acceptance_head ... --gin_file=gin/tasks/tatoeba_joined.gin --mode=report

`experiments/make_acceptance_data.py` makes the data. A killed run resumes where it last saved: give the same command
again. All heads of the grid are trained at once; they are stored in <run_dir>/heads.

The report (tables, <run_dir>/report/report.json, reliability.png) needs a task with prompts that were not trained on.

    --gin.HeadTrainer.depths="(0, 3)" --gin.HeadTrainer.w_rejs="(1, 6)"    the grid
    --gin.HeadTrainer.epochs=8 --gin.HeadTrainer.peak=2e-3                 AdamW, warm-up and cosine
    --gin.HeadTrainer.from_target=0.15                         share of target tokens in a training sequence
    --gin.Evaluation.quality_examples=200 --gin.HeadReport.block_size=10   examples and block size of the report
"""

from __future__ import annotations

import json

import gin
from absl import app, flags, logging

from speccascade_jax.runtime import gin_flags, interrupts, malloc, short_flags
from speccascade_jax.training.heads import report, train

SHORT = short_flags.Offered(function=train.HeadTrainer)
gin_flags.define_flags(SHORT)
MODE = flags.DEFINE_enum("mode", "train", ["train", "report"], "train: train or resume. report: evaluate the heads.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --gin.NAME=VALUE")
    with gin_flags.one_line_errors():
        gin_flags.read_alone(
            "python -m experiments.train_acceptance_head --gin_file=gin/train_acceptance_head.gin", SHORT
        )
        if MODE.value == "train":
            print(json.dumps(gin.get_configurable(train.HeadTrainer)().run(), indent=1))
        else:
            gin.get_configurable(report.HeadReport)().run()


if __name__ == "__main__":
    malloc.keep_freed_memory()
    logging.set_verbosity(logging.INFO)
    gin_flags.run_app(main, interrupts.SAVED)
