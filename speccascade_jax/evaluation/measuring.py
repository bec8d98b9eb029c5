"""Measurement of points (configurations): quality and counters in batches, and latency at batch size 1.

Latency is measured in turns with the target alone. The outputs of a point, the source of each token (draft or target)
and some traces of rounds are stored in files beside the records.
"""

import datetime
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from speccascade_jax.core.names import TARGET
from speccascade_jax.data.vocabularies.vocabulary import added_texts
from speccascade_jax.drafters.selected import choices
from speccascade_jax.engine import tracing
from speccascade_jax.engine.counters import level_counters, per_example, summarise, tail_steps
from speccascade_jax.engine.generate import Generation, failures, model_names, raise_if_failed
from speccascade_jax.evaluation import latency
from speccascade_jax.evaluation.environment import device, package, peak_memory, versions
from speccascade_jax.evaluation.points import Evaluation, Point, Settings, check_code
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.speeds import speeds
from speccascade_jax.methods import block_costs
from speccascade_jax.methods.build_drafter import levels_of, threshold_text
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import AUTO, sampling_of
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.prompts import decoder_context
from speccascade_jax.results.store import outputs, trace
from speccascade_jax.results.store.outputs import ENTRY, LETTERS, Output
from speccascade_jax.results.store.record import FORMAT, Record, Row, get_entry, point_title
from speccascade_jax.runtime import hosts, own_files
from speccascade_jax.runtime.program_memory import release_when_crowded
from speccascade_jax.runtime.progress import counted, stage

_LETTERS = "".join(LETTERS)


class Seen(NamedTuple):
    """Recorded rounds of one row: the source letter of each token, tokens per round, and `RoundFacts` if traced."""

    sources: str = ""
    rounds: tuple[int, ...] = ()
    facts: Any = None


_SMALL = 16_384
"""Largest vocabulary size at which every batch records the full `RoundFacts` of all rows, traced or not.

With a small vocabulary, this costs less than compiling a second program for batches without a traced row.
"""


def recording(evaluation: Evaluation, decoder: Decoder, traced: bool) -> dict[str, Any]:
    """Returns the argument `record` of `Decoder.generate`, or no argument if nothing is to be recorded.

    Nothing is recorded for a method that consists of several generations, because it has no single loop over rounds.

    Args:
        evaluation: says whether outputs and traces are kept (`keep_outputs`, `keep_traces`).
        decoder: the decoder whose rounds are recorded.
        traced: whether the batch has a row whose trace is kept.
    """
    if not evaluation.keep_outputs or decoder.engine is None:
        return {}
    whole = traced or (evaluation.keep_traces and decoder.engine.target.vocab_size <= _SMALL)
    return {"record": tracing.facts if whole else tracing.origins}


def seen(record: Any, rows: int, traced: Sequence[bool], alone: bool) -> list[Seen]:
    """Returns the recorded rounds of the first `rows` rows, as arrays on the host.

    `traced` marks the rows whose full `RoundFacts` are kept. `alone` says that the draft decoded alone, so that every
    token comes from the draft.
    """
    if record is None:
        return [Seen()] * rows
    record = jax.tree.map(np.asarray, record)
    origins, rows_seen = getattr(record, "origins", record), []
    for row in range(rows):
        counts = origins.num_new[:, row]
        parts = [origins.source[number, row, :count] for number, count in enumerate(counts.tolist())]
        sources = "d" * int(counts.sum()) if alone else "".join(_LETTERS[n] for n in np.concatenate(parts).tolist())
        facts = jax.tree.map(lambda x, row=row: x[:, row : row + 1].copy(), record) if traced[row] else None
        rows_seen.append(Seen(sources, tuple(counts[counts > 0].tolist()), facts))
    return rows_seen


OWN = "own"
"""Name in records for an engine that a user-defined drafter contains."""


Runs = list[tuple[partial[Generation], Generation]]
"""Timed runs in chronological order: for each run, the prepared call and the generation that it returned."""

Earlier = Callable[[Point], Row | None]
"""Function that returns a point's quality and counters from an older record (other hardware or untimed), or `None`."""


def never(point: Point) -> Row | None:
    """Returns `None`, so that no older record is reused."""
    return None


def evaluate(session: Session, points: Sequence[Point], earlier: Earlier = never) -> Iterator[Record]:
    """Measures points that differ only in α; yields each record as soon as it is complete."""
    release_when_crowded()  # a long sweep compiles more programs than one process can hold
    begin = time.perf_counter()
    known = {point: result for point in points if (result := earlier(point)) is not None}
    unknown = [point for point in points if point not in known]
    results = known | dict(zip(unknown, judge(session, unknown) if unknown else (), strict=True))
    judged = [results[point] for point in points]
    share = (time.perf_counter() - begin) / len(points)
    # only two methods at a time, because at most two can run directly before and after one run of the target
    for first in range(0, len(points), 2):
        yield from _timed(session, points[first : first + 2], judged[first : first + 2], share)


