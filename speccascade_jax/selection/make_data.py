"""Making what policies learn from: what `experiments/make_selection_data.py` calls (METHODS section 8).

For every query of every domain the target and each candidate write their greedy output, alone. The alignment of a
candidate is ROUGE-L (F1) between the two texts. *Autoregressive* as a candidate is the target itself: its sampled
output is held against its greedy one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.core.checks import check_seed, several
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.types import BoundModel, count
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Settings, recorded
from speccascade_jax.evaluation.session import Session, load_source
from speccascade_jax.evaluation.validation import validate_evaluation
from speccascade_jax.methods import build_drafter, build_selection
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.metrics import quality
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.selection import data
from speccascade_jax.selection.outputs import Outputs, Writer
from speccascade_jax.storage import archives, locks
from speccascade_jax.storage.files import expanded, plain, point_key, write_atomically


def make(
    *,
    pair: ModelPair,
    domains: Sequence[Evaluation],
    drafters: Sequence[str | Level | Arm],
    seed: int = 0,
    output: str,
) -> dict[str, Any]:
    """Write a folder of selection data; one that was killed goes on after its last shard, to the same bytes.

    Outputs lie by domain and model: another call for more queries or other candidates makes what is not there, and the
    folder's data are then those of that call.

    Args:
        pair: whose target and drafts; domains: each a task, with the examples for quality as its queries.
        drafters: the candidates, as in a method's `drafters`; "autoregressive" may be one.
        seed: of the target's sampled outputs.
        output: the folder.

    Returns:
        The number of `queries`, and each candidate's mean `alignment` by domain.

    Raises:
        ValueError: a value without meaning; a candidate that writes nothing alone; outputs made with other settings.
        LockedError: another process writes the folder.
    """
    check_seed(seed)
    arms = _checked(domains, drafters)
    folder = expanded(output)
    with locks.held(folder / "lock", folder):
        loaded = load_source(pair)
        prints = build_selection.prints(loaded, arms)  # before anything is written
        writers = {arm.called: writer_of(loaded, arm) for arm in arms}
        build_selection.target_of(loaded)
        sessions = [Session(pair, each.resolved(), loaded) for each in domains]
        parts = [_domain(folder, session, writers, prints, seed) for session in sessions]
        sizes = {arm.called: parameters(loaded, arm) for arm in arms}
        manifest = data.manifest(pair.name, loaded, prints, sizes, parts, seed)
        write_atomically(folder / data.MANIFEST, json.dumps(plain(manifest), indent=1).encode())
    found = data.read(folder)
    alignment = {name: dict(zip(found.arms, means, strict=True)) for name, means in found.alignment_by_domain().items()}
    for name, means in alignment.items():
        print(f"{name}: " + ", ".join(f"{arm} {mean:.3f}" for arm, mean in means.items()) + " (mean ROUGE-L)")
    return {"queries": len(found.features), "alignment": plain(alignment)}


def _checked(domains: Sequence[Evaluation], drafters: Sequence[str | Level | Arm]) -> tuple[Arm, ...]:
    several("domains", domains, 1)
    several("drafters", drafters, 1)
    for each in domains:
        validate_evaluation(each)
    called = [each.resolved().task if isinstance(each.task, str) else each.task.name for each in domains]
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"domains names the task {twice[0]!r} twice: name each once, with more quality_examples")
    choice = Settings(method="spec_decode", drafters=tuple(drafters), choose=build_selection.RANDOM)
    return build_selection.arms_of(recorded(choice))  # refuses what cannot be


def writer_of(pair: Pair, arm: Arm) -> BoundModel:
    """The model that writes what a drafter stands for; a hierarchy's is the model right below the target.

    Raises:
        ValueError: a lossy hierarchy, whose tokens no model alone would write, or a drafter of one's own.
    """
    drafter = arm.drafter
    if drafter == TARGET:
        return pair.target
    if isinstance(drafter, Level):
        if not build_drafter.verifier_of(drafter.accept, deferral.get(drafter.rule)).lossless:
            raise ValueError(f"what arm {arm.called!r} drafts no model writes alone: its rule is lossy; leave it out")
        return pair.model(drafter.model)
    if "." in drafter:
        raise ValueError(f"arm {arm.called!r} is a drafter of one's own, which writes nothing alone: leave it out")
    return pair.model(drafter)


def parameters(pair: Pair, arm: Arm) -> int:
    """How many parameters draft: of a hierarchy all its models'."""
    if arm.drafter == TARGET:
        return count(pair.target.params)
    return sum(count(pair.model(name).params) for name in dict.fromkeys(build_drafter.models_of((arm.drafter,))))


def _domain(
    folder: Path, session: Session, writers: dict[str, BoundModel], prints: dict[str, str], seed: int
) -> dict[str, Any]:
    """Outputs and alignments of one domain; what the manifest says of it."""
    where, target = folder / session.task.name, session.pair.target
    written = Writer(session, "target", target, embeds=True)
    made = point_key(written=written.settings())
    truth = written.fill(where / made)
    aligned = {}
    for name, bound in writers.items():
        sampled = bound is target
        writer = Writer(session, name, bound, float(sampled), seed if sampled else 0)
        own = point_key(writer=writer.settings())
        path = where / own / f"alignment-{made}-{session.evaluation.first_example}-{len(truth.ids)}.npz"
        found = writer.fill(where / own)
        key = point_key(target=truth.tokens, drafter=found.tokens)
        aligned[name] = {"file": str(path.relative_to(folder)), "key": key}
        if not data.is_there(path, key):
            archives.write(path, key, {"alignment": alignment(session, truth, found)})
    return {
        "task": session.task.name,
        "queries": len(truth.ids),
        "first_example": session.evaluation.first_example,
        "outputs": f"{session.task.name}/{made}",
        "alignment": aligned,
        "examples": session.loaded["examples"],
    }


def alignment(session: Session, truth: Outputs, found: Outputs) -> np.ndarray:
    """float32 `[N]`: ROUGE-L (F1, 0 to 1) of every output against the target's, as texts."""

    def texts(outputs: Outputs) -> list[str]:
        cut = zip(outputs.tokens, outputs.lengths, strict=True)
        return [session.vocabulary.decode(tokens[:length].tolist()) for tokens, length in cut]

    rows = [quality.sentence_rouge_l(own, other) for own, other in zip(texts(found), texts(truth), strict=True)]
    return np.asarray(rows, np.float32)
