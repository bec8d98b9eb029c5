"""Compile the papers' own pairs for TPUs that this machine does not have, and print the programs' costs as Markdown.

    python -m benchmarks.compiled results/compiled.json                 needs libtpu; about an hour on 2 cores
    python -m benchmarks.compiled results/compiled.json --markdown      the tables of the programs compiled so far

Programs that are in the file are not compiled again. Nothing runs: all figures are compiled for the devices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax import preflight
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.runtime import arguments
from speccascade_jax.storage.files import check_replaceable, expanded, rewrite

SETTINGS = {"method": "token_v3", "alpha": 0.5, "block_size": 5, "temperature": 1.0, "dtype": "bfloat16"}
KEPT = 0.8
"""Assumed acceptance rate in the table of predicted speed-ups."""
_BEGIN = r'\{\n "compiled": '


class Pair(NamedTuple):
    """A pair of published models, its devices, and the lengths of prompts and outputs in a paper.

    Attributes:
        name: title of the pair; target, draft: presets of its models.
        topology: the devices, such as "v5e:2x2"; mesh: their arrangement (data, model).
        read, written: numbers of tokens of a prompt and of an output.
        batches: batch sizes, one program for each.
        schedules: whether the compute time at batch 1 is taken from the compiler's final schedules; compiling takes
            longer if it writes them.
        whole: whether every device holds the whole draft.
    """

    name: str
    target: str
    draft: str
    topology: str
    mesh: tuple[int, int]
    read: int
    written: int
    batches: tuple[int, ...] = (1, 64)
    schedules: bool = False
    whole: bool = True


PAIRS = (
    Pair("T5 small → base", "t5_1_1_base", "t5_1_1_small", "v5e:2x2", (1, 1), 80, 80, schedules=True, whole=False),
    Pair("T5 small → large", "t5_1_1_large", "t5_1_1_small", "v5e:2x2", (1, 4), 80, 80, schedules=True),
    Pair("T5 small → XL", "t5_1_1_xl", "t5_1_1_small", "v5e:2x2", (1, 4), 1024, 64, schedules=True),
    Pair("T5 small → XXL", "t5_1_1_xxl", "t5_1_1_small", "v5e:2x4", (1, 8), 1024, 64),
    Pair("T5 small → XL", "t5_1_1_xl", "t5_1_1_small", "v5p:2x2x1", (1, 4), 1024, 64),
    Pair("Gemma 2 2B, replicated → 9B", "gemma2_9b", "gemma2_2b", "v5e:2x2", (1, 4), 1024, 80, (1,)),
    Pair("Gemma 2 2B → 9B", "gemma2_9b", "gemma2_2b", "v5e:2x2", (1, 4), 1024, 80, (1,), whole=False),
    Pair("Gemma 2 2B → 9B", "gemma2_9b", "gemma2_2b", "v5p:2x2x1", (1, 4), 1024, 80, whole=False),
    # four key-value heads of the draft cannot be split over eight devices
    Pair("Gemma 2 2B, replicated → 27B", "gemma2_27b", "gemma2_2b", "v5e:2x4", (1, 8), 1024, 80, (1,)),
    Pair("Gemma 2 2B → 27B", "gemma2_27b", "gemma2_2b", "v5p:2x2x1", (1, 4), 1024, 80, whole=False),
    Pair("T5 small → XXL", "t5_1_1_xxl", "t5_1_1_small", "v5e:16x16", (16, 16), 1024, 64, (64,)),
    Pair("Gemma 2 2B, replicated → 27B", "gemma2_27b", "gemma2_2b", "v5e:16x16", (16, 16), 1024, 80, (64,)),
)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key of every program and its arguments of `preflight.report`; programs at batch 1 come first."""
    listed = []
    for pair in PAIRS:
        for batch in pair.batches:
            for part in ("round", "target") if batch == 1 else ("round",):
                listed.append((batch != 1 and "16x16" not in pair.topology, pair, batch, part))
    for _, pair, batch, part in sorted(listed, key=lambda job: job[0]):
        yield f"{pair.name}|{pair.topology}|{pair.mesh}|{batch}|{part}", {
            "target": pair.target, "draft": pair.draft, "topology": pair.topology, "mesh": pair.mesh, "batch": batch,
            "prompt_length": pair.read, "max_new_tokens": pair.written, "part": part, "draft_whole": pair.whole,
            "dump": pair.schedules and batch == 1, **SETTINGS,
        }  # fmt: skip