def evaluate_together(session: Session, points: Sequence[Point], earlier: Earlier = never) -> Iterator[Record]:
    """Measures points of any methods and times them in one loop, so that their latencies are closely comparable."""
    release_when_crowded()
    begin = time.perf_counter()
    judged = [earlier(point) or judge(session, [point])[0] for point in points]
    yield from _timed(session, points, judged, (time.perf_counter() - begin) / len(points))


def _timed(session: Session, points: Sequence[Point], judged: Sequence[Row], judging: float) -> Iterator[Record]:
    """Times points whose quality is already computed, and yields their records.

    `judging` is the time in seconds per point that computing the quality took.
    """
    started, begin = datetime.datetime.now(datetime.UTC), time.perf_counter()
    timed = time_beside_target(session, points)
    wall = (time.perf_counter() - begin) / len(points) + judging
    for point, result, times in zip(points, judged, timed, strict=True):
        hosts.stop_here()
        whole = describe(session, point) | {"started": started.isoformat(), "wall_seconds": wall} | result | times
        yield cast(Record, whole | peak_memory())


def describe(session: Session, point: Point) -> Row:
    """Returns the entries of a point's record that are known before anything is measured."""
    key, judged, provenance = session.identity(point)
    point = session.held(point)
    return {
        "key": key,
        "judged_key": judged,
        "format": FORMAT,
        "point": point.coordinates(),
        "configuration": point.configuration(),
        "fingerprints": session.fingerprints(point.settings),
        "provenance": provenance,
        **session.fitted.told(),
        "prompt_length": session.prompt_length,
        **session.heads.described(point.settings),
        **session.policies.described(point.settings),
        "versions": versions(),
        "package": package(),
        **({"revisions": session.revisions} if session.revisions else {}),
        **({"imports": own_files.loaded()} if own_files.loaded() else {}),
        "device": device(),
    }


def judge(session: Session, points: Sequence[Point]) -> list[Row]:
    """Computes the quality, counters and derived measures of each point; all points are decoded in the same batches.

    Examples for which a model gave NaN or infinite logits are left out of these numbers, instead of counting as bad
    outputs. The record lists their ids (`failed_examples`) and describes the first failure (`failure`). Such a record
    covers other examples, so it is compared with no other record.

    Raises:
        FloatingPointError: every example of a point failed.
    """
    evaluation = points[0].evaluation
    check_code(evaluation)
    examples = session.window(evaluation, evaluation.quality_examples)
    encoded = session.prompts.encoder_length
    lengths = np.asarray(session.prompts.length if encoded is None else encoded)
    # A batch runs until its longest row is done, so rows of similar prompt length share a batch. Traced rows come
    # first, so that few batches contain a traced row.
    plain = examples >= evaluation.first_example + evaluation.keep_traces
    rows = np.repeat(examples[np.lexsort((lengths[examples], plain))], len(points))
    point_of_row = np.tile(np.arange(len(points)), len(examples))
    generations, planned, noted = [], list[Row](), list[Seen]()
    alone, decoder = points[0].method.draft_alone, session.decoder(points[0].settings)
    traced = rows < evaluation.first_example + evaluation.keep_traces
    batches = session.in_batches(np.arange(len(rows)), session.evaluation.quality_batch)
    for chosen, kept in counted(batches, f"quality of {_named(points)}", "batches"):
        hosts.stop_here()
        alphas = [points[n].settings.alpha for n in point_of_row[chosen]]
        run = session.prepare(points[0], rows[chosen], alphas)
        generation = run(points[0].seed, **recording(evaluation, decoder, bool(traced[chosen].any())))
        noted += seen(generation.record, kept, traced[chosen], alone)
        inner = level_counters(generation.inner), tail_steps(generation.inner), choices(generation.inner)
        per_row = generation.tokens, generation.lengths, generation.stats, inner, generation.failed_at
        generations.append(jax.tree.map(lambda x, kept=kept: np.asarray(x)[:kept], per_row))
        if points[0].settings.block_size == AUTO:
            planned.append(_planned(decoder, run, np.asarray(generation.inner["chosen"])[:kept]))
    measured = jax.tree.map(lambda *parts: np.concatenate(parts), *generations)
    records = []
    for number, point in enumerate(points):
        places = np.flatnonzero(point_of_row == number)
        part = jax.tree.map(lambda x, places=places: x[places], measured)
        record = _score(session, point, part, rows[places], [noted[place] for place in places])
        records.append(record | ({"planned": planned} if planned else {}))
    return records


