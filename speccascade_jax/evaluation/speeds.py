"""Speed of timed generations: tokens per second, and the model FLOPs utilisation (MFU) of the devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from speccascade_jax.drafters.model import ModelDrafter, NoDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generation
from speccascade_jax.evaluation.latency import Timings
from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.session import Session
from speccascade_jax.models.operations import config_of, generation_flops
from speccascade_jax.runtime.peaks import peak_flops


def speeds(session: Session, point: Point, timings: Timings, generations: Sequence[Generation]) -> dict[str, float]:
    """Returns the speed of a point's timed generations, as entries of a record's latency.

    `tokens_per_second` is the number of output tokens divided by the time of whole generations at batch size 1, the
    prefill included. `mfu` is the share of the devices' peak FLOPs in bfloat16 that the matrix products of both models
    reach (`models.operations`), even if the models have another dtype. `mfu` is left out if the peak is unknown, as for
    CPUs, or if the drafter is not a single model.

    Args:
        session: provides the decoder, the lengths of the prompts and the mesh.
        point: the point that was timed.
        timings: its timings, arrays `[trials, examples]`.
        generations: its timed generations in the order of time, that is, trial by trial.
    """
    seconds = float(timings.seconds.sum())
    entries = {"tokens_per_second": float(timings.tokens.sum()) / seconds}
    peak, engine = peak_flops(jax.devices()[0]), session.decoder(point.settings).engine
    operations = None if peak is None or engine is None else _operations(session, point, engine, generations)
    if peak is not None and operations is not None:
        devices = 1 if session.pair.mesh is None else session.pair.mesh.size
        entries["mfu"] = operations / (seconds * peak * devices)
    return entries


def _operations(session: Session, point: Point, engine: Engine, generations: Sequence[Generation]) -> float | None:
    """Returns the operations of generations; `None` if a model or drafter is of a kind that is not counted."""
    target, drafter = config_of(engine.target), engine.drafter
    draft = config_of(drafter.model) if type(drafter) is ModelDrafter and drafter.catches_up == 1 else None
    if target is None or (draft is None and type(drafter) is not NoDrafter):
        return None
    rows = session.window(point.evaluation, point.evaluation.latency_examples)
    lengths, encoded = np.asarray(session.prompts.length)[rows], session.prompts.encoder_length
    prompts = {"prompt": lengths, "encoded": None if encoded is None else np.asarray(encoded)[rows]}

    def total(name: str) -> np.ndarray:
        counts = [np.sum(np.asarray(getattr(generation.stats, name))) for generation in generations]
        return np.reshape(counts, (-1, len(rows)))  # [trials, examples], as the prompts repeat in every trial

    output = total("committed")
    # In every call the target scores the last committed token and the drafted block. Blocks that were committed without
    # a call are subtracted.
    scored = total("target_calls") + total("drafted") - total("unverified_tokens")
    operations = generation_flops(target, output=output, fed=scored, **prompts)
    if draft is not None:
        operations = operations + generation_flops(draft, output=output, fed=total("draft_steps"), **prompts)
    return float(operations.sum())
