r"""Find the fastest hierarchy (stack) of a pair's models: measure acceptance and costs, solve, and time the result.

    python -m experiments.optimize_hierarchy --gin_file=gin/optimize_hierarchy.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tiny_translation.gin \
        --gin.ModelPair.others="{'exit1': 'exit:1', 'exit2': 'exit:2', 'copies': 'lookup:8'}"

The candidates are the pair's draft and the further drafts of `ModelPair.others`: checkpoints, early exits of the target
(exit:2), copies from the context (lookup), tables that experiments.count_bigrams wrote (bigrams:FILE, max_gram:FILE).
The command prints the acceptance of every pair of models and the cost of their calls. Then it prints the best single
draft and two stacks, each with its predicted and its measured speed-up. The first stack minimises the latency as
Globerson et al. (2025) define it. The second one minimises a latency that also counts tokens beyond a level's budget.

With costs of calls on a TPU or GPU that this machine lacks, from compiled programs (preflight.costs.per_call):

    python -m experiments.optimize_hierarchy --gin_file=gin/optimize_hierarchy.gin --gin_file=gin/compiled_costs.gin \
        --gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tiny_translation.gin \
        --gin.per_call.topology="'v5e:2x4'"

Other settings, with their defaults:

    --gin.Settings.temperature=0.0
    --gin.optimize.max_budget=15
    --gin.optimize.output="'results/hierarchy.json'"     the rows, the matrix and the costs
"""

from speccascade_jax.hierarchy import optimizing
from speccascade_jax.runtime import gin_flags, interrupts, short_flags

EXAMPLE = (
    "python -m experiments.optimize_hierarchy --gin_file=gin/optimize_hierarchy.gin "
    "--gin_file=gin/models/tatoeba_en_de.gin --gin_file=gin/tasks/tiny_translation.gin"
)

if __name__ == "__main__":
    gin_flags.main(optimizing.optimize, EXAMPLE, interrupts.ANEW, sizes=short_flags.SIZES)
