"""Fine-tune any model on any task, on any mesh; export or evaluate it, or write its outputs as a training corpus.

Examples:
    python -m experiments.finetune --gin_file=gin/finetune/file.gin --gin.TASK="'mine.csv'" \\
        --gin.MODEL="'google/t5-v1_1-small'" --gin.RUN_DIR="'runs/mine/draft'"
    python -m experiments.finetune --gin_file=gin/finetune/t5_small.gin --gin_file=gin/finetune/wmt14_en_de.gin \\
        --gin.MODEL="'checkpoints/t5_1_1_small'" --gin.RUN_DIR="'runs/wmt14_en_de/draft'"
    python -m experiments.finetune --gin_file=gin/train_target.gin
    python -m experiments.finetune --gin_file=gin/train_target.gin --mode=export --output=runs/tatoeba_en_de/pair/target
    python -m experiments.finetune --gin_file=gin/train_target.gin --mode=evaluate --examples=200
    python -m experiments.finetune --gin_file=gin/finetune/distill_draft.gin --gin.RUN_DIR="'runs/distilled/student'" \\
        --mode=evaluate --against=runs/distilled/data/model
    python -m experiments.finetune --gin_file=gin/train_draft.gin --mode=translate --examples=50000 \\
        --checkpoint=runs/tatoeba_en_de/pair/target --output=runs/tatoeba_en_de/outputs.pieces.gz

A killed run or translation resumes where it last saved: run the same command again. A complete run holds its model with
the vocabulary in the folder `model`, which is a target or a draft for every other command. The gin file contains the
settings. To change one, add --gin.NAME=VALUE, where NAME is a macro of the file (STEPS) or a parameter
(trainer.Trainer.seed). Several processes train together: give --coordinator_address and the two flags with it, or start
the command under SLURM or on each host of a TPU pod.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gin
from absl import app, flags, logging

from speccascade_jax.runtime import compilation_cache, gin_flags, hosts, interrupts, malloc, recipe_header
from speccascade_jax.training.finetune import evaluations, output_files, trainer
from speccascade_jax.training.finetune.run import train

gin_flags.define_flags()
MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "export", "evaluate", "translate"],
    "train: train or resume. export: write the trained weights to --output. evaluate: metrics and acceptance rates of "
    "--checkpoint. translate: write the outputs of --checkpoint for the joined training sources to --output, to train "
    "a draft on.",
)
OUTPUT = flags.DEFINE_string("output", "", "export: the checkpoint's folder. translate: the file, x.pieces.gz.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32", "int8"], "export: how weights are stored.")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "", "evaluate, translate: a checkpoint's folder; if empty, the run's saved state."
)
AGAINST = flags.DEFINE_string(
    "against", "", "evaluate: another checkpoint, whose acceptance rates are subtracted from those of --checkpoint."
)
EXAMPLES = flags.DEFINE_integer(
    "examples", 1000, "evaluate: number of validation examples. translate: number of joined training examples.", 1
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "translate: 0 is greedy, 1 samples from the model's distribution.", 0.0
)
CANDIDATES = flags.DEFINE_integer(
    "candidates", 1, "translate: outputs sampled for every source; the one nearest to its reference is written.", 1
)
LEAST = flags.DEFINE_float(
    "least", 0.0, "translate: a candidate needs this sentence BLEU, else the reference is written.", 0.0, 100.0
)
COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache", None, f"Folder for compiled programs, or off; default: ${compilation_cache.VARIABLE}."
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --gin.NAME=VALUE")
    if COMPILATION_CACHE.value is not None:
        os.environ[compilation_cache.VARIABLE] = COMPILATION_CACHE.value
    if MODE.value in ("export", "translate") and not OUTPUT.value:
        raise app.UsageError(f"--mode={MODE.value} needs --output=PATH")
    with hosts.together(interrupts.SAVED), gin_flags.one_line_errors():
        gin_flags.join(MODE.value == "train", "python -m experiments.finetune")
        compilation_cache.switch_on()
        gin_flags.read("python -m experiments.finetune --gin_file=gin/train_target.gin")
        recipe_header.announce(file=sys.stderr)
        result = run(gin.get_configurable(trainer.Trainer)())
        if hosts.first():
            print(json.dumps(result))


def run(chosen: trainer.Trainer) -> dict[str, Any]:
    if MODE.value == "export":
        return dict(trainer.export(chosen, Path(OUTPUT.value), DTYPE.value))
    if MODE.value == "translate":
        flagged = (CHECKPOINT, EXAMPLES, TEMPERATURE, CANDIDATES, LEAST)
        named = {flag.name: flag.value for flag in flagged}
        return output_files.Outputs(trainer=chosen, path=OUTPUT.value, **named).write()
    if MODE.value == "evaluate":
        return evaluations.evaluate(chosen, CHECKPOINT.value, EXAMPLES.value, AGAINST.value)
    if hosts.first():
        logging.info("%s", gin.config_str())
    return train(chosen)


if __name__ == "__main__":
    malloc.keep_freed_memory()
    logging.set_verbosity(logging.INFO)
    gin_flags.run_app(main, interrupts.SAVED)
