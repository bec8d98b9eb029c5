"""The front door: `decode`, `target_law`, and the pieces that experiments put together themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import check_seed, whole
from speccascade_jax.core.controls import make_controls, make_sampling
from speccascade_jax.core.sampling import make_law_pair, softmax, transform
from speccascade_jax.core.types import Array, Controls, Prompt
from speccascade_jax.data.vocabularies.vocabulary import Ids
from speccascade_jax.engine.generate import Generation, generate, raise_on_failure
from speccascade_jax.engine.measures import summarise
from speccascade_jax.methods.assemble import assemble, build, check_alpha, check_example_ids, method_controls
from speccascade_jax.methods.sequence import run
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import decoder_context, make_prompt
from speccascade_jax.rules import deferral
from speccascade_jax.rules.deferral import Rule


@dataclass(frozen=True)
class DecodeOutput:
    """What `decode` returns, on the host.

    Attributes:
        texts: decoded outputs; `None` for a pair without a vocabulary. A decoder-only pair's continue their prompts,
            spaces included.
        tokens: int32 `[B, max_new_tokens]`, 0 after the end; lengths: int32 `[B]`, a stop id included.
        stats: the measures of METHODS section 9 over the batch, and `rows`: the counters per row.
        generation: the raw result.
    """

    texts: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    stats: dict[str, Any]
    generation: Generation


def decode(
    pair: Pair,
    prompts: Any,
    *,
    rule: str | Rule | None = None,
    alpha: Any = None,
    block_size: int | None = None,
    temperature: Any = 0.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    bonus: str | None = None,
    example_ids: Any = None,
    stop_ids: Sequence[int] | None = None,
    method: str = "speculative",
    accept: str | None = None,
    stop_threshold: Any = None,
) -> DecodeOutput:
    """Generate with a draft and a target under a rule.

    Args:
        pair: the models, from `load_pair` or made by hand.
        prompts: texts (`prompts.text_ids` says which ids they become), or token ids: `[B, P]` or a list of lists (one
            flat list is one prompt).
        rule: a name of `speccascade_jax.rules.RULES`, or a `Rule` of your own; `None` is the method's own, which for
            "speculative" is lossless.
        alpha: the rule's trade-off, a number or `[B]`; rules without one ignore it.
        block_size: γ, draft tokens per round at most; `None` is the method's own, which for "speculative" is 5.
        temperature: 0 is greedy; a number or `[B]`. So are `top_p`, `top_k` (0: off) and `draft_temperature`
            (`None`: the target's).
        max_new_tokens: the most tokens to generate.
        seed: of all randomness; a row's bits depend on the seed and its example id only.
        bonus: what follows a fully kept block: "rule", "target" or "none" (METHODS section 2); `None` is the method's.
        example_ids: `[B]`, default `0 … B − 1`; rows with one id draw the same bits.
        stop_ids: ids that end a row; default: the vocabulary's, or none without a vocabulary.
        method: a name of `speccascade_jax.methods.METHODS`: "speculative"; the two ends of every plot,
            "autoregressive" (the target alone) and "autoregressive_draft"; "fuzzy", "bild", "token_cascade" and others.
        accept: "speculative", or "deferral" (keep with probability 1 − r, replace from the target); `None` is the
            method's.
        stop_threshold: where the method drafts only while it is sure, how unsure it may be, a number or `[B]`.

    Returns:
        A `DecodeOutput`.

    Raises:
        ValueError: an argument without meaning; names it and the remedy, before anything is compiled.
        FloatingPointError: NaN logits; names the model, the row and the position.
    """
    engine, params = build(
        pair, rule=rule, block_size=block_size, bonus=bonus, method=method, stop_ids=stop_ids, accept=accept
    )
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 1)
    prompt = make_prompt(pair, prompts, max_new_tokens=max_new_tokens)
    rows = prompt.tokens.shape[0]
    controls = method_controls(
        method, rule, rows, alpha=alpha, temperature=temperature, top_p=top_p, top_k=top_k,
        draft_temperature=draft_temperature, stop_threshold=stop_threshold,
    )  # fmt: skip
    generation = run(
        engine,
        params,
        prompt,
        check_seed(seed),
        controls=controls,
        max_new_tokens=max_new_tokens,
        example_ids=check_example_ids(example_ids, rows),
    )
    return collect(pair, generation, method, prompt)


def collect(
    pair: Pair, generation: Generation, method: str = "speculative", prompt: Prompt | None = None
) -> DecodeOutput:
    """A generation on the host, as text where the pair has a vocabulary; raises on NaN logits.

    `prompt`: what it began from; without it, texts begin anew instead of continuing the prompt's.
    """
    generation, before = jax.device_get((generation, prompt))  # one transfer
    raise_on_failure(generation, ("draft", "draft") if method == "autoregressive_draft" else ("target", "draft"))
    tokens, lengths = np.asarray(generation.tokens), np.asarray(generation.lengths)
    texts = None
    if pair.vocabulary is not None:
        begins: list[Ids] = [()] * len(tokens) if before is None else decoder_context(before)
        rows = zip(tokens, lengths, begins, strict=True)
        texts = [pair.vocabulary.decode(row[:n].tolist(), after=begin) for row, n, begin in rows]
    fields = type(generation.stats).__dataclass_fields__
    per_row_stats = {name: getattr(generation.stats, name) for name in fields}
    measured = summarise(generation.stats, lengths, draft_alone=method == "autoregressive_draft")
    return DecodeOutput(texts, tokens, lengths, {**measured, "rows": per_row_stats}, generation)


def target_law(
    rule: str | Rule,
    q_logits: Any,
    p_logits: Any,
    *,
    alpha: Any = None,
    temperature: Any = 1.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
) -> Array:
    """`π`: what a token is drawn from under a rule.

    Args:
        rule: name or `Rule`.
        q_logits, p_logits: `[..., V]` raw logits of draft and target.
        alpha: a number, or the shape of the leading axes.
        temperature, top_p, top_k, draft_temperature: numbers, as in `decode`.

    Returns:
        float32 `[..., V]`.
    """
    chosen = deferral.get(rule)
    q_logits, p_logits = jnp.asarray(q_logits, jnp.float32), jnp.asarray(p_logits, jnp.float32)
    if q_logits.shape != p_logits.shape:
        raise ValueError(f"q_logits have shape {q_logits.shape} and p_logits {p_logits.shape}; they must agree")
    lead = p_logits.shape[:-1]
    rows = math.prod(lead)
    deferral.check_greedy(chosen, temperature, draft_temperature)
    alpha = np.reshape(alpha, -1) if np.ndim(alpha) and np.shape(alpha) == lead else alpha
    values = check_alpha(chosen, alpha, rows)
    controls = make_controls(
        rows, alpha=values, temperature=temperature, top_p=top_p, top_k=top_k, draft_temperature=draft_temperature
    )
    q_flat, p_flat = q_logits.reshape(rows, -1), p_logits.reshape(rows, -1)
    return _target_law(chosen, q_flat, p_flat, controls).reshape(p_logits.shape)


@partial(jax.jit, static_argnames="rule")
def _target_law(rule: Rule, q_logits: Array, p_logits: Array, controls: Controls) -> Array:
    greedy = controls.draft.temperature <= 0
    q, q_tilde = softmax(q_logits), transform(q_logits, controls.draft)
    pair = make_law_pair(q, q_tilde, greedy, p_logits, controls.target)
    return rule.target_law(pair, controls.alpha[:, None])


__all__ = [
    "DecodeOutput",
    "assemble",
    "check_alpha",
    "collect",
    "decode",
    "generate",
    "make_controls",
    "make_prompt",
    "make_sampling",
    "target_law",
]
