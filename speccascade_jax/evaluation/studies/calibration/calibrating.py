"""Search for the fastest setting within a tolerated loss of quality, or the best within a latency bound.

`experiments/calibrate.py` calls `calibrate`, and gin/calibrate.gin binds its arguments. The search writes a table, a
JSON report and a gin file with the chosen setting. The numbers in these files come from examples that the search never
saw.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from speccascade_jax.results.report import printing
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.bucket_store import open_store
from speccascade_jax.results.store.result_store import check_format, check_name
from speccascade_jax.runtime import recipe_header
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

MODES = ("halving", "appendix_d")


class Split(NamedTuple):
    """Three consecutive ranges of examples: for the search, the test of the last candidates, and the final numbers."""

    search: Window
    test: Window
    held_out: Window


class Found(NamedTuple):
    """Result of a search: its part of the report, the text of the gin file, and the error if no setting passed."""

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
    """Finds the fastest (or best) setting within a tolerance of quality (or latency).

    The chosen setting, the runners-up and the target are measured on unseen examples, and printed with confidence
    intervals together with the text of a gin file. The numbers and the gin file are also written beside the store, as
    `.json` and `.gin`. A killed calibration resumes where it stopped. All settings are checked before anything is
    loaded.

    Args:
        pair: the models, as in `experiment.sweep`.
        evaluation: the examples. The search uses examples from `first_example` on, and times `latency_examples` of them
            (fewer if a step of the search uses few examples); later examples are held out. `quality_examples` is
            ignored.
        settings: sampling settings of all methods.
        methods: the candidates' methods, as in `experiment.sweep`; the draft alone is also a candidate.
        alphas: the candidates' α's, as in `experiment.sweep`.
        block_sizes: the candidates' values of γ, as in `experiment.sweep`.
        bonus: the candidates' bonus, as in `experiment.sweep`.
        max_loss: share of the target's quality that may be lost (`Tolerance`); `None`: no bound.
        max_latency: largest allowed latency relative to the target's (`Tolerance`); `None`: no bound.
        confidence: share of paired resamples in which every bound must hold (`Tolerance`).
        mode: "halving", or "appendix_d" for the procedure of Holsman et al. (2025), which has its own candidates and
            bound (`thresholds`). With "appendix_d", the arguments from `methods` to `bonus` and `confidence` are
            ignored, and `max_loss` and `max_latency` are refused.
        appendix_d: settings of the procedure "appendix_d"; `None`: the settings of Holsman et al. (2025).
        search_examples: number of examples that the search measures candidates on (`halving`). The procedure
            "appendix_d" searches on these and the test examples together.
        test_examples: number of examples that the last candidates are tested on.
        held_out_examples: number of examples that the chosen setting, the runners-up and the target are measured on.
        runners_up: number of further settings that are also measured on the held-out examples.
        seeds: random seeds; every setting is measured with each seed.
        output: path of the store.

    Returns:
        The content of the `.json` file.

    Raises:
        ValueError: a value is invalid; or no candidate keeps the tolerance with enough confidence (raised after the
            report is written).
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    check_name(output)
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
        count = f"{len(points)} candidates"
        find = partial(_halve, points, tolerance, split, checks.whole("runners_up", runners_up, 0))
    else:
        if (max_loss, max_latency) != (None, None):
            raise ValueError("mode='appendix_d' has its own bound (AppendixD.lost): leave max_loss and max_latency out")
        procedure, base = appendix_d or AppendixD(), candidates(**shared, methods=())[0]
        thresholds.check(base, procedure)
        find, count = partial(_climb, base, procedure, split), ""
    recipe_header.announce(count)
    with open_store(output) as store:
        check_format(store.records, output)
        loaded = replace(split.search, judged=split.held_out.end - split.search.first)
        result = find(Bench(store, Session(pair, loaded.of(evaluation)), seeds))
    examples = {name: asdict(window) for name, window in split._asdict().items()}
    report = plain({"mode": mode} | examples | result.report)
    write_atomically(Path(output).with_suffix(".json"), json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(Path(output).with_suffix(".gin"), result.pasted)
    print(f"\n{result.pasted}\nresults: {output}, with the report (.json) and the gin file (.gin) in the same folder")
    if result.refusal:
        raise ValueError(result.refusal)
    return report


def windows(evaluation: Evaluation, search_examples: int, test_examples: int, held_out_examples: int) -> Split:
    """Returns the ranges of examples for search, test and final numbers; ValueError if one has too few examples."""
    counts = {"search_examples": search_examples, "test_examples": test_examples}
    counts |= {"held_out_examples": held_out_examples, "latency_examples": evaluation.latency_examples}
    searched, tested, held_out, timed = (checks.whole(name, value, 0) for name, value in counts.items())
    for name, value in counts.items():
        if value < LEAST_EXAMPLES:
            raise ValueError(f"{name}={value} is too few for an interval: give at least {LEAST_EXAMPLES}")
    first = checks.whole("first_example", evaluation.first_example, 0)
    search = Window(first=first, judged=searched, timed=min(timed, searched))
    test = Window(first=search.end, judged=tested, timed=min(timed, tested))
    return Split(search, test, Window(first=test.end, judged=held_out, timed=min(timed, held_out)))


def candidates(*, seeds: Sequence[int], **shared: Any) -> list[Point]:
    """Returns the points of the target alone, of the draft alone, and of all other candidates, with the first seed."""
    groups = enumerate_points(seeds=seeds, **shared)
    return [point for group in groups for point in group if point.seed == seeds[0]]


def _halve(points: Sequence[Point], tolerance: Tolerance, split: Split, runners_up: int, bench: Bench) -> Found:
    """Searches by successive halving, then measures the resulting settings on the held-out examples.

    If no setting kept the tolerance, the best settings are measured on the test examples instead.
    """
    target, *tried = points
    bench.session.check(point.settings for point in points)
    choice = halving.search(bench, tried, target, tolerance, halving.rungs(split.search), split.test, 1 + runners_up)
    # if no setting was chosen, the safest comes first
    best = [choice.chosen, *choice.others] if choice.chosen else choice.others
    names = ["chosen" if choice.chosen else "safest", *(f"runner-up {n}" for n in range(1, runners_up + 1))]
    named = dict(zip(names, best, strict=False))
    window = split.held_out if choice.chosen else split.test
    print(f"measuring {len(named)} settings and the target on examples {window.first} to {window.end - 1}")
    entries = measure_settings(bench, {name: v.point for name, v in named.items()}, target, window, tolerance)
    kind = "held-out" if choice.chosen else "test"
    heading = f"Tolerance: {tolerance.describe()}. Measured on {window.judged} {kind} examples"
    show_settings(heading, entries)
    if choice.chosen and not entries[0]["kept"]:
        print(
            "The chosen setting does not keep the tolerance on these examples: give more test_examples or a larger "
            "tolerance."
        )
    settings = [(v.point, said(entry)) for v, entry in zip(named.values(), entries, strict=False)]
    head = [heading, *_about(target)]
    if not choice.chosen:
        head.insert(0, "No setting keeps the tolerance; these come nearest.")
    shares = {name: v.share for name, v in named.items()}
    report = {"tolerance": asdict(tolerance), "candidates": len(tried), "settings": entries, "share_in_test": shares}
    pasted = paste(settings, head, live=choice.chosen is not None)
    if choice.chosen:
        return Found(report, pasted)
    refusal = (
        f"no setting keeps the tolerance ({tolerance.describe()}) in {tolerance.confidence:.0%} of the resamples of "
        f"{window.judged} examples; the safest, {entries[0]['setting']}, keeps it in {best[0].share:.0%}: give a "
        "larger tolerance, more test_examples, or add candidates (methods, alphas, block_sizes)"
    )
    return Found(report, pasted, refusal)


def _climb(base: Point, settings: AppendixD, split: Split, bench: Bench) -> Found:
    """Runs the procedure "appendix_d", then measures its settings Low, Med and High on the held-out examples.

    The procedure itself uses the search examples and the test examples.
    """
    searched = replace(split.search, judged=split.test.end - split.search.first)
    subset = searched.part(max(searched.judged // 4, LEAST_EXAMPLES))
    trail = thresholds.run(bench, base, settings, searched, subset)
    thresholds.show(trail, settings)
    trail.check()
    window = split.held_out
    print(f"measuring three levels and the target on examples {window.first} to {window.end - 1}")
    target = thresholds.point_of(base, base.settings)
    entries = measure_settings(bench, trail.levels, target, window)
    heading = f"Appendix D with {settings.rule}: measured on {window.judged} held-out examples"
    show_settings(heading, entries)
    # the last level is the fastest with sufficient quality, so it becomes the active setting of the gin file
    pasted = [(trail.levels[entry["name"]], said(entry)) for entry in reversed(entries[:-1])]
    report = {"appendix_d": asdict(settings), "trail": trail.plain(), "settings": entries}
    return Found(report, paste(pasted, [heading, *_about(base)]))


_USE = "Use: experiments/run.py with gin/run.gin, a pair's file, a task's file, and this one."


def _about(target: Point) -> list[str]:
    """Returns lines for the gin file, which name the pair and the task, and explain how to use the file."""
    task = get_task(target.evaluation.task).name
    return [f"Pair {target.pair.name}, task {task}, split {target.evaluation.split}.", _USE]


NOTE = (
    "[low, high]: 95% confidence interval from paired resamples of the examples. Latency: batch 1, relative to the "
    "target."
)
Entry = dict[str, Any]
"""One setting with its numbers, as values for JSON; `_entry` describes them."""


def measure_settings(
    bench: Bench, named: Mapping[str, Point], target: Point, window: Window, tolerance: Tolerance | None = None
) -> list[Entry]:
    """Measures settings and the target on a range of examples, and returns an entry for each of them.

    Args:
        bench: measures the settings and stores their records.
        named: maps the name of a setting, for instance "chosen", to the setting.
        target: the target alone; its entry comes last.
        window: the range of examples.
        tolerance: the bounds that each entry is compared with; `None`: entries do not say whether they keep bounds.
    """
    measured, bootstrap = bench.measure([*named.values(), target], window), Bootstrap()
    entries = [
        _entry(name, point, measured[point], measured[target], bootstrap, tolerance) for name, point in named.items()
    ]
    return [*entries, _entry("target", target, measured[target], measured[target], bootstrap, None)]


def _entry(
    name: str, point: Point, records: Records, target: Records, bootstrap: Bootstrap, tolerance: Tolerance | None
) -> Entry:
    """Returns the numbers of one setting with 95% confidence intervals, each as `[value, low, high]`.

    The intervals come from resamples of the examples, paired with the target's. `difference_percent` compares the
    quality with the target's. `latency` is relative to the target's, and `None` for the target itself. `kept` says
    whether the tolerance is kept on all examples, and `share` is the share of resamples in which it is kept.
    """
    quality, reference = bootstrap.qualities(records, target)
    timed = point.settings.method != TARGET
    entry: Entry = {
        "name": name,
        "setting": point.label().rpartition(" seed=")[0],  # all settings have the same seeds
        "settings": asdict(point.settings),
        "metric": records[0]["quality"]["metric"],
        "quality": bootstrap.interval(quality),
        "difference_percent": bootstrap.interval(100 * (quality / reference - 1)) if reference.min() > 0 else None,
        "latency": bootstrap.interval(bootstrap.latencies(records)) if timed else None,
    }
    if tolerance is not None:
        kept = tolerance.kept(records, target, bootstrap)
        entry |= {"kept": bool(kept[0]), "share": float(kept[1:].mean())}
    return entry


def show_settings(title: str, entries: Sequence[Entry]) -> None:
    """Prints the entries as a table."""
    rows = []
    for entry in entries:
        numbers = [_cell(entry["quality"], "{:.2f}"), _cell(entry["difference_percent"], "{:+.1f}%")]
        numbers.append(_cell(entry["latency"], "{:.2f}"))
        kept = f"{'yes' if entry['kept'] else 'no'}, {entry['share']:.0%}" if "kept" in entry else NONE
        rows.append([entry["name"], entry["setting"], *numbers, kept])
    header = ["", "setting", entries[0]["metric"], "difference to target", "latency / target's", "kept, in resamples"]
    printing.print_grids([Grid(title=title, header=header, rows=rows, notes=[NOTE])])


def paste(settings: Sequence[tuple[Point, str]], head: Sequence[str], live: bool = True) -> str:
    """Returns the text of a gin file for `experiments/run.py` with the given settings.

    The file is used together with gin/run.gin, a pair's file and a task's file. Its first setting is active, unless
    `live` is false; all other settings follow as comments.

    Args:
        settings: the settings, each with a comment.
        head: first lines of the file, which become comments.
        live: whether the first setting is active.
    """
    lines = [*(f"# {line}" for line in head), "from __gin__ import dynamic_registration", ""]
    lines += ["from speccascade_jax.evaluation import points"]
    for number, (point, comment) in enumerate(settings):
        block = gin_blocks(point.settings)
        lines += ["", f"# {comment}", *(line if live and number == 0 else f"# {line}" for line in block)]
    return "\n".join(lines) + "\n"


def said(entry: Entry) -> str:
    """Returns one line of text with the results of one setting, which `entry` contains."""
    words = [f"{entry['name']}: {entry['setting']}", f"{entry['metric']} {_cell(entry['quality'], '{:.2f}')}"]
    if entry["difference_percent"]:
        words.append(f"{_cell(entry['difference_percent'], '{:+.1f}%')} compared with the target")
    if entry["latency"]:
        words.append(f"latency {_cell(entry['latency'], '{:.2f}')} of the target's")
    if "kept" in entry:
        words.append(f"tolerance {'kept' if entry['kept'] else 'not kept'} (kept in {entry['share']:.0%} of resamples)")
    return ", ".join(words)


def _cell(interval: Interval | None, form: str) -> str:
    if interval is None:
        return NONE
    value, low, high = (form.format(number) for number in interval)
    return f"{value} [{low}, {high}]"
