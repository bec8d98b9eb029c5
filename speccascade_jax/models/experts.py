"""Mixture-of-experts feed-forward: a router chooses a few of many gated feed-forwards (experts) for every token.

Sources: routing by softmax and top-k (Shazeer et al., 2017), experts of decoder-only models (Jiang et al., 2024; Qwen
Team, 2025). Every token gets all the experts that it chose: no expert has a capacity that drops tokens.

The least time of a call is the bytes that it reads, divided by the memory's bandwidth. Qwen 3 30B-A3B in bfloat16 at
batch 1 reads 6.1 GB for one token: 8 of 128 experts, attention and the output layer. At γ = 5 a call scores six tokens,
which choose about 41 different experts of a layer if they choose evenly and independently, and reads 21 GB: 6.3 ms on
an H100 (3.35 TB/s), 1.9 ms on four TPU v5p (2.77 TB/s each). All experts are 58 GB. So a loop over the experts that
any token chose reads each of them once, in place, and no others. It multiplies all tokens of a call by each of these
experts, which is free while a product takes less time than the read of its weights, up to about `FEW` tokens on
accelerators. Calls with more tokens group them by expert in blocks. `jax.lax.ragged_dot` computes the same, but on a
CPU it multiplies every token by every expert. A gather of each token's experts would write and read copies of them.

On a mesh, devices split the hidden units of every expert, as in a dense feed-forward. With whole experts spread over
devices, a few tokens would load some devices several times as much as others.

Shape letters: those of `core/types.py`, and here `X` is the number of experts, `k` the number that a token chooses,
`F` is expert_d_ff, `N` the number of tokens of all rows, and `E` is d_model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Packed, Params, is_packed
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.layers import RMSNorm
from speccascade_jax.models.products import by_xla, multiply, parameter
from speccascade_jax.models.sharding import P, gathered, local, summed
from speccascade_jax.models.stacks import InStack
from speccascade_jax.runtime.mesh import DATA, MODEL

FEW = 256
"""Largest number of tokens that are all multiplied by every chosen expert."""
BLOCK = 128
"""Number of tokens in a block of tokens that chose the same expert, if there are more than `FEW` tokens."""
EXPERTS = "experts"
"""Name of the kernels of a layer's experts, `mlp/experts/wo/kernel` `[X, F, E]`."""
MIXTURE = "mixture"
"""Name of a layer's mixture of experts if its `mlp` is a dense feed-forward (`DecoderConfig.parallel`)."""

Kernels = tuple[Any, ...]
"""The kernels of a layer's experts, `[X, …]` each: `wi_01` and `wo`, or `wi_0`, `wi_1` and `wo`."""


def in_place(params: Params, stack: Params, layer: Any) -> Params:
    """Returns the parameters of a layer with its experts' kernels replaced by their places in `stack`.

    A slice would copy the kernels of all experts before the loop over experts begins, so the loop slices the stack.
    """
    part = MIXTURE if MIXTURE in stack else "mlp"
    kernels = jax.tree.map(lambda kernel: InStack(kernel, jnp.asarray(layer, jnp.int32)), stack[part][EXPERTS])
    return {**params, part: {**params[part], EXPERTS: kernels}}


class Router(nn.Module):
    """Linear layer, in Gemma 4 with a norm before it, whose softmax gives the probability of each expert."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Returns the weights float32 and the indices int32 of the experts that each token chose, `[B, T, k]`."""
        c = self.config
        if c.parallel_experts:
            # The factor undoes the growth of the logits with the width.
            x = RMSNorm(c.norm_epsilon, c.dtype, c.norm_offset, name="norm")(x) * jnp.asarray(c.d_model**-0.5, x.dtype)
        # The parameter is not called "kernel", because kernels may be stored in 8 bits, which would change the choice.
        weight = self.param("weight", nn.initializers.lecun_normal(), (c.d_model, c.num_experts))
        weight = gathered(weight, c.dtype, self.path, "weight")
        weights, chosen = local(self._choose, (P(DATA), P()), (P(DATA), P(DATA)))(x, weight)
        return weights, chosen

    def _choose(self, x: Array, weight: Array) -> tuple[Array, Array]:
        # The logits stay float32, because in bfloat16 close ones would become equal.
        probabilities = jax.nn.softmax(multiply(x, weight, self.config.dtype), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, self.config.experts_per_token)
        if self.config.norm_expert_weights:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, chosen


class ExpertKernel(nn.Module):
    """Kernels of all experts, `[X, inputs, outputs]`."""

    shape: tuple[int, int, int]
    dtype: str

    @nn.compact
    def __call__(self) -> Any:
        """Returns the kernels: an array, or its place in a stack of layers."""
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        return gathered(parameter(self, "kernel", init, self.shape), self.dtype, self.path, "kernel")


