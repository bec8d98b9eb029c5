"""Generation of the training data of policies that choose among drafters (docs/methods.md, section 8).

`experiments/make_selection_data.py` runs it.

For every query of every domain, the target and each candidate model write a greedy output alone. A candidate's
alignment is the ROUGE-L (F1) between the two texts. The candidate *autoregressive* is the target itself: its sampled
output is compared with its greedy output.

Outputs are stored, and later calls with other candidates use them again. A folder of outputs holds a file
`settings.json` with the settings on which the outputs depend, and shards named `000000-256.npz`, … (first query, number
of queries). A shard holds `ids`, `tokens` `[N, L]` (0 after the end) and `lengths`; a shard of the target also holds
`features` `[N, D]`. Each shard is written completely or not at all. A shard's key is a hash of the settings and of its
queries, so a call with more queries only adds shards.
"""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import check_seed, several
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.types import Array, BoundModel, Params, Prompt, count
from speccascade_jax.engine.generate import raise_on_failure
from speccascade_jax.engine.scoring import prompt_features
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, recorded, validate_evaluation
from speccascade_jax.evaluation.session import Session, load_source
from speccascade_jax.methods import build_drafter, build_selection
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.metrics import quality
from speccascade_jax.models import fingerprints
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import counted
from speccascade_jax.selection import data
from speccascade_jax.selection.data import AGAIN, Outputs
from speccascade_jax.storage import archives, locks
from speccascade_jax.storage.files import claim, expanded, plain, point_key, write_atomically
from speccascade_jax.training import runs
from speccascade_jax.training.heads import shards

REMEDY = "name another output, or remove the folder"