def compile_all(path: Path) -> None:
    """Compiles the programs that are missing in the file `path`, and rewrites the file after each program."""
    entries = read(path)
    for key, job in jobs():
        if key in entries:
            continue
        begin = time.monotonic()
        try:
            entries[key] = preflight.report(**job).as_json()
        except ValueError as error:
            entries[key] = {"error": str(error)}
        print(f"{key}: {entries[key].get('error', 'compiled')}, {time.monotonic() - begin:.0f} s", flush=True)
        rewrite(path, json.dumps({"compiled": entries}, indent=1), start=_BEGIN)


def read(path: Path) -> dict[str, Any]:
    """Returns the reports of the programs in a file, by key; empty if there is no file."""
    entries: dict[str, Any] = json.loads(path.read_text())["compiled"] if path.exists() else {}
    return entries


def markdown(entries: Mapping[str, Any]) -> str:
    """Returns two Markdown tables: the compiled programs, and the speed-ups that their costs predict."""
    lines = [
        "| pair | devices, mesh | rows | program | GB a device | HBM MB | compute ms | ops | collectives | ms "
        "| bound by | compile s, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(key, entry) for key, entry in entries.items()),
        "",
        f"With {KEPT:.0%} of the draft's tokens accepted, independently:",
        "",
        "| pair | devices | target alone, ms a token | a round, ms | speed-up of γ = 5 |",
        "|---|---|---|---|---|",
        *_speed_ups(entries),
    ]
    return "\n".join(lines)


def _row(key: str, entry: Mapping[str, Any]) -> str:
    name, topology, mesh, batch, part = key.split("|")
    begin = f"| {name} | {topology}, {mesh} | {batch} | {part} |"
    if "error" in entry:
        return f"{begin} does not compile: {entry['error']} | | | | | | | |"
    report = preflight.Report.from_json(entry)
    total, band = report.total, report.band
    peak = report.memory.peak / 1e9
    fits = f"{peak:.2f}" if report.fits else f"**{peak:.2f}** of {chip_of(report.chip).memory / 1e9:.2f}"
    memory = f"{report.compile_memory / 1e9:.1f}" if report.compile_memory else "–"
    compiler = f"{report.compile_seconds:.0f}, {memory}"
    compute = f"{band.compute * 1e3:.2f}" if report.dumped else "–"
    return (
        f"{begin} {fits} | {total.hbm_bytes / 1e6:,.0f} | {compute} | {total.ops:,.0f} | {total.collectives:,.0f} | "
        f"{band.low * 1e3:.2f} to {band.high * 1e3:.2f} | {band.bound} | {compiler} |"
    )


def _speed_ups(entries: Mapping[str, Any]) -> Iterator[str]:
    tokens = (1 - KEPT**6) / (1 - KEPT)  # METHODS section 2: a round of 5 drafts and one more token
    for key, entry in entries.items():
        name, topology, mesh, batch, part = key.split("|")
        alone = entries.get("|".join((name, topology, mesh, batch, "target")), {"error": ""})
        if part == "round" and batch == "1" and "error" not in entry and "error" not in alone:
            first, second = (preflight.Report.from_json(values).band for values in (alone, entry))
            low, high = (tokens * getattr(first, end) / getattr(second, end) for end in ("low", "high"))
            yield (
                f"| {name} | {topology}, {mesh} | {first.low * 1e3:.2f} to {first.high * 1e3:.2f} | "
                f"{second.low * 1e3:.2f} to {second.high * 1e3:.2f} | {min(low, high):.2f} to {max(low, high):.2f} |"
            )


def main() -> None:
    """Compiles the missing programs, unless `--markdown` is given, and prints the tables."""
    parser = arguments.parser(__doc__)
    parser.add_argument("output", help="JSON file of the programs")
    parser.add_argument("--markdown", action="store_true", help="print the tables, compile nothing")
    args = parser.parse_args()
    path = expanded(args.output)
    check_replaceable(path, start=_BEGIN)
    if not args.markdown:
        compile_all(path)
    print(markdown(read(path)))


if __name__ == "__main__":
    main()
