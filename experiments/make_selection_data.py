r"""Make what selection policies learn from: what the target and every candidate write for queries of some domains.

    python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin

Queries, their embeddings and how well each candidate's greedy output agrees with the target's (ROUGE-L) end up in the
folder `make.output`, by domain and by model: more queries, or another candidate, are another call of the same command,
and only what is not there is made. A folder that was killed goes on where it stopped and ends as it would have.

    --gin.make.drafters="('draft', 'de_en')"      the candidates, as in a method's drafters
    --gin.QUERIES=4096                            of each domain
    --gin.make.output="'runs/selection/data'"     where to
    --gin.make.seed=1                             other sampled outputs, where autoregressive is a candidate

The format is described in `speccascade_jax/selection/data.py`; experiments/train_policy.py reads it.
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import make_data

EXAMPLE = (
    "python -m experiments.make_selection_data --gin_file=gin/selection_data.gin --gin_file=gin/selection/two_ways.gin"
)

if __name__ == "__main__":
    gin_flags.main(make_data.make, EXAMPLE)
