"""Distributions of draft and target that are stored as logits; probabilities are computed only where they are read.

Programs on TPUs use this form. A probability follows from a logit and a few numbers per position, such as the maximum
of the logits and the sum of their exponentials. So a round stores the logits of a block once, and no probabilities.
Verification then computes a few probabilities at each position, and all of them at one position. If a rule reads all
probabilities of every position, XLA computes them in the same pass as the rule. The logits include the vocabulary's
padding, and `LogitPair.whole` cuts it off, so a rule sees only real tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.sampling import argmax, expand, first_with_mass, is_identity, keep_largest
from speccascade_jax.core.types import Array, Controls, LawPair, LogitLaws, LogPair, Sampling


class Numbers(NamedTuple):
    """The numbers that turn logits `x` into a distribution, float32 `[..., 1]` each.

    Attributes:
        peak: the largest logit.
        total: the sum of the weights `exp((x - peak) * cool)` of the entries that top-k and top-p keep.
        cool: 1 / temperature; 1 in greedy rows.
        choice: the token of a greedy row, -1 in other rows.
        lowest, last: the smallest kept logit, and the last index at which an equal logit is kept (top-k, top-p).
    """

    peak: Array
    total: Array
    cool: Array
    choice: Array
    lowest: Array
    last: Array


COUNT = len(Numbers._fields)
TILES = (512, 256, 128)
"""Possible widths of tiles, in vocabulary entries; drawing a token first finds its tile, then its place in the tile.