JUDGED = (
    "counts", "measures", "by_position", "inconclusive", "quality", "per_example", "failed_examples", "failure",
    "levels", "planned",
)  # fmt: skip
"""Entries of a record that `judge` returns."""


def judged_part(store: Path, record: Record, keep_outputs: bool) -> Row | None:
    """Returns the entries of a stored record that `judge` computes, so that they need not be computed again.

    The result is `None` if the outputs are needed but not stored.

    Args:
        store: path of the record's store.
        record: a stored record.
        keep_outputs: whether the record's outputs are needed too.
    """
    part: Row = {name: get_entry(record, name) for name in JUDGED if name in record}
    if not keep_outputs:
        return part
    kept = outputs.read(store, record)
    return None if kept is None else part | {ENTRY: kept}


def _score(
    session: Session,
    point: Point,
    measured: tuple[np.ndarray, np.ndarray, Any, tuple[list[Any], list[Any], Any], np.ndarray],
    rows: np.ndarray,
    noted: Sequence[Seen],
) -> Row:
    """Computes one point's record entries from the outputs, counters and recorded rounds of its rows."""
    draft_alone = point.method.draft_alone
    failed = failures(measured[-1], model_names(draft_alone))
    if len(failed) == len(rows):
        raise_if_failed(failed)
    lost, failure_entries = [item.row for item in failed], {}
    if failed:
        ids = [session.examples[row].id for row in rows[lost]]
        first = f"example {ids[0]}: NaN or infinite logits of the {failed[0].model} at position {failed[0].position}"
        failure_entries = {"failed_examples": ids, "failure": first}
    tokens, lengths, stats, (inner, tails, arms) = jax.tree.map(lambda x: np.delete(x, lost, axis=0), measured[:-1])
    noted, rows = [item for row, item in enumerate(noted) if row not in lost], np.delete(rows, lost)
    # the ids before each output, because the text of a token may depend on them (its leading space)
    context = decoder_context(session.prompts)
    written = [ids[:length].tolist() for ids, length in zip(tokens, lengths, strict=True)]
    texts = (session.text(ids, context[row]) for ids, row in zip(written, rows, strict=True))
    predictions = list(map(session.task.postprocess, texts))
    references = [session.examples[row].reference for row in rows]
    ids, samples = [session.examples[row].id for row in rows], session.evaluation.resamples
    scored = quality.measure(session.task.metrics, ids, predictions, references, samples=samples)
    summary = summarise(stats, lengths, draft_alone=draft_alone)  # measures defined in docs/methods.md, section 9
    apart = {name: summary.pop(name) for name in ("by_position", "inconclusive")}
    models = [level.model for level in levels_of(point.settings.drafters)]  # a user's drafter has none of these names
    named = itertools.zip_longest(models, inner, tails[1:], fillvalue=None)
    drafted = ((model, counters, tail) for model, counters, tail in named if counters is not None)
    levels = [{"model": model or OWN, **summarise(counters), **_tail(tail)} for model, counters, tail in drafted]
    record: Row = {
        "counts": {name: value for name, value in summary.items() if type(value) is int} | _tail(tails[0]),
        "measures": {name: value for name, value in summary.items() if type(value) is not int},  # ratios
        **apart,
        "quality": scored | {"tokens_per_example": float(np.mean(lengths))},
        "per_example": {"ids": ids, **per_example(stats, draft_alone=draft_alone)}
        | ({} if arms is None else {"arm": arms.tolist()}),  # each example's index into the record's `selection.arms`
        **failure_entries,
        **({"levels": levels} if levels else {}),
    }
    if point.evaluation.keep_outputs:
        record[ENTRY] = _outputs(session, point, zip(rows, noted, written, predictions, strict=True))
    return record


def _outputs(session: Session, point: Point, parts: Iterable[tuple[int, Seen, list[int], str]]) -> list[Output]:
    """Returns a point's outputs in the form in which they are stored, in the order of the examples.

    Args:
        session: provides the examples, the prompts and the vocabulary.
        point: the point; the traces name its method and settings.
        parts: for every row its index, its recorded rounds, its generated tokens, and the text that is scored.
    """
    method, context = point.method, decoder_context(session.prompts)
    trace_facts: dict[str, Any] = {"threshold": threshold_text(method, point.settings), "alone": method.draft_alone}
    kept = []
    for row, row_seen, tokens, prediction in sorted(parts, key=lambda part: part[0]):
        example = session.examples[row]
        prompt = session.task.build_prompt(example)

        def texts(some: list[int], before: list[int], row: int = row) -> list[str]:
            return added_texts(session.vocabulary, some, [*context[row], *before])

        output = Output(
            id=example.id,
            prompt=prompt,
            reference=example.reference,
            output=prediction,
            tokens=tuple(tokens),
            pieces=tuple(texts(tokens, [])),
            sources=row_seen.sources,
            rounds=row_seen.rounds,
            trace=None
            if row_seen.facts is None
            else trace.read(row_seen.facts, 0, texts, prompt=prompt, **trace_facts),
        )
        kept.append(output)
    return kept


