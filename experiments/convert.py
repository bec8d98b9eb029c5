"""Convert a checkpoint to this project's format (config.json and Orbax), streamed array by array.

    python -m experiments.convert models/theirs models/gemma2_2b           a directory with config.json and safetensors
    python -m experiments.convert google/gemma-2-2b models/gemma2_2b       the same from Hugging Face's hub
    python -m experiments.convert stories260K.bin models/stories260K       a llama2.c file, version 0
    python -m experiments.convert run/checkpoint_1000000 models/t5         T5X, native or through Orbax
    python -m experiments.convert SOURCE DESTINATION --dtype bfloat16      half of float32's size
    python -m experiments.convert SOURCE --dry-run                         list the mapping; read and write nothing
    python -m experiments.convert SOURCE --checksums                       write checksums.json into SOURCE only

SOURCE is a path in any supported format, or a name on the hub (owner/name or owner/name@revision). safetensors files
have no digests, so a flipped bit is not detected. Run --checksums once, while the files are known to be good: every
later load then verifies the stored digests and names the file and the tensor that changed. --checksums also accepts the
folder of a pair, for its vocabulary file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from speccascade_jax.checkpoints import converting, native, reading
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.runtime.progress import clock_time
from speccascade_jax.storage.locks import LockedError


def main(argv: Sequence[str] | None = None) -> int:
    """Converts a checkpoint, lists the mapping (--dry-run) or writes checksums; returns the exit status."""
    args = _arguments(argv)
    try:
        if args.checksums:
            _write_checksums(args)
        elif args.dry_run:
            _show(args)
        else:
            _convert(args)
    except (ValueError, OSError, LockedError) as error:
        message = "; ".join(line.strip() for line in str(error).splitlines())
        print(f"error: {message.replace('pass overwrite=True', 'add --overwrite')}", file=sys.stderr)
        return 1
    return 0


def _convert(args: argparse.Namespace) -> None:
    stored = reading.find(args.source)
    dtype, begin = args.dtype or converting.default_dtype(stored), time.monotonic()
    converting.check_outside(args.source, args.destination)
    native.check_free(args.destination, args.overwrite)
    size = filesize.decimal(converting.size(stored, dtype))
    print(f"{stored.format}: {len(stored.plan)} parameters, {size} as {dtype}")
    with _progress("reading and writing") as advance:
        converting.convert(stored, args.destination, dtype, overwrite=args.overwrite, advance=advance)
    print(f"written: {args.destination} in {clock_time(time.monotonic() - begin)}")


def _write_checksums(args: argparse.Namespace) -> None:
    with _progress("digests") as advance:
        file = converting.write_checksums(args.source, advance)
    print(f"written: {file}")


@contextlib.contextmanager
def _progress(label: str) -> Iterator[converting.Advance]:
    """Shows a progress bar on stderr once the first bytes arrive."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("left")
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task(label, total=None)

    with contextlib.ExitStack() as shown:

        def advance(count: int, total: int) -> None:
            if not progress.live.is_started:
                shown.enter_context(progress)
            progress.update(task, advance=count, total=total)

        yield advance


def _show(args: argparse.Namespace) -> None:
    stored = reading.find(args.source)
    print(reading.describe(args.source))
    table = Table("parameter", "shape", "from", "in", title="parameters and their tensors", title_justify="left")
    for row in converting.rows(stored):
        table.add_row(row.name, " × ".join(map(str, row.shape)), row.sources, row.file)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments; exits with an error on arguments that --checksums would ignore."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)  # parse_args would refuse a DESTINATION after an option
    if args.destination is None and not (args.dry_run or args.checksums):
        parser.error("give DESTINATION, or --dry-run or --checksums")
    flag_values = {"DESTINATION": args.destination, "--dtype": args.dtype, "--overwrite": args.overwrite}
    if args.checksums and (ignored := [name for name, value in flag_values.items() if value]):
        parser.error(f"--checksums writes into SOURCE and nothing else: leave out {', '.join(ignored)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__, prog="python -m experiments.convert")
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint: a directory, a file, or a name on the hub")
    parser.add_argument("destination", metavar="DESTINATION", nargs="?", help="the directory to create")
    parser.add_argument(
        "--dtype",
        choices=native.SAVED_DTYPES,
        help="dtype of the written parameters (default: the source's if it can be saved, otherwise float32)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="list the tensors of each parameter, and stop")
    instead.add_argument("--checksums", action="store_true", help="write checksums.json beside the source, and stop")
    parser.add_argument("--overwrite", action="store_true", help="replace this project's checkpoint at DESTINATION")
    return parser


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
