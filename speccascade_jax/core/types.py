"""Data types that the subpackages pass to each other.

Shape letters have the same meaning in all files: `B` rows, `P` prompt tokens, `N` encoder tokens, `T` tokens fed in one
call, `S` cache slots, `L` length of the token buffer (before `D`: number of layers), `G` longest block (static), `V`
vocabulary, `D` features. Annotations use these letters in jaxtyping's notation; `#V` means `V`, or 1 if nothing is
drafted. `tests/core/types_test.py` compares the annotations with the engine's arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32

Array = jax.Array
PyTree = Any
Cache = Any
Params = Any


DTYPES = ("float32", "bfloat16", "float16", "int8")
"""The dtypes that parameters may be loaded in; int8 matrices have one scale per column."""
STORED = "stored"
"""The value of the setting `draft_dtype` that loads a draft in its checkpoint's dtype, if this is as exact and fast."""


@flax.struct.dataclass
class Packed:
    """A parameter matrix `[K, N]` that is stored in panels of `P` columns, with 32, 16 or 8 bits per entry.

    It replaces an ordinary array among a model's parameters. A CPU that multiplies a few rows by the matrix reads
    panels at full memory bandwidth.

    Attributes:
        panels: `[ceil(N / P), K, P]`; panel `c // P` contains column `c`, and the last panel is padded with zeros;
            float32, float16, bfloat16 or int8.
        scales: float32 `[ceil(N / P) * P]`, the factor of each int8 column; `None` for the other types.
        columns: `N` (static).
        turned: whether the parameter is the transpose of the matrix, as for an embedding that also computes the logits
            (static).
        stacked: whether every panel is a separate matrix `[K, P]`, as for the experts of a mixture; the parameter then
            has the shape of `panels`, and `N` counts the columns of all matrices (static).
    """

    panels: jax.Array
    scales: jax.Array | None
    columns: int = flax.struct.field(pytree_node=False)
    turned: bool = flax.struct.field(pytree_node=False, default=False)
    stacked: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape: `(K, N)`, or `(N, K)` if `turned`."""
        if self.stacked:
            return tuple(self.panels.shape)
        shape = (self.panels.shape[1], self.columns)
        return shape[::-1] if self.turned else shape

    @property
    def size(self) -> int:
        """The number of entries of the matrix."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The type that the entries are stored in."""
        return self.panels.dtype

    def rows(self, taken: jax.Array) -> jax.Array:
        """Returns the matrix columns with indices `taken` (int32, any shape) in float32; used for embedding rows."""
        # Indexing by panel and column gathers only the requested columns; a transpose would copy the whole matrix.
        width = self.panels.shape[2]
        columns = self.panels[taken // width, :, taken % width].astype(jnp.float32)
        return columns if self.scales is None else columns * self.scales[taken][..., None]

    def dense(self) -> np.ndarray:
        """Returns the parameter as an ordinary matrix on the host, without multiplying int8 numbers by their scales."""
        panels = np.asarray(self.panels)
        if self.stacked:
            return panels
        matrix = panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)[:, : self.columns]
        # The last panel is padded with zero columns; they are cut off before the transpose.
        return matrix.T if self.turned else matrix

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the parameter as an ordinary matrix: `dense()`, multiplied by the scales if there are any."""
        dense = self.dense()
        if self.scales is not None:
            scales = np.asarray(self.scales)[: self.columns]
            if self.stacked:
                scales = scales.reshape(len(dense), 1, -1)
            dense = dense.astype(np.float32) * (scales[:, None] if self.turned else scales)
        return dense if dtype is None else dense.astype(dtype)


def is_packed(leaf: Any) -> bool:
    """Returns whether a leaf is a `Packed` matrix; as `is_leaf` of `jax.tree` functions, it makes `Packed` a leaf."""
    return isinstance(leaf, Packed)


def count(params: Params) -> int:
    """Returns how many numbers a model's parameters hold."""
    return sum(leaf.size if is_packed(leaf) else np.size(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))


@flax.struct.dataclass
class Prompt:
    """The right-padded token ids from which a generation starts.

    Attributes:
        tokens: int32 `[B, P]`, the decoder's context: the prompt of a decoder-only model, the single
            start token of an encoder-decoder.
        length: int32 `[B]`, how many of `tokens` are not padding; at least 1.
        encoder_tokens: int32 `[B, N]`, the encoder's input, 0 where padded; `None` without an encoder.
        encoder_length: int32 `[B]`, how many of `encoder_tokens` are not padding; `None` means all up to the last
            nonzero id.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Prompt
        >>> prompt = Prompt(tokens=np.array([[5, 7], [4, 0]]), length=np.array([2, 1]))
        >>> [row[:length].tolist() for row, length in zip(prompt.tokens, prompt.length)]
        [[5, 7], [4]]
    """

    tokens: Int32[Array, "B P"]
    length: Int32[Array, " B"]
    encoder_tokens: Int32[Array, "B N"] | None = None
    encoder_length: Int32[Array, " B"] | None = None

    @property
    def encoder_real(self) -> Array:
        """The mask `[B, N]` of encoder tokens that are not padding; an id 0 inside a prompt is not padding."""
        assert self.encoder_tokens is not None
        if self.encoder_length is None:
            return real_tokens(self.encoder_tokens)
        return jnp.arange(self.encoder_tokens.shape[1])[None] < self.encoder_length[:, None]


