"""Random weights whose greedy tokens, and the acceptance of whose draft, are set beforehand.

Random models agree on nothing, and a benchmark of speculation needs a rate. Here the next token is a function of the
last: the output layer's column of token `f(t)` is the embedding of `t`, and `f` is one long cycle, so that no text
repeats itself. All other weights are random, dense and of full size, but what layers add to the residual stream is
small: every library does all of the work, and the best token wins by a margin that no rounding turns over. The draft
has the same `f` but for a share of tokens that it sends elsewhere: the rate at which it is rejected. It is as sure of
these as of the others, so that nothing is gained by asking how sure it is.

A T5 starts from token 0, whose embedding is zero here: its first token follows the one that its input repeats most
often, which the last layer's cross-attention, an average, hands over.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config

Flat = dict[str, np.ndarray]
"""Parameter name -> values, float32."""

SPECIAL = 2
"""Ids below it (start or padding, end of sequence) are never written."""
STRETCH = 20
"""The set share is kept within every so many steps of the cycle: a short run meets it too."""
ADDED = 0.02
"""What a layer adds to a residual stream of size 1."""
HANDED_OVER = 0.5
"""What the last cross-attention adds of the mean of its input."""
BEST = 20.0
"""The best token's logit; others are a few at most."""


def successors(size: int, seed: int) -> np.ndarray:
    """`f`, int `[size]`: what follows each token, one cycle over all but the special ones (which follow themselves)."""
    cycle = np.random.default_rng(seed).permutation(np.arange(SPECIAL, size))
    after = np.arange(size)
    after[cycle] = np.roll(cycle, -1)
    return after


def astray(after: np.ndarray, acceptance: float, seed: int) -> np.ndarray:
    """A draft's `f`: another token in a share `1 − acceptance` of all places, evenly spread over the cycle.

    Raises:
        ValueError: no acceptance between 0 and 1.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is no share: give a number from 0 to 1")
    draws, cycle = np.random.default_rng(seed), [SPECIAL]
    while (following := int(after[cycle[-1]])) != SPECIAL:
        cycle.append(following)
    wrong: list[int] = []
    for start in range(0, len(cycle), STRETCH):
        places = cycle[start : start + STRETCH]
        count = round((1 - acceptance) * (start + len(places))) - len(wrong)
        wrong += draws.permutation(places)[:count].tolist()
    out = after.copy()
    # each has what belongs to another of them: a draft writes every token somewhere too
    out[wrong] = after[np.roll(np.array(wrong, int), 1)]
    return out


def t5(config: T5Config, after: np.ndarray, seed: int) -> Flat:
    """A T5's parameters, whose greedy outputs follow `after`.

    Raises:
        ValueError: a configuration that ties its output layer to the embedding.
    """
    out = _random(config, seed)
    embedding = out["token_embedder/embedding"]
    embedding[0] = 0.0
    attention = f"decoder/layers_{config.num_decoder_layers - 1}/encoder_decoder_attention"
    out[f"{attention}/query/kernel"][:] = 0.0  # an even look at all of the input
    kept = min(config.d_model, config.num_heads * config.head_dim)
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(config.d_model, kept)))[0].astype(np.float32)
    value, mixed = out[f"{attention}/value/kernel"], out[f"{attention}/out/kernel"]
    value[:], mixed[:] = 0.0, 0.0
    value[:, :kept], mixed[:kept] = basis, HANDED_OVER * basis.T
    return out | {"decoder/logits_dense/kernel": _output(embedding, after)}


def decoder(config: DecoderConfig, after: np.ndarray, seed: int) -> Flat:
    """A decoder-only model's parameters, whose greedy outputs follow `after`.

    Raises:
        ValueError: a configuration that ties its output layer to the embedding.
    """
    out = _random(config, seed)
    return out | {"decoder/logits_dense/kernel": _output(out["token_embedder/embedding"], after)}


def _output(embedding: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The output layer `[E, V]`: column `after[t]` finds the embedding of `t`; those of padding find nothing."""
    kernel = np.zeros(embedding.shape[::-1], np.float32)
    kernel[:, after[SPECIAL:]] = embedding[SPECIAL : len(after)].T * np.float32(BEST / embedding.shape[1])
    return kernel


def _random(config: T5Config | DecoderConfig, seed: int) -> Flat:
    """All parameters at random, in the sizes that keep a signal's size; layers add `ADDED` of it."""
    if config.tied:
        raise ValueError("the output layer is tied to the embedding, and planting needs its own: give tied=False")
    draws = np.random.default_rng(seed)
    queries = config.head_dim**-0.5 if isinstance(config, T5Config) else 1.0  # T5 does not scale them otherwise
    out: Flat = {}
    for name, shape in expected_shapes(config).items():
        part, leaf = name.split("/")[-2:]
        if leaf == "scale":
            out[name] = np.ones(shape, np.float32)
            continue
        size = {"kernel": shape[0] ** -0.5, "rel_embedding": 0.5}.get(leaf, 1.0)
        size *= {"out": ADDED, "wo": ADDED, "query": queries}.get(part, 1.0)
        out[name] = draws.normal(size=shape).astype(np.float32) * np.float32(size)
    return out


def start_prompts(after: np.ndarray, count: int, width: int, seed: int) -> list[list[int]]:
    """Prompts `[count][width]` for both families: one token in half of the places and last, others around it."""
    draws = np.random.default_rng(seed)
    rows = draws.integers(SPECIAL, len(after), (count, width))
    rows[:, 1::2] = rows[:, -1:]
    return rows.tolist()


def expected(after: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """What a target writes behind a prompt of `start_prompts`."""
    out = [int(after[prompt[-1]])]
    while len(out) < count:
        out.append(int(after[out[-1]]))
    return out


def parameters(flat: Mapping[str, np.ndarray]) -> int:
    """How many numbers they are."""
    return sum(values.size for values in flat.values())
