"""What ran when, from a trace of `jax.profiler`: each instruction's own share of the wall-clock time.

XLA on a CPU runs a generation's instructions one after another, on whichever pool thread is free, and a large product
on several threads at once. So time is wall-clock time on one axis, not time of a thread: a moment belongs to the
instruction that runs then (halved between two that run at once), never to the loop around it, and a moment in which
none runs is the waiting time of the one that starts next.

On an accelerator the device's own plane is read; that path has not been tried on one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

_END = "end: "  # XLA:CPU's mark that other threads have finished an instruction too


@dataclass(frozen=True)
class Event:
    """One execution of an instruction, in ns on the trace's clock.

    Attributes:
        begin, end: of the thread's work that started it.
        done: when other threads are known to have finished their parts of it. XLA may run what comes after before it
            says so: an instruction that begins in between shows that they had.
        run: which run of the program.
    """

    name: str
    begin: float
    end: float
    done: float
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


def read_runs(folder: Path | str, module: str, count: int) -> list[list[Event]]:
    """The executions of one program's instructions in a trace, by run and by time.

    Args:
        folder: what `jax.profiler.trace` wrote to; of several traces the newest is read.
        module: the program's name, such as `jit_generate`; count: how often it ran.

    Raises:
        FileNotFoundError: no trace in the folder. ValueError: the trace does not have `count` runs of that program.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}; did the profiler start?")
    # An accelerator has a plane of its own, on which the host's is only the launching; a CPU has the host's alone.
    planes = {plane.name: plane for plane in ProfileData.from_file(str(files[-1])).planes}
    devices = [name for name in sorted(planes) if name.startswith("/device:")] or ["/host:CPU"]
    runs: dict[int, list[Event]] = defaultdict(list)
    for event in _events(planes[devices[0]], module) if devices[0] in planes else ():
        runs[event.run].append(event)
    if len(runs) != count:
        raise ValueError(
            f"the trace in {folder} has {len(runs)} runs of {module}, not {count}: the profiler lost some (trace fewer "
            f"or shorter generations) or does not number them on this device; its planes: {', '.join(planes)}"
        )
    ordered = (sorted(run, key=lambda event: event.begin) for run in runs.values())
    return sorted(ordered, key=lambda run: run[0].begin)


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
        yield Event(name, begin, end, max(end, ends.get(stats.get("_p"), end)), int(stats.get("run_id", 0)))


def own_times(runs: Iterable[Sequence[Event]], is_control: Callable[[str], bool]) -> dict[str, Spent]:
    """Each instruction's share of the time from a run's first beginning to its last end; the shares add up to it.

    Args:
        runs: each by time; is_control: whether other instructions run inside this one, which is then not in the answer.
    """
    spent: dict[str, Spent] = defaultdict(Spent)
    for run in runs:
        _share(run, is_control, spent)
    return dict(spent)


def _share(run: Sequence[Event], is_control: Callable[[str], bool], spent: dict[str, Spent]) -> None:
    """Walk along the run's beginnings and ends, charging the time since the last one to what was running."""
    leaves = _leaves(run, is_control)
    points = sorted(point for n, (_, begin, end) in enumerate(leaves) for point in ((begin, 1, n), (end, 0, n)))
    active: set[int] = set()
    now = run[0].begin
    for at, begins, n in points:
        for other in active:
            spent[leaves[other][0]].running += (at - now) / len(active)
        if not active:
            spent[leaves[n][0]].waiting += at - now
        if begins:
            active.add(n)
            spent[leaves[n][0]].count += 1
        else:
            active.remove(n)
        now = at


def _leaves(run: Sequence[Event], is_control: Callable[[str], bool]) -> list[tuple[str, float, float]]:
    """Name, begin and end of the executions inside which no other runs.

    A loop, branch or call that XLA made one kernel of has none inside: it is an instruction like any other.
    """
    following = [event.begin for event in run[1:]] + [run[-1].end]
    return [
        (event.name, event.begin, max(event.end, min(event.done, begin)))
        for event, begin in zip(run, following, strict=True)
        if not (is_control(event.name) and begin < event.done)
    ]
