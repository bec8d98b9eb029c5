r"""Compare the choice of a drafter per query with fixed drafters (Huang et al., 2024, assistant selection).

    python -m experiments.compare_drafters --gin_file=configs/paper5_table1.gin --gin_file=configs/sizes/tiny.gin

The command prints one table per temperature and block size. For each domain, a table shows quality, speed-up, time per
token (including the policy's own time), acceptance, and how often each drafter was chosen. It also shows the result of
choosing each query's best drafter in hindsight. Several sets of drafters (`compare.further`, see
configs/paper5_further.gin) share one table and are timed in turns. A second table shows the cost of choosing and of one
more drafter. Records go to `compare.output`; a killed run resumes. To print the table again, or for a paper:

    python -m experiments.tables results/paper5_table1.jsonl --measures selection --format latex

    --gin.compare.block_sizes="(5, 7, 10)"                  block sizes γ
    --gin.compare.temperatures="(0.5, 0.9, 1.0)"            temperatures of both models
    --gin.compare.policies="('runs/a.msgpack',)"            instead of the pair's own policy
    --gin.compare.ways="('greedy',)"                        how a policy chooses: greedy, dynamic, thompson, optimistic
    --gin.compare.alone=False                               leave out the runs of each drafter without a selection
    --gin.compare.dry_run=True                              list the points
"""

from speccascade_jax.runtime import gin_flags, short_flags
from speccascade_jax.selection import report

EXAMPLE = (
    "python -m experiments.compare_drafters --gin_file=configs/paper5_table1.gin --gin_file=configs/sizes/tiny.gin"
)

if __name__ == "__main__":
    gin_flags.main(report.compare, EXAMPLE, sizes=short_flags.SIZES)
