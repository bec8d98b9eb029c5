r"""Make training data for acceptance heads (SpecDec++): target outputs, draft proposals, acceptance probabilities.

    python -m experiments.make_acceptance_data --gin_file=gin/acceptance_data.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tatoeba_joined.gin \
        --gin.Evaluation.split="'train'" --gin.Evaluation.quality_examples=8000 --gin.Settings.temperature=1.0 \
        --gin.make.output="'runs/acceptance/train'"

A killed run resumes where it stopped, and its result is the same: run the same command again. The format is described
in `speccascade_jax/training/heads/shards.py`.

    --gin.make.rule="'chow'" --gin.make.alpha=0.3    the rule of the labels (default spec_decode)
    --gin.make.seed=1                                the seed of outputs and proposals
    --gin.make.shard_size=512                        prompts per shard; a kill loses at most one shard
    --gin.Evaluation.quality_batch=64                rows decoded together
    --gin.Evaluation.first_example=1000              skip the examples before this one
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.training.heads import make_data

EXAMPLE = (
    "python -m experiments.make_acceptance_data --gin_file=gin/acceptance_data.gin "
    "--gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tiny_translation.gin"
)

if __name__ == "__main__":
    gin_flags.main(make_data.make, EXAMPLE)
