"""Plots of quality against relative latency and against the rejection rate, one figure per setting.

    python experiments/plots.py results/quickstart.jsonl
    python experiments/plots.py results/quickstart.jsonl --output docs/figures --format svg
    python experiments/plots.py results/gamma1.jsonl --rejections rejections_per_token      x-axis of paper 1's Figure 3

Left: paper 1's Figure 4 (lower latency is further left); right: its Figure 3. One line per rule through its α's (the
largest ringed), bars for the spread, the target's quality dotted. Hollow markers: inconclusive, nothing was drafted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax import figures, results, summary


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures and name them; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        panels = summary.panels(results.read_records(*args.records))
        folder = Path(args.output) if args.output else Path(args.records[0]).parent
        paths = figures.draw_all(panels, folder, Path(args.records[0]).stem, args.format, args.rejections)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"plot: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", help="result files (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument("--output", help="folder for the figures (default: beside the first result file)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument(
        "--rejections",
        choices=tuple(figures.REJECTIONS),
        default="rejection_rate",
        help="x-axis of the right-hand plot",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
