r"""Learn which drafter to choose while serving: a stream of queries whose domain shifts, and the learners' regret.

    python -m experiments.serve_online --gin_file=configs/paper5_online.gin

Every query is decoded by each learner and, for comparison, with each fixed drafter; a learner observes its own time
only. Prints time per token and regret per query, before and after each shift; writes <output>/queries.jsonl (a line per
query), regret.json and regret.png. A killed run resumes: run the same command again.

    --gin.serve.learning="('thompson', 'exp3')"    thompson, thompson_prior (starts from a trained policy), exp3,
                                                   greedy (that policy, without further learning), random
    --gin.serve.temperature=1.0                    of both models
    --gin.serve.discount=0.99                      factor per query by which Thompson sampling discounts the past
    --gin.serve.output="'results/online'"          another folder
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import serving

EXAMPLE = "python -m experiments.serve_online --gin_file=configs/paper5_online.gin"

if __name__ == "__main__":
    gin_flags.main(serving.serve, EXAMPLE)
