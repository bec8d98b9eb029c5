"""What gin files bind and the scripts call: `run` (one point) and `sweep` (many), into a store that resumes.

In processes other than the first, a `Follower` stands for the store: all know what is done, one writes.
"""

from __future__ import annotations

import itertools
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
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Identity, Session, open_session
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.methods import table
from speccascade_jax.methods.settings import TOKEN
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.analysis.panels import SHARES
from speccascade_jax.results.report import page, printing
from speccascade_jax.results.store import outputs, result_store, shards
from speccascade_jax.results.store.record import Record, Row
from speccascade_jax.results.store.record_key import is_stale
from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.runtime import gin_errors, hosts
from speccascade_jax.storage.files import expanded, write_atomically


def run(
    *, pair: ModelPair, evaluation: Evaluation, settings: Settings, seed: int = 0, output: str = "results/runs.jsonl"
) -> Record:
    """Measure one point, print it and add it to a store; a point that the store holds is printed, not repeated.

    Args:
        pair, evaluation, settings, seed: the point; output: the store.

    Raises:
        ValueError: a value without meaning, before anything is loaded; as `Heads.check`, before anything is compiled.
    """
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=settings, seed=seed)
    validate(point)
    with opened(output) as store:
        result_store.check_format(store.records, output)
        session = open_session([point])
        (key,) = measure([[point]], store, session, progress=False)
        record: Record = next((record for record in store.records if record["key"] == key), cast(Record, {}))
        tell_without_outputs(store, point.evaluation, [key])
    if hosts.first():
        printing.print_record(record)
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
    dry_run: bool = False,
) -> Path | None:
    """Measure rules × α × γ × temperature × top-p × seeds; a sweep that was killed goes on where it stopped.

    Target and draft alone are always among the points. All points are checked before anything is loaded.

    Args:
        pair, evaluation: the models, and on what.
        methods: names in `methods.table.METHODS`, where every rule is one, `module.NAME` of your own, or `Settings`
            with a rule, a stop threshold or drafters of their own.
        alphas: name of a method (or `curves.curve`) -> its α's; one that is not named gets its usual range.
        stop_thresholds: method -> its stop thresholds, where it stops by one (`h` of specdecpp); no compilation each.
        heads: files of acceptance heads, each of which methods that ask one are measured with; empty: the pair's own.
        block_sizes: γ's; each is a compilation per rule.
        temperatures, top_ps, top_k, draft_temperatures, bonus: as `sc.decode` takes them; a draft temperature `None` is
            the method's own.
        verify: "token", "block" or both: how blocks are verified, by methods that keep all that the law allows.
        seeds: each is a record of its own; tables and plots average over them.
        cooler: the target alone is judged at these shares of every temperature above 0 too: what sharpening gains.
        plan: where above 0, every rule among `methods` that `alphas` does not name gets as many α's, placed where an
            estimate from one pass over the examples sees its rejection rate move (`surveying.plan`, at the first
            temperature and top-p).
        together, share: what tables and plots put side by side (`panels.panels`), and the second plot's horizontal
            axis, a name in `labels.SHARES`.
        reuse: stores from which points that this sweep has too are copied instead of being measured again.
        output: the store; what its parts hold (`shards`) is taken over.
        shard_id, num_shards: measure one part of so many, into a store of its own (`shards.path_of`): for processes
            on several machines or devices, which need not know of each other. Tables and plots of `output` read all
            of them, and so does this sweep without shards.
        workers, worker_device, ray_address: where above 0, so many processes measure the points, each on a device of
            its own, and this one writes (`pool.Pool`, whose `count`, `device` and `address` they are).
        dry_run: only list the points.

    Returns:
        The store's path; `None` after a dry run.

    Raises:
        ValueError: as `enumerate_points` and `pool.check`, before anything is loaded; as `Heads.check`, before anything
            is measured. ImportError, RuntimeError: as `pool.Pool` and its `fill`.
    """
    validate_types.check(sweep, locals())
    workers = whole("workers", workers, 0)
    _check_workers(workers, worker_device, ray_address, plan)
    _check_shown(together, share)
    samplings = _samplings(top_k, temperatures=temperatures, top_ps=top_ps, draft_temperatures=draft_temperatures)
    shared: dict[str, Any] = {"pair": pair, "evaluation": evaluation, "samplings": samplings, "seeds": seeds}
    shared |= {"methods": methods, "stop_thresholds": stop_thresholds, "heads": heads}
    shared |= {"block_sizes": block_sizes, "bonus": bonus, "verify": verify, "cooler": cooler}
    groups = enumerate_points(alphas=alphas, **shared)
    shard = shards.checked(shard_id, num_shards)
    if plan:
        planned = _planned(list(itertools.chain(*groups)), methods, dict(alphas or {}), plan)
        groups = enumerate_points(alphas=planned, **shared)
    groups = shards.share(groups, *shard)
    points = list(itertools.chain(*groups))
    if workers and points:
        pool.check(points, workers, worker_device)
    if dry_run:
        printing.print_points([point.label() for point in points])
        return None
    if not points:
        print(f"part {shard_id} of {num_shards} has nothing to measure: there are fewer groups of points")
        return None
    path = expanded(output if num_shards == 1 else shards.path_of(output, *shard))
    elsewhere = [*([output] if num_shards > 1 else shards.parts_of(output)), *reuse]
    with opened(path) as store:
        result_store.check_format(store.records, path)
        if workers:
            started = pool.Pool(points, workers, ray_address, worker_device)
            keys = measure_in(started, groups, store, elsewhere)
        else:
            session = open_session(points)
            store.take_over(map(session.key, points), elsewhere)
            keys = measure(groups, store, session)
        tell_without_outputs(store, points[0].evaluation, keys)
        if num_shards == 1 and hosts.first():
            present(store, together, share)
        elif hosts.first():
            print(f"part {shard_id} of {num_shards}: {path}; experiments.tables and plots of {output} read all parts")
    return path


