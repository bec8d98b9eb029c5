"""Random weights with planned greedy outputs, and drafts with a planned (*planted*) acceptance rate.

Two models with random weights would hardly ever agree on a token, but a benchmark of speculation needs a known
acceptance rate. Here the greedy next token is a function `f` of the last token, because the output layer's column of
token `f(t)` is the embedding of `t`. `f` is one long cycle, so no text repeats itself. All other weights are random,
dense and of full size, so every library has to do all of the work. But the layers add little to the residual stream, so
the best token wins by a margin that rounding cannot change. The draft has the same `f`, except for a share of tokens
with another successor. This share is the rejection rate. The draft is equally confident at all tokens, so its
confidence does not reveal the wrong ones.

A T5 starts from token 0, whose embedding is zero here. Its first output token is the successor of the most frequent
input token, because the last layer's cross-attention adds the average of the input.
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
"""The first id that outputs contain: id 0 is start and padding, id 1 is end of sequence."""
STRETCH = 20
"""Number of consecutive steps of the cycle among which the rejection rate is exactly the planned one, so that short
outputs have this rate, too."""
ADDED = 0.02
"""Size of a layer's contribution, relative to the residual stream."""
HANDED_OVER = 0.5
"""Factor with which the last cross-attention adds the mean of the encoder's output."""
BEST = 20.0
"""Logit of the best token; all other logits are far smaller."""


def successors(size: int, seed: int) -> np.ndarray:
    """Returns `f`, int `[size]`: each token's successor, in one cycle over all tokens but the special ones.

    The successor of a special token is the token itself.
    """
    cycle = np.random.default_rng(seed).permutation(np.arange(SPECIAL, size))
    after = np.arange(size)
    after[cycle] = np.roll(cycle, -1)
    return after


def astray(after: np.ndarray, acceptance: float, seed: int) -> np.ndarray:
    """Returns the `f` of a draft, which differs from `after` at the share `1 − acceptance` of tokens.

    These tokens are spread evenly over the cycle.

    Raises:
        ValueError: `acceptance` is not between 0 and 1.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is not a rate: give a number from 0 to 1")
    draws, cycle = np.random.default_rng(seed), [SPECIAL]
    while (following := int(after[cycle[-1]])) != SPECIAL:
        cycle.append(following)
    wrong: list[int] = []
    for start in range(0, len(cycle), STRETCH):
        places = cycle[start : start + STRETCH]
        count = round((1 - acceptance) * (start + len(places))) - len(wrong)
        wrong += draws.permutation(places)[:count].tolist()
    out = after.copy()
    # the wrong tokens exchange successors, so that the draft still writes every token somewhere
    out[wrong] = after[np.roll(np.array(wrong, int), 1)]
    return out


def t5(config: T5Config, after: np.ndarray, seed: int) -> Flat:
    """Returns the parameters of a T5 whose greedy outputs follow `after`.

    Raises:
        ValueError: the configuration ties its output layer to the embedding.
    """
    out = _random(config, seed)
    embedding = out["token_embedder/embedding"]
    embedding[0] = 0.0
    attention = f"decoder/layers_{config.num_decoder_layers - 1}/encoder_decoder_attention"
    out[f"{attention}/query/kernel"][:] = 0.0  # uniform attention over the whole input
    kept = min(config.d_model, config.num_heads * config.head_dim)
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(config.d_model, kept)))[0].astype(np.float32)
    value, mixed = out[f"{attention}/value/kernel"], out[f"{attention}/out/kernel"]
    value[:], mixed[:] = 0.0, 0.0
    value[:, :kept], mixed[:kept] = basis, HANDED_OVER * basis.T
    return out | {"decoder/logits_dense/kernel": _output(embedding, after)}


def decoder(config: DecoderConfig, after: np.ndarray, seed: int) -> Flat:
    """Returns the parameters of a decoder-only model whose greedy outputs follow `after`.

    Raises:
        ValueError: the configuration ties its output layer to the embedding.
    """
    out = _random(config, seed)
    return out | {"decoder/logits_dense/kernel": _output(out["token_embedder/embedding"], after)}


def _output(embedding: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the output layer `[E, V]`: column `after[t]` matches the embedding of `t`; padding is zero."""
    kernel = np.zeros(embedding.shape[::-1], np.float32)
    kernel[:, after[SPECIAL:]] = embedding[SPECIAL : len(after)].T * np.float32(BEST / embedding.shape[1])
    return kernel


def _random(config: T5Config | DecoderConfig, seed: int) -> Flat:
    """Draws all parameters at scales that keep the size of activations; a layer adds only the share `ADDED` of it."""
    if config.tied:
        raise ValueError(
            "the output layer is tied to the embedding, but planting needs a separate one: give tied=False"
        )
    draws = np.random.default_rng(seed)
    queries = config.head_dim**-0.5 if isinstance(config, T5Config) else 1.0  # T5 does not scale queries elsewhere
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
    """Returns prompts `[count][width]` for both model families.

    A prompt's last token fills every second position, so that it is the most frequent one. The others are random.
    """
    draws = np.random.default_rng(seed)
    rows = draws.integers(SPECIAL, len(after), (count, width))
    rows[:, 1::2] = rows[:, -1:]
    return rows.tolist()


def expected(after: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Returns the tokens that a target writes after a prompt of `start_prompts`."""
    out = [int(after[prompt[-1]])]
    while len(out) < count:
        out.append(int(after[out[-1]]))
    return out


def parameters(flat: Mapping[str, np.ndarray]) -> int:
    """Returns the number of parameters."""
    return sum(values.size for values in flat.values())