@dataclass(frozen=True)
class Writer:
    """A writer of one model's outputs for the queries of a session; the model decodes alone.

    Attributes:
        session: provides examples and prompts; the model takes the place of the target in the session's pair.
        name: the model's name in progress messages.
        bound: the model with its parameters.
        temperature: sampling temperature; 0 is greedy.
        seed: random seed of sampled outputs.
        embeds: whether to store features of the prompts.
    """

    session: Session
    name: str
    bound: BoundModel
    temperature: float = 0.0
    seed: int = 0
    embeds: bool = False

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the outputs depend on, except the queries."""
        session, asked = self.session, self.session.evaluation
        settings: dict[str, Any] = {"weights": fingerprints.of_model(self.bound), "task": session.task.name}
        settings |= {"split": asked.split, "max_new_tokens": asked.max_new_tokens, "batch": asked.quality_batch}
        settings |= {"stop_ids": session.loaded["stop_ids"], "temperature": self.temperature}
        return settings | {"seed": self.seed, "features": self.embeds} | session.chat

    def fill(self, folder: Path) -> Outputs:
        """Writes the missing shards; returns the outputs of all queries.

        Raises:
            ValueError: the folder was started with other settings (the message names them), or a shard is damaged.
            FloatingPointError: logits are NaN or infinite.
        """
        settings = self.settings()
        claim(folder / "settings.json", settings, REMEDY)
        asked = self.session.evaluation
        rows = self.session.window(asked, asked.quality_examples)
        cut = [rows[start : start + data.SHARD] for start in range(0, len(rows), data.SHARD)]
        paths = [folder / name for name in data.shard_names(asked.first_example, len(rows))]
        keys = [point_key(settings=settings, queries=self._queries(some)) for some in cut]
        missing = [n for n, path in enumerate(paths) if not path.exists()]
        began = time.monotonic()
        for done, n in enumerate(counted(missing, "making data", "shards"), 1):
            archives.write(paths[n], keys[n], self._write(cut[n]))
            progress = f"shard {done} of {len(missing)}, {runs.time_left(began, done, len(missing))} left"
            print(f"{self.session.task.name}: {self.name}, {progress}", flush=True)
        foreign = f"holds outputs for other queries or settings than its folder's: {AGAIN}"
        parts = zip(paths, keys, strict=True)
        return shards.join([runs.read_shard(path, Outputs, "damaged", AGAIN, key, foreign) for path, key in parts])

    def _queries(self, rows: np.ndarray) -> list[Any]:
        return [(self.session.examples[row].id, self.session.examples[row].source) for row in rows]

    def _write(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        session, settings = self._alone(), Settings(method=TARGET, temperature=self.temperature)
        point = Point(pair=session.source, evaluation=session.evaluation, settings=settings, seed=self.seed)
        parts = []
        batches = session.in_batches(rows, session.evaluation.quality_batch)
        for batch, kept in counted(batches, f"outputs of {self.name}", "batches"):
            prepared = session.prepare(point, batch)
            generation = prepared(point.seed)
            raise_on_failure(generation)
            part = {"tokens": generation.tokens, "lengths": generation.lengths}
            if self.embeds:
                part["features"] = embedded(self.bound.model, self.bound.params, prepared.args[0])
            parts.append({name: np.asarray(value)[:kept] for name, value in part.items()})
        together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        ids = np.asarray([session.examples[row].id for row in rows], np.int32)
        return {"ids": ids, **together}

    def _alone(self) -> Session:
        """Returns a copy of the session in which this model is the target; the copy shares prompts and examples."""
        session = copy.copy(self.session)
        session.pair = replace(session.pair, target=self.bound, draft=self.bound, others={}, head=None, policy=None)
        session._decoders, session._code = {}, {}  # the old caches belong to the pair's original target
        return session


@partial(jax.jit, static_argnames="model")
def embedded(model: Any, params: Params, prompt: Prompt) -> Array:
    """Returns the features of prompts that a selection policy reads, float32 `[B, D]` (docs/methods.md, section 8)."""
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + 1)
    return prompt_features(model, cache).astype(jnp.float32)


def make(
    *, pair: ModelPair, domains: Sequence[Evaluation], drafters: Sequence[str | Level | Arm], seed: int = 0, output: str
) -> dict[str, Any]:
    """Writes a folder of selection data; a repeated call resumes a killed call after its last shard.

    The resumed call writes the same bytes as an uninterrupted one. Outputs are stored by domain and model. Another call
    with more queries or other candidates adds the missing outputs, and the manifest then describes the queries and
    candidates of that call.

    Args:
        pair: provides the target and the drafts.
        domains: the tasks; the queries of a domain are its examples for quality.
        drafters: the candidates, as in a method's `drafters`; one of them may be "autoregressive".
        seed: random seed of the target's sampled outputs.
        output: the folder.

    Returns:
        The number of `queries`, and each candidate's mean `alignment` by domain.

    Raises:
        ValueError: a value is invalid, a candidate cannot decode alone, or outputs were made with other settings.
        LockedError: another process writes the folder.
    """
    check_seed(seed)
    arms = _checked(domains, drafters)
    recipe_header.announce(f"{len(arms)} candidates on {sum(domain.quality_examples for domain in domains)} queries")
    folder = expanded(output)
    with locks.held(folder / "lock", folder):
        loaded = load_source(pair)
        prints = build_selection.prints(loaded, arms)  # raises for invalid candidates before a file is written
        writers = {arm.called: writer_of(loaded, arm) for arm in arms}
        target, features = build_selection.target_of(loaded)
        sessions = [Session(pair, domain.resolved(), loaded) for domain in domains]
        parts = [_domain(folder, session, writers, seed) for session in sessions]
        manifest = {"format": data.FORMAT, "pair": pair.name, "target": target, "features": features}
        manifest |= {"arms": list(prints), "prints": list(prints.values())}
        manifest |= {"parameters": [parameters(loaded, arm) for arm in arms]}
        manifest |= {"seed": seed if TARGET in prints else None, "domains": parts}
        write_atomically(folder / data.MANIFEST, json.dumps(plain(manifest), indent=1).encode())
    written = data.read(folder)
    alignment = {
        name: dict(zip(written.arms, means, strict=True)) for name, means in written.alignment_by_domain().items()
    }
    for name, means in alignment.items():
        print(f"{name}: " + ", ".join(f"{arm} {mean:.3f}" for arm, mean in means.items()) + " (mean ROUGE-L)")
    return {"queries": len(written.features), "alignment": plain(alignment)}


def _checked(domains: Sequence[Evaluation], drafters: Sequence[str | Level | Arm]) -> tuple[Arm, ...]:
    several("domains", domains, 1)
    several("drafters", drafters, 1)
    for domain in domains:
        validate_evaluation(domain)
    called = [domain.resolved().task if isinstance(domain.task, str) else domain.task.name for domain in domains]
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"domains names the task {twice[0]!r} twice: name each once, with more quality_examples")
    choice = Settings(method="spec_decode", drafters=tuple(drafters), choose=build_selection.RANDOM)
    return build_selection.arms_of(recorded(choice))  # `recorded` raises for invalid combinations


def writer_of(pair: Pair, arm: Arm) -> BoundModel:
    """Returns the model that decodes alone in place of a drafter; for a hierarchy, the level right below the target.

    Raises:
        ValueError: the drafter is a hierarchy with a lossy rule, whose tokens no single model would write, or a user's
            drafter.
    """
    drafter = arm.drafter
    if drafter == TARGET:
        return pair.target
    if isinstance(drafter, Level):
        if not build_drafter.verifier_of(drafter.accept, deferral.get(drafter.rule)).lossless:
            raise ValueError(f"arm {arm.called!r} has a lossy rule, so no single model writes its drafts: leave it out")
        return pair.model(drafter.model)
    if "." in drafter:
        raise ValueError(f"arm {arm.called!r} is a custom drafter, which cannot write whole outputs: leave it out")
    return pair.model(drafter)


def parameters(pair: Pair, arm: Arm) -> int:
    """Returns the number of parameters of a drafter, which for a hierarchy is the sum over all its models."""
    if arm.drafter == TARGET:
        return count(pair.target.params)
    return sum(count(pair.model(name).params) for name in dict.fromkeys(build_drafter.models_of((arm.drafter,))))


def _domain(folder: Path, session: Session, writers: dict[str, BoundModel], seed: int) -> dict[str, Any]:
    """Writes outputs and alignments of one domain; returns the domain's entry in the manifest."""
    task_folder, target = folder / session.task.name, session.pair.target
    written = Writer(session, "target", target, embeds=True)
    target_key = point_key(written=written.settings())
    truth = written.fill(task_folder / target_key)
    aligned = {}
    for name, bound in writers.items():
        sampled = bound is target
        writer = Writer(session, name, bound, float(sampled), seed if sampled else 0)
        writer_key = point_key(writer=writer.settings())
        path = (
            task_folder / writer_key / f"alignment-{target_key}-{session.evaluation.first_example}-{len(truth.ids)}.npz"
        )
        outputs = writer.fill(task_folder / writer_key)
        key = point_key(target=truth.tokens, drafter=outputs.tokens)
        aligned[name] = {"file": str(path.relative_to(folder)), "key": key}
        if not _is_there(path, key):
            archives.write(path, key, {"alignment": alignment(session, truth, outputs)})
    name, first = session.task.name, session.evaluation.first_example
    domain = {"task": name, "queries": len(truth.ids), "first_example": first, "outputs": f"{name}/{target_key}"}
    return domain | {"alignment": aligned, "examples": session.loaded["examples"]}


def _is_there(path: Path, key: str) -> bool:
    """Returns whether a file of arrays is complete and has this key."""
    try:
        return path.exists() and archives.read(path)[0] == key
    except Exception:  # `archives.read` raises many error types on damaged bytes
        return False


def alignment(session: Session, truth: Outputs, candidates: Outputs) -> np.ndarray:
    """Returns the ROUGE-L (F1, 0 to 1) of every candidate output's text against the target's text, float32 `[N]`."""

    def texts(outputs: Outputs) -> list[str]:
        cut = zip(outputs.tokens, outputs.lengths, strict=True)
        return [session.vocabulary.decode(tokens[:length].tolist()) for tokens, length in cut]

    rows = [
        quality.sentence_rouge_l(text, reference)
        for text, reference in zip(texts(candidates), texts(truth), strict=True)
    ]
    return np.asarray(rows, np.float32)
