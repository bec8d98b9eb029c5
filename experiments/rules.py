r"""Measure rules of your own beside all rules of Narasimhan et al. (2024); print the table, plot and report.

    python -m experiments.rules my_rules.FAVOURITE
    python -m experiments.rules my_rules.FAVOURITE --task=mine.csv
    python -m experiments.rules my_rules.FAVOURITE my_rules.SECOND --alphas=my_rules.FAVOURITE:0.2,0.8
    python -m experiments.rules my_rules.FAVOURITE --quick         a first look

The names of your rules come first. A file my_rules.py in the current folder is imported by itself, as in all commands;
--import names one elsewhere. The command is a sweep of configs/rules.gin, whose settings apply; another --gin_file may
replace that file. A killed sweep resumes, and a table of two rules comes from one command with both. It runs in one
process; on several hosts, run `sweep` with the same gin file and --gin.MINE="('my_rules.FAVOURITE',)".
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from speccascade_jax.evaluation import experiment
from speccascade_jax.results.report import printing
from speccascade_jax.runtime import gin_flags, short_flags

EXAMPLE = "python -m experiments.rules my_rules.FAVOURITE --task=mine.csv"


def main(argv: Sequence[str]) -> None:
    """Runs the sweep of the rules that the first words of the command line name."""
    rules = tuple(itertools.takewhile(lambda word: not word.startswith("-"), argv[1:]))
    flags = argv[1 + len(rules) :]
    if any(flag.lstrip("-").partition("=")[0] == "methods" for flag in flags):
        remedy = f"name your rules first, without a flag ({EXAMPLE}); `sweep --methods=…` measures chosen methods"
        sys.exit(f"error: rules has no flag --methods, because it measures all rules of the paper: {remedy}")
    if not (rules or {"--help", "--helpfull", "--version"} & {*flags}):
        sys.exit(f"error: name your rules before all flags; for example: {EXAMPLE}; --help lists all flags")
    sys.argv = [argv[0], f"--gin.MINE={rules!r}", *flags]
    about = [name.rpartition(".")[2] for name in rules]
    short = {"sizes": short_flags.SIZES, "default": "configs/rules.gin", "about": about, "without": ("methods",)}
    gin_flags.main(experiment.sweep, EXAMPLE, switches=printing.NOTES, **short)


if __name__ == "__main__":
    main(sys.argv)