class Experts(nn.Module):
    """Gated feed-forwards (experts); each token uses only the experts that it chose."""

    config: DecoderConfig

    def setup(self) -> None:
        """Declares the kernels; Flax creates only those that a call uses."""
        c = self.config
        into, out = (c.num_experts, c.d_model, c.expert_d_ff), (c.num_experts, c.expert_d_ff, c.d_model)
        self.wi_0, self.wi_1, self.wo = (ExpertKernel(shape, c.dtype) for shape in (into, into, out))
        self.wi_01 = ExpertKernel((*into[:2], 2 * c.expert_d_ff), c.dtype)

    def __call__(self, x: Array, weights: Array, chosen: Array, fixed: bool = False) -> Array:
        """Returns the weighted sums of the outputs of the chosen experts, `[B, T, E]`.

        Args:
            x: the experts' input, `[B, T, E]`.
            weights: float32 `[B, T, k]`, the factor of each chosen expert's output.
            chosen: int32 `[B, T, k]`, the indices of the chosen experts; those of one token are all different.
            fixed: whether no gradients are needed; the loop over experts has none.
        """
        fused = self.has_variable("params", "wi_01")
        kernels = ((self.wi_01(),) if fused else (self.wi_0(), self.wi_1())) + (self.wo(),)
        layouts = [_layout(kernel, P(None, None, MODEL)) for kernel in kernels[:-1]]
        layouts.append(_layout(kernels[-1], P(None, MODEL)))
        mix = local(partial(self._mix, fixed), (P(DATA),) * 3 + tuple(layouts), P(DATA))
        return mix(x, weights, chosen, *kernels).astype(self.config.dtype)

    def _mix(self, fixed: bool, x: Array, weights: Array, chosen: Array, *kernels: Any) -> Array:
        rows, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
        mixed = self._mix_by_block if len(rows) > FEW or not fixed else self._mix_by_expert
        # Each device has computed the sum over its part of the hidden units; `summed` adds up these partial sums.
        return summed(mixed(rows, weights, chosen, kernels, fixed)).reshape(x.shape)

    def _mix_by_expert(self, x: Array, weights: Array, chosen: Array, kernels: Kernels, _: bool) -> Array:
        """Returns the mixture float32 `[N, E]` by a loop over the chosen experts; each reads all tokens `[N, E]`."""
        picks = chosen[..., None] == jnp.arange(self.config.num_experts)
        # `picks` is [N, k, X]. `picked` and `factors` are [X, N], so that the loop takes one row of them per expert.
        picked = picks.any(1).T
        factors = jnp.where(picks, weights[..., None], 0.0).sum(1).T
        used = picked.any(1)
        # The indices of the used experts come first.
        order = jnp.argsort(~used, stable=True)

        def add(place: Array, total: Array) -> Array:
            number = order[place]
            outputs = factors[number][:, None] * self._outputs(x, kernels, number)
            # An expert that a token did not choose must not change it, even if its output is infinite.
            return total + jnp.where(picked[number][:, None], outputs, 0.0)

        total: Array = jax.lax.fori_loop(0, used.sum(dtype=jnp.int32), add, jnp.zeros(x.shape, jnp.float32))
        return total

    def _mix_by_block(self, x: Array, weights: Array, chosen: Array, kernels: Kernels, fixed: bool) -> Array:
        """Returns the mixture float32 `[N, E]` by products of blocks of tokens that chose the same expert.

        If gradients are needed, one batched product multiplies all blocks by copies of their experts' kernels.
        """
        blocks = Blocks.of(chosen, self.config.num_experts, min(BLOCK, len(x)))
        factors = blocks.take(weights.reshape(-1, 1), blocks.assigned)

        def outputs(block: Array) -> Array:
            rows = blocks.take(x, blocks.tokens[block])
            return factors[block] * self._outputs(rows, kernels, blocks.experts[block])

        def add(block: Array, total: Array) -> Array:
            return total.at[blocks.tokens[block]].add(outputs(block), mode="drop")

        total = jnp.zeros(x.shape, jnp.float32)
        if fixed:
            mixed: Array = jax.lax.fori_loop(0, blocks.filled, add, total)
            return mixed
        return total.at[blocks.tokens].add(jax.vmap(outputs)(jnp.arange(len(blocks.tokens))), mode="drop")

    def _outputs(self, rows: Array, kernels: Kernels, number: Array) -> Array:
        """Returns one expert's outputs for `rows` `[R, E]`, float32; on a mesh, the sums over the device's units."""
        c = self.config
        *inner, outer = (_kernel_of(kernel, number) for kernel in kernels)
        units = [_product(rows, kernel, c.dtype).astype(c.dtype) for kernel in inner]
        gate, linear = jnp.split(units[0], 2, axis=-1) if len(units) == 1 else units
        return _product(activation(c)(gate) * linear, outer, c.dtype)