def _check_workers(workers: int, device: str | None, address: str | None, plan: int) -> None:
    """Refuses settings of workers without workers, and what workers or several hosts do not go with."""
    for name, value in (("worker_device", device), ("ray_address", address)):
        if value and not workers:
            raise ValueError(f"{name}={value!r} is for workers: give workers too")
    if plan and (hosts.many() or workers):
        raise ValueError(f"plan={plan} is for one process, without workers: leave it out")
    if workers and hosts.many():
        raise ValueError(f"workers={workers} are asked by one process: leave them out, or run one")


def _check_shown(together: Sequence[str], share: str) -> None:
    """Refuses what tables and plots cannot put side by side or along an axis."""
    for name, chosen, known in (("together", together, panels.MIXABLE), ("share", (share,), SHARES)):
        if unknown := [value for value in chosen if value not in known]:
            raise ValueError(f"{name}: {hint(unknown[0], known)}{unknown[0]!r} is not one of {', '.join(known)}")


def _samplings(top_k: int, **lists: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns every combination as settings by name.

    Args:
        lists: values of a setting, by its name in the plural.
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
) -> list[str]:
    """Fills the store with the groups' points, and returns their keys in the order of the points.

    Records of other code are measured anew (`record_key.is_stale`). What was judged on other hardware, or without
    latency, is not judged again.

    Args:
        way: what measures a group's points; by default `evaluate`; progress: whether it is shown.
    """
    identities = {point: session.identity(point) for group in groups for point in group}
    keys = [identity.key for identity in identities.values()]
    _agree(store, keys)
    stale = tell_stale(store, identities.values())

    def earlier(point: Point) -> Row | None:
        if hosts.many():  # all processes must do the same, and only the first has the store
            return None
        identity = identities[point]
        record = store.judged(identity.judged_key)
        if record is None or is_stale(record, **identity.provenance):
            return None
        return judged_part(store.path, record, point.evaluation.keep_outputs)

    evaluate_points = partial(way or evaluate, session, earlier=earlier)
    with _progress(store, keys, stale) if progress else nullcontext() as shown:
        on_record = shown.advance if shown else lambda record: None
        result_store.fill(store, groups, lambda point: identities[point].key, evaluate_points, on_record, stale)
    return keys


def tell_stale(store: ResultStore, identities: Iterable[Identity]) -> set[str]:
    """Returns the keys of records that other code measured under the same toolchain, and says how many there are."""
    code = {identity.key: identity.provenance for identity in identities}
    stale = {r["key"] for r in store.records if r["key"] in code and is_stale(r, **code[r["key"]])}
    if stale and hosts.first():
        print(f"{len(stale)} of {len(code)} points were measured by other code: they are measured anew")
    return set(hosts.agreed(sorted(stale)))


def measure_in(
    workers: pool.Pool, groups: Sequence[Sequence[Point]], store: ResultStore, elsewhere: Sequence[str]
) -> list[str]:
    """Does as `measure`, by the workers of a pool, which ends with it."""
    try:
        identities = workers.identities()
        keys = {point: identity.key for point, identity in identities.items()}
        store.take_over(keys.values(), elsewhere)
        stale = tell_stale(store, identities.values())
        with _progress(store, keys.values(), stale) as progress:
            workers.fill(store, groups, keys, progress.advance, stale)
        return list(keys.values())
    finally:
        workers.close()


def _progress(store: ResultStore, keys: Collection[str], stale: Collection[str]) -> printing.Progress:
    done = store.done_keys() - set(stale)
    return printing.Progress(len(keys), sum(key in done for key in keys), str(store.path))


def present(store: ResultStore, together: Sequence[str] = (), share: str = "rejection_rate") -> None:
    """Prints Table 2 of everything the store holds (all points, where nothing was timed), and writes its figures."""
    found = panels.panels(store.records, together)
    printing.show(found, points=not any(record.get("latency") for record in store.records))
    print(f"results: {store.path}")
    if any(panel.curves for panel in found):
        from speccascade_jax.results.report.figures import tradeoff

        for path in tradeoff.draw_all(found, store.path.parent, store.path.stem, share=share):
            print(f"plot: {path}")
    if text := gin_errors.operative():  # what gin gave this run; empty where no gin file was read
        write_atomically(store.path.with_suffix(".settings.gin"), f"{text}\n")
    if any(panel.target for panel in found):
        report = page.write(found, store.path)
        print(f"report: {report}")
        printing.print_next(found, store.path, report)


