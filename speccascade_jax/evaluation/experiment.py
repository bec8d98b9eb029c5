"""Entry points for gin files and scripts: `run` measures one configuration, `sweep` many, into a resumable store.

If several processes run together, only the first writes the store. Every other process holds a `Follower`, an in-memory
list of the same keys, so that all processes know which points are done.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from speccascade_jax.core import validate_types
from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.names import hint
from speccascade_jax.evaluation import pool
from speccascade_jax.evaluation.enumeration import enumerate_points
from speccascade_jax.evaluation.measuring import evaluate, judged_part
from speccascade_jax.evaluation.point_trace import FirstPoint
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Identity, Session, open_session, rehearse
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.methods import table
from speccascade_jax.methods.settings import TOKEN
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.analysis.panels import SHARES
from speccascade_jax.results.report import page, printing
from speccascade_jax.results.report.figures import FIGURE
from speccascade_jax.results.store import bucket_store, lines, outputs, result_store, shards
from speccascade_jax.results.store.record import Record, Row
from speccascade_jax.results.store.record_key import is_stale
from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.runtime import gin_errors, hosts, profiles, recipe_header
from speccascade_jax.runtime.progress import counted, stage
from speccascade_jax.storage.files import check_replaceable, expanded, rewrite


def run(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    seed: int = 0,
    output: str = "results/runs.jsonl",
    profile_at: str | None = None,
) -> Record:
    """Measures one configuration, prints its record and stores it; an already stored configuration is only printed.

    Args:
        pair: the models.
        evaluation: the examples that the models are measured on.
        settings: how tokens are generated.
        seed: the random seed.
        output: the store's path.
        profile_at: folder, local or in a bucket, for a trace of the configuration (`point_trace.trace`), which is made
            after the measurement.

    Raises:
        ValueError: a value is invalid (raised before anything is loaded); the errors of `Heads.check` (raised before
            anything is compiled).
    """
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=settings, seed=seed)
    validate(point)
    result_store.check_name(output)
    profiles.check_place("profile_at", profile_at)
    recipe_header.announce("1 point")
    with opened(output) as store:
        result_store.check_format(store.records, output)
        session, known = open_session([point]), list(store.records)
        (key,) = measure([[point]], store, session, progress=False, profile_at=profile_at)
        record: Record = next((record for record in store.records if record["key"] == key), cast(Record, {}))
        tell_without_outputs(store, point.evaluation, [key])
    if hosts.first():
        printing.print_record(record)
    if any(record is earlier for earlier in known):
        measured = f"key {key[:8]}…, measured {record.get('started', 'earlier')[:10]}"
        print(f"already in {output} ({measured}): nothing was measured")
    else:
        print(f"stored in {output}")
    return record


def sweep(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    methods: Sequence[str | Settings],
    alphas: Mapping[str, Sequence[float]] | None = None,
    stop_thresholds: Mapping[str, Sequence[float]] | None = None,
    heads: Sequence[str] = (),
    block_sizes: Sequence[int] = (5,),
    temperatures: Sequence[float] = (0.0,),
    top_ps: Sequence[float] = (1.0,),
    top_k: int = 0,
    draft_temperatures: Sequence[float | None] = (None,),
    seeds: Sequence[int] = (0,),
    bonus: str | None = None,
    verify: Sequence[str] = (TOKEN,),
    cooler: Sequence[float] = (0.0, 0.5),
    plan: int = 0,
    together: Sequence[str] = (),
    share: str = "rejection_rate",
    reuse: Sequence[str] = (),
    output: str = "results/sweep.jsonl",
    shard_id: int = 0,
    num_shards: int = 1,
    workers: int = 0,
    worker_device: str | None = None,
    ray_address: str | None = None,
    profile_at: str | None = None,
    notes: bool = False,
    dry_run: bool = False,
) -> Path | None:
    """Measures every combination of method, α, γ, sampling and seed; a killed sweep resumes where it stopped.

    α is the number that sets a rule's trade-off between quality and speed, and γ is the block size. The points
    (configurations) always include the target alone, and the draft alone if the draft can generate without its target.
    All points are checked before anything is loaded.

    Args:
        pair: the models.
        evaluation: the examples that the models are measured on.
        methods: names in `methods.table.METHODS` (which also has every rule), `module.NAME` for a method of your own,
            or `Settings` with their own rule, stop threshold or drafters.
        alphas: maps the name of a method, or of one of its curves (`curves.curve`), to its α's; a method that is not
            named is measured at its usual α's.
        stop_thresholds: maps the name of a method with a stop threshold (such as `specdecpp`, threshold `h`) to the
            thresholds to measure; all thresholds share one compiled program.
        heads: files of acceptance heads; every method that needs a head is measured with each file. If empty, the
            pair's own head is used.
        block_sizes: values of γ; each value needs one compiled program per rule.
        temperatures: values of `temperature` in `sc.decode`.
        top_ps: values of `top_p` in `sc.decode`.
        top_k: as in `sc.decode`.
        draft_temperatures: values of `draft_temperature` in `sc.decode`; `None`: the method's default.
        seeds: random seeds; each seed gives a record of its own, and tables and plots average over the seeds.
        bonus: as in `sc.decode`.
        verify: verification algorithms: "token", "block" or both. They apply to methods that accept a drafted token
            with probability `min(1, π/q̃)`.
        cooler: fractions of every temperature above 0; the quality of the target alone is also measured at these lower
            temperatures, to show the effect of sharper distributions.
        plan: if above 0, the number of α's for every rule among `methods` that `alphas` does not name. These α's are
            evenly spaced in the rejection rate, which is estimated from one pass over the examples at the first
            temperature and top-p (`surveying.plan`).
        together: names of settings whose different values share one table and plot, instead of one table for each value
            (`panels.panels`).
        share: the quantity on the horizontal axis of the second plot, a name in `panels.SHARES`.
        reuse: paths of other stores; points that they share with this sweep are copied instead of being measured again.
        output: path of the store; records from the stores of the sweep's parts (`num_shards`) are copied into this
            store.
        shard_id: index of the part of the sweep that this process measures, 0 to `num_shards - 1`; each part has a
            store of its own (`shards.path_of`).
        num_shards: number of parts of the sweep, for independent processes on several machines or devices. Tables and
            plots of `output` read the stores of all parts, and so does the same sweep with `num_shards=1`.
        workers: if above 0, the number of worker processes that measure the points (`count` of `pool.Pool`); this
            process then only writes the store.
        worker_device: the Ray resource of which each worker reserves one unit (`device` of `pool.Pool`).
        ray_address: address of a Ray cluster (`address` of `pool.Pool`).
        profile_at: folder, local or in a bucket, for a trace of the first point that this process measures, or of its
            first point if all are stored (`point_trace.trace`). `run` traces any point.
        notes: whether all notes are printed below the tables, instead of only the most important ones.
        dry_run: whether to only list the points, and check that the pair and the examples exist.

    Returns:
        The store's path; `None` after a dry run.

    Raises:
        ValueError: the errors of `enumerate_points` and `pool.check`, before anything is loaded; those of
            `Heads.check`, before anything is measured. ImportError, RuntimeError: the errors of `pool.Pool` and its
            `fill`.
    """
    validate_types.check(sweep, locals())
    workers = whole("workers", workers, 0)
    _check_workers(workers, worker_device, ray_address, plan, profile_at)
    _check_shown(output, together, share)
    shared = _shared(locals())
    groups = enumerate_points(alphas=alphas, **shared)
    shard = shards.checked(shard_id, num_shards)
    if plan:
        planned = _planned(list(itertools.chain(*groups)), methods, dict(alphas or {}), plan)
        groups = enumerate_points(alphas=planned, **shared)
    groups = shards.share(groups, *shard)
    points = list(itertools.chain(*groups))
    if workers and points:
        pool.check(points, workers, worker_device)
    path = expanded(output if num_shards == 1 else shards.path_of(output, *shard))
    recipe_header.announce(f"{len(points)} points", subject=_described(points))
    if dry_run or not points:
        _list(points, f"part {shard_id} of {num_shards}")
        return None
    profiles.check_place("profile_at", profile_at)
    elsewhere = [*([output] if num_shards > 1 else shards.parts_of(output)), *reuse]
    with opened(path, f"{shard_id}-of-{num_shards}") as store:
        result_store.check_format(store.records, path)
        tell_other_panels(store, points[0])
        if workers:
            started = pool.Pool(points, workers, ray_address, worker_device)
            keys = measure_in(started, groups, store, elsewhere)
        else:
            session = open_session(points)
            recipe_header.announce_places()
            store.take_over(map(session.key, points), elsewhere)
            keys = measure(groups, store, session, profile_at=profile_at)
        tell_without_outputs(store, points[0].evaluation, keys)
        if num_shards == 1 and hosts.first():
            present(store, together, share, notes)
    if num_shards > 1 and hosts.first():
        print(f"part {shard_id} of {num_shards}: {path}; tables and plots of {output} read all parts")
    return path


def points_of(arguments: Mapping[str, Any]) -> list[Point]:
    """Returns the points that `sweep` would measure with these arguments; nothing is loaded.

    Arguments that do not name points, such as `output`, are ignored. `plan` is ignored too: a rule whose α's it would
    choose gets its usual α's.

    Raises:
        TypeError: an unknown argument, or a required one is missing.
        ValueError: the errors of `enumerate_points`.
    """
    chosen = inspect.signature(sweep).bind(**arguments)
    chosen.apply_defaults()
    groups = enumerate_points(alphas=chosen.arguments["alphas"], **_shared(chosen.arguments))
    return list(itertools.chain(*groups))


_NAMING = (
    "pair", "evaluation", "methods", "stop_thresholds", "heads", "block_sizes", "seeds", "bonus", "verify", "cooler",
)  # fmt: skip
"""Arguments of `sweep` that are arguments of `enumerate_points` too."""


def _shared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `enumerate_points`, except `alphas`, for the given arguments of `sweep`."""
    lists = {name: arguments[name] for name in ("temperatures", "top_ps", "draft_temperatures")}
    return {name: arguments[name] for name in _NAMING} | {"samplings": _samplings(arguments["top_k"], **lists)}


