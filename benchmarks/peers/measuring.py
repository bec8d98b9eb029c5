"""Measurement of one pair: times all settings of all libraries in turns, and compares their tokens with ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.measure import spread
from benchmarks.peers import contenders as table
from benchmarks.peers.contenders import Contender
from benchmarks.peers.pairs import Prepared
from benchmarks.peers.protocol import Ids, Worker, WorkerError

Row = dict[str, Any]
Say = Callable[[str], None]
SETTLE = 0.3
"""Seconds of pause between libraries: after a call, threads of some libraries keep a core busy for 0.2 s."""


def measure(workers: Mapping[str, Worker], prepared: Prepared, settings: Row, say: Say) -> dict[str, Any]:
    """Measures a pair; returns its rows (see `_row`), and the quality of our lossy settings if the pair has a task.

    The entry `left_out` of the result lists the settings that cannot run, with the reason.

    Args:
        settings: `batches`, the batch sizes; `turns` and `batch_turns`, the largest number of turns at batch 1 and at
            larger batches; `examples`, the number of the task's examples.
    """
    out: dict[str, Any] = {"rows": [], "left_out": [], "quality": []}
    for name in list(workers):
        workers[name].ask("load", pair=prepared.told())
    chosen = table.contenders(list(workers), prepared.family, prepared.uneven)
    if prepared.task and "ours" in workers:
        say(f"{prepared.name}, quality of lossy settings")
        out["quality"] = qualities(workers["ours"], prepared.task, settings["examples"])
        for best in best_lossy(out["quality"]):
            chosen += table.lossy(best["rule"], best["alpha"])
    for size in [size for size in settings["batches"] if size <= prepared.largest_batch]:
        fitting = [contender for contender in chosen if contender.largest_batch >= size]
        say(f"{prepared.name}, batch {size}: {len(fitting)} settings, first run")
        tokens, left_out = warm(workers, fitting, prepared, size)
        out["left_out"] += left_out
        fitting = [contender for contender in fitting if contender in tokens]
        limit = "turns" if size == 1 else "batch_turns"
        turns = min(getattr(prepared, limit), settings[limit])
        say(f"{prepared.name}, batch {size}: {len(fitting)} settings, {turns} turns")
        seconds = interleave(workers, fitting, prepared.batches(size), turns)
        out["rows"] += rows(workers.get("ours"), prepared, size, seconds, tokens)
    return out


def warm(
    workers: Mapping[str, Worker], chosen: Sequence[Contender], prepared: Prepared, size: int
) -> tuple[dict[Contender, Ids], list[Row]]:
    """Runs each setting once, which converts and compiles; returns tokens by setting, and the settings that failed."""
    tokens, left_out = {}, []
    for contender in chosen:
        try:
            answer = workers[contender.library].ask("run", options=contender.options, batches=prepared.batches(size))
            tokens[contender] = answer["tokens"]
        except WorkerError as error:
            left_out.append(_named(contender) | {"batch": size, "reason": str(error)})
    return tokens, left_out


def interleave(
    workers: Mapping[str, Worker],
    chosen: Sequence[Contender],
    batches: Sequence[Ids],
    turns: int,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Contender, np.ndarray]:
    """Times each setting for all batches, in seconds `[turns]`; the order is reversed every other turn."""
    seconds, last = {contender: np.zeros(turns) for contender in chosen}, None
    for turn in range(turns):
        for contender in chosen if turn % 2 == 0 else reversed(chosen):
            if last != contender.library:
                sleep(SETTLE)
            last = contender.library
            answer = workers[contender.library].ask("run", options=contender.options, batches=batches)
            seconds[contender][turn] = sum(answer["seconds"])
    return seconds


def rows(
    ours: Worker | None,
    prepared: Prepared,
    size: int,
    seconds: Mapping[Contender, np.ndarray],
    tokens: Mapping[Contender, Ids],
) -> list[Row]:
    """Returns one row per setting, see `_row` and `compare`; our target alone is the baseline."""
    base = next((contender for contender in seconds if contender.group == ("ours", "float32", table.PLAIN)), None)
    ms_per_token = {c: seconds[c] * 1e3 / sum(map(len, tokens[c])) for c in seconds}
    prompts = [prompt for batch in prepared.batches(size) for prompt in batch]
    table_rows = []
    for contender in seconds:
        row = _row(contender, size, ms_per_token[contender], tokens[contender])
        if base is not None:
            row["ratio"] = spread(ms_per_token[contender] / ms_per_token[base])
        if base is not None and ours is not None and contender.kind != table.LOSSY:
            row |= compare(ours, prompts, tokens[base], tokens[contender])
        table_rows.append(row)
    return table_rows


def _named(contender: Contender) -> Row:
    keys = ("library", "weights", "kind", "label", "options")
    return {key: getattr(contender, key) for key in keys}


def _row(contender: Contender, size: int, ms_per_token: np.ndarray, tokens: Ids) -> Row:
    """Returns a setting's row; `ms_per_token` is the time of the whole call over all tokens of all outputs.

    `rows` adds `ratio`, the time over that of our target alone in the same turn.
    """
    counts = {"batch": size, "outputs": len(tokens), "tokens": sum(map(len, tokens)), "turns": len(ms_per_token)}
    return _named(contender) | counts | {"ms_per_token": spread(ms_per_token)}


def compare(ours: Worker, prompts: Ids, wanted: Ids, found: Ids) -> Row:
    """Compares outputs with those of our target alone.

    `equal_outputs` is the share of equal outputs. `equal_tokens` is the share of tokens before an output's first
    difference. `gap` is the largest margin by which our logits prefer our token at a first difference, or `None`.
    """
    same = [agreed(a, b) for a, b in zip(wanted, found, strict=True)]
    share = sum(same) / sum(max(len(a), len(b)) for a, b in zip(wanted, found, strict=True))
    places = [n for n, agreed_length in enumerate(same) if agreed_length < min(len(wanted[n]), len(found[n]))]
    whole = sum(a == b for a, b in zip(wanted, found, strict=True)) / len(wanted)
    gaps = [0.0]
    if places:
        request = {
            "prompts": [prompts[n] for n in places],
            "rows": [wanted[n][: same[n] + 1] for n in places],
            "others": [found[n][same[n]] for n in places],
        }
        gaps = ours.ask("gaps", given=request)
    return {"equal_outputs": whole, "equal_tokens": share, "gap": max(gaps) if places else None}


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common beginning of two outputs."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def qualities(ours: Worker, task: str, examples: int) -> list[Row]:
    """Returns the quality of the target, and of every lossy rule and α, on the same examples."""
    request = {"options": {"method": "autoregressive"}, "task": task, "limit": examples}
    quality_rows = [{"rule": None, "alpha": None} | ours.ask("quality", given=request)]
    for rule, alpha in table.LOSSY_POINTS:
        options = {"rule": rule, "alpha": alpha, "block_size": 5}
        quality_rows.append({"rule": rule, "alpha": alpha} | ours.ask("quality", given=request | {"options": options}))
    return quality_rows


def best_lossy(found: Sequence[Row]) -> list[Row]:
    """Returns, for each rule, the row with the most tokens per target call that keeps the target's quality.

    The first row of `found` is the target's; `KEPT_QUALITY` is the loss that still counts as kept.
    """
    target, *points = found
    kept = [point for point in points if point["quality"] >= target["quality"] - table.KEPT_QUALITY]
    by_rule = {point["rule"]: point for point in sorted(kept, key=lambda point: point["tokens_per_call"])}
    return list(by_rule.values())
