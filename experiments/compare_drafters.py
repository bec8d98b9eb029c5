r"""Hold ways of choosing a drafter for each query against each drafter always, on several domains (paper 5).

    python -m experiments.compare_drafters --gin_file=configs/paper5_table1.gin --gin_file=configs/sizes/tiny.gin

Prints a table for every temperature and block size: per domain quality, speed-up, time per token with the policy's own,
acceptance and how often each drafter was chosen; and what each query's best drafter, known afterwards, would give.
Several sets of drafters (`compare.further`: configs/paper5_further.gin) stand in one table and are timed in turn; a
second table says what choosing, and what a further drafter, costs. Records go to `compare.output`; a run that was
killed goes on. The table again, or for a paper:

    python -m experiments.tables results/paper5_table1.jsonl --measures selection --format latex

    --gin.compare.block_sizes="(5, 7, 10)"                  γ
    --gin.compare.temperatures="(0.5, 0.9, 1.0)"            of both models
    --gin.compare.policies="('runs/a.msgpack',)"            instead of the pair's own policy
    --gin.compare.ways="('greedy',)"                        how a policy chooses: greedy, dynamic, thompson, optimistic
    --gin.compare.alone=False                               no drafter without a selection around it
    --gin.compare.dry_run=True                              list the points
"""

from speccascade_jax.runtime import gin_flags
from speccascade_jax.selection import report

EXAMPLE = (
    "python -m experiments.compare_drafters --gin_file=configs/paper5_table1.gin --gin_file=configs/sizes/tiny.gin"
)

if __name__ == "__main__":
    gin_flags.main(report.compare, EXAMPLE)
