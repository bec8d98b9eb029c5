"""Section `acceptance`: how often the target accepts the draft's tokens on a task, for a model card.

Command: `python -m benchmarks --sections=acceptance --pair=FOLDER --examples=500`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.setting import Bench, Rows
from speccascade_jax.api import make_controls, make_prompt
from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.core.sampling import argmax, softmax
from speccascade_jax.core.types import Array, BoundModel, Prompt
from speccascade_jax.data.tasks.table import Task, get_task
from speccascade_jax.engine.counters import summarise
from speccascade_jax.engine.generate import generate, raise_on_failure
from speccascade_jax.evaluation.points import Settings, recorded
from speccascade_jax.metrics import quality

BATCH = 32
_MEASURES = ("acceptance_rate", "block_efficiency", "draft_utilisation")


class Written(NamedTuple):
    """Outputs of one method: tokens `[N, L]`, lengths `[N]`, counters per row."""

    tokens: np.ndarray
    lengths: np.ndarray
    stats: Any


def run(bench: Bench) -> Rows:
    """Returns the table `acceptance`, with a row per method and temperature, and the table `agreement`."""
    task = best_task() if bench.settings.acceptance_task is None else get_task(bench.settings.acceptance_task)
    examples = task.load(limit=bench.settings.acceptance_examples)
    prompts = prompts_of(bench, task, [task.build_prompt(example) for example in examples])
    points = [
        (recorded(Settings(method=TARGET)), 0.0),
        (recorded(Settings(method=DRAFT)), 0.0),
        *((bench.lossless, t) for t in (0.0, 1.0)),
    ]
    rows, written = [], {}
    for method, temperature in bench.track(points):
        outputs = written[method.method, temperature] = write(bench, method, temperature, prompts, task)
        texts = texts_of(bench, task, outputs)
        bleu = quality.score([task.main_metric], texts, [example.reference for example in examples])
        seen = summarise(outputs.stats, outputs.lengths, draft_alone=method.method == DRAFT)
        alone = {} if method.method in (TARGET, DRAFT) else {name: seen[name] for name in _MEASURES}
        row = {"task": task.name, "examples": len(examples), "method": method.method, "temperature": temperature}
        row |= {"block_size": method.block_size, "quality": bleu[task.main_metric], "metric": task.main_metric}
        rows.append(row | alone | {"tokens": float(np.mean(outputs.lengths))})
    agreed = _agreement(bench, prompts, written[TARGET, 0.0])
    return {"acceptance": rows, "agreement": [{"task": task.name, "examples": len(examples)} | agreed]}


def best_task() -> Task:
    """Returns the task `tatoeba_joined`, or without a data directory the shipped task `tiny_translation`."""
    try:
        get_task("tatoeba_joined").load(limit=1)
    except FileNotFoundError:
        return get_task("tiny_translation")
    return get_task("tatoeba_joined")


def prompts_of(bench: Bench, task: Task, texts: list[str]) -> Prompt:
    """Returns prompts cut to the task's longest input, all padded to one length."""
    vocabulary = bench.pair.vocabulary
    assert vocabulary is not None
    ids = [[*vocabulary.encode(text)[: task.max_input_length - 1], vocabulary.eos_id] for text in texts]
    return make_prompt(bench.pair, ids)


def _batches(count: int) -> list[np.ndarray]:
    """Splits the example numbers below `count` into batches of one size.

    The last batch repeats its own examples until it is full, because another batch size would need another compilation.
    """
    size = min(BATCH, count)
    return [np.resize(np.arange(start, min(start + size, count)), size) for start in range(0, count, size)]


def write(bench: Bench, method: Settings, temperature: float, prompts: Prompt, task: Task) -> Written:
    engine, params = bench.engine(method)
    longest = min(task.max_output_length, bench.settings.acceptance_tokens)
    parts = []
    for rows in _batches(len(prompts.tokens)):
        batch = jax.tree.map(lambda x, rows=rows: x[rows], prompts)
        controls = make_controls(len(rows), temperature=temperature)
        out = generate(engine, params, batch, 0, controls=controls, max_new_tokens=longest, example_ids=rows)
        raise_on_failure(out)
        parts.append(jax.device_get((out.tokens, out.lengths, out.stats)))
    joined = jax.tree.map(lambda *xs: np.concatenate(xs)[: len(prompts.tokens)], *parts)
    return Written(*joined)


def texts_of(bench: Bench, task: Task, outputs: Written) -> list[str]:
    vocabulary = bench.pair.vocabulary
    assert vocabulary is not None
    rows = zip(outputs.tokens, outputs.lengths, strict=True)
    return [task.postprocess(vocabulary.decode(tokens[:length].tolist())) for tokens, length in rows]


def _agreement(bench: Bench, prompts: Prompt, outputs: Written) -> dict[str, Any]:
    """Compares the distributions of draft and target at every position of the target's greedy outputs.

    `greedy_agreement` is the share of positions at which both models have the same most likely token. `shared_mass` is
    the mean of `Σ min(p, q)` at temperature 1, which is the lossless rule's probability of acceptance.
    """
    same, mass, positions = 0.0, 0.0, 0
    for rows in _batches(len(prompts.tokens)):
        batch = jax.tree.map(lambda x, rows=rows: x[rows], prompts)
        tokens, lengths = outputs.tokens[rows], outputs.lengths[rows]
        real = np.arange(tokens.shape[1])[None] < lengths[:, None]
        real[len(set(rows.tolist())) :] = False  # the last batch may contain repeated rows, which must not count twice
        comparison = _compare(bench.pair.target, bench.pair.draft, batch, jnp.asarray(tokens))
        agrees, shared = (np.asarray(x)[real] for x in comparison)
        same, mass, positions = same + agrees.sum(), mass + shared.sum(), positions + int(real.sum())
    return {"greedy_agreement": same / positions, "shared_mass": mass / positions, "positions": positions}


@jax.jit
def _compare(target: BoundModel, draft: BoundModel, prompt: Prompt, tokens: Array) -> tuple[Array, Array]:
    """Returns, at each position of `tokens` `[B, L]`, whether both models have the same argmax, and `Σ min(p, q)`.

    Both models are teacher-forced.
    """
    p, q = _logits(target, prompt, tokens), _logits(draft, prompt, tokens)
    return argmax(p) == argmax(q), jnp.minimum(softmax(p), softmax(q)).sum(-1)


def _logits(bound: BoundModel, prompt: Prompt, tokens: Array) -> Array:
    """Returns float32 `[B, L, V]`: the model's logits for each of `tokens`, given the tokens before it."""
    model = bound.model
    cache = model.prefill(bound.params, prompt, prompt.tokens.shape[1] + tokens.shape[1])
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    out, _ = model.extend(bound.params, cache, jnp.concatenate([pending, tokens[:, :-1]], axis=1))
    return out.logits[..., : model.vocab_size]
