r"""Write an HTML report of a sweep's results file: plot, tables, and every point's settings, outputs and rejections.

    python -m experiments.report results/quickstart.jsonl
    python -m experiments.report results/quickstart.jsonl --output=for_anna.html --most=20
    python -m experiments.report results/quickstart.jsonl --predict=v5e:2x4      latencies predicted for another device

A point is one measured combination of settings. The report is a single file that needs no network and no server. Every
sweep writes it at its end, beside the results file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from speccascade_jax.core.checks import whole
from speccascade_jax.results.analysis.panels import MIXABLE, TOGETHER, panels, read_points
from speccascade_jax.results.report import page, predicting
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.storage.files import expanded


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__)
    parser.add_argument("records", help="a store (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument("--output", help="the file to write (default: <store>.html beside the store)")
    parser.add_argument(
        "--most", type=int, default=page.MOST, help=f"number of outputs shown of each point ({page.MOST})"
    )
    parser.add_argument("--together", nargs="+", default=[], choices=MIXABLE, help=TOGETHER)
    predicting.add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        whole("most", args.most, 0)
        records = read_points(args.records)
        records += predicting.predicted(records, args.records, predicting.of_arguments(args), _complete)
        shown = panels(records, args.together)
        path = None if args.output is None else expanded(args.output)
        print(page.write(shown, args.records, path, most=args.most))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _complete(*arguments: Any) -> dict[str, Any]:
    """Compiles the programs whose costs lack; JAX and the compilers are imported only here."""
    from speccascade_jax.preflight import costs

    return costs.complete(*arguments)


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