def real_tokens(padded: Array) -> Array:
    """Returns the mask `[B, N]` of ids that are not padding: all ids of a row up to its last nonzero one."""
    return jnp.cumsum(padded[:, ::-1] != 0, axis=1)[:, ::-1] > 0


class LMOutput(NamedTuple):
    """A model's output for the tokens that it is fed.

    Attributes:
        logits: `[B, T, V]`, before temperature, top-k and top-p; padding entries of the vocabulary are -inf.
        hidden: `[B, T, D]`, the final hidden states, from which the logits are computed; `None` if the model returns
            none.
        layer_states: `[B, T, L, D]`, the hidden states after the `L` layers that the caller named
            (`core.protocols.LayeredModel`); `None` if the caller named no layers.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> bound = sc.TableLM([[0.0, 1.0], [2.0, 0.0]])
        >>> output, _ = bound.model.extend(bound.params, np.array([0]), np.array([[1, 0, 1]]))
        >>> output.logits.shape, output.logits[0].argmax(-1).tolist(), output.layer_states
        ((1, 3, 2), [0, 1, 0], None)
    """

    logits: Float[Array, "B T V"]
    hidden: Float[Array, "B T D"] | None = None
    layer_states: Float[Array, "B T L D"] | None = None


@flax.struct.dataclass
class BoundModel:
    """A model together with its parameters, as the public functions take it.

    Attributes:
        params: a pytree of arrays.
        model: a `core.protocols.LanguageModel`, static under jit.

    Examples:
        >>> import speccascade_jax as sc
        >>> bound = sc.TableLM([[0.0, 1.0], [2.0, 0.0]])
        >>> bound
        BoundModel(Table, 4 parameters)
        >>> bound.model.vocab_size, bound.params.shape
        (2, (2, 2))
    """

    params: Params
    model: Any = flax.struct.field(pytree_node=False)

    def __repr__(self) -> str:
        """Returns the model's class and the number of its parameters, without their values."""
        return f"BoundModel({type(self.model).__name__}, {count(self.params):,} parameters)"


@flax.struct.dataclass
class LawPair:
    """The draft's and the target's distributions at a position, which a rule may read (docs/methods.md, section 1).

    Attributes:
        q, p: float32 `[..., V]`, the raw distributions of draft and target: softmax of the logits at temperature 1,
            nothing truncated. Most rules decide from them.
        q_tilde, p_tilde: float32 `[..., V]`, the scaled distributions that tokens are drawn from.
        greedy: bool `[..., 1]`, whether the draft is decoded greedily; the rule `bild_star` reads it.
        logs: the logs of the four distributions, computed from logits, or `None`; see `log`.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import LawPair
        >>> q, p = np.array([[0.5, 0.5]]), np.array([[0.25, 0.75]])
        >>> greedy_draft = np.array([[1.0, 0.0]])  # at temperature 0, q̃ is a one-hot
        >>> pair = LawPair(q=q, p=p, q_tilde=greedy_draft, p_tilde=p, greedy=np.array([[True]]))
        >>> divergence = (pair.q * (pair.log("q") - pair.log("p"))).sum(-1)  # KL(q ‖ p) in nats
        >>> round(float(divergence[0]), 3)
        0.144
    """

    q: Float32[Array, "*positions #V"]
    p: Float32[Array, "*positions V"]
    q_tilde: Float32[Array, "*positions #V"]
    p_tilde: Float32[Array, "*positions V"]
    greedy: Bool[Array, "*positions 1"]
    logs: LogPair | None = None

    def log(self, name: str) -> Array:
        """Returns the log of the named distribution, float32 `[..., V]`; -inf only if the probability is truly 0.

        A float32 probability is already 0 where a logit is 87 below the largest. If the rule sets `Rule.reads_logs`,
        the draft's logs are exact even there. For other rules, and for a `LawPair` without `logs`, they are the logs of
        the float32 probabilities.
        """
        if self.logs is None:
            return jax.numpy.log(getattr(self, name))
        logs: Array = getattr(self.logs, name)
        return logs


