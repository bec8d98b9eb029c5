r"""Make training data for policies that choose a drafter: outputs of the target and of every candidate drafter.

    python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin

The command writes queries, their embeddings, and the ROUGE-L of each candidate's greedy output against the target's to
the folder `make.output`, by domain and by model. To add queries or a candidate, run the command again with the new
settings: it makes only the missing data. A killed run resumes where it stopped, and its result is the same.

    --gin.make.drafters="('draft', 'de_en')"      the candidates, as in a method's drafters
    --gin.QUERIES=4096                            number of queries per domain
    --gin.make.output="'runs/selection/data'"     the folder
    --gin.make.seed=1                             seed of the sampled outputs, if autoregressive is a candidate

The format is described in `speccascade_jax/selection/data.py`; experiments/train_policy.py reads it.
"""

from speccascade_jax.runtime import gin_flags, short_flags
from speccascade_jax.selection import make_data

EXAMPLE = (
    "python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin"
)

if __name__ == "__main__":
    gin_flags.main(make_data.make, EXAMPLE, sizes=short_flags.SIZES)
