r"""Make what acceptance heads (SpecDec++) are trained on: target outputs, draft proposals, how likely each is kept.

    python -m experiments.make_acceptance_data --gin_file=gin/acceptance_data.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tatoeba_joined.gin \
        --gin.Evaluation.split="'train'" --gin.Evaluation.quality_examples=8000 --gin.Settings.temperature=1.0 \
        --gin.make.output="'runs/acceptance/train'"

A folder that was killed goes on where it stopped and ends as it would have: give the same command again. The format is
described in `speccascade_jax/training/heads/shards.py`.

    --gin.make.rule="'chow'" --gin.make.alpha=0.3    labels of another rule than spec_decode
    --gin.make.seed=1                                other outputs and proposals
    --gin.make.shard_size=512                        prompts per shard: what a kill loses at most
    --gin.Evaluation.quality_batch=64                rows decoded together
    --gin.Evaluation.first_example=1000              pass over examples
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.training.heads import make_data

EXAMPLE = (
    "python -m experiments.make_acceptance_data --gin_file=gin/acceptance_data.gin "
    "--gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tiny_translation.gin"
)

if __name__ == "__main__":
    gin_flags.main(make_data.make, EXAMPLE)
