r"""Learn which drafter to choose while serving queries whose domain shifts, and measure each learner's regret.

    python -m experiments.serve_online --gin_file=configs/paper5_online.gin

Every query is decoded by each learner and, for comparison, with each fixed drafter. A learner observes only its own
times. The command prints time per token and regret per query, before and after each shift of the domain. It writes
<output>/queries.jsonl (a line per query), regret.json and regret.png. A killed run resumes: run the same command again.

    --gin.serve.learning="('thompson', 'exp3')"    thompson, thompson_prior (starts from a trained policy), exp3,
                                                   greedy (a trained policy, without further learning), random
    --gin.serve.temperature=1.0                    temperature of both models
    --gin.serve.discount=0.99                      factor per query by which Thompson sampling discounts the past
    --gin.serve.output="'results/online'"          another folder
"""

from speccascade_jax.runtime import gin_flags, short_flags
from speccascade_jax.selection import serving

EXAMPLE = "python -m experiments.serve_online --gin_file=configs/paper5_online.gin"

if __name__ == "__main__":
    gin_flags.main(serving.serve, EXAMPLE, sizes=short_flags.SIZES)
