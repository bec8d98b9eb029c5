"""Serving a stream of queries whose domain shifts, learning on the way: what `experiments/serve_online.py` runs.

Every query is decoded once for each learner and once with each drafter always, in an order that changes from query to
query; a learner is told its own time alone. What each query gave is one line of a file, written before the next begins:
a run that was killed reads its lines, tells them to its learners again, and goes on as if nothing had happened.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.flat_params import Flat
from speccascade_jax.core.names import hint
from speccascade_jax.drafters import chooser
from speccascade_jax.drafters.selected import SelectedDrafter
from speccascade_jax.engine.generate import Generation, generate, raise_on_failure
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Session, load_source
from speccascade_jax.evaluation.validation import validate
from speccascade_jax.methods import build_selection
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.models.sharding import replicate
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.selection import learners, regret
from speccascade_jax.selection.learners import LEARNERS, Learner, Rewards
from speccascade_jax.selection.outputs import embedded
from speccascade_jax.storage.files import claim, expanded, plain, point_key
from speccascade_jax.training import runs

Row = dict[str, Any]
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
    """Serve the phases one after the other; print what learning cost against knowing, and draw the regret.

    Args:
        pair, drafters, block_size, temperature: how is decoded; phases: tasks, each with how many of its examples for
            latency are queries; a task may come again, with other examples.
        learning: names of `learners.LEARNERS`.
        policy: of "thompson_prior" and "greedy"; `None`: the pair's own.
        sample: examples for quality of each phase whose embeddings alone say how features are spread.
        noise, discount: of Thompson sampling (`posterior`); seed: of choices and outputs.
        output: a folder; clock: seconds, a fake one in tests.

    Returns:
        A row for each query: `round`, `phase`, `domain`, and `runs`, by learner and by arm ("always NAME"): `arm`,
        `seconds`, `tokens`.

    Raises:
        ValueError: a value without meaning, a policy of others, a folder begun with other settings.
        LockedError: another process serves into the folder.
    """
    _check(phases, learning, sample)
    folder = expanded(output)
    with runs.alone(folder):
        server = Server(
            pair=pair, phases=tuple(each.resolved() for each in phases), drafters=tuple(drafters),
            learning=tuple(learning), policy=policy, block_size=block_size, temperature=temperature, sample=sample,
            noise=noise, discount=discount, seed=seed,
        )  # fmt: skip
        taught = server.learners()  # refuses what cannot be learnt with, before anything is written
        claim(folder / "settings.json", server.settings(), "name another output, or remove the folder")
        rows = server.run(taught, folder, clock)
        regret.report(rows, folder)
    return rows


def _check(phases: Sequence[Evaluation], learning: Sequence[str], sample: int) -> None:
    several("phases", phases, 1)
    several("learning", learning, 1)
    whole("sample", sample, 2)
    for name in learning:
        if name not in LEARNERS:
            raise ValueError(f"unknown learner {name!r}; {hint(name, LEARNERS)}choose among {', '.join(LEARNERS)}")
    if len(set(learning)) < len(learning):
        raise ValueError(f"learning={tuple(learning)} names one twice: name each once")
    for each in phases:
        whole("latency_examples of a phase", each.latency_examples, 1)


@dataclass(kw_only=True)
class Server:
    """A stream being served; see `serve`."""

    pair: ModelPair
    phases: tuple[Evaluation, ...]
    drafters: tuple[str | Level | Arm, ...]
    learning: tuple[str, ...]
    policy: str | None
    block_size: int
    temperature: float
    sample: int
    noise: float
    discount: float
    seed: int

    def __post_init__(self) -> None:
        self.point = Point(
            pair=self.pair,
            evaluation=self.phases[0],
            settings=Settings(
                method="spec_decode",
                drafters=self.drafters,
                choose=build_selection.RANDOM,
                block_size=self.block_size,
                temperature=self.temperature,
            ),
            seed=self.seed,
        )
        for each in self.phases:
            validate(replace(self.point, evaluation=each))
        self.loaded: Pair = load_source(self.pair)
        self.sessions = [Session(self.pair, each, self.loaded) for each in self.phases]
        self.sessions[0].check([self.point.settings])
        self.arms = [arm.called for arm in build_selection.arms_of(self.point.settings)]

    @property
    def asks(self) -> bool:
        """Whether a trained policy is asked."""
        return any(name in ("thompson_prior", "greedy") for name in self.learning)

    def settings(self) -> Row:
        """What the result hangs on beside the clock."""
        given = {name: getattr(self, name) for name in ("learning", "block_size", "temperature", "sample", "noise")}
        given |= {"discount": self.discount, "seed": self.seed, "arms": self.arms}
        given["max_new_tokens"] = [each.max_new_tokens for each in self.phases]
        given["sampled"] = [each.quality_examples for each in self.phases]
        arms = build_selection.arms_of(self.point.settings)
        prints = build_selection.prints(self.loaded, arms).values()
        given["drafters"] = [[str(arm), fingerprint] for arm, fingerprint in zip(arms, prints, strict=True)]
        given["policy"] = build_selection.policy_of(self.loaded, self.policy).fingerprint if self.asks else None
        given["queries"] = [point_key(examples=session.loaded, count=session.evaluation.latency_examples,
                                      first=session.evaluation.first_example) for session in self.sessions]  # fmt: skip
        return dict(plain(given))

    def run(self, taught: dict[str, Learner], folder: Path, clock: Callable[[], float]) -> list[Row]:
        """Serve what is left of the stream."""
        count = len(self.arms)
        fixed = {f"always {name}": learners.Fixed(*chooser.always(n, count)) for n, name in enumerate(self.arms)}
        log = runs.MetricsLog(folder / QUERIES, 2**62)
        rows = [json.loads(line) for line in (folder / QUERIES).read_text().splitlines()]
        rewards = {name: Rewards() for name in taught}
        for row in rows:
            _tell(taught, row, rewards)
        stream = [(n, place) for n, each in enumerate(self.phases) for place in range(each.latency_examples)]
        warm, began, first = set[int](), time.monotonic(), len(rows)
        for number in range(len(rows), len(stream)):
            phase, place = stream[number]
            if phase not in warm:
                self._warm(taught | fixed, phase)
                warm.add(phase)
            row = self._served(taught | fixed, number, phase, place, clock)
            rows.append(row)
            log.append(row)
            _tell(taught, row, rewards)
            if (number + 1) % 50 == 0 or number + 1 == len(stream):
                remaining = runs.time_left(began, number + 1 - first, len(stream) - first)
                print(f"{number + 1} of {len(stream)} queries served, {remaining} left", flush=True)
        return rows

    def learners(self) -> dict[str, Learner]:
        """Those of `learning`, at the beginning of the stream."""
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
        """Of some examples for quality, whose rewards nobody knows: how features are spread."""
        asked = session.evaluation
        rows = session.window(asked, min(self.sample, asked.quality_examples))
        prompt = session.prepare(self.point, rows).args[0]
        return np.asarray(embedded(self.loaded.target.model, self.loaded.target.params, prompt))

    def _warm(self, ways: dict[str, Learner], phase: int) -> None:
        """Compile what a phase needs: prompts of another task may be padded to another width."""
        for learner in ways.values():
            jax.block_until_ready(self._call(learner, phase, 0, 0)(self.seed).tokens)

    def _served(self, ways: dict[str, Learner], number: int, phase: int, place: int, clock: Callable[[], float]) -> Row:
        """One query by every way, whoever went first last time going later now."""
        names = list(ways)
        first = number % len(names)
        timed = {name: self._timed(ways[name], number, phase, place, clock) for name in names[first:] + names[:first]}
        domain = self.sessions[phase].task.name
        row = {"step": number, "round": number, "phase": phase, "place": place, "domain": domain}
        return row | {"arms": self.arms, "runs": {name: timed[name] for name in names}}

    def _timed(self, learner: Learner, number: int, phase: int, place: int, clock: Callable[[], float]) -> Row:
        """A query's arm, time and tokens; what is learnt and laid ready between queries is no query's time."""
        ready = self._call(learner, phase, place, number)
        begin = clock()
        generation = ready(self.seed)
        jax.block_until_ready(generation.tokens)
        seconds = clock() - begin
        raise_on_failure(generation)
        inner, length = generation.inner, int(generation.lengths[0])
        told: Row = {"arm": int(inner["choice"][0]), "seconds": seconds, "tokens": length}
        if learner.chooser.reads_features:
            told["features"] = base64.b64encode(np.asarray(inner["features"][0], np.float32).tobytes()).decode()
        return told

    def _call(self, learner: Learner, phase: int, place: int, number: int) -> Callable[[int], Generation]:
        """A phase's query with the learner's chooser and numbers; its bits hang on its round, not on its place."""
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
    """What a query taught every learner: its own run alone."""
    for name, learner in taught.items():
        own = row["runs"][name]
        features = np.frombuffer(base64.b64decode(own.get("features", "")), np.float32)
        learner.learn(features, own["arm"], rewards[name](own["seconds"] / max(own["tokens"], 1)))
