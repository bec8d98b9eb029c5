"""Run a chain of commands: from public checkpoints to a table of the paper.

Examples:
    python -m experiments.recipe --gin_file=configs/paper1/t5_xsum.gin --gin.DRAFT="'checkpoints/t5_1_1_small'" \\
        --gin.TARGET="'checkpoints/t5_1_1_xl'" --gin.TEXT="'c4.txt.gz'"
    python -m experiments.recipe --gin_file=configs/paper1/t5_xsum.gin --gin_file=configs/paper1/sizes/rehearsal.gin
    python -m experiments.recipe --gin_file=configs/paper1/t5_xsum.gin … --gin.recipe.run.dry_run=True  print them

The same command continues a recipe that was stopped: steps whose result exists are skipped, and the others resume. A
recipe lists its steps in a gin file (configs/paper1/t5.gin), and a file of sizes after it makes them small.
"""

import sys

from speccascade_jax.runtime import gin_flags, recipe


def finish(status: int) -> None:
    """Ends the program with the status of the failed step."""
    if status:
        sys.exit(status)


if __name__ == "__main__":
    example = "python -m experiments.recipe --gin_file=configs/paper1/t5_xsum.gin"
    sizes = {"quick": "configs/paper1/sizes/rehearsal.gin", "full": ""}  # the recipes have the published sizes
    gin_flags.main(recipe.run, example, after=finish, sizes=sizes)