def _described(points: Sequence[Point]) -> str:
    """Returns the task, the pair and the methods of points; empty without points."""
    names = dict.fromkeys(point.title() for point in points)
    return f"{_subject(points[0].coordinates())}: {', '.join(names)}" if points else ""


def _list(points: Sequence[Point], part: str) -> None:
    """Prints the points, or that the part has none; raises an error if their pair or examples do not exist."""
    if not points:
        print(f"{part} has nothing to measure: the sweep has fewer groups of points")
        return
    recipe_header.announce_places()
    printing.print_points([point.label() for point in points])
    if points:
        rehearse(points[0].pair, points[0].evaluation)


def _check_workers(workers: int, device: str | None, address: str | None, plan: int, profile_at: str | None) -> None:
    """Refuses worker options without workers, and options that cannot be combined with workers or several hosts."""
    for name, value in (("worker_device", device), ("ray_address", address)):
        if value and not workers:
            raise ValueError(f"{name}={value!r} needs workers: give workers too")
    if plan and (hosts.many() or workers):
        raise ValueError(f"plan={plan} needs a single process without workers: leave plan out")
    if workers and profile_at:
        raise ValueError(f"profile_at={profile_at} traces this process, and workers={workers} measure: leave one out")
    if workers and hosts.many():
        raise ValueError(f"workers={workers} needs a single driver process: leave workers out, or start one process")


