"""Operations of a generation, counted from the sizes of a model: the numerator of its model FLOPs utilisation (MFU).

A product of a matrix `[m, n]` with one token costs `2 m n` operations (Chowdhery et al., 2022 (PaLM), appendix B). All
tokens that a model reads count, draft tokens that are rejected later included, because the device computes them.
Attention counts the committed tokens that a token can see. Without a window, a generated token sees the prompt and, on
average, half of the output. Padding, norms, softmax, sampling, deferral rules and embedding look-ups are not counted.
They take time, so they lower the utilisation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5
from speccascade_jax.models.t5_config import T5Config


def config_of(model: Any) -> T5Config | DecoderConfig | None:
    """Returns the sizes of a model whose operations can be counted; `None` for other models, such as early exits."""
    return model.config if type(model) in (T5, DecoderLM) else None


def generation_flops(
    config: T5Config | DecoderConfig, *, prompt: Any, output: Any, fed: Any, encoded: Any = None
) -> np.ndarray:
    """Returns the operations of generations by one model, float64; all arguments broadcast against each other.

    The prefill reads all tokens of the prompt but the last, and computes no logits. Then the model reads `fed` tokens
    and computes logits for each: one token per step without drafts, otherwise the pending token and the drafts of every
    scored block.

    Args:
        config: the model's configuration.
        prompt: for each generation, the number of tokens that the decoder begins with.
        output: the number of generated tokens.
        fed: the number of tokens that the model reads after the prefill.
        encoded: the number of tokens that an encoder reads; `None` without an encoder.
    """
    prompt, output, fed = (np.asarray(count, np.float64) for count in (prompt, output, fed))
    if isinstance(config, T5Config):
        return _t5_flops(config, prompt, output, fed, np.asarray(encoded, np.float64))
    total = _decoder_flops(config, prompt, output, fed)
    if config.encoder is None:
        return total
    encoded = np.asarray(encoded, np.float64)
    return np.asarray(total + encoder_flops(config, encoded) + cross_flops(config, prompt - 1 + fed, encoded))


class TokenCosts(NamedTuple):
    """Numbers of operations of a model's matrix products; a product with a matrix `[m, n]` costs `2 m n` per token.

    Attributes:
        layer: a decoder layer, per token.
        attention: the scores and the weighted sum of one attention in one layer, per pair of a query and a key.
        logits: the output layer, per token.
        encoder_layer: an encoder layer, per token.
        cross: the keys and values of a decoder layer's cross-attention, per encoder token.
        queries: the queries and outputs of a T5Gemma layer's cross-attention, per decoder token. In a T5, `layer`
            includes them.
    """

    layer: int
    attention: int
    logits: int
    encoder_layer: int = 0
    cross: int = 0
    queries: int = 0


def token_costs(c: T5Config | DecoderConfig, number: int = 0) -> TokenCosts:
    """Returns the operations of a model's parts; in a decoder-only model, of the layer with the index `number`."""
    logits = 2 * c.d_model * c.num_embeddings
    if isinstance(c, DecoderConfig):
        sizes = c.layer(number)
        # The columns of the query and output kernels, and of the key and value kernels. The layer's additional input
        # has three more matrices: projection, gate and output.
        heads = 2 * c.num_heads + (len(sizes.projections) - 1) * sizes.kv_heads
        columns = sizes.head_dim * heads + 3 * (c.layer_input or 0)
        width = c.num_heads * sizes.head_dim
        cross = 0 if c.encoder is None else 4 * c.encoder.d_model * c.num_kv_heads * c.head_dim
        layer = 2 * c.d_model * columns + _feed_forward(c, number)
        queries = 4 * c.d_model * width if c.has_cross_attention else 0
        return TokenCosts(layer, 4 * width, logits, cross=cross, queries=queries)
    width = c.num_heads * c.head_dim
    attention = 4 * width
    projection, feed_forward = 2 * c.d_model * width, 2 * c.d_model * c.d_ff * (3 if c.gated else 2)
    # In a decoder layer, self-attention has 4 projections, and cross-attention 2 per token and 2 per encoder token.
    layer, encoder_layer = 6 * projection + feed_forward, 4 * projection + feed_forward
    return TokenCosts(layer, attention, logits, encoder_layer, 2 * projection)


def _feed_forward(c: DecoderConfig, number: int) -> int:
    """Returns the operations of a layer's feed-forward, per token."""
    dense = 6 * c.d_model * c.layer(number).d_ff  # gate, up and down
    if not c.sparse[number]:
        return dense
    # A layer with experts has a router, and a token uses only the experts that it chooses.
    experts = 2 * c.d_model * (c.num_experts + 3 * c.expert_d_ff * c.experts_per_token)
    return experts + dense if c.parallel(number) else experts


def _decoder_flops(c: DecoderConfig, prompt: np.ndarray, output: np.ndarray, fed: np.ndarray) -> np.ndarray:
    total: np.ndarray = token_costs(c).logits * fed
    for number, window in enumerate(c.windows):
        costs = token_costs(c, number)
        total = total + costs.layer * (prompt - 1 + fed)
        before, after = _keys(prompt - 1, window), _keys(prompt + output, window)
        total = total + costs.attention * (before + fed * (after - before) / (output + 1))
    return total


def encoder_flops(c: DecoderConfig, encoded: Any) -> Any:
    """Returns the operations of a T5Gemma's encoder for inputs of `encoded` tokens."""
    assert c.encoder is not None
    costs = token_costs(c.encoder)
    widest = [w if w is None or c.encoder.centered_window else 2 * w + 1 for w in c.encoder.windows]
    keys = sum(encoded if w is None else encoded.clip(max=w) for w in widest)
    return c.encoder.num_layers * costs.layer * encoded + costs.attention * encoded * keys


def cross_flops(c: DecoderConfig, read: Any, encoded: Any) -> Any:
    """Returns the operations of cross-attention in all layers, for `read` tokens of the decoder."""
    costs = token_costs(c)
    return c.num_layers * (costs.cross * encoded + costs.queries * read + costs.attention * read * encoded)


def _keys(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """Returns the sum of the numbers of keys that a sequence's first `tokens` tokens see, each at most `window`."""
    widest = tokens if window is None else np.minimum(tokens, window)
    return np.asarray(widest * (widest + 1) / 2 + (tokens - widest) * widest)


def _t5_flops(c: T5Config, prompt: np.ndarray, output: np.ndarray, fed: np.ndarray, encoded: np.ndarray) -> np.ndarray:
    costs, read = token_costs(c), prompt - 1 + fed
    encoder = costs.encoder_layer * encoded + costs.attention * encoded**2
    keys = (prompt - 1) * prompt / 2 + fed * (prompt + output / 2) + read * encoded
    decoder = costs.layer * read + costs.cross * encoded + costs.attention * keys
    return np.asarray(c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + costs.logits * fed)