@flax.struct.dataclass
class LogPair:
    """The logs of the four distributions of a `LawPair`, float32 `[..., V]` each."""

    q: Float32[Array, "*positions #V"]
    p: Float32[Array, "*positions V"]
    q_tilde: Float32[Array, "*positions #V"]
    p_tilde: Float32[Array, "*positions V"]


@flax.struct.dataclass
class Sampling:
    """The settings of the sampling transform `S`: three float32 arrays `[B]` with one number per row.

    `temperature` 0 means greedy decoding; `top_k` 0 and `top_p` 1 change nothing.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Sampling
        >>> sampling = Sampling(temperature=np.float32([0, 1]), top_p=np.ones(2, "f"), top_k=np.zeros(2, "f"))
        >>> print(sampling.temperature <= 0)  # which rows are greedy
        [ True False]
    """

    temperature: Float32[Array, " B"]
    top_p: Float32[Array, " B"]
    top_k: Float32[Array, " B"]


@flax.struct.dataclass
class Controls:
    """The numbers that experiments vary, float32 `[B]` each; they are traced, so changing one never recompiles.

    Attributes:
        alpha: the rule's trade-off parameter.
        stop_threshold: the stop policy's threshold (for `Confidence`, the α_f of BiLD).
        draft, target: the settings of the sampling transforms `S_d` and `S_t`.
        inner: the controls of each engine that drafts for this one, nested as those engines are.
        rule: int32 `[B]`, the index of the rule to use, the same in all rows, if the compiled program contains several
            rules (`rules.one_of`); `None` if it contains one rule.

    Examples:
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import Settings
        >>> settings = Settings(method="chow", alpha=[0.2, 0.8], temperature=1.0, draft_temperature=0.0)
        >>> controls = sc.METHODS["chow"].controls(settings, 2)
        >>> print(controls.alpha, controls.target.temperature, controls.draft.temperature)
        [0.2 0.8] [1. 1.] [0. 0.]
    """

    alpha: Float32[Array, " B"]
    stop_threshold: Float32[Array, " B"]
    draft: Sampling
    target: Sampling
    inner: tuple[Controls, ...] = ()
    rule: Int32[Array, " B"] | None = None


@flax.struct.dataclass
class Laws:
    """Buffers for a block's draft distributions, float32 `[B, G + 1, V]` each (`[B, 1, 1]` if nothing is drafted).

    The buffers are carried from round to round and written in place, so no round has to fill them with zeros. Entries
    that the current round did not write are meaningless.

    Attributes:
        q, q_tilde: the raw and the scaled distributions.
        logs: the logs of `q` and `q_tilde` if the rule reads them (`Rule.reads_logs`), otherwise `None`.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Draft, Laws  # a drafter gives the logs as a second `Laws`
        >>> q, none = np.float32([[[0.25, 0.75]] * 2]), np.zeros(1, np.int32)
        >>> names = {"q": q, "q_tilde": q, "greedy": none == 1, "steps": none, "bad": np.zeros((1, 2), bool)}
        >>> draft = Draft(np.int32([[1]]), none + 1, **names, logs=Laws(np.log(q), np.log(q)))
        >>> draft.laws.logs is draft.logs
        True
    """

    q: Float32[Array, "B places V"]
    q_tilde: Float32[Array, "B places V"]
    logs: Laws | None = None


@flax.struct.dataclass
class LogitLaws:
    """Distributions as logits and the numbers that turn them into probabilities (`core.logit_laws`).

    As buffers of a block they are `[B, G + 1, V]` and `[B, G + 1, 6]`, and replace `Laws`.

    Attributes:
        logits: float32 `[..., V]`.
        numbers: float32 `[..., 6]`, one `core.logit_laws.Numbers` per position.
    """

    logits: Float32[Array, "*positions V"]
    numbers: Float32[Array, "*positions 6"]


