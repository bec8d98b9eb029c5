"""What ran when, from a trace of `jax.profiler`: each instruction's own share of the wall-clock time.

XLA on a CPU runs a generation's instructions one after another, on whichever pool thread is free, and a large product
on several threads at once. So time is wall-clock time on one axis, not time of a thread: a moment belongs to the
instruction that runs then (halved between two that run at once), never to the loop around it, and a moment in which
none runs is the waiting time of the one that starts next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

_END = "end: "  # XLA:CPU marks the end of an instruction that other threads finished


@dataclass(frozen=True)
class Event:
    """One execution of an instruction: `begin` and `end` in ns on the trace's clock; `run` is the program's run."""

    name: str
    begin: float
    end: float
    run: int


@dataclass(kw_only=True)
class Spent:
    """What an instruction cost in all its executions: ns while it ran, ns waited before it, how often."""

    running: float = 0.0
    waiting: float = 0.0
    count: int = 0

    @property
    def total(self) -> float:
        """Running and waiting, ns."""
        return self.running + self.waiting


def read_events(folder: Path | str, module: str) -> list[Event]:
    """The executions of one program's instructions in a trace, by time.

    Args:
        folder: what `jax.profiler.trace` wrote to.
        module: the program's name, such as `jit_generate`.

    Raises:
        FileNotFoundError: no trace in the folder. ValueError: the trace has no instruction of that program.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}; did the profiler start?")
    # An accelerator has a plane of its own, on which the host's is only the launching; a CPU has the host's alone.
    planes = {plane.name: plane for plane in ProfileData.from_file(str(files[-1])).planes}
    devices = [plane for name, plane in sorted(planes.items()) if name.startswith("/device:")]
    chosen = devices[:1] or [plane for name, plane in planes.items() if name.startswith("/host:CPU")]
    events = [event for plane in chosen for event in _events(plane, module)]
    if not events:
        raise ValueError(f"the trace in {folder} has no instruction of {module}; its planes: {', '.join(planes)}")
    return sorted(events, key=lambda event: event.begin)


def _events(plane, module: str) -> Iterable[Event]:  # type: ignore[no-untyped-def]
    found, ends = [], {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ends[dict(event.stats).get("_c")] = event.start_ns
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module", module) == module:
                found.append((str(stats["hlo_op"]), event.start_ns, max(event.duration_ns, 1), stats))
    for name, begin, duration, stats in found:
        end = begin + duration
        yield Event(name, begin, max(end, ends.get(stats.get("_p"), end)), int(stats.get("run_id", 0)))


def own_times(events: Sequence[Event], is_control: Callable[[str], bool]) -> dict[str, Spent]:
    """Each instruction's share of the time between its run's first event and last; the shares add up to that time.

    Args:
        events: by time.
        is_control: whether other instructions run inside this one.

    Returns:
        By name. Loops and branches get what is left when nothing starts after it.
    """
    runs = defaultdict(list)
    for event in events:
        runs[event.run].append(event)
    spent: dict[str, Spent] = defaultdict(lambda: Spent())
    for run in runs.values():
        _share(run, is_control, spent)
    return dict(spent)


def _share(run: Sequence[Event], is_control: Callable[[str], bool], spent: dict[str, Spent]) -> None:
    # a loop, branch or call that XLA made one kernel of has nothing inside: it is an instruction like any other
    following = [event.begin for event in run[1:]] + [float("inf")]
    leaves = [x for x, begin in zip(run, following, strict=True) if not (is_control(x.name) and begin < x.end)]
    points = sorted(
        [(event.begin, 1, n) for n, event in enumerate(leaves)] + [(event.end, 0, n) for n, event in enumerate(leaves)]
    )
    active: set[int] = set()
    now = min(event.begin for event in run)
    for at, starts, n in points:
        if active:
            for other in active:
                spent[leaves[other].name].running += (at - now) / len(active)
        else:
            spent[leaves[n].name].waiting += at - now
        now = at
        if starts:
            active.add(n)
            spent[leaves[n].name].count += 1
        else:
            active.discard(n)
    spent[max(run, key=lambda event: event.end).name].waiting += max(event.end for event in run) - now


def traced_seconds(events: Sequence[Event]) -> float:
    """The time between each run's first event and last, added up."""
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        spans[event.run] += [event.begin, event.end]
    return sum(max(span) - min(span) for span in spans.values()) / 1e9
