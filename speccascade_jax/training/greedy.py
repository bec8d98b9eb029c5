"""Batched greedy translation with a cache, for validation during training.

Experiments decode through the engine; this is the plain loop, without drafts, rules or statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sacrebleu

from speccascade_jax.data import tasks
from speccascade_jax.data.vocabularies import Vocabulary
from speccascade_jax.models.base import Array, BoundModel, LanguageModel, Params, Prompt, right_pad

Carry = tuple[Any, ...]


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def greedy_decode(model: LanguageModel, params: Params, encoder_tokens: Array, max_new: int, eos_id: int = 1) -> Array:
    """int32 `[B, max_new]`: the most probable token at every step, 0 after EOS.

    Args:
        encoder_tokens: int32 `[B, N]`, 0 where padded.
    """
    rows = encoder_tokens.shape[0]
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32), encoder_tokens)
    cache = model.prefill(params, prompt, max_new)

    def proceed(carry: Carry) -> Array:
        step, _, done, _, _ = carry
        return (step < max_new) & ~jnp.all(done)

    def body(carry: Carry) -> Carry:
        step, token, done, tokens, cache = carry
        output, cache = model.extend(params, cache, token[:, None])
        token = jnp.where(done, 0, jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32))
        return step + 1, token, done | (token == eos_id), tokens.at[:, step].set(token), cache

    start = (0, jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool), jnp.zeros((rows, max_new), jnp.int32), cache)
    return jax.lax.while_loop(proceed, body, start)[3]


def translate(
    bound: BoundModel, vocabulary: Vocabulary, sources: Sequence[str], max_new: int = 96, batch_size: int = 64
) -> list[str]:
    """The greedy translation of every source, in order.

    Sources are sorted by length into batches; each batch is padded to a multiple of 16 tokens.
    """
    encoded = [[*vocabulary.encode(source), vocabulary.eos_id] for source in sources]
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    texts = [""] * len(sources)
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size].tolist()
        rows = [encoded[i] for i in chosen] + [[vocabulary.eos_id]] * (batch_size - len(chosen))
        width = 16 * -(-max(map(len, rows)) // 16)
        tokens = np.asarray(greedy_decode(bound.model, bound.params, right_pad(rows, width), max_new))
        for i, ids in zip(chosen, tokens, strict=False):
            texts[i] = vocabulary.decode(ids.tolist())
    return texts


def bleu(bound: BoundModel, vocabulary: Vocabulary, task_name: str, count: int, max_new: int = 96) -> float:
    """BLEU (sacrebleu's defaults) of greedy decoding on the first `count` examples of a task's first split."""
    task = tasks.get_task(task_name)
    examples = task.load(limit=count)
    found = translate(bound, vocabulary, [task.build_prompt(example) for example in examples], max_new)
    references = [example.reference for example in examples]
    return float(sacrebleu.corpus_bleu([task.postprocess(text) for text in found], [references]).score)
