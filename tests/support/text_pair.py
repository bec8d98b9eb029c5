"""A pair of tabular models over a real vocabulary: text in, text out, without training or long compilation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.data.vocabularies import load
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings

PIECES = 320
SOURCE = ModelPair(name="tabular")


def evaluation(**changes) -> Evaluation:
    """Returns an evaluation of few sentences and short outputs, without timing or stored outputs."""
    few = {"quality_examples": 3, "quality_batch": 2, "latency_examples": 0, "max_new_tokens": 6, "resamples": 10}
    return Evaluation(**{"task": "tiny_translation", "keep_outputs": False, "keep_traces": 0} | few | changes)


def point(method: str, on: Evaluation, seed: int = 0, **settings) -> Point:
    """Returns a `Point` (settings and seed of one measurement) with the pair of this module."""
    return Point(pair=SOURCE, evaluation=on.resolved(), settings=Settings(method=method, **settings), seed=seed)


def make(folder: Path) -> sc.Pair:
    """Returns the pair; its vocabulary is trained on `tiny_translation` and written into `folder`."""
    texts = [text for e in TASKS["tiny_translation"].load(limit=40) for text in (e.source, e.reference)]
    path = folder / "vocabulary.model"
    path.write_bytes(load.train(texts, PIECES))
    draws = np.random.default_rng(0)
    target = draws.normal(size=(PIECES, PIECES))
    draft = target + 0.7 * draws.normal(size=(PIECES, PIECES))
    return sc.Pair(target=sc.TableLM(2 * target), draft=sc.TableLM(2 * draft), vocabulary=load.Vocabulary(path))


def damaged(
    pair: sc.Pair, outputs: np.ndarray, model: str = "target", wanted: Callable[[set[int]], bool] = bool
) -> tuple[sc.Pair, list[int]]:
    """Returns a copy of the pair in which one model gives NaN logits after some token, and the rows that contain it.

    The rows are those of `outputs` `[N, L]`; `wanted` accepts or refuses their set when the token is chosen.
    """
    reached = {token: set(np.flatnonzero((outputs[:, :-1] == token).any(1)).tolist()) for token in np.unique(outputs)}
    token, rows = next((t, rows) for t, rows in reached.items() if 0 < len(rows) < len(outputs) and wanted(rows))
    table = np.array(getattr(pair, model).params)
    table[token] = np.nan
    return replace(pair, **{model: sc.TableLM(table)}), sorted(rows)