def tell_without_outputs(store: ResultStore, evaluation: Evaluation, keys: Collection[str]) -> None:
    """Says of how many points no outputs are kept although asked: a point in a store is not measured again."""
    if not (evaluation.keep_outputs and hosts.first()):
        return
    asked = set(keys)
    own = [record for record in store.records if record["key"] in asked]
    if missing := sum(not outputs.kept(store.path, record) for record in own):
        lacking = f"no outputs of {missing} of these {len(own)} points lie beside {store.path}"
        print(f"{lacking}: measure into another store to have them")


class Follower:
    """As much of a `ResultStore` as sweeps ask; keeps what it is given in memory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.records: list[Record] = []
        self.keys: set[str] = set()

    def append(self, record: Record) -> None:
        record.pop(outputs.ENTRY, None)  # the first process keeps them
        self.records.append(record)
        self.keys.add(record["key"])

    def take_over(self, keys: Iterable[str], paths: Iterable[str | Path]) -> int:
        return 0

    def done_keys(self) -> set[str]:
        return set(self.keys)


def opened(path: str | Path) -> Any:
    """Opens the store at a path in the first process, and what stands for it in the others."""
    return ResultStore(path) if hosts.first() else nullcontext(Follower(path))


def _agree(store: Any, keys: list[str]) -> None:
    """Lets all processes know what the first one's store holds.

    Raises:
        ValueError: in processes that were given other points, weights or examples, and so other keys, than the first.
    """
    if hosts.agreed(keys) != keys:
        raise ValueError(
            "this process was given other settings, weights or examples than the first one, or runs on another kind of "
            "machine: give all of them the same"
        )
    held = hosts.agreed(sorted(store.done_keys()))
    if isinstance(store, Follower):
        store.keys = set(held)


SHORTEST = 4
_KEYS: tuple[Literal["key", "former_key"], ...] = ("key", "former_key")
"""Entries of a record that it is found by: its key, and the one that it had in a former format."""
AGAIN = "again-"
"""What stores of points that were run again begin with: they are not looked through for records."""


def rerun_store(record: Record) -> str:
    """Returns the path of a store that is not there yet, for a record that is run again."""
    numbers = itertools.count(1)
    names = (f"results/{AGAIN}{record['key'][:8]}-{number}.jsonl" for number in numbers)
    return next(name for name in names if not Path(name).exists())


def find_record(key: str, store: str | None = None) -> tuple[Record, Path]:
    """Returns the record whose key begins with `key`, and its store: the one named, or any `results/*.jsonl`.

    Raises:
        ValueError: none, several, or too few digits to tell. FileNotFoundError: no such store.
    """
    if len(key) < SHORTEST:
        raise ValueError(f"from_record={key!r}: give at least {SHORTEST} digits of the record's key")
    found, keys = dict[str, tuple[Record, Path]](), list[str]()
    stores = [path for path in sorted(Path("results").glob("*.jsonl")) if not path.name.startswith(AGAIN)]
    for path in [expanded(store)] if store else stores:
        try:
            records = result_store.read_records(path)
        except result_store.NotAStoreError:
            if store:
                raise
            continue
        keys += [record["key"] for record in records]
        found |= {r["key"]: (r, path) for r in records if any(r.get(name, "").startswith(key) for name in _KEYS)}
    where = store or "results/*.jsonl"
    if not found:
        raise ValueError(f"no record of {where} has a key that begins with {key!r}: {hint(key, keys)}give --store")
    if len(found) > 1:
        raise ValueError(f"{len(found)} records of {where} have keys that begin with {key!r}: give more digits")
    record, path = next(iter(found.values()))
    if "configuration" not in record:
        raise ValueError(f"record {record['key']} of {path} is of no point: it has no configuration to run again")
    return record, path


def compare_rerun(old: Record, old_store: Path, new: Record, new_store: str | Path) -> str:
    """Says what became of a record that was run again."""
    told = ["the same key"] if old["key"] == new["key"] else [f"another key, {new['key']}: {_changed(old, new)}"]
    before, after = outputs.read(old_store, old), outputs.read(new_store, new)
    if before is None or after is None:
        return "; ".join([*told, "outputs were not kept, so they cannot be compared"])
    known = {each.id: each.tokens for each in before}
    same = sum(known.get(each.id) == each.tokens for each in after)
    return "; ".join([*told, f"the same tokens in {same} of {len(after)} outputs"])


def _changed(old: Record, new: Record) -> str:
    fingerprints = [record.get("fingerprints", {}) for record in (old, new)]
    others = [{name: record.get(name) for name in ("device", "configuration")} for record in (old, new)]
    codes = [{"code": record.get("provenance", {}).get("code")} for record in (old, new)]
    pairs = (fingerprints, codes, others)
    differs = [name for before, after in pairs for name in {**before, **after} if before.get(name) != after.get(name)]
    return f"other {', '.join(differs)}" if differs else "another version of records"
