"""What models need, before anything is downloaded or allocated: parameters, cache, the laws of a block.

    python -m experiments.describe gemma2_9b gemma2_2b
    python -m experiments.describe llama3.1_70b --batch 1 8 32 --length 32768 --block-size 7
    python -m experiments.describe path/to/checkpoint --dtype float32

A model is a preset's name or a checkpoint that the package reads, of which only names and shapes are looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from rich.console import Console

from speccascade_jax import checkpoints
from speccascade_jax.core import names
from speccascade_jax.core.checks import whole
from speccascade_jax.core.files import expanded
from speccascade_jax.models import needs
from speccascade_jax.models.decoder import PRESETS, DecoderLM
from speccascade_jax.models.t5 import T5
from speccascade_jax.results.tables.grid import Grid
from speccascade_jax.runtime import interrupts

DTYPES = ("bfloat16", "float32", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        for name, low in (("length", 1), ("block-size", 1)):
            whole(name, getattr(args, name.replace("-", "_")), low)
        batches = [whole("batch", batch, 1) for batch in args.batch]
        models = {name: model(name, args.dtype) for name in args.models}
        grid = table(models, batches=batches, length=args.length, block_size=args.block_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 140).print(grid.rich())
    return 0


def model(name: str, dtype: str) -> DecoderLM | T5:
    """A preset's model, or the one of a checkpoint, computing in `dtype`.

    Raises:
        ValueError: neither a preset nor a path; names the nearest presets.
    """
    if name in PRESETS:
        return DecoderLM(dataclasses.replace(PRESETS[name], dtype=dtype))
    if not expanded(name).exists():
        hint = names.hint(name, PRESETS)
        raise ValueError(f"no preset and no checkpoint {name!r}: {hint}the presets are {', '.join(PRESETS)}")
    found = checkpoints.model_of(name)
    return dataclasses.replace(found, config=dataclasses.replace(found.config, dtype=dtype))


def table(models: dict[str, DecoderLM | T5], *, batches: list[int], length: int, block_size: int) -> Grid:
    """A row per model and batch, in GB (10⁹ bytes)."""
    rows = []
    for name, model in models.items():
        for batch in batches:
            found = needs.needs(model, batch=batch, length=length, block_size=block_size)
            sizes = (found.parameter_bytes, found.cache_bytes, found.laws_bytes, found.call_bytes)
            rows.append([name, f"{found.parameters:,}", str(batch), *(f"{size / 1e9:.3f}" for size in sizes)])
    header = ["model", "parameters", "batch", "weights", "cache", "laws of a block", "read by a call"]
    dtypes = ", ".join(sorted({model.config.dtype for model in models.values()}))
    notes = [
        f"GB (10⁹ bytes), {dtypes}; {length:,} positions, γ = {block_size}. Laws: q̃ and p̃ of γ + 1 positions "
        "in float32. A call reads at least the cache and the weights, once, without an encoder's and, where the output "
        "layer is not tied, without the embedding's.",
        *(_beyond(name, model, length) for name, model in models.items() if length > needs.longest(model)),
    ]
    return Grid(title="What the models need", header=header, rows=rows, notes=notes, bold=set())


def _beyond(name: str, model: DecoderLM | T5, length: int) -> str:
    return f"{length:,} positions are beyond the {needs.longest(model):,} that {name} was made for."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"presets: {', '.join(PRESETS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a preset's name, or the path of a checkpoint")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows (default: 1 8)")
    parser.add_argument("--length", type=int, default=4096, help="positions in the cache (default: 4096)")
    parser.add_argument("--block-size", type=int, default=5, help="γ (default: 5)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache (default: bfloat16)")
    return parser


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