def _check_shown(output: str, together: Sequence[str], share: str) -> None:
    """Refuses names in `together` and `share` that tables and plots do not know, and checks the output paths."""
    _check_output(output)
    for name, chosen, known in (("together", together, panels.MIXABLE), ("share", (share,), SHARES)):
        if unknown := [value for value in chosen if value not in known]:
            raise ValueError(f"{name}: {hint(unknown[0], known)}{unknown[0]!r} is not one of {', '.join(known)}")


_OPERATIVE = r"from __gin__ import dynamic_registration\n.*\n# Parameters for [\w.]+:\n# ={70}"
"""Regular expression that matches the beginning of the gin settings file that a sweep writes beside its store."""


def _check_output(output: str) -> None:
    """Refuses an output path whose plot, report or settings file would replace a file that no sweep wrote."""
    result_store.check_name(output)
    store = page.default_path(output)
    check_replaceable(store.with_suffix(".settings.gin"), start=_OPERATIVE)
    check_replaceable(store.with_suffix(".png"), start=FIGURE)


def _samplings(top_k: int, **lists: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns every combination of the listed sampling settings, each as a dictionary by name.

    Args:
        top_k: the same value for every combination.
        lists: the values of each setting; an argument's name is the plural of the setting's name, such as
            `temperatures`.
    """
    for name, values in lists.items():
        several(name, values, 1)
    names = [name.removesuffix("s") for name in lists]
    return [dict(zip(names, chosen, strict=True)) | {"top_k": top_k} for chosen in itertools.product(*lists.values())]


def _planned(
    points: Sequence[Point], methods: Sequence[str | Settings], alphas: dict[str, Sequence[float]], count: int
) -> dict[str, Sequence[float]]:
    unnamed = {name: table.get(name) for name in methods if isinstance(name, str) and name not in alphas}
    bare = [name for name, recipe in unnamed.items() if isinstance(recipe, Speculation) and recipe.bare]
    free = [name for name in unnamed if name in RULES or name in bare]
    return alphas | surveying.plan(open_session(points), points[0], free, whole("plan", count, 2))


def measure(
    groups: Sequence[Sequence[Point]],
    store: ResultStore,
    session: Session,
    way: Callable[..., Iterator[Record]] | None = None,
    *,
    progress: bool = True,
    profile_at: str | Path | None = None,
) -> list[str]:
    """Fills the store with the records of all points, and returns their keys in the order of the points.

    Records that another version of the code measured are measured again (`record_key.is_stale`). Quality that was
    measured on other hardware, or without latency, is reused.

    Args:
        groups: the points, in groups that share a compiled program and a batch.
        store: receives the records.
        session: holds the pair and its examples.
        way: the function that measures a group's points; by default `evaluate`.
        progress: whether to show progress.
        profile_at: place for a trace of the first point that is measured, or of the first one if all are stored.
    """
    points = list(itertools.chain(*groups))
    identities = {point: session.identity(point) for point in counted(points, "looking for their records", "points")}
    keys = [identity.key for identity in identities.values()]
    _agree(store, list(identities.values()))
    stale = tell_stale(store, identities.values())
    tell_timed_elsewhere(store, identities.values())

    def earlier(point: Point) -> Row | None:
        # all processes must make the same decisions, but only the first can look up records in the store
        if hosts.many():
            return None
        identity = identities[point]
        record = store.judged(identity.judged_key)
        if record is None or is_stale(record, **identity.provenance):
            return None
        return judged_part(store.path, record, point.evaluation.keep_outputs)

    # Only the first of several processes has a store. The others would find other points undone, and share other
    # programs.
    if not hosts.many():
        done = store.done_keys() - stale
        session.share(point.settings for point, identity in identities.items() if identity.key not in done)
    evaluate_points = FirstPoint(partial(way or evaluate, session, earlier=earlier), session, profile_at)
    with _progress(store, keys, stale) if progress else nullcontext() as shown:
        on_record = shown.advance if shown else lambda record: None
        with stage(lambda: f"measured {shown.done} of {shown.total} points" if shown else "measuring"):
            result_store.fill(store, groups, lambda point: identities[point].key, evaluate_points, on_record, stale)
    if profile_at is not None:
        evaluate_points.trace(next(iter(identities)))
    return keys


def tell_stale(store: ResultStore, identities: Iterable[Identity]) -> set[str]:
    """Returns the keys of records that another version of the code measured, and prints how many they are.

    Only records with the same toolchain as now are compared.
    """
    code = {identity.key: identity.provenance for identity in identities}
    stale = {r["key"] for r in store.records if r["key"] in code and is_stale(r, **code[r["key"]])}
    if stale and hosts.first():
        print(f"{len(stale)} of {len(code)} points were measured by other code and are measured again")
    return set(hosts.agreed(sorted(stale)))


def tell_timed_elsewhere(store: ResultStore, identities: Collection[Identity]) -> None:
    """Prints how many points must be timed again, because their device, mesh or latency settings differed."""
    done, timed = store.done_keys(), {record.get("judged_key") for record in store.records if record.get("latency")}
    if moved := sum(identity.key not in done and identity.judged_key in timed for identity in identities):
        kept = "are measured anew" if hosts.many() else "keep their quality and are timed anew"
        difference = "on other devices, on another mesh or with other latency settings"
        print(f"{moved} of {len(identities)} points were timed {difference}: here they {kept}")


def measure_in(
    workers: pool.Pool, groups: Sequence[Sequence[Point]], store: ResultStore, elsewhere: Sequence[str]
) -> list[str]:
    """Measures like `measure`, but with the workers of a pool, and closes the pool at the end."""
    try:
        identities = workers.identities()
        keys = {point: identity.key for point, identity in identities.items()}
        store.take_over(keys.values(), elsewhere)
        stale = tell_stale(store, identities.values())
        with (
            _progress(store, keys.values(), stale) as shown,
            stage(lambda: f"workers measured {shown.done} of {shown.total} points"),
        ):
            workers.fill(store, groups, keys, shown.advance, stale)
        return list(keys.values())
    finally:
        workers.close()


def _progress(store: ResultStore, keys: Collection[str], stale: Collection[str]) -> printing.Progress:
    done = store.done_keys() - set(stale)
    return printing.Progress(len(keys), sum(key in done for key in keys), str(store.path))


def present(
    store: ResultStore, together: Sequence[str] = (), share: str = "rejection_rate", notes: bool = False
) -> None:
    """Prints the results of the whole store as Table 2 of Narasimhan et al. (2024), and writes plots and a report.

    If nothing was timed, the list of all points is printed instead of Table 2. Arguments are those of `sweep`.
    """
    with stage("making tables"):
        all_panels = panels.panels(store.records, together)
    timed = any(record.get("latency") for record in store.records)
    shown = ["--together", *together] * bool(together) + ["--points"] * (not timed)
    more = printing.notes_command(store.path, *shown)
    printing.show(all_panels, not timed, more=None if notes else more)
    print(f"results: {store.path}")
    if any(panel.curves for panel in all_panels):
        from speccascade_jax.results.report.figures import tradeoff

        with stage("drawing plots"):
            paths = tradeoff.draw_all(all_panels, store.path.parent, store.path.stem, share=share)
        for path in paths:
            print(f"plot: {path}")
    if text := gin_errors.operative():  # all gin values of this run; empty without a gin file
        rewrite(store.path.with_suffix(".settings.gin"), f"{text}\n", start=_OPERATIVE)
    if any(panel.target for panel in all_panels):
        with stage("writing the report"):
            report = page.write(all_panels, store.path)
        print(f"report: {report}")
        printing.print_next(all_panels, store.path, report)


def tell_without_outputs(store: ResultStore, evaluation: Evaluation, keys: Collection[str]) -> None:
    """Prints how many stored points lack the requested outputs; such points are not measured again."""
    if not (evaluation.keep_outputs and hosts.first()):
        return
    asked = set(keys)
    records = [record for record in store.records if record["key"] in asked]
    if missing := sum(not outputs.kept(store.path, record) for record in records):
        lacking = f"{missing} of these {len(records)} points have no stored outputs beside {store.path}"
        print(f"{lacking}: measure into another store to get them")


def tell_other_panels(store: ResultStore, point: Point) -> None:
    """Prints which other tasks and pairs the store has results of, because its tables and report show these too."""
    counts = Counter(_subject(record["point"]) for record in store.records if "point" in record)
    counts.pop(_subject(point.coordinates()), None)
    if counts:
        others = ", ".join(f"{count} of {subject}" for subject, count in counts.items())
        kept_apart = "--output=PATH names another place"
        print(f"{store.path} holds other results ({others}), which tables and report show too; {kept_apart}")


def _subject(coordinates: Mapping[str, Any]) -> str:
    return f"{coordinates['task']}, {panels.short_name(coordinates['pair'])}"


class Follower:
    """In-memory replacement of `ResultStore` for all processes but the first, with the methods that sweeps use."""

    def __init__(self, path: str | Path):
        self.path = expanded(path)
        self.records: list[Record] = []
        self.keys: set[str] = set()

    def append(self, record: Record) -> None:
        """Adds a record without its outputs, which only the first process stores."""
        record.pop(outputs.ENTRY, None)  # to save memory
        self.records.append(record)
        self.keys.add(record["key"])

    def take_over(self, keys: Iterable[str], paths: Iterable[str | Path]) -> int:
        """Copies nothing and returns 0: only the first process reads other stores."""
        return 0

    def done_keys(self) -> set[str]:
        """Returns the keys of the records that are done, from memory."""
        return set(self.keys)


def opened(path: str | Path, part: str = "whole") -> Any:
    """Opens a part of the store at a path in the first process, and a `Follower` in the others."""
    follow = not hosts.many()
    return bucket_store.open_store(path, part, follow) if hosts.first() else nullcontext(Follower(path))


def _agree(store: Any, identities: list[Identity]) -> None:
    """Sends the keys of the records in the first process's store to all processes.

    Raises:
        ValueError: a process has other weights, examples or code than the first, or another kind of machine.
    """
    provenances = {identity.key: identity.provenance for identity in identities}
    expected = hosts.agreed(provenances)
    if list(expected) != list(provenances):
        raise ValueError(
            "this process has other weights or examples than process 0, or runs on another kind of machine: copy the "
            "same files to all hosts, and use machines of one kind"
        )
    if any(is_stale({"provenance": expected[key]}, **provenance) for key, provenance in provenances.items()):
        raise ValueError("this process has other code than process 0: copy the same files to all hosts")
    done = hosts.agreed(sorted(store.done_keys()))
    if isinstance(store, Follower):
        store.keys = set(done)


SHORTEST = 4
_KEYS: tuple[Literal["key", "former_key"], ...] = ("key", "former_key")
"""Entries that identify a record: its key, and its key in a former format."""
AGAIN = "again-"
"""Prefix of the file names of stores for points that are run again; `find_record` ignores these stores."""


def rerun_store(record: Record) -> str:
    """Returns the path of a store that does not exist yet, for a record that is run again."""
    numbers = itertools.count(1)
    names = (f"results/{AGAIN}{record['key'][:8]}-{number}.jsonl" for number in numbers)
    return next(name for name in names if not Path(name).exists())


def find_record(key: str, store: str | None = None) -> tuple[Record, Path]:
    """Returns the record whose key begins with `key`, and the path of its store.

    Searches `store` if it is given, and otherwise every `results/*.jsonl`.

    Raises:
        ValueError: no record or several records match, or `key` has too few digits.
        FileNotFoundError: `store` does not exist.
    """
    if len(key) < SHORTEST:
        raise ValueError(f"from_record={key!r}: give at least {SHORTEST} digits of the record's key")
    matches, keys = dict[str, tuple[Record, Path]](), list[str]()
    stores = [path for path in sorted(Path("results").glob("*.jsonl")) if not path.name.startswith(AGAIN)]
    for path in [expanded(store)] if store else stores:
        try:
            records = result_store.read_records(path)
        except lines.NotAStoreError:
            if store:
                raise
            continue
        keys += [record["key"] for record in records]
        matches |= {r["key"]: (r, path) for r in records if any(r.get(name, "").startswith(key) for name in _KEYS)}
    searched = store or "results/*.jsonl"
    if not matches:
        remedy = f'its {len(keys)} keys are in the lines\' entry "key"' if store else "give --store"
        raise ValueError(f"no record in {searched} has a key that begins with {key!r}: {hint(key, keys)}{remedy}")
    if len(matches) > 1:
        raise ValueError(f"{len(matches)} records in {searched} have keys that begin with {key!r}: give more digits")
    record, path = next(iter(matches.values()))
    if "configuration" not in record:
        raise ValueError(f"record {record['key']} in {path} is not a point: it has no configuration to run again")
    return record, path


def compare_rerun(old: Record, old_store: Path, new: Record, new_store: str | Path) -> str:
    """Describes in words how a record that was run again differs from the old record."""
    remarks = ["the same key"] if old["key"] == new["key"] else [f"another key, {new['key']}: {_changed(old, new)}"]
    if old["key"] == new["key"] and is_stale(old, **new["provenance"]):
        remarks = ["the same key, but other code: the method, the task or a metric has changed"]
    before, after = outputs.read(old_store, old), outputs.read(new_store, new)
    if before is None or after is None:
        return "; ".join([*remarks, "outputs were not kept, so they cannot be compared"])
    known = {output.id: output.tokens for output in before}
    same = sum(known.get(output.id) == output.tokens for output in after)
    return "; ".join([*remarks, f"the same tokens in {same} of {len(after)} outputs"])


def _changed(old: Record, new: Record) -> str:
    fingerprints = [record.get("fingerprints", {}) for record in (old, new)]
    remaining = [{name: record.get(name) for name in ("device", "configuration")} for record in (old, new)]
    codes = [{"code": record.get("provenance", {}).get("code")} for record in (old, new)]
    pairs = (fingerprints, codes, remaining)
    differs = [name for before, after in pairs for name in {**before, **after} if before.get(name) != after.get(name)]
    return f"other {', '.join(differs)}" if differs else "another version of records"
