"""Generation of the training data of acceptance heads, for `experiments/make_acceptance_data.py`.

The procedure is that of SpecDec++ (Huang et al., 2024, section 3.3; METHODS section 6). For every prompt, the target
alone decodes an output `X` under its own sampling settings. Both models then compute their distributions at every
position of `X` in one pass. One token `Y_i ~ q̃` is drawn from the draft's distribution, and its label is the rule's
probability of keeping it, `P_i = min(1, π(Y_i)/q̃(Y_i))`. `shards` defines the file format.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import bucket
from speccascade_jax.core.checks import whole
from speccascade_jax.core.sampling import log_laws, make_law_pair, raw_and_scaled, sample
from speccascade_jax.core.types import Array, Controls
from speccascade_jax.engine.generate import raise_on_failure
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings, validate
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.evaluation.studies.survey.surveying import Written
from speccascade_jax.methods.settings import check_sampling_alone, sampling_of
from speccascade_jax.models import fingerprints, teacher_forcing
from speccascade_jax.rules import deferral, laws, measures
from speccascade_jax.rules.rule import Rule
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import clock_time, counted
from speccascade_jax.storage import locks
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.heads import shards
from speccascade_jax.training.heads.mixing import uniforms
from speccascade_jax.training.heads.shards import Examples

PROPOSALS = 0x59
"""Number that is folded into the seed's key to draw proposals, so that their random bits differ from those that decode
`X` with the same seed and example ids."""


def make(
    *,
    pair: ModelPair,
    evaluation: Evaluation,
    settings: Settings,
    rule: str = "spec_decode",
    alpha: float | None = None,
    seed: int = 0,
    shard_size: int = 512,
    output: str,
) -> dict[str, int]:
    """Writes a folder of training data; a killed call resumes after its last shard, with identical results.

    Args:
        pair: the models, as in `experiment.run`.
        evaluation: as in `experiment.run`; the examples on which it would measure quality provide the prompts.
        settings: sampling settings of both models.
        rule: rule whose probability of keeping a token is the label, a name in `rules.deferral.RULES`.
        alpha: the rule's α.
        seed: the random seed, as in `experiment.run`.
        shard_size: number of prompts per shard; a kill loses the work of at most one shard.
        output: path of the folder.

    Returns:
        The numbers of `prompts` and `positions` in the folder.

    Raises:
        ValueError: a value is invalid; the folder was started with other settings (the message names them), or its
            shards are damaged.
        LockedError: another process writes the folder.
    """
    labelled = Settings(rule=rule, alpha=alpha, **sampling_of(check_sampling_alone(settings, "make")))
    point = Point(pair=pair, evaluation=evaluation.resolved(), settings=labelled, seed=seed)
    validate(point, timed=False)
    whole("shard_size", shard_size, 1)
    recipe_header.announce(f"{point.evaluation.quality_examples} prompts")
    return write(Session(pair, point.evaluation), point, shard_size, expanded(output))


def write(session: Session, point: Point, shard_size: int, folder: Path) -> dict[str, int]:
    """Does the work of `make`, with models and examples that are already loaded."""
    asked, positions = point.evaluation, 0
    with locks.held(folder / "lock", folder):
        manifest = _manifest(session, point, shard_size)
        shards.begin(folder, manifest)
        paths = [shards.shard_path(folder, n) for n in range(-(-asked.quality_examples // shard_size))]
        missing = [n for n, path in enumerate(paths) if not path.exists()]
        print(f"{len(paths)} shards in {folder}, {len(missing)} still to make")
        for n in set(range(len(paths))) - set(missing):
            positions += int(shards.read_shard(paths[n], manifest).lengths.sum())
        began = time.monotonic()
        for done, n in enumerate(counted(missing, "making data", "shards"), 1):
            start = n * shard_size
            size, first = min(shard_size, asked.quality_examples - start), asked.first_example + start
            window = dataclasses.replace(asked, first_example=first, quality_examples=size)
            shard = examples(session, dataclasses.replace(point, evaluation=window))
            shards.write_shard(folder, n, manifest, shard)
            positions += int(shard.lengths.sum())
            times = clock_time(time.monotonic() - began), runs.time_left(began, done, len(missing))
            print(f"[{done}/{len(missing)}] {positions:,} positions ({times[0]} elapsed, {times[1]} left)", flush=True)
    return {"prompts": asked.quality_examples, "positions": positions}


def _manifest(session: Session, point: Point, shard_size: int) -> dict[str, Any]:
    coordinates, asked, loaded = point.coordinates(), point.evaluation, session.loaded
    names = ("pair", "task", "split", "first_example", "max_new_tokens", "seed", *shards.MEANING[3:])
    manifest = {name: coordinates[name] for name in names} | {
        "format": shards.FORMAT,
        "pair_fingerprint": loaded["weights"],
    }
    manifest |= {"code": session.code(point.settings), "draft_fingerprint": fingerprints.of_model(session.pair.draft)}
    manifest |= {"examples_fingerprint": loaded["examples"], "dtype": point.pair.dtype}
    return manifest | {"prompts": asked.quality_examples, "batch": asked.quality_batch, "shard_size": shard_size}


def examples(session: Session, point: Point) -> Examples:
    """Decodes the session's examples with the target, and labels the draft's proposals by the rule of `point`.

    Only the examples on which quality is measured are decoded.
    """
    written = surveying.write(session, surveying.written_by("target", point))
    window = session.window(point.evaluation, point.evaluation.quality_examples)
    ids = np.asarray([session.examples[row].id for row in window], np.int32)
    ends = np.cumsum([int(batch.counts.sum()) for batch in written])
    parts = zip(written, np.split(ids, ends[:-1]), strict=True)
    labelled = counted(parts, "labelling the outputs", "batches", len(written))
    return shards.join([_labelled(session, point, batch, of_batch) for batch, of_batch in labelled])


def _labelled(session: Session, point: Point, written: Written, ids: np.ndarray) -> Examples:
    """Returns the labelled examples of one batch, without the rows that only fill the batch up."""
    raise_on_failure(written.generation)
    lengths, rows = np.asarray(written.generation.lengths), len(written.counts)
    width = min(bucket(int(lengths.max())), written.generation.tokens.shape[1])
    tokens = written.generation.tokens[:, :width]
    controls = session.controls(point, [point.settings.alpha] * rows)
    q, p = (teacher_forcing.along(b, written.prompt, tokens) for b in (session.pair.draft, session.pair.target))
    if (failed := np.flatnonzero(teacher_forcing.failing(q, jnp.asarray(lengths))[: len(ids)])).size:
        place = f"on the output of example {ids[failed[0]]}"
        raise FloatingPointError(f"the draft model gave NaN or infinite logits {place}: check its weights")
    draws = proposal_uniforms(point.seed, np.resize(ids, rows), width)
    labels = jax.device_get(label(q, p, controls, draws, point.method.rule(point.settings)))
    real, inside = np.arange(rows) < len(ids), np.arange(width)[None] < lengths[:, None]
    prompt = jax.device_get(written.prompt)
    encoder = np.zeros((rows, 0), np.int32) if prompt.encoder_tokens is None else prompt.encoder_tokens
    prompts = (prompt.tokens[real], prompt.length[real], encoder[real])
    outputs = (np.asarray(tokens)[real], lengths[real].astype(np.int32))
    labels = {name: np.where(inside, value, 0).astype(value.dtype)[real] for name, value in labels.items()}
    return Examples(ids, *prompts, *outputs, **labels)


def proposal_uniforms(seed: int, ids: np.ndarray, width: int) -> Array:
    """Returns uniform numbers in [0, 1), float32 `[B, width]`, which depend only on seed, example id and position."""
    return uniforms(jax.random.fold_in(rngs.root(seed), PROPOSALS), ids, width)


@partial(jax.jit, static_argnames="rule")
def label(q_logits: Array, p_logits: Array, controls: Controls, uniforms: Array, rule: Rule | str) -> dict[str, Array]:
    """Draws a proposal at every position and computes the rule's probability of keeping it.

    Args:
        q_logits: `[B, L, V]`, logits of the draft.
        p_logits: `[B, L, V]`, logits of the target.
        controls: sampling settings of both models and α, per row.
        uniforms: `[B, L]`, random numbers that draw the proposals.
        rule: rule whose probability of keeping a proposal is computed.

    Returns:
        `proposals` int32, `kept`, `max_q`, `entropy_q` and `q_of_proposal` float32, each `[B, L]`.
    """
    q, q_tilde, _ = raw_and_scaled(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    pair = make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)
    proposals = sample(q_tilde, uniforms)
    return {"proposals": proposals} | judged(pair, proposals, controls.alpha, deferral.get(rule))


def judged(pair: Any, tokens: Array, alpha: Array, rule: Rule) -> dict[str, Array]:
    """Returns the acceptance probabilities of drafted tokens `[B, L]`, and the draft's certainty at their positions.

    Args:
        pair: `LawPair` over `[B, L, V]`.
        tokens: int32 `[B, L]`, the drafted tokens.
        alpha: `[B]`, the rule's α.
        rule: rule whose acceptance probability is returned.
    """
    column = jnp.broadcast_to(alpha[:, None, None], (*tokens.shape, 1))
    drawn = laws.at_tokens(pair.q_tilde, tokens)[..., 0]
    kept = rule.kept_at(pair, column, tokens)
    max_q, entropy_q = measures.max_of(pair.q)[..., 0], measures.entropy(pair.q)[..., 0]
    kept = jnp.clip(kept / jnp.where(drawn > 0, drawn, 1.0), 0.0, 1.0)
    return {"kept": kept, "max_q": max_q, "entropy_q": entropy_q, "q_of_proposal": drawn}
