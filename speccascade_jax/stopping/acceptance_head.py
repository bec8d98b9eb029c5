"""The acceptance head of SpecDec++, which predicts whether the target will keep the token just fed to the draft.

The head reads the draft's final hidden state `e_i` of token `y_i`. The `sigmoid` of its output is
`P(y_i kept | all tokens before y_i kept)` (Huang et al., 2024 (SpecDec++), section 3.2 and eq. 3.1; docs/methods.md,
section 6). Its parameters are a nested dictionary, named as flax names them:
`{"block_0": {"kernel" [D, D], "bias" [D]}, …, "out": {"kernel" [D], "bias" []}}`.

In addition to the paper's input, a head may read two numbers: `log max q` of the distribution that `y_i` was drawn
from, and `log q̃(y_i)` (`with_law`). They cost almost nothing, because the drafter has computed them. They can help
because the state `e_i` of a shallow decoder may not show how likely `y_i` was.
"""

import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import full_precision
from speccascade_jax.core.types import Array, Params

_LAW = 2  # the number of inputs that describe the distribution; they follow the hidden state
_LEAST = 1e-6  # the least probability; smaller ones are raised to it, because they predict a rejection no better


def initial(key: Array, features: int, depth: int, law: bool = False) -> Params:
    """Returns initial float32 parameters: residual blocks of zeros, and a linear unit whose output is near 0.

    Raises:
        ValueError: `depth` is negative.
    """
    if depth < 0:
        raise ValueError(f"depth={depth} is negative: give 0 for a linear head")
    features += _LAW if law else 0

    def block() -> Params:
        return {"kernel": jnp.zeros((features, features)), "bias": jnp.zeros((features,))}

    out = {"kernel": jax.random.normal(key, (features,)) / features, "bias": jnp.zeros(())}
    return {f"block_{n}": block() for n in range(depth)} | {"out": out}


def depth(params: Params) -> int:
    """Returns the number of residual blocks of a head with these parameters."""
    return len(params) - 1


def with_law(hidden: Array, max_q: Array, drawn: Array) -> Array:
    """Returns the inputs of a head that also reads two numbers about the distribution, float32 `[..., D + 2]`.

    Args:
        hidden: `[..., D]`, the states `e_i`.
        max_q: `[...]`, the maximum of the raw distribution that `y_i` was drawn from.
        drawn: `[...]`, the probability `q̃(y_i)` with which `y_i` was drawn.
    """
    logs = [jnp.log(jnp.maximum(jnp.asarray(x, jnp.float32), _LEAST)) for x in (max_q, drawn)]
    return jnp.concatenate([hidden.astype(jnp.float32), jnp.stack(logs, axis=-1)], axis=-1)


def reads_law(params: Params, features: int) -> bool:
    """Returns whether a head also reads the numbers of `with_law`, that is, more than `features` inputs."""
    return bool(params["out"]["kernel"].shape[0] > features)


def logits(params: Params, inputs: Array) -> Array:
    """Computes the head's logits, float32 `[...]`: `x + SiLU(W x + b)` block by block, then one linear unit.

    A head that was trained on states alone ignores the two numbers that `with_law` appends.
    """
    x = inputs.astype(jnp.float32)[..., : params["out"]["kernel"].shape[0]]
    with full_precision("float32"):
        for n in range(depth(params)):
            block = params[f"block_{n}"]
            x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
        scores: Array = x @ params["out"]["kernel"] + params["out"]["bias"]
        return scores


def weighted_bce(logits: Array, kept: Array, counted: Array, w_rej: float, w_acc: float = 1.0) -> Array:
    """Returns the mean of `−[w_acc P log P̂ + w_rej (1 − P) log(1 − P̂)]` over counted positions.

    Source: Huang et al., 2024 (SpecDec++), section 3.3.

    Args:
        logits: `[...]`, the logits of `P̂`.
        kept: float32 `[...]`, `P`.
        counted: bool `[...]`, the positions to average over.
        w_rej: the weight of rejections.
        w_acc: the weight of acceptances.
    """
    losses = -(w_acc * kept * jax.nn.log_sigmoid(logits) + w_rej * (1.0 - kept) * jax.nn.log_sigmoid(-logits))
    return jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)
