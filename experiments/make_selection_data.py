r"""Make training data for selection policies: outputs of the target and of every candidate for queries of domains.

    python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin

Queries, their embeddings and the agreement of each candidate's greedy output with the target's (ROUGE-L) are written to
the folder `make.output`, by domain and by model. For more queries, or another candidate, run the same command again: it
makes only the missing data. A killed run resumes where it stopped, and its result is the same.

    --gin.make.drafters="('draft', 'de_en')"      the candidates, as in a method's drafters
    --gin.QUERIES=4096                            of each domain
    --gin.make.output="'runs/selection/data'"     the folder
    --gin.make.seed=1                             other sampled outputs, if autoregressive is a candidate

The format is described in `speccascade_jax/selection/data.py`; experiments/train_policy.py reads it.
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import make_data

EXAMPLE = (
    "python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin"
)

if __name__ == "__main__":
    gin_flags.main(make_data.make, EXAMPLE)
