r"""Train a policy that chooses a drafter for each query; compare objectives, numbers of queries, weights of rewards.

    python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin
    python -m experiments.train_policy --gin_file=gin/train_policy.gin

The policy is stored in <run_dir>/selection_policy.msgpack: move it into the pair's folder, or name it as a method's
`policy`. A killed run resumes where it last saved: run the same command again.

    --gin.PolicyTrainer.objective="'best_arm'"     reinforce (the paper's), expected, best_arm, linucb
    --gin.PolicyTrainer.hidden="()"                a linear policy
    --gin.PolicyTrainer.alignment_weight=0.5       weight of ROUGE-L in the reward; the rest rewards small candidates
    --gin.PolicyTrainer.arms="('draft', 'de_en')"  choose among these candidates of the data only
    --mode=curves                                  rewards by number of queries, for every objective (Figure 3)
    --mode=weights                                 choices and rewards by alignment_weight (Figure 2)

The modes curves and weights print a table, and write its rows and a picture to <run_dir> (curves.json, curves.png). The
figures are those of Huang et al., 2024 (assistant selection).
"""

from __future__ import annotations

import json

import gin
from absl import app, flags, logging

from speccascade_jax.runtime import gin_flags, interrupts, malloc, short_flags
from speccascade_jax.selection import train

SHORT = short_flags.Offered(function=train.PolicyTrainer, sizes=short_flags.POLICY_SIZES)
gin_flags.define_flags(SHORT)
MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "curves", "weights"],
    "train: one policy. curves: one per number of queries and objective. weights: one per alignment_weight.",
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; flags look like --gin.NAME=VALUE")
    with gin_flags.one_line_errors():
        gin_flags.read_alone("python -m experiments.train_policy --gin_file=gin/train_policy.gin", SHORT)
        trainer = gin.get_configurable(train.PolicyTrainer)()
        if MODE.value == "train":
            print(json.dumps(trainer.run(), indent=1))
        else:
            gin.get_configurable(train.curves if MODE.value == "curves" else train.weights)(trainer)


if __name__ == "__main__":
    malloc.keep_freed_memory()
    logging.set_verbosity(logging.INFO)
    gin_flags.run_app(main, interrupts.SAVED)
