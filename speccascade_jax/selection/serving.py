"""Serving of a stream of queries whose domain changes, with online learning: `experiments/serve_online.py`.

Every query is decoded once for each learner and once with each fixed drafter, in an order that changes from query to
query. A learner learns only from its own run. The results of each query are one line of a file, written before the next
query starts. A restarted run reads these lines, passes them to its learners again, and continues with the same state.
"""

import base64
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.names import hint
from speccascade_jax.core.transfers import Flat
from speccascade_jax.drafters import chooser
from speccascade_jax.drafters.selected import SelectedDrafter
from speccascade_jax.engine.generate import Generation, generate, raise_on_failure
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session, load_source
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.models.sharding import replicate
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.results.store.record import Row
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import counted
from speccascade_jax.selection import learners
from speccascade_jax.selection.learners import LEARNERS, Learner, Rewards
from speccascade_jax.selection.make_data import embedded
from speccascade_jax.storage.files import claim, expanded, plain, point_key, rewrite
from speccascade_jax.training import runs

QUERIES = "queries.jsonl"


def serve(
    *,
    pair: ModelPair,
    phases: Sequence[Evaluation],
    drafters: Sequence[str | Level | Arm],
    learning: Sequence[str] = ("thompson", "exp3"),
    policy: str | None = None,
    block_size: int = 7,
    temperature: float = 0.0,
    sample: int = 64,
    noise: float = 0.3,
    discount: float = 1.0,
    seed: int = 0,
    output: str = "results/online",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Serves the phases one after the other; prints and plots each learner's regret against the best fixed drafters.

    A phase is a number of queries from one domain.

    Args:
        pair: the models.
        phases: one evaluation for each phase, whose examples for latency are the queries; a task may occur again, with
            other examples.
        drafters: the drafters to choose from.
        learning: names of `learners.LEARNERS`.
        policy: file of the policy that "thompson_prior" and "greedy" use; `None`: the pair's own policy.
        block_size: γ of the decoder.
        temperature: temperature of the decoder.
        sample: number of examples for quality, in each phase, whose features give the spread of all features.
        noise: σ of Thompson sampling (`learners.Posterior`).
        discount: factor on older queries in Thompson sampling (`learners.Posterior`).
        seed: random seed of choices and outputs.
        output: folder of the results.
        clock: a function that returns seconds; tests pass a fake one.

    Returns:
        A row for each query: `round`, `phase`, `domain`, and `runs`. `runs` holds `arm`, `seconds` and `tokens` for
        each learner and for each fixed arm ("always NAME").

    Raises:
        ValueError: a value is invalid, the policy belongs to other drafters, or the folder was started with other
            settings.
        LockedError: another process serves into the folder.
    """
    _check(phases, learning, sample)
    folder, resolved = expanded(output), tuple(phase.resolved() for phase in phases)
    decoded: dict[str, Any] = {"drafters": tuple(drafters), "block_size": block_size, "temperature": temperature}
    settings = Settings(method="spec_decode", choose=build_selection.RANDOM, **decoded)
    point = Point(pair=pair, evaluation=resolved[0], settings=settings, seed=seed)
    learnt_by: dict[str, Any] = {"learning": tuple(learning), "policy": policy, "noise": noise, "discount": discount}
    served = sum(phase.latency_examples for phase in resolved)
    recipe_header.announce(f"{served} queries with {len(learning)} learners and {len(drafters)} fixed drafters")
    with runs.alone(folder):
        server = Server(point=point, phases=resolved, sample=sample, **learnt_by)
        taught = server.learners()  # raises for invalid learners before a file is written
        claim(folder / "settings.json", server.settings(), "name another output, or remove the folder")
        recipe_header.announce_places()
        rows = server.run(taught, folder, clock)
        report(rows, folder)
    return rows


def _check(phases: Sequence[Evaluation], learning: Sequence[str], sample: int) -> None:
    several("phases", phases, 1)
    several("learning", learning, 1)
    whole("sample", sample, 2)
    for name in learning:
        if name not in LEARNERS:
            raise ValueError(f"unknown learner {name!r}; {hint(name, LEARNERS)}choose among {', '.join(LEARNERS)}")
    if len(set(learning)) < len(learning):
        raise ValueError(f"learning={tuple(learning)} names a learner twice: name each once")
    for phase in phases:
        whole("latency_examples of a phase", phase.latency_examples, 1)


@dataclass(kw_only=True)
class Server:
    """The server of one stream of queries; see `serve`."""

    point: Point
    phases: tuple[Evaluation, ...]
    learning: tuple[str, ...]
    policy: str | None
    sample: int
    noise: float
    discount: float

    def __post_init__(self) -> None:
        for phase in self.phases:
            validate(replace(self.point, evaluation=phase))
        self.loaded: Pair = load_source(self.point.pair)
        self.sessions = [Session(self.point.pair, phase, self.loaded) for phase in self.phases]
        self.sessions[0].check([self.point.settings])
        self.arms = [arm.called for arm in build_selection.arms_of(self.point.settings)]

    def settings(self) -> Row:
        """Returns the settings on which the results depend, except the clock."""
        point = self.point
        facts: Row = {"learning": self.learning}
        facts |= {name: getattr(point.settings, name) for name in ("block_size", "temperature")}
        facts |= {name: getattr(self, name) for name in ("sample", "noise", "discount")}
        facts |= {"seed": point.seed, "arms": self.arms}
        facts["max_new_tokens"] = [phase.max_new_tokens for phase in self.phases]
        facts["sampled"] = [phase.quality_examples for phase in self.phases]
        arms = build_selection.arms_of(point.settings)
        prints = build_selection.prints(self.loaded, arms).values()
        facts["drafters"] = [[str(arm), fingerprint] for arm, fingerprint in zip(arms, prints, strict=True)]
        asks = not {"thompson_prior", "greedy"}.isdisjoint(self.learning)  # these learners use a trained policy
        facts["policy"] = build_selection.policy_of(self.loaded, self.policy).fingerprint if asks else None
        facts["queries"] = []
        for session in self.sessions:
            count, first = session.evaluation.latency_examples, session.evaluation.first_example
            facts["queries"].append(point_key(examples=session.loaded, count=count, first=first))
        return dict(plain(facts))

    def run(self, taught: dict[str, Learner], folder: Path, clock: Callable[[], float]) -> list[Row]:
        """Serves the queries that the file of results lacks; returns the results of all queries."""
        count = len(self.arms)
        fixed = {f"always {name}": learners.Fixed(*chooser.always(n, count)) for n, name in enumerate(self.arms)}
        log = runs.MetricsLog(folder / QUERIES, 2**62)
        rows = [json.loads(line) for line in (folder / QUERIES).read_text().splitlines()]
        rewards = {name: Rewards() for name in taught}
        for row in rows:
            _tell(taught, row, rewards)
        stream = [
            (n, place) for n, evaluation in enumerate(self.phases) for place in range(evaluation.latency_examples)
        ]
        warm, began, first = set[int](), time.monotonic(), len(rows)
        for number in counted(range(len(rows), len(stream)), "serving", "queries"):
            phase, place = stream[number]
            if phase not in warm:
                # The prompts of this phase may have another padded length: compile its programs before timing.
                for learner in counted((taught | fixed).values(), "warming up", "learners", len(taught | fixed)):
                    jax.block_until_ready(self._call(learner, phase, 0, 0)(self.point.seed).tokens)
                warm.add(phase)
            row = self._served(taught | fixed, number, phase, place, clock)
            rows.append(row)
            log.append(row)
            _tell(taught, row, rewards)
            if (number + 1) % 50 == 0 or number + 1 == len(stream):
                remaining = runs.time_left(began, number + 1 - first, len(stream) - first)
                print(f"{number + 1} of {len(stream)} queries served, {remaining} left", flush=True)
        log.flush()
        return rows

    def learners(self) -> dict[str, Learner]:
        """Returns the learners named in `learning`, in their state before the first query."""
        sample = np.concatenate([self._embeddings(session) for session in self.sessions])
        return {name: self._learner(name, sample) for name in self.learning}

    def _learner(self, name: str, sample: np.ndarray) -> Learner:
        if name == "exp3":
            return learners.Exp3(len(self.arms))
        untaught = partial(learners.thompson, sample, len(self.arms), noise=self.noise, discount=self.discount)
        if name == "thompson":
            return untaught()
        choose = build_selection.RANDOM if name == build_selection.RANDOM else "greedy"
        settings = replace(self.point.settings, choose=choose, policy=self.policy)
        trained, numbers = build_selection.chooser_of(self.loaded, settings, "serving")
        if name != "thompson_prior":
            return learners.Fixed(trained, numbers)
        policy = build_selection.policy_of(self.loaded, self.policy)
        return learners.with_prior(untaught(), policy, numbers, sample)

    def _embeddings(self, session: Session) -> np.ndarray:
        """Returns the features of some examples, which show the spread of the features; their rewards are not known."""
        asked = session.evaluation
        rows = session.window(asked, min(self.sample, asked.quality_examples))
        prompt = session.prepare(self.point, rows).args[0]
        return np.asarray(embedded(self.loaded.target.model, self.loaded.target.params, prompt))

    def _served(self, ways: dict[str, Learner], number: int, phase: int, place: int, clock: Callable[[], float]) -> Row:
        """Decodes one query with every learner and every fixed drafter; the order rotates from query to query."""
        names = list(ways)
        first = number % len(names)
        timed = {name: self._timed(ways[name], number, phase, place, clock) for name in names[first:] + names[:first]}
        domain = self.sessions[phase].task.name
        row = {"step": number, "round": number, "phase": phase, "place": place, "domain": domain}
        return row | {"arms": self.arms, "runs": {name: timed[name] for name in names}}

    def _timed(self, learner: Learner, number: int, phase: int, place: int, clock: Callable[[], float]) -> Row:
        """Decodes a query; returns its arm, time and tokens. Learning and preparation between queries are not timed."""
        ready = self._call(learner, phase, place, number)
        begin = clock()
        generation = ready(self.point.seed)
        jax.block_until_ready(generation.tokens)
        seconds = clock() - begin
        raise_on_failure(generation)
        inner, length = generation.inner, int(generation.lengths[0])
        result: Row = {"arm": int(inner["choice"][0]), "seconds": seconds, "tokens": length}
        if learner.chooser.reads_features:
            result["features"] = base64.b64encode(np.asarray(inner["features"][0], np.float32).tobytes()).decode()
        return result

    def _call(self, learner: Learner, phase: int, place: int, number: int) -> Callable[[int], Generation]:
        """Returns a function that decodes a phase's query with the learner's chooser and numbers.

        The random bits depend on the query's number in the stream, not on its position in the phase.
        """
        session = self.sessions[phase]
        decoder = session.decoder(self.point.settings)
        engine, params = decoder.require_engine(), decoder.params
        assert isinstance(engine.drafter, SelectedDrafter)
        row = int(session.window(session.evaluation, session.evaluation.latency_examples)[place])
        call = session.prepare(self.point, np.asarray([row]))
        numbers = {**params["drafter"], "policy": jax.device_put(learner.params())}
        taught = Flat({**params, "drafter": numbers})
        chosen = replace(engine, drafter=replace(engine.drafter, chooser=learner.chooser))
        (prompt,), arguments = call.args, {**call.keywords, "example_ids": np.asarray([number], np.int32)}
        del arguments["params"]
        return lambda seed: replicate(generate(chosen, taught, prompt, seed, **arguments))


def _tell(taught: dict[str, Learner], row: Row, rewards: dict[str, Rewards]) -> None:
    """Updates every learner with the result of its own run of a query."""
    for name, learner in taught.items():
        run = row["runs"][name]
        features = np.frombuffer(base64.b64decode(run.get("features", "")), np.float32)
        learner.learn(features, run["arm"], rewards[name](seconds_per_token(run)))


def costs(rows: list[Row]) -> dict[str, np.ndarray]:
    """Returns the milliseconds per token of all queries, float64 `[N]`, for each learner and each fixed drafter."""
    runs_of = {name: [row["runs"][name] for row in rows] for name in rows[0]["runs"]}
    return {name: np.asarray([1e3 * seconds_per_token(run) for run in runs]) for name, runs in runs_of.items()}


def seconds_per_token(run: Row) -> float:
    """Returns the seconds per token of one run of a query."""
    return float(run["seconds"] / max(run["tokens"], 1))


def phases(rows: list[Row]) -> list[tuple[str, np.ndarray]]:
    """Returns for every phase, in order, its domain and a mask of its queries (bool `[N]`)."""
    number = np.asarray([row["phase"] for row in rows])
    return [(rows[int(np.flatnonzero(number == n)[0])]["domain"], number == n) for n in np.unique(number)]


def summary(rows: list[Row]) -> Row:
    """Returns the best fixed arm of the stream and of every phase, and each learner's regret per query.

    Returns:
        A dictionary with three entries:

        - `best`: the arm with the least time over the stream;
        - `phases`: for each phase its domain, queries, `best` arm, and `ms_per_token` of every learner and fixed arm;
        - `learners`: for each learner its `regret` against `best` over the stream, and its regret against each phase's
          own best arm over the `first` and `last` half of the phase, in ms per token and query. `over_knowing` is the
          ratio of its time to that of the best arm of every phase, minus 1.
    """
    times = costs(rows)
    arms = [name for name in times if name.startswith("always ")]
    best = min(arms, key=lambda name: times[name].sum())
    by_phase, knowing = [], np.zeros(len(rows))
    for domain, chosen in phases(rows):
        best_of_phase = min(arms, key=lambda name: times[name][chosen].sum())
        knowing[chosen] = times[best_of_phase][chosen]
        means = {name: float(values[chosen].mean()) for name, values in times.items()}
        by_phase.append({"domain": domain, "queries": int(chosen.sum()), "best": best_of_phase, "ms_per_token": means})
    learnt = {name: _learner(rows, times[name], times[best], knowing) for name in times if name not in arms}
    return {"best": best, "phases": by_phase, "learners": learnt}


def _learner(rows: list[Row], times: np.ndarray, best: np.ndarray, knowing: np.ndarray) -> Row:
    halves: dict[str, list[float]] = {"first": [], "last": []}
    for _, chosen in phases(rows):
        queries = np.flatnonzero(chosen)
        for name, some in zip(halves, np.array_split(queries, 2), strict=True):
            halves[name].append(float((times - knowing)[some].mean()) if len(some) else math.nan)
    over = float(times.sum() / knowing.sum() - 1)
    return {"regret": float((times - best).mean()), **halves, "over_knowing": over}


def report(rows: list[Row], folder: Path) -> Row:
    """Prints the result of `summary`, writes it to `regret.json`, and draws `regret.png`."""
    from speccascade_jax.results.report.figures import studies as figures

    result = summary(rows)
    console = Console()
    names = list(result["phases"][0]["ms_per_token"])
    table = Table("phase", "queries", *names, title="ms per token")
    for phase in result["phases"]:
        means = phase["ms_per_token"]
        cells = [f"{means[name]:.3f}" + ("*" if name == phase["best"] else "") for name in names]
        table.add_row(phase["domain"], str(phase["queries"]), *cells)
    console.print(table)
    heads = (f"regret against {result['best']}", "regret by phase, first half", "last half", "over best per phase")
    table = Table("learner", *heads)
    for name, values in result["learners"].items():
        halves = [", ".join(f"{value:+.4f}" for value in values[half]) for half in ("first", "last")]
        table.add_row(name, f"{values['regret']:+.4f}", *halves, f"{values['over_knowing']:+.1%}")
    console.print(table)
    rewrite(folder / "regret.json", json.dumps(plain(result), indent=1), '"learners":', '"phases":')
    figures.draw_regret(rows, result, folder / "regret.png")
    print(f"queries: {folder / 'queries.jsonl'}\nplot: {folder / 'regret.png'}")
    return result
