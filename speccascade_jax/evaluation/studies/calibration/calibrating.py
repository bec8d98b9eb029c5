"""From a pair, a task and a tolerance to a setting: what gin/calibrate.gin binds and experiments/calibrate.py calls.

Settings are told with numbers on examples that the search never saw: as a table, as JSON and as gin to paste.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from speccascade_jax.core import checks
from speccascade_jax.core.names import TARGET
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, gin_blocks
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.calibration import halving, thresholds
from speccascade_jax.evaluation.studies.calibration.halving import Bench, Records, Tolerance, Window
from speccascade_jax.evaluation.studies.calibration.thresholds import AppendixD
from speccascade_jax.methods.settings import check_sampling_alone, sampling_of
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import ResultStore, check_format
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

MODES = ("halving", "appendix_d")


class Split(NamedTuple):
    """The examples that are searched on; behind them those that the last candidates are tested on; then all unseen."""

    search: Window
    test: Window
    held_out: Window


class Found(NamedTuple):
    """What a search came to: what the report says of it, the gin file, and what is wrong if no setting will do."""

    report: dict[str, Any]
    pasted: str
    refusal: str = ""


def calibrate(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    methods: Sequence[str | Settings] = (),
    alphas: Mapping[str, Sequence[float]] | None = None,
    block_sizes: Sequence[int] = (5,),
    bonus: str | None = None,
    max_loss: float | None = None,
    max_latency: float | None = None,
    confidence: float = 0.9,
    mode: str = "halving",
    appendix_d: AppendixD | None = None,
    search_examples: int = 200,
    test_examples: int = 400,
    held_out_examples: int = 400,
    runners_up: int = 3,
    seeds: Sequence[int] = (0,),
    output: str = "results/calibration.jsonl",
) -> dict[str, Any]:
    """Find the fastest (or best) setting that keeps a tolerance, and measure it on examples that the search never saw.

    Prints the setting, the runners-up and the target with intervals, and gin to paste; the same goes beside the store
    as `.json` and `.gin`. A calibration that was killed goes on where it stopped. All is checked before anything is
    loaded.

    Args:
        pair, seeds: as for a sweep; settings: how all methods sample; every setting is measured with each seed.
        evaluation: on what; the search takes its examples from `first_example` on, and times `latency_examples` of
            them (few on few); those after them are held out. Its `quality_examples` does not matter.
        methods, alphas, block_sizes, bonus: the candidates, as a sweep's points; the draft alone is one too.
        max_loss, max_latency, confidence: the tolerance (`Tolerance`).
        mode: "halving", or "appendix_d" for paper 2's procedure, which has candidates and bounds of its own
            (`thresholds`): there, `methods` to `confidence` mean nothing.
        appendix_d: its settings; the paper's if none.
        search_examples, test_examples, held_out_examples: how many of each (`halving`; Appendix D searches on the first
            two together).
        runners_up: how many further settings are measured on the held-out examples.
        output: the store.

    Returns:
        The report, as in the `.json`.

    Raises:
        ValueError: a value without meaning; no candidate keeps the tolerance surely enough (after the report).
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    if not output.endswith(".jsonl"):
        place = "report and gin file take its place with .json, .gin"
        raise ValueError(f"output={output!r} does not end in .jsonl: {place}")
    for name, values in {"methods": methods, "block_sizes": block_sizes, "seeds": seeds}.items():
        checks.several(name, values)
    check_replaceable(Path(output).with_suffix(".json"), '"mode":', '"settings":')
    check_replaceable(Path(output).with_suffix(".gin"), _USE)
    split = windows(evaluation, search_examples, test_examples, held_out_examples)
    samplings = [sampling_of(check_sampling_alone(settings, "calibrate"))]
    shared: dict[str, Any] = {"pair": pair, "evaluation": evaluation, "samplings": samplings, "seeds": tuple(seeds)}
    if mode == "halving":
        tolerance = Tolerance(max_loss=max_loss, max_latency=max_latency, confidence=confidence)
        shared |= {"methods": methods, "alphas": alphas, "block_sizes": block_sizes}
        points = candidates(**shared, bonus=bonus)
        find = partial(_halve, points, tolerance, split, checks.whole("runners_up", runners_up, 0))
    else:
        if (max_loss, max_latency) != (None, None):
            raise ValueError("mode='appendix_d' stops where its own bound says: leave max_loss and max_latency out")
        procedure, base = appendix_d or AppendixD(), candidates(**shared, methods=())[0]
        thresholds.check(base, procedure)
        find = partial(_climb, base, procedure, split)
    with ResultStore(output) as store:
        check_format(store.records, output)
        loaded = replace(split.search, judged=split.held_out.end - split.search.first)
        found = find(Bench(store, Session(pair, loaded.of(evaluation)), seeds))
    examples = {name: asdict(each) for name, each in split._asdict().items()}
    report = plain({"mode": mode} | examples | found.report)
    write_atomically(Path(output).with_suffix(".json"), json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(Path(output).with_suffix(".gin"), found.pasted)
    print(f"\n{found.pasted}\nresults: {output}, beside it the report (.json) and the gin file (.gin)")
    if found.refusal:
        raise ValueError(found.refusal)
    return report


def windows(evaluation: Evaluation, search_examples: int, test_examples: int, held_out_examples: int) -> Split:
    """Which examples are searched on, tested on and held out, all with as many timed; ValueError for too few of any."""
    given = {"search_examples": search_examples, "test_examples": test_examples}
    given |= {"held_out_examples": held_out_examples, "latency_examples": evaluation.latency_examples}
    searched, tested, held, timed = (checks.whole(name, value, 0) for name, value in given.items())
    for name, value in given.items():
        if value < LEAST_EXAMPLES:
            raise ValueError(f"{name}={value} is too few for an interval: give at least {LEAST_EXAMPLES}")
    first = checks.whole("first_example", evaluation.first_example, 0)
    search = Window(first=first, judged=searched, timed=min(timed, searched))
    test = Window(first=search.end, judged=tested, timed=min(timed, tested))
    return Split(search, test, Window(first=test.end, judged=held, timed=min(timed, held)))


def candidates(*, seeds: Sequence[int], **given: Any) -> list[Point]:
    """The target, then every candidate with the first seed, the draft alone first of all; as `enumerate_points`."""
    groups = enumerate_points(seeds=seeds, **given)
    return [point for group in groups for point in group if point.seed == seeds[0]]


def _halve(points: Sequence[Point], tolerance: Tolerance, split: Split, runners_up: int, bench: Bench) -> Found:
    """Search, then measure what was found on the held-out examples; on those of the test, if nothing will do."""
    target, *others = points
    bench.session.check(point.settings for point in points)
    found = halving.search(bench, others, target, tolerance, halving.rungs(split.search), split.test, 1 + runners_up)
    best = [found.chosen, *found.others] if found.chosen else found.others  # the safest first
    names = ["chosen" if found.chosen else "safest", *(f"runner-up {n}" for n in range(1, runners_up + 1))]
    named = dict(zip(names, best, strict=False))
    window = split.held_out if found.chosen else split.test
    print(f"{len(named)} settings and the target on {window.judged} examples, {window.first} to {window.end - 1}")
    entries = measure_settings(bench, {name: each.point for name, each in named.items()}, target, window, tolerance)
    seen = "that nothing was chosen by" if found.chosen else "of the test"
    heading = f"Asked for: {tolerance.describe()}. Measured on {window.judged} examples {seen}"
    show_settings(heading, entries)
    if found.chosen and not entries[0]["kept"]:
        print(
            "The setting found does not keep the tolerance on these examples: give more test_examples, or allow more."
        )
    settings = [(each.point, said(told)) for each, told in zip(named.values(), entries, strict=False)]
    head = [*([] if found.chosen else ["No setting will do; these come nearest."]), heading, *_about(target)]
    shares = {name: each.share for name, each in named.items()}
    report = {"tolerance": asdict(tolerance), "candidates": len(others), "settings": entries, "share_in_test": shares}
    pasted = paste(settings, head, live=found.chosen is not None)
    if found.chosen:
        return Found(report, pasted)
    refusal = (
        f"no setting keeps the tolerance ({tolerance.describe()}) in {tolerance.confidence:.0%} of the resamples of "
        f"{window.judged} examples; the safest, {entries[0]['setting']}, does in {best[0].share:.0%}: allow "
        "more, give more test_examples, or add candidates (methods, alphas, block_sizes)"
    )
    return Found(report, pasted, refusal)


def _climb(base: Point, settings: AppendixD, split: Split, bench: Bench) -> Found:
    """Appendix D on the examples searched on, then its three levels on the held-out ones."""
    searched = replace(split.search, judged=split.test.end - split.search.first)
    subset = searched.part(max(searched.judged // 4, LEAST_EXAMPLES))
    trail = thresholds.run(bench, base, settings, searched, subset)
    thresholds.show(trail, settings)
    trail.check()
    window = split.held_out
    print(f"three levels and the target on {window.judged} examples, {window.first} to {window.end - 1}")
    target = thresholds.point_of(base, base.settings)
    entries = measure_settings(bench, trail.levels, target, window)
    heading = f"Appendix D with {settings.rule}: on {window.judged} examples that nothing was chosen by"
    show_settings(heading, entries)
    # the fastest takes effect: its quality was still held
    pasted = [(trail.levels[each["name"]], said(each)) for each in reversed(entries[:-1])]
    report = {"appendix_d": asdict(settings), "trail": trail.plain(), "settings": entries}
    return Found(report, paste(pasted, [heading, *_about(base)]))


_USE = "Use: experiments/run.py with gin/run.gin, a pair's file, a task's file, and this one."


def _about(target: Point) -> list[str]:
    """What settings were found for, and how a file of them is used."""
    task = get_task(target.evaluation.task).name
    return [f"Pair {target.pair.name}, task {task}, split {target.evaluation.split}.", _USE]


NOTE = "[low, high]: 95% of paired resamples of the examples. Latency: batch 1, beside the target."
Entry = dict[str, Any]
"""One setting with its numbers, as JSON knows them; `_entry` says what is in it."""


def measure_settings(
    bench: Bench, named: Mapping[str, Point], target: Point, window: Window, tolerance: Tolerance | None = None
) -> list[Entry]:
    """Measures settings and the target on a window.

    Args:
        bench: what measures; named: what a setting is called, for instance "chosen" -> setting.
        target: the target alone; it comes last.
    """
    measured, bootstrap = bench.measure([*named.values(), target], window), Bootstrap()
    entries = [
        _entry(name, point, measured[point], measured[target], bootstrap, tolerance) for name, point in named.items()
    ]
    return [*entries, _entry("target", target, measured[target], measured[target], bootstrap, None)]


def _entry(
    name: str, point: Point, records: Records, target: Records, bootstrap: Bootstrap, tolerance: Tolerance | None
) -> Entry:
    """Returns a setting's numbers with 95% intervals over examples, paired with the target's: `[value, low, high]`.

    `quality`; `difference_percent` to the target's quality; `latency` over the target's, and `None` for the target
    itself; `kept`: whether the tolerance is kept on all examples; `share`: in how many resamples of them.
    """
    quality, reference = bootstrap.qualities(records, target)
    timed = point.settings.method != TARGET
    told: Entry = {
        "name": name,
        "setting": point.label().rpartition(" seed=")[0],  # seeds are told once for all
        "settings": asdict(point.settings),
        "metric": records[0]["quality"]["metric"],
        "quality": bootstrap.interval(quality),
        "difference_percent": bootstrap.interval(100 * (quality / reference - 1)) if reference.min() > 0 else None,
        "latency": bootstrap.interval(bootstrap.latencies(records)) if timed else None,
    }
    if tolerance is not None:
        kept = tolerance.kept(records, target, bootstrap)
        told |= {"kept": bool(kept[0]), "share": float(kept[1:].mean())}
    return told


def show_settings(title: str, entries: Sequence[Entry]) -> None:
    """Prints the entries as a table."""
    rows = []
    for each in entries:
        numbers = [_cell(each["quality"], "{:.2f}"), _cell(each["difference_percent"], "{:+.1f}%")]
        numbers.append(_cell(each["latency"], "{:.2f}"))
        kept = f"{'yes' if each['kept'] else 'no'}, {each['share']:.0%}" if "kept" in each else NONE
        rows.append([each["name"], each["setting"], *numbers, kept])
    header = ["", "setting", entries[0]["metric"], "to the target", "latency / target's", "kept, in resamples"]
    Console(width=140).print(Grid(title=title, header=header, rows=rows, notes=[NOTE]).rich())


def paste(settings: Sequence[tuple[Point, str]], head: Sequence[str], live: bool = True) -> str:
    """Returns a gin file for `experiments/run.py`, beside gin/run.gin, a pair's file and a task's.

    The first setting takes effect (none, if not `live`), the others stand below as comments to be uncommented.

    Args:
        settings: with what is to be said of each; head: the file's first lines.
    """
    lines = [*(f"# {line}" for line in head), "from __gin__ import dynamic_registration", ""]
    lines += ["from speccascade_jax.evaluation import points"]
    for number, (point, comment) in enumerate(settings):
        block = gin_blocks(point.settings)
        lines += ["", f"# {comment}", *(line if live and number == 0 else f"# {line}" for line in block)]
    return "\n".join(lines) + "\n"


def said(each: Entry) -> str:
    """Says an entry in one line."""
    words = [f"{each['name']}: {each['setting']}", f"{each['metric']} {_cell(each['quality'], '{:.2f}')}"]
    if each["difference_percent"]:
        words.append(f"{_cell(each['difference_percent'], '{:+.1f}%')} to the target")
    if each["latency"]:
        words.append(f"latency {_cell(each['latency'], '{:.2f}')} of the target's")
    if "kept" in each:
        words.append(f"tolerance {'kept' if each['kept'] else 'not kept'} (kept in {each['share']:.0%} of resamples)")
    return ", ".join(words)


def _cell(interval: Interval | None, form: str) -> str:
    if interval is None:
        return NONE
    value, low, high = (form.format(number) for number in interval)
    return f"{value} [{low}, {high}]"
