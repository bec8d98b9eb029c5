"""Train a T5 model on joined sentence pairs; export or evaluate it, or translate a training corpus with it.

Examples:
    python -m experiments.train_vocab
    python -m experiments.train_t5 --gin_file=gin/train_target.gin
    python -m experiments.train_t5 --gin_file=gin/train_target.gin --mode=export --output=runs/tatoeba_en_de/pair/target
    python -m experiments.train_t5 --gin_file=gin/train_draft.gin --gin.TEACHER="'runs/tatoeba_en_de/pair/target'"
    python -m experiments.train_t5 --gin_file=gin/train_target.gin --mode=evaluate --examples=200
    python -m experiments.train_t5 --gin_file=gin/train_draft.gin --mode=translate --examples=50000 \\
        --checkpoint=runs/tatoeba_en_de/pair/target --output=runs/tatoeba_en_de/outputs.pieces.gz
    python -m experiments.train_t5 --gin_file=gin/train_draft.gin --gin.MAX_JOINED=1 \\
        --gin.CORPUS="'runs/tatoeba_en_de/outputs.pieces.gz'" --gin.RUN_DIR="'runs/tatoeba_en_de/draft_outputs'"
    python -m experiments.train_t5 --gin_file=gin/train_draft.gin --gin.MINUTES=5 --gin.RUN_DIR="'runs/quick'"

A killed run or translation resumes where it last saved: run the same command again. The gin file contains the settings.
To change one, add --gin.NAME=VALUE, where NAME is a macro of the file (MINUTES) or a parameter (loop.Trainer.seed).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import gin
from absl import app, flags, logging

from speccascade_jax.runtime import compilation_cache, gin_flags, interrupts, malloc
from speccascade_jax.training.t5 import loop, outputs

gin_flags.define_flags()
MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "export", "evaluate", "translate"],
    "train: train or resume. export: write the trained weights to --output. evaluate: BLEU of --checkpoint. "
    "translate: write the outputs of --checkpoint for the joined training sources to --output, to train a draft on.",
)
OUTPUT = flags.DEFINE_string("output", "", "export: the checkpoint's folder. translate: the file, x.pieces.gz.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32", "int8"], "export: how weights are stored.")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "", "evaluate, translate: a checkpoint's folder; if empty, the run's saved state."
)
EXAMPLES = flags.DEFINE_integer(
    "examples", 1000, "evaluate: most validation examples. translate: number of joined training examples.", 1
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
    compilation_cache.switch_on()
    if MODE.value in ("export", "translate") and not OUTPUT.value:
        raise app.UsageError(f"--mode={MODE.value} needs --output=PATH")
    with gin_flags.one_line_errors():
        gin_flags.read_alone("python -m experiments.train_t5 --gin_file=gin/train_target.gin")
        trainer = gin.get_configurable(loop.Trainer)()
        if MODE.value == "train":
            logging.info("%s", gin.config_str())
            print(json.dumps(trainer.run()))
        elif MODE.value == "export":
            print(json.dumps(loop.export(trainer, Path(OUTPUT.value), DTYPE.value)))
        elif MODE.value == "translate":
            flagged = (CHECKPOINT, EXAMPLES, TEMPERATURE, CANDIDATES, LEAST)
            chosen = {flag.name: flag.value for flag in flagged}
            print(json.dumps(outputs.Outputs(trainer=trainer, path=OUTPUT.value, **chosen).write()))
        else:
            print(json.dumps(loop.evaluate(trainer, CHECKPOINT.value, EXAMPLES.value)))


if __name__ == "__main__":
    malloc.keep_freed_memory()
    logging.set_verbosity(logging.INFO)
    gin_flags.run_app(main, interrupts.SAVED)
