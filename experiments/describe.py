"""List the memory that models need, before anything is downloaded or allocated: weights, cache, distributions.

    python -m experiments.describe gemma2_9b gemma2_2b
    python -m experiments.describe llama3.1_70b --batch 1 8 32 --length 32768 --block-size 7
    python -m experiments.describe t5_1_1_xl t5_1_1_small --length 1024
    python -m experiments.describe path/to/checkpoint --dtype float32
    python -m experiments.describe gemma2_27b --mesh 1 8 --batch 8 --memory 16      the share of each of 8 devices

A model is given by the name of a preset, by the path of a checkpoint in any supported format, or by its name on Hugging
Face's hub (owner/name or owner/name@revision). Only names and shapes are read from a checkpoint, and only the
configuration is fetched from the hub.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from speccascade_jax import checkpoints
from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import AttachedModel
from speccascade_jax.models import memory_estimate
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.families import PRESETS
from speccascade_jax.models.t5 import T5
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import Grid
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.runtime import mesh as meshes

DTYPES = ("bfloat16", "float32", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        for name, low in (("length", 1), ("block-size", 1)):
            whole(name, getattr(args, name.replace("-", "_")), low)
        batches = [whole("batch", batch, 1) for batch in args.batch]
        models = {name: model(name, args.dtype) for name in args.models}
        mesh = meshes.checked(args.mesh)
        if args.memory is not None and not args.memory > 0:
            raise ValueError(f"memory={args.memory:g}: give GB above 0")
        grid = table(models, batches=batches, length=args.length, block_size=args.block_size, mesh=mesh)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    printing.print_grids([grid])
    return _fits(grid, args.memory)


def _fits(grid: Grid, memory: float | None) -> int:
    """Prints errors for rows that need more GB than a device has; returns the exit status."""
    sizes = [(row, sum(map(float, row[3:6]))) for row in grid.rows]
    large = [(row, size) for row, size in sizes if memory is not None and size > memory]
    for row, size in large:
        print(
            f"error: {row[0]} at batch {row[2]} needs {size:.1f} GB on each device, which has {memory:g}: spread "
            f"the model over more devices (--mesh), or reduce --batch, --length or the bits of --dtype",
            file=sys.stderr,
        )
    return 1 if large else 0


def model(name: str, dtype: str) -> DecoderLM | T5:
    """Returns a preset's model, or the model of a checkpoint, that computes in `dtype`.

    Raises:
        ValueError: `name` is neither a preset nor an existing path; the message names similar presets.
    """
    named_model = checkpoints.named(name)
    return dataclasses.replace(named_model, config=dataclasses.replace(named_model.config, dtype=dtype))


def table(
    models: dict[str, DecoderLM | T5], *, batches: list[int], length: int, block_size: int, mesh: tuple[int, int]
) -> Grid:
    """Returns a table with a row per model and batch, in GB (10⁹ bytes) on each device."""
    rows, experts = [], {}
    for name, model in models.items():
        for batch in batches:
            estimate = memory_estimate.needs(model, batch=batch, length=length, block_size=block_size, mesh=mesh)
            if estimate.active < estimate.parameters:
                experts[name] = f"{name}: a token uses {estimate.active:,} of the parameters."
            sizes = (estimate.parameter_bytes, estimate.cache_bytes, estimate.laws_bytes, estimate.call_bytes)
            rows.append([name, f"{estimate.parameters:,}", str(batch), *(f"{size / 1e9:.3f}" for size in sizes)])
    header = ["model", "parameters", "batch", "weights", "cache", "distributions of a block", "read by a call"]
    dtypes = ", ".join(sorted({model.config.dtype for model in models.values()}))
    notes = [
        f"GB (10⁹ bytes){_on(mesh)}, {dtypes}; {length:,} positions, γ = {block_size}. Distributions: q̃ and p̃ at "
        "γ + 1 positions, in float32. A call reads the cache and the weights at least once, except the weights of an "
        "encoder and of an embedding that is not tied to the output layer; of experts, those that its tokens choose if "
        "they choose evenly and independently. Estimated from shapes; to compile for "
        "a TPU or GPU, temporary buffers included: experiments.preflight.",
        *experts.values(),
        *(f"{name}: {model.about}." for name, model in models.items() if isinstance(model, AttachedModel)),
        *(_beyond(name, model, length) for name, model in models.items() if length > memory_estimate.longest(model)),
    ]
    return Grid(title="Memory of the models", header=header, rows=rows, notes=notes, bold=set())


def _on(mesh: tuple[int, int]) -> str:
    return "" if mesh == (1, 1) else f" on each of {mesh[0]} × {mesh[1]} devices (rows × model)"


def _beyond(name: str, model: DecoderLM | T5, length: int) -> str:
    return f"{length:,} positions exceed the {memory_estimate.longest(model):,} that {name} supports."


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__, epilog=f"presets: {', '.join(PRESETS)}")
    about = "a preset's name, the path of a checkpoint, or a name on the hub"
    parser.add_argument("models", nargs="+", metavar="MODEL", help=about)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--length", type=int, default=4096, help="positions in the cache (default: 4096)")
    parser.add_argument("--block-size", type=int, default=5, help="γ (default: 5)")
    parser.add_argument(
        "--mesh", type=int, nargs=2, default=[1, 1], metavar=("DATA", "MODEL"),
        help="numbers of devices that the batch and the model are spread over (default: 1 1)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=float, metavar="GB", help="memory of one device: rows that need more are errors"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="type of weights and cache (default: bfloat16)"
    )
    return parser


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