@flax.struct.dataclass
class Draft:
    """A block of drafted tokens and their distributions, as a drafter returns it.

    Attributes:
        tokens: int32 `[B, G]`; entries at or beyond `length` are meaningless.
        length: int32 `[B]`, the number of drafted tokens; 0 is allowed.
        q, q_tilde: float32 `[B, G + 1, V]`. `q_tilde[:, j]` is *the array from which token `j` was drawn*, and
            acceptance divides by it: for a greedy draft it is a one-hot, although `q` is not. Entry `length` is the
            distribution at the bonus position; it is valid if it was requested and `lawful` is true.
        greedy: bool `[B]`, whether the tokens were chosen greedily.
        steps: int32 `[B]`, forward passes of the draft model that this row needed.
        bad: bool `[B, G + 1]`, the entries at which the draft's logits were not finite.
        lawful: bool `[B]`, whether entry `length` contains a distribution if one was requested. A drafter without a
            model has none; the bonus token then comes from `p̃`. `None` means true in every row.
        logs: the logs of `q` and `q_tilde`, exact where float32 cannot hold the probabilities, for rules that read them
            (`Request.block` then has room for them). `None` means the logs of the stored `q` and `q_tilde`.
        arm: int32 `[B]`, the index of the drafter that wrote the row's block, if there are several drafters with
            different rules (`rules.verification.ByArm`). `None`: all rows have the same rule.
        stop: float32 `[B, G + 1]`, the number that the stop policy compared with its threshold at each slot, NaN where
            the policy was not called. Only traces show it. `None`: no policy compared a number, or the drafter belongs
            to an inner engine.
        spent: int32 `[B]`, how many tokens were drafted, if that is more than `length`. In a tree of drafts
            (`core.trees`), `length` is the length of a path, `tokens` contains all nodes, and entry `n + 1` of the
            distributions is the one after node `n`.
        logits: the distributions as logits (`core.logit_laws`); until the block is verified, `q` and `q_tilde` are then
            placeholders `[B, 1, 1]`. `None` if `q` and `q_tilde` hold the distributions.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Draft
        >>> one_hot = np.array([[[0.0, 1.0], [1.0, 0.0]]])  # [B, G + 1, V]: token 1, then the bonus position
        >>> none, bad = np.array([0]), np.zeros((1, 2), bool)
        >>> draft = Draft(np.array([[1]]), none + 1, one_hot, one_hot, greedy=none == 0, steps=none, bad=bad)
        >>> draft.tokens.shape, draft.length.tolist(), draft.q_tilde.shape
        ((1, 1), [1], (1, 2, 2))
    """

    tokens: Int32[Array, "B G"]
    length: Int32[Array, " B"]
    q: Float32[Array, "B G+1 #V"]
    q_tilde: Float32[Array, "B G+1 #V"]
    greedy: Bool[Array, " B"]
    steps: Int32[Array, " B"]
    bad: Bool[Array, "B G+1"]
    lawful: Bool[Array, " B"] | None = None
    logs: Laws | None = None
    arm: Int32[Array, " B"] | None = None
    stop: Float32[Array, "B G+1"] | None = None
    spent: Int32[Array, " B"] | None = None
    logits: LogitLaws | None = None

    @property
    def laws(self) -> Laws:
        """The buffers that hold the block's distributions; the next round reuses them."""
        # buffers of logits (`LogitLaws`) are only passed to `ModelDrafter` and the engine, which handle both types
        return Laws(self.q, self.q_tilde, self.logs) if self.logits is None else cast(Laws, self.logits)


@flax.struct.dataclass
class Round:
    """The record of one round; rows that had already ended have `num_new = 0`.

    Attributes:
        start: int32 `[B]`, the row's length when the round began.
        active: bool `[B]`, whether the row still generates.
        draft: the drafted block.
        num_kept: int32 `[B]`, the number of accepted draft tokens.
        rejected: bool `[B]`, whether a draft token was rejected.
        examined: int32 `[B]`, how many draft tokens were examined: those up to the first rejected one, or the whole
            block if it is verified jointly (`Verifier.joint`).
        tokens: int32 `[B, G + 1]`; the first `num_new` are committed.
        num_new: int32 `[B]`, committed tokens.
        source: int32 `[B, G + 1]`, the source of each committed token, an index into `core.names.SOURCES`.
        pair: the draft's and the target's distributions at each position, with arrays `[B, G + 1, V]`.
        law: float32 `[B, G + 1, V]`, the distribution of each committed token given its prefix.
        unverified: bool `[B]`, whether the block was committed without the target (`Engine.verify_final`).
        eta: float32 `[B, G + 1]`, `Σ r q̃`, the probability that a drafted token is deferred to the target; 0 if the
            rule has no deferral.
        deferred: float32 `[B, G]`, the deferral `r` of each draft token; 0 if the rule has no deferral.

    If the drafter's blocks vary in length, `pair`, `law` and `eta` are zero at positions that the target did not score
    (`engine.scoring`).
    """

    start: Int32[Array, " B"]
    active: Bool[Array, " B"]
    draft: Draft
    num_kept: Int32[Array, " B"]
    rejected: Bool[Array, " B"]
    examined: Int32[Array, " B"]
    tokens: Int32[Array, "B G+1"]
    num_new: Int32[Array, " B"]
    source: Int32[Array, "B G+1"]
    pair: LawPair
    law: Float32[Array, "B G+1 V"]
    unverified: Bool[Array, " B"]
    eta: Float32[Array, "B G+1"]
    deferred: Float32[Array, "B G"]