def _tail(steps: np.ndarray | None) -> dict[str, int]:
    return {} if steps is None else {"tail_steps": int(steps.sum())}


def time_beside_target(session: Session, points: Sequence[Point]) -> list[Row]:
    """Measures the latency of points with equal sampling settings, absolute and relative to the target alone.

    Returns the record entries of each point. There are no entries if no examples are timed. There are none for an
    oracle either, because computing its knowledge takes time that no real method spends. A run in which the point or
    the target gives NaN or infinite logits ends early, so its time is meaningless. If any run ends early, the entries
    contain no latency, and `failed_timings` is the number of such runs.
    """
    evaluation = points[0].evaluation
    examples, trials = evaluation.latency_examples, evaluation.latency_trials
    if not examples or not points[0].method.timed:
        return [{} for _ in points]
    target = replace(points[0], settings=Settings(method=TARGET, **sampling_of(points[0].settings)))
    (baseline, *methods), seen = zip(*(_runner(session, point) for point in (target, *points)), strict=True)
    with stage("warming up the target"):
        jax.block_until_ready(baseline(0, 0))  # compiles the program, or warms the caches
    warmed = list(itertools.product(methods, range(examples)))
    for run, example in counted(warmed, f"warming up {_named(points)}", "runs"):
        hosts.stop_here()
        # warm up every example: the first long block of a generation costs several times as much as the next one
        jax.block_until_ready(run(example, 0))
    for runs in seen:
        runs.clear()
    with stage(f"latency of {_named(points)}"):
        alone, timings = latency.interleave(baseline, methods, examples=examples, trials=trials)
    ended, *early = (sum(len(failures(generation.failed_at)) for _, generation in runs) for runs in seen)
    speed = partial(_speed, session)
    records = []
    for point, timed, failed, runs in zip(points, timings, early, seen[1:], strict=True):
        record: Row = {"failed_timings": ended + failed}
        if not ended + failed:
            record = {
                "latency": latency.latency(timed, draft_alone=point.method.draft_alone) | speed(point, timed, runs)
            }
            record |= {"target_latency": latency.latency(alone) | speed(target, alone, seen[0])}
            record |= {"relative_latency": latency.relative_latency(timed, alone)}
            if point.settings.block_size == AUTO:
                record["planned_latency"] = _planned_timings(session, point, runs)
        records.append(record)
    return records


def _named(points: Sequence[Point]) -> str:
    """Returns the name of the points' first one, and how many more there are."""
    return point_title(points[0].coordinates()) + (f" and {len(points) - 1} more" if len(points) > 1 else "")


def _speed(session: Session, point: Point, timed: latency.Timings, runs: Runs) -> dict[str, float]:
    return speeds(session, point, timed, [generation for _, generation in runs])


def _planned(decoder: Decoder, run: partial[Generation], chosen: np.ndarray) -> Row:
    """Returns a record's entry about the block lengths that were chosen during decoding (`block_costs.planned`)."""
    return block_costs.planned(run.keywords["params"], decoder.require_engine(), chosen)


def _planned_timings(session: Session, point: Point, runs: Runs) -> Row:
    """Returns the entry of `_planned` for timed runs; they all have the same shapes and therefore the same costs."""
    chosen = np.concatenate([np.asarray(generation.inner["chosen"]) for _, generation in runs])
    return _planned(session.decoder(point.settings), runs[0][0], chosen)


def _runner(session: Session, point: Point) -> tuple[latency.Run, Runs]:
    """Returns a function `(example, trial) -> generation`, and a list to which it appends each generation."""
    trials, seen = point.evaluation.latency_trials, Runs()
    rows = session.window(point.evaluation, point.evaluation.latency_examples)
    prepared = [session.prepare(point, np.asarray([row])) for row in rows]

    def run(example: int, trial: int) -> Generation:
        generation = prepared[example]((point.seed * trials + trial) % 2**32)
        seen.append((prepared[example], generation))
        return generation

    return run, seen
