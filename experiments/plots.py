"""Plot quality against speed-up and against the rejection rate, one figure per setting.

    python -m experiments.plots results/quickstart.jsonl
    python -m experiments.plots results/quickstart.jsonl --output docs/figures --format svg
    python -m experiments.plots results/gamma1.jsonl --share rejections_per_token      Narasimhan et al., 2024, Figure 3
    python -m experiments.plots --histograms wmt.json xsum.json      Holsman et al., Figure 3, from survey.py's output
    python -m experiments.plots results/paper3.jsonl --pareto      SpecDec++, Figure 4: verification over discard rate
    python -m experiments.plots results/hierarchy.json --acceptance    acceptance between models (optimize_hierarchy.py)
    python -m experiments.plots results/quickstart.jsonl --predict=v5e:2x4     also a figure of predicted latencies

The left plot is Figure 4 of Narasimhan et al., 2024 with speed-ups (faster is further right); the right plot is their
Figure 3. A line connects the α's of each rule, which are written at its points. Of more than five rules, those that no
other rule beats are in colour. The grey line shows whole requests sent at random to draft or target. A ring marks the
fastest point whose measured quality is at least the target's, with its paired 95% intervals. Hollow markers are
inconclusive points: nothing was drafted there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.results.analysis import families, histograms, panels
from speccascade_jax.results.report import predicting
from speccascade_jax.results.report.figures import fronts, studies, tradeoff
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.storage.files import expanded


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the figures and prints their paths; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        hardware = predicting.of_arguments(args)
        folder = expanded(args.output) if args.output else expanded(args.records[0]).parent
        stem = Path(args.records[0]).stem
        if args.histograms:
            paths = [folder / f"{stem}-histogram.{args.format}"]
            studies.draw_histograms(histograms.read(args.records), paths[0])
        elif args.acceptance:
            paths = [folder / f"{stem}-acceptance.{args.format}"]
            studies.draw_acceptance(studies.read_acceptance(args.records), paths[0])
        elif args.pareto:
            every = families.of_records(result_store.read_records(*args.records))
            paths, missing = fronts.draw_fronts(every, folder, stem, args.format)
            if not paths:
                raise ValueError("\nerror: ".join(missing))
            for reason in missing:
                print(f"left out: {reason}", file=sys.stderr)
        else:
            records = panels.read_points(*args.records)
            predicted = predicting.predicted(records, args.records[0], hardware, _complete)
            shown = panels.panels(records, args.together), panels.panels(predicted, args.together)
            paths = tradeoff.draw_all(shown[0], folder, stem, args.format, args.share)
            paths += tradeoff.draw_predicted(shown[1], folder, stem, args.format, args.share)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"plot: {path}")
    return 0


def _complete(*arguments: Any) -> dict[str, Any]:
    """Compiles the programs whose costs lack; JAX and the compilers are imported only here."""
    from speccascade_jax.preflight import costs

    return costs.complete(*arguments)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__)
    parser.add_argument("records", nargs="+", help="result files (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument(
        "--histograms", action="store_true", help="draw the histograms of survey.py's files: one panel per file"
    )
    parser.add_argument("--acceptance", action="store_true", help="draw heat maps of optimize_hierarchy.py's files")
    parser.add_argument(
        "--pareto", action="store_true", help="draw verification over discard rate, a point per γ or threshold"
    )
    parser.add_argument("--output", help="folder for the figures (default: beside the first result file)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument(
        "--share",
        choices=tuple(panels.SHARES),
        default="rejection_rate",
        help="x-axis of the right-hand plot",
    )
    parser.add_argument("--together", nargs="+", default=(), choices=tuple(panels.MIXABLE), help=panels.TOGETHER)
    predicting.add_flags(parser)
    return parser


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