The widest suitable width is chosen, because wide tiles need fewer sums across the lanes of a TPU's registers.
"""


def blank(rows: int, places: int, vocab_size: int) -> LogitLaws:
    """Returns zeroed buffers for the logits of a block, with `places` positions."""
    return LogitLaws(*(jnp.zeros((rows, places, size), jnp.float32) for size in (vocab_size, COUNT)))


def of_logits(logits: Array, sampling: Sampling) -> LogitLaws:
    """Returns the distributions of logits `[B, ..., V]` under the transform `S` (`core.sampling.transform`)."""
    logits = logits.astype(jnp.float32)
    peak = logits.max(-1, keepdims=True)

    def identity(x: Array) -> Array:
        return _packed(peak, x.shape[-1], total=jnp.exp(x - peak).sum(-1, keepdims=True))

    def greedy(x: Array) -> Array:
        return _packed(peak, x.shape[-1], choice=_top(x))

    return LogitLaws(logits, _switch(sampling, (identity, greedy, partial(_mixed, peak, sampling)), logits))


def drawn(logits: Array, sampling: Sampling, uniform: Array) -> tuple[LogitLaws, Array]:
    """Returns the distributions of logits `[B, V]`, and one token drawn from each, int32 `[B]`.

    With the same random numbers `uniform` `[B]`, `core.sampling.sample` draws the same tokens. One pass over the logits
    computes the mass of every tile, and from these masses the sum that normalises the distribution.
    """
    logits = logits.astype(jnp.float32)
    peak = logits.max(-1, keepdims=True)

    def identity(x: Array) -> tuple[Array, Array]:
        sums = _cumulative(jnp.exp(x - peak))
        token = _search(x, sums, uniform, lambda tile, _: jnp.exp(tile - peak))
        # the last cumulative sum is the total; if the tiles were summed once more, XLA would read all entries again
        return _packed(peak, x.shape[-1], total=sums.upto[:, -1:]), token

    def greedy(x: Array) -> tuple[Array, Array]:
        top = _top(x)
        return _packed(peak, x.shape[-1], choice=top), top[..., 0].astype(jnp.int32)

    def mixed(x: Array) -> tuple[Array, Array]:
        laws = LogitLaws(x, _mixed(peak, sampling, x))
        choice = numbers_of(laws).choice[..., 0].astype(jnp.int32)
        sums = _cumulative(_masses(laws, _iota(laws.logits)))
        token = _search(x, sums, uniform, lambda tile, indices: _masses(replace(laws, logits=tile), indices))
        return laws.numbers, jnp.where(choice >= 0, choice, token)

    numbers, token = _switch(sampling, (identity, greedy, mixed), logits)
    return LogitLaws(logits, numbers), token


def _switch(sampling: Sampling, branches: tuple[Callable[[Array], Any], ...], logits: Array) -> Any:
    """Calls one of three `branches` for the whole batch.

    The first is called if the transform `S` is the identity in every row, the second if every row is greedy, and the
    third otherwise. Each branch computes its own sums. XLA would split a sum that precedes the switch, move one part
    into the branches, and write the other part to memory.
    """
    case = jnp.where(jnp.all(sampling.temperature <= 0.0), 1, jnp.where(jnp.all(is_identity(sampling)), 0, 2))
    with jax.named_scope("identity_greedy_or_scaled"):
        return jax.lax.switch(case, branches, logits)


def _packed(peak: Array, size: int, **numbers: Array) -> Array:
    """Returns the fields of `Numbers` as one array, float32 `[..., 6]`.

    Fields that are not given get the values of a position that is not greedy and keeps all entries. Each field is
    written by a select with a constant mask, because XLA fuses such selects into one operation.
    """
    usual = {"peak": 0.0, "total": 1.0, "cool": 1.0, "choice": -1.0, "lowest": -np.inf, "last": float(size)}
    row = np.array([usual[name] for name in Numbers._fields], np.float32)
    packed = jnp.broadcast_to(row, (*peak.shape[:-1], COUNT))
    for name, values in {"peak": peak, **numbers}.items():
        packed = jnp.where(np.arange(COUNT) == Numbers._fields.index(name), values, packed)
    return packed


def _mixed(peak: Array, sampling: Sampling, logits: Array) -> Array:
    """Returns the packed `Numbers` of rows that may differ in temperature, top-k and top-p, float32 `[..., 6]`."""
    heat, top_p, top_k = (expand(x, logits.ndim) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    # greedy rows divide by 1 instead of 0; their distribution follows from `choice` alone
    cool = jnp.broadcast_to(1.0 / jnp.where(heat <= 0.0, 1.0, heat), peak.shape)
    truncates = jnp.any((heat > 0.0) & ((top_k > 0) | (top_p < 1.0)))

    def all_kept(x: Array) -> tuple[Array, Array, Array]:
        sums = _weights(x, peak, cool).sum(-1, keepdims=True)
        return sums, jnp.full_like(peak, -jnp.inf), jnp.full_like(peak, x.shape[-1])

    with jax.named_scope("truncates"):
        total, lowest, last = jax.lax.cond(truncates, lambda x: _ends(x, peak, cool, top_k, top_p), all_kept, logits)
    choice = jnp.where(heat <= 0.0, _top(logits), -1.0)
    return _packed(peak, logits.shape[-1], total=total, cool=cool, choice=choice, lowest=lowest, last=last)


def _top(logits: Array) -> Array:
    return argmax(logits)[..., None].astype(jnp.float32)


def _weights(logits: Array, peak: Array, cool: Array) -> Array:
    return jnp.exp((logits - peak) * cool)


def _ends(logits: Array, peak: Array, cool: Array, top_k: Array, top_p: Array) -> tuple[Array, Array, Array]:
    """Returns `total`, `lowest` and `last` of `Numbers`, for rows that may use top-k and top-p."""
    size, indices = logits.shape[-1], _iota(logits)
    weights = _weights(logits, peak, cool)
    kept = keep_largest(weights, jnp.ones_like(weights), jnp.where(top_k > 0, top_k, float(size)))
    # top-p applies to the entries that top-k keeps, relative to the sum of their weights (docs/methods.md, section 1)
    of_top_k = jnp.where(kept, weights, 0.0)
    need = jnp.minimum(top_p, 1.0) * of_top_k.sum(-1, keepdims=True)
    kept &= keep_largest(of_top_k, of_top_k, need) | (top_p >= 1.0)
    # Ties go to the lowest index, so the smallest kept logit and its last kept index tell which entries are kept.
    lowest = jnp.where(kept, logits, jnp.inf).min(-1, keepdims=True)
    last = jnp.where(kept & (logits == lowest), indices, -1).max(-1, keepdims=True).astype(jnp.float32)
    # After rounding, different logits may have equal weights, so `kept` and `_kept` can differ. The sum uses `_kept`,
    # because `scaled` does.
    total = jnp.where(_kept(logits, lowest, last, indices), weights, 0.0).sum(-1, keepdims=True)
    return total, lowest, last


def _kept(logits: Array, lowest: Array, last: Array, indices: Array) -> Array:
    kept: Array = (logits > lowest) | ((logits == lowest) & (indices <= last))
    return kept


def numbers_of(laws: LogitLaws) -> Numbers:
    """Unpacks the `Numbers` of each position from the array `laws.numbers`."""
    return Numbers(*(laws.numbers[..., place : place + 1] for place in range(COUNT)))


def raw_total(laws: LogitLaws, sampling: Sampling) -> Array:
    """Returns the sum of `exp(x - peak)`, float32 `[..., 1]`, which normalises the raw distribution.

    If `sampling` changes nothing in any row, the sum is already stored and is not computed again.
    """
    numbers = numbers_of(laws)

    def summed(x: Array) -> Array:
        return jnp.exp(x - numbers.peak).sum(-1, keepdims=True)

    with jax.named_scope("is_identity"):
        total: Array = jax.lax.cond(jnp.all(is_identity(sampling)), lambda _: numbers.total, summed, laws.logits)
    return total


def raw(laws: LogitLaws, total: Array) -> Array:
    """Returns the softmax of the logits at temperature 1; `total` is their `raw_total`."""
    return jnp.exp(laws.logits - numbers_of(laws).peak) * (1.0 / total)


def scaled(laws: LogitLaws, indices: Array | None = None) -> Array:
    """Returns the distribution that tokens are drawn from, float32, with the shape of the logits.

    Args:
        laws: the logits and their numbers.
        indices: int32, the token of each logit; `None` if the logits cover the vocabulary.
    """
    n = numbers_of(laws)
    indices = _iota(laws.logits) if indices is None else indices
    # a sum that is NaN makes every probability NaN, so that no token is kept and the engine reports it
    warm = _masses(laws, indices) * (1.0 / n.total)
    return jnp.where(n.choice >= 0, (indices == n.choice).astype(jnp.float32), warm)


def _masses(laws: LogitLaws, indices: Array) -> Array:
    """Returns the weights of the kept entries, which are multiples of the probabilities unless the row is greedy."""
    x, n = laws.logits, numbers_of(laws)
    return jnp.where(_kept(x, n.lowest, n.last, indices), _weights(x, n.peak, n.cool), 0.0)


def at_tokens(laws: LogitLaws, tokens: Array) -> Array:
    """Returns the scaled distribution at `tokens` `[...]`, float32 `[..., 1]`."""
    return scaled(_at(laws, tokens[..., None]), tokens[..., None])


def _at(laws: LogitLaws, indices: Array) -> LogitLaws:
    return replace(laws, logits=jnp.take_along_axis(laws.logits, indices, axis=-1))


def draw(masses: Array, uniform: Array) -> Array:
    """Draws a token from each row of `masses`, float32 `[B, V]`, as `core.sampling.sample` does; returns int32 `[B]`.

    It splits the rows into tiles in a way that needs no copy on a TPU.
    """
    # padding has mass 0, which is never drawn
    missing = -masses.shape[-1] % TILES[-1]
    masses = jnp.pad(masses, [(0, 0), (0, missing)]) if missing else masses
    return _search(masses, _cumulative(masses), uniform, lambda tile, _: tile)


class _Sums(NamedTuple):
    """The masses of tiles, float32 `[B, tiles]`: `inside` each tile, and cumulative `upto` and including each tile."""

    inside: Array
    upto: Array


def _cumulative(masses: Array) -> _Sums:
    inside = _in_tiles(masses).sum(-1).reshape(len(masses), -1)
    return _Sums(inside, jnp.cumsum(inside, -1))


def _in_tiles(values: Array) -> Array:
    """Reshapes values `[B, V]` to `[B / 8, 8, tiles, width]`, which a TPU stores in the same order as `[B, V]`."""
    # a register holds eight rows of 128 entries; if rows were not grouped by eight, a TPU would copy the array
    group = 8 if len(values) % 8 == 0 else 1
    return values.reshape(len(values) // group, group, -1, _width(values))


def _width(values: Array) -> int:
    size = values.shape[-1]
    # Widths with `size % (4 * width) == 0` come first: if four devices share the vocabulary, no tile then lies on two
    # devices.
    fitting = [width for width in TILES if size % (4 * width) == 0] + [width for width in TILES if size % width == 0]
    return fitting[0] if fitting else size


def _search(values: Array, sums: _Sums, uniform: Array, masses_of: Callable[[Array, Array], Array]) -> Array:
    """Returns the first token whose cumulative mass exceeds `uniform` times the sum of all, int32 `[B]`.

    Args:
        values: float32 `[B, V]`.
        sums: the tiles' masses.
        uniform: float32 `[B]` in [0, 1).
        masses_of: the masses of a tile of values `[B, width]`, whose tokens are int32 `[B, width]`.
    """
    width, rest = _width(values), uniform * sums.upto[:, -1]
    tile = first_with_mass(sums.upto > rest[:, None], sums.inside)[:, None]
    # One entry of each row is selected by a sum with zeros, which needs fewer operations than a gather.
    before = jnp.where(_iota(sums.upto) == tile - 1, sums.upto, 0.0).sum(-1, keepdims=True)
    inside = _in_tiles(jnp.where(_iota(values) // width == tile, values, 0.0)).sum(2).reshape(len(values), width)
    masses = masses_of(inside, tile * width + _iota(inside))
    # `before` comes from the sums that chose the tile, because another order of summation would round differently
    index = first_with_mass(jnp.cumsum(masses, -1) > rest[:, None] - before, masses)
    return tile[:, 0] * width + index


def _iota(values: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)


@flax.struct.dataclass
class LogitPair:
    """The draft's and the target's distributions as logits; `whole` computes the `LawPair` that a rule reads.

    Attributes:
        draft, target: the logits, and the numbers of each position.
        draft_total, target_total: `raw_total` of both, float32 `[..., 1]`.
        greedy: bool `[..., 1]`, whether the draft is greedy.
        vocab_size: the number of real entries of the vocabulary.
        indices: int32 `[..., 1]`, the tokens whose logits this pair contains; `None` if it covers the vocabulary.
    """

    draft: LogitLaws
    target: LogitLaws
    draft_total: Array
    target_total: Array
    greedy: Array
    vocab_size: int = flax.struct.field(pytree_node=False)
    indices: Array | None = None

    @classmethod
    def of(cls, draft: LogitLaws, logits: Array, controls: Controls, vocab_size: int) -> LogitPair:
        """Returns the pair of a block from the draft's logits and the target's, `[B, W, V]` each."""
        target = of_logits(logits, controls.target)
        greedy = jnp.broadcast_to(expand(controls.draft.temperature <= 0, logits.ndim), (*logits.shape[:-1], 1))
        totals = raw_total(draft, controls.draft), raw_total(target, controls.target)
        return cls(draft, target, *totals, greedy, vocab_size)

    def at_tokens(self, tokens: Array) -> LawPair:
        """Returns the distributions at `tokens` `[...]` only, as a `LawPair` of arrays `[..., 1]`."""
        # the logits of the tokens are looked up first, so that no probability of another token is computed
        indices = tokens[..., None]
        draft, target = (_at(laws, indices) for laws in (self.draft, self.target))
        return replace(self, draft=draft, target=target, indices=indices).whole()

    def at_position(self, positions: Array) -> LogitPair:
        """Returns the pair at one position of each row of a block, int32 `[B]`, with arrays `[B, V]`.

        It sums over all positions, with zeros at those that are not selected. On a TPU, a gather along this axis would
        first copy the block.
        """

        def select(values: Array) -> Array:
            chosen = (jnp.arange(values.shape[1])[None] == positions[:, None])[..., None]
            if values.dtype == bool:
                return (chosen & values).any(1)
            return jnp.where(chosen, values, 0.0).sum(1)

        pair: LogitPair = jax.tree.map(select, self)
        return pair

    def whole(self) -> LawPair:
        """Computes all distributions; a compiled program omits those that the caller does not read."""
        q, p = self._real(raw(self.draft, self.draft_total)), self._real(raw(self.target, self.target_total))
        q_tilde, p_tilde = (self._real(scaled(laws, self.indices)) for laws in (self.draft, self.target))
        x, n = self.target.logits, numbers_of(self.target)
        distance = self._real(x - n.peak)
        # entries that greedy decoding, top-k or top-p removes have probability 0, which their logits do not show
        cut = (n.choice >= 0) | (n.lowest > -jnp.inf)
        logs = LogPair(
            q=jnp.log(q),
            p=distance - jnp.log(self.target_total),
            q_tilde=jnp.log(q_tilde),
            p_tilde=jnp.where(cut, jnp.log(p_tilde), distance * n.cool - jnp.log(n.total)),
        )
        return LawPair(q=q, p=p, q_tilde=q_tilde, p_tilde=p_tilde, greedy=self.greedy, logs=logs)

    def _real(self, values: Array) -> Array:
        return values[..., : self.vocab_size]


def as_law_pair(pair: LawPair | LogitPair) -> LawPair:
    """Returns `pair` as a `LawPair`, which holds probabilities; a `LogitPair` is converted."""
    return pair.whole() if isinstance(pair, LogitPair) else pair
