r"""Learn which drafter to choose while serving: a stream of queries whose domain shifts, and the regret of learners.

    python -m experiments.serve_online --gin_file=configs/paper5_online.gin

Every query is decoded by each learner and, to hold them against, with each drafter always; a learner is told its own
time alone. Prints time per token and regret per query, before and after each shift; writes <output>/queries.jsonl (a
line per query), regret.json and regret.png. A run that was killed goes on: give the same command again.

    --gin.serve.learning="('thompson', 'exp3')"    thompson, thompson_prior (a trained policy is where it begins), exp3,
                                                   greedy (that policy, which learns nothing more), random
    --gin.serve.temperature=1.0                    of both models
    --gin.serve.discount=0.99                      what Thompson sampling knows counts for less with every query
    --gin.serve.output="'results/online'"          another folder
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import serving

EXAMPLE = "python -m experiments.serve_online --gin_file=configs/paper5_online.gin"

if __name__ == "__main__":
    gin_flags.main(serving.serve, EXAMPLE)