class Blocks(NamedTuple):
    """Blocks of `R` tokens that chose the same expert.

    Shapes are static, so there are as many blocks as any choice of experts could need; some may be empty or part empty.

    Attributes:
        assigned: int32 `[blocks, R]`, indices of choices in the flattened `chosen` `[N * k]`; `N * k` marks an empty
            place of a block.
        tokens: int32 `[blocks, R]`, the tokens that made these choices; `N` marks an empty place.
        experts: int32 `[blocks]`, the expert of each block.
        filled: int32, the number of blocks that are not empty; they come first.
    """

    assigned: Array
    tokens: Array
    experts: Array
    filled: Array

    @classmethod
    def of(cls, chosen: Array, experts: int, size: int) -> "Blocks":
        """Returns the blocks of `size` tokens for the choices `[N, k]` among `experts` experts."""
        choices = chosen.reshape(-1)
        counts = jnp.bincount(choices, length=experts).astype(jnp.int32)
        ends = jnp.cumsum(-(-counts // size))
        # Choices of the same expert follow each other in `order`; an expert's first block begins at a new slot.
        order = jnp.argsort(choices, stable=True).astype(jnp.int32)
        expert = choices[order]
        rank = jnp.arange(len(choices)) - (jnp.cumsum(counts) - counts)[expert]
        # `counts // -size` is minus the number of an expert's blocks, so the sum is the number of its first block.
        slots = (ends + counts // -size)[expert] * size + rank
        # Each chosen expert has at most one block that is not full.
        most = min(experts, len(choices)) + len(choices) // size
        assigned = jnp.full(most * size, len(choices), jnp.int32).at[slots].set(order).reshape(most, size)
        # An expert without tokens ends where the expert before it does, and `right` passes over it. Blocks after the
        # last end have no expert. They get the last one, but all their places are empty.
        by_block = jnp.searchsorted(ends, jnp.arange(most), side="right")
        # The division turns the mark of empty places, the number of choices, into the number of tokens, which is out of
        # range too: reads there give zeros, and writes are dropped.
        return cls(assigned, assigned // chosen.shape[1], jnp.minimum(by_block, experts - 1), ends[-1])

    @staticmethod
    def take(values: Array, places: Array) -> Array:
        """Returns the rows of `values` at `places`; zeros for the empty places of a block."""
        rows: Array = values.at[places].get(mode="fill", fill_value=0)
        return rows


def activation(config: DecoderConfig) -> Callable[[Array], Array]:
    """Returns the function of a feed-forward's gate: GELU's tanh approximation, or SiLU."""
    return nn.gelu if config.activation == "gelu" else nn.silu


def _layout(kernel: Any, spec: P) -> Any:
    """Returns the layout of kernels on a mesh; for kernels in a stack, the layouts of the stack and the layer index."""
    return InStack(P(None, *spec), P()) if isinstance(kernel, InStack) else spec


def _kernel_of(kernel: Any, number: Array) -> Array | Packed:
    """Returns the kernel of one expert."""
    if is_packed(kernel):
        scales = kernel.scales.reshape(len(kernel.panels), -1)
        panel, scale = (jax.lax.dynamic_index_in_dim(part, number) for part in (kernel.panels, scales))
        return Packed(panel, scale[0], scale.shape[1])
    if not isinstance(kernel, InStack):
        return jnp.asarray(jax.lax.dynamic_index_in_dim(kernel, number, keepdims=False))
    zero = jnp.zeros((), jnp.int32)
    start = (kernel.layer, number.astype(jnp.int32), zero, zero)
    part: Array = jax.lax.dynamic_slice(kernel.stack, start, (1, 1, *kernel.stack.shape[2:]))[0, 0]
    return part


def _product(rows: Array, kernel: Array | Packed, dtype: str) -> Array:
    """Returns the float32 product of `rows` `[R, K]` with an expert's kernel `[K, N]`."""
    # An expert's 8-bit kernel is one panel of any width, which the CPU code cannot multiply.
    return by_xla(rows, kernel) if isinstance(kernel, Packed) else multiply(rows, kernel, dtype)


class Factors(nn.Module):
    """Stored factors of the experts' outputs, one for each expert."""

    experts: int

    @nn.compact
    def __call__(self, weights: Array, chosen: Array) -> Array:
        """Returns the weights float32 `[B, T, k]` times the factors of the chosen experts."""
        # The router divided the weights by their sum before, so that these products need not sum to 1.
        scale = self.param("scale", nn.initializers.ones_init(), (self.experts,))
        return weights * scale.astype(jnp.float32)[chosen]


class MixtureOfExperts(nn.Module):
    """Feed-forward in which a router chooses `experts_per_token` of `num_experts` experts for every token."""

    config: DecoderConfig

    def setup(self) -> None:
        """Creates the router and the experts."""
        self.router, self.experts = Router(self.config), Experts(self.config)
        if self.config.parallel_experts:
            self.factors = Factors(self.config.num_experts)

    def __call__(self, x: Array, fixed: bool = False, state: Array | None = None) -> Array:
        """Returns the layer's output for `x`, both `[B, T, E]`.

        Args:
            x: the experts' input.
            fixed: whether no gradients are needed.
            state: the router's input; `None`: that of the experts.
        """
        weights, chosen = self.router(x if state is None else state)
        if self.config.parallel_experts:
            weights = self.factors(weights, chosen)
        return self.experts(x, weights, chosen, fixed)
