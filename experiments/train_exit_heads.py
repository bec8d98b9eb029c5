r"""Train a head for every early exit of a pair's target on the target's own outputs; the target is not changed.

    python -m experiments.make_acceptance_data --gin_file=gin/acceptance_data.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tatoeba_joined.gin \
        --gin.Evaluation.split="'train'" --gin.Evaluation.quality_examples=2048 --gin.Evaluation.max_new_tokens=64 \
        --gin.Settings.temperature=1.0 --gin.make.output="'runs/exits/data'"
    python -m experiments.train_exit_heads --gin_file=gin/train_exit_heads.gin --gin_file=gin/models/tatoeba_en_de.gin

All heads are trained at once and stored in <run_dir>/exit_heads.msgpack. A pair uses one as a draft by the name
"exit:2:<run_dir>/exit_heads.msgpack" (ModelPair.others). A killed run resumes where it last saved: give the same
command again.

    --gin.ExitTrainer.layers="(1, 2, 3)"                     the number of target layers before each exit
    --gin.ExitTrainer.peak=2e-4 --gin.ExitTrainer.epochs=2   AdamW: 5% linear warm-up, then a cosine
    --gin.ExitTrainer.layers="(1,)" --gin.ExitTrainer.towards=2 --gin.ExitTrainer.init_from="'…/exit_heads.msgpack'" \
        --gin.ExitTrainer.run_dir="'runs/exits/fine'"        train the lowest exit further, towards the one above it
"""

from __future__ import annotations

import json

import gin
from absl import app, logging

from speccascade_jax.runtime import gin_flags, interrupts, malloc, short_flags
from speccascade_jax.training import exits

SHORT = short_flags.Offered(function=exits.ExitTrainer)
gin_flags.define_flags(SHORT)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --gin.NAME=VALUE")
    with gin_flags.one_line_errors():
        gin_flags.read_alone("python -m experiments.train_exit_heads --gin_file=gin/train_exit_heads.gin", SHORT)
        print(json.dumps(gin.get_configurable(exits.ExitTrainer)().run(), indent=1))


if __name__ == "__main__":
    malloc.keep_freed_memory()
    logging.set_verbosity(logging.INFO)
    gin_flags.run_app(main, interrupts.SAVED)
