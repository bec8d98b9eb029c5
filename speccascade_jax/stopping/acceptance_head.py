"""The acceptance head of SpecDec++: will the target keep the token that the draft has just been fed?

The head reads the draft's final hidden state `e_i` of token `y_i`; `sigmoid` of what it gives is
`P(y_i kept | all before it kept)` (paper 3, section 3.2 and eq. 3.1; METHODS section 6). Its parameters are a nested
dict, named as flax names them: `{"block_0": {"kernel" [D, D], "bias" [D]}, …, "out": {"kernel" [D], "bias" []}}`.

A head may read two numbers more than the paper's: `log max q` of the law that `y_i` was drawn from, and `log q̃(y_i)`
(`with_law`). They cost next to nothing, for the drafter has them, and a shallow decoder's `e_i`, which is computed from
the tokens up to `y_i`, need not know what was thought likely in `y_i`'s place.
"""

import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import full_precision
from speccascade_jax.core.types import Array, Params

_LAW = 2  # numbers of the law behind the state
_LEAST = 1e-6  # a smaller probability is no surer sign of a rejection


def initial(key: Array, features: int, depth: int, law: bool = False) -> Params:
    """Fresh float32 parameters: blocks that change nothing yet, and a linear unit that says next to nothing.

    Raises:
        ValueError: a negative depth.
    """
    if depth < 0:
        raise ValueError(f"depth={depth} is negative: 0 is a linear head")
    features += _LAW if law else 0

    def block() -> Params:
        return {"kernel": jnp.zeros((features, features)), "bias": jnp.zeros((features,))}

    out = {"kernel": jax.random.normal(key, (features,)) / features, "bias": jnp.zeros(())}
    return {f"block_{n}": block() for n in range(depth)} | {"out": out}


def depth(params: Params) -> int:
    """How many residual blocks the parameters are."""
    return len(params) - 1


def with_law(hidden: Array, max_q: Array, drawn: Array) -> Array:
    """Everything that a head may read of tokens, float32 `[..., D + 2]`.

    Args:
        hidden: `[..., D]`, the states `e_i`; max_q: `[...]`, of the raw law that `y_i` was drawn from; drawn: `[...]`,
            the probability `q̃(y_i)` it was drawn with.
    """
    logs = [jnp.log(jnp.maximum(jnp.asarray(x, jnp.float32), _LEAST)) for x in (max_q, drawn)]
    return jnp.concatenate([hidden.astype(jnp.float32), jnp.stack(logs, axis=-1)], axis=-1)


def reads_law(params: Params, features: int) -> bool:
    """Whether a head reads more than the `features` of a hidden state."""
    return bool(params["out"]["kernel"].shape[0] > features)


def logits(params: Params, inputs: Array) -> Array:
    """float32 `[...]` of `inputs` `[..., D]`: `x + SiLU(W x + b)` block by block, then one linear unit.

    Of `with_law`'s inputs a head that was trained on states alone reads these alone.
    """
    x = inputs.astype(jnp.float32)[..., : params["out"]["kernel"].shape[0]]
    with full_precision("float32"):
        for n in range(depth(params)):
            block = params[f"block_{n}"]
            x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
        scores: Array = x @ params["out"]["kernel"] + params["out"]["bias"]
        return scores


def weighted_bce(logits: Array, kept: Array, counted: Array, w_rej: float, w_acc: float = 1.0) -> Array:
    """Mean of `−[w_acc P log P̂ + w_rej (1 − P) log(1 − P̂)]` over counted positions (paper 3, section 3.3).

    Args:
        logits: `[...]`, of `P̂`; kept: float32 `[...]`, `P`; counted: bool `[...]`.
    """
    losses = -(w_acc * kept * jax.nn.log_sigmoid(logits) + w_rej * (1.0 - kept) * jax.nn.log_sigmoid(-logits))
    return jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)
