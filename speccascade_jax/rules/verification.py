"""Verification of a block: the longest accepted prefix, and one token after it (docs/methods.md, section 2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from speccascade_jax.core import logit_laws, rngs
from speccascade_jax.core.logit_laws import LogitPair, as_law_pair
from speccascade_jax.core.sampling import expand, sample
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.rule import Rule


class Verdict(NamedTuple):
    """The outcome of verifying a block.

    Attributes:
        num_kept: int32 `[B]`, the number of accepted draft tokens.
        rejected: bool `[B]`, whether a draft token was rejected.
        final: int32 `[B]`, the token after the kept ones: a replacement or a bonus.
        law: float32 `[B, G + 1, V]`, the distribution of the token that is committed at each position, given the
            tokens before it; meaningless where none is committed.
        path: int32 `[B, N + 1]`, the entries of a tree on the kept path, entry 0 first (`core.trees`); `None` for a
            plain block.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Verdict
        >>> law = np.full((2, 4, 8), 1 / 8)  # [B, G + 1, V]
        >>> verdict = Verdict(np.array([3, 1]), np.array([False, True]), np.array([5, 7]), law)
        >>> (verdict.num_kept + 1).tolist()  # committed: the kept drafts, and the bonus or the replacement
        [4, 2]
    """

    num_kept: Array
    rejected: Array
    final: Array
    law: Array
    path: Array | None = None


class Verifier(Protocol):
    """The interface of a component that decides which draft tokens are kept; frozen and hashable.

    Attributes:
        name: the name for errors and records.
        reads_q: whether `π` depends on the draft's distribution; if so, a bonus token drawn from `π` needs one more
            pass of the draft.
        lossless: whether `π = p̃`.
        defers: whether `deferred` returns anything but zeros.
        reads_logs: whether the verifier reads exact logs of the draft's distributions (`Rule.reads_logs`).
        joint: whether a block is examined as a whole, and not only up to its first rejection.

    Examples:
        >>> from dataclasses import dataclass
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Draft, LawPair, Verdict, Verifier
        >>> @dataclass(frozen=True)
        ... class KeepAll:  # keeps every token of a greedy draft, whose q̃ are one-hots
        ...     name, reads_q, lossless, defers, reads_logs, joint = "keep_all", True, False, False, False, False
        ...     def verify(self, pair, draft, keys, alpha, bonus):
        ...         last = jnp.take_along_axis(pair.q_tilde, draft.length[:, None, None], axis=1)[:, 0]
        ...         return Verdict(draft.length, draft.length < 0, last.argmax(-1), pair.q_tilde)
        ...     def law(self, pair, alpha):
        ...         return pair.q_tilde
        ...     def deferred(self, pair, alpha, tokens):
        ...         rows, block = tokens.shape
        ...         return jnp.zeros((rows, block + 1)), jnp.zeros((rows, block))
        >>> verifier: Verifier = KeepAll()
        >>> q, none = np.array([[[0.0, 1.0], [1.0, 0.0]]]), np.array([0])
        >>> pair = LawPair(q=q, p=q, q_tilde=q, p_tilde=q, greedy=np.ones((1, 2, 1), bool))
        >>> draft = Draft(none[:, None] + 1, none + 1, q, q, greedy=none == 0, steps=none, bad=q[..., 0] > 1)
        >>> verdict = verifier.verify(pair, draft, keys=None, alpha=np.array([0.5]), bonus="rule")
        >>> verdict.num_kept.tolist(), verdict.rejected.tolist(), verdict.final.tolist()
        ([1], [False], [0])
    """

    @property
    def name(self) -> str:
        """The name for errors and records."""
        ...

    @property
    def reads_q(self) -> bool:
        """Whether `π` depends on the draft's distribution."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether `π = p̃`."""
        ...

    @property
    def defers(self) -> bool:
        """Whether `deferred` returns anything but zeros."""
        ...

    @property
    def reads_logs(self) -> bool:
        """Whether the verifier reads exact logs of the draft's distributions."""
        ...

    @property
    def joint(self) -> bool:
        """Whether the verifier decides about all tokens of a block jointly."""
        ...

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """Decides which draft tokens are kept, and draws the token after them.

        `pair` has arrays `[B, G + 1, V]`, and `alpha` is `[B]`.
        """

    def law(self, pair: LawPair, alpha: Array) -> Array:
        """Returns `π`, the distribution of a token at a position, float32 `[..., V]`; `alpha` is `[..., 1]`."""

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns how much of a block is deferred to the target, for the counters; see `TokenWise.deferred`."""


class Acceptance(NamedTuple):
    """The two parts of the target distribution `π` at a position.

    Attributes:
        kept: `[..., V]`, the mass of tokens that are drafted and kept.
        replacement: `[..., V]`, the distribution after a rejection.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Acceptance
        >>> q, p = np.array([0.5, 0.5]), np.array([0.25, 0.75])
        >>> kept = np.minimum(q, p)  # speculative sampling keeps min(q, p)
        >>> parts = Acceptance(kept, replacement=(p - kept) / (1 - kept.sum()))
        >>> print(parts.kept + (1 - parts.kept.sum()) * parts.replacement)  # the target's distribution
        [0.25 0.75]
    """

    kept: Array
    replacement: Array


@dataclass(frozen=True)
class TokenWise:
    """The base class of verification token by token under a rule; subclasses are in `rules.acceptance`.

    A subclass defines the kept mass and the replacement (`__call__`, `kept_at`), and this class applies them to a
    block. The target distribution is the rule's. Sources: docs/methods.md, section 2; Narasimhan et al., 2024,
    Algorithm 4.

    Attributes:
        rule: the rule that decides.
        joint: as in `Verifier`.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import LawPair, TokenWise
        >>> verifier = TokenWise(sc.RULES["chow"])
        >>> verifier.name, verifier.lossless, verifier.defers
        ('chow', False, True)
        >>> q, p = np.array([0.5, 0.5]), np.array([0.25, 0.75])
        >>> pair = LawPair(q=q, p=p, q_tilde=q, p_tilde=p, greedy=np.array([False]))
        >>> for alpha in (0.1, 0.9):  # defers to the target if max q < 1 - α
        ...     print(verifier.law(pair, np.array([alpha])))
        [0.25 0.75]
        [0.5 0.5]
    """

    rule: Rule
    joint: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def reads_q(self) -> bool:
        """Whether the rule's `π` depends on the draft's distribution."""
        return self.rule.reads_q

    @property
    def lossless(self) -> bool:
        """Whether the rule's `π` is `p̃`."""
        return self.rule.lossless

    @property
    def defers(self) -> bool:
        """Whether the rule has a deferral function."""
        return self.rule.deferral is not None

    @property
    def reads_logs(self) -> bool:
        """Whether the rule reads exact logs of the draft's distributions."""
        return self.rule.reads_logs

    def __call__(self, pair: LawPair, alpha: Array) -> Acceptance:
        """Returns the kept mass and the replacement at every position; `alpha` is `[..., 1]`."""
        raise NotImplementedError

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns the kept mass at `tokens` `[...]`, if possible without computing it for the whole vocabulary."""
        raise NotImplementedError

    def law(self, pair: LawPair, alpha: Array) -> Array:
        """Returns the rule's `π`, float32 `[..., V]`; `alpha` is `[..., 1]`."""
        return self.rule.target_law(as_law_pair(pair), alpha)

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """Keeps the longest accepted prefix of each row's block and draws one token after it.

        Source: docs/methods.md, section 2.

        Args:
            pair: distributions over `[B, G + 1, V]`.
            draft: the block; its tokens were drawn from `draft.q_tilde`.
            keys: this round's random bits.
            alpha: `[B]`.
            bonus: the source of the token after a fully kept block. "rule": it is drawn from `π`, or from `p̃` if the
                draft has no distribution there. "target": it is drawn from `p̃`. "none": as "rule", and the engine
                drops the token.

        Returns:
            A `Verdict`. The replacement or bonus is drawn at one position of each row, not at all positions.
        """
        with jax.named_scope("rule"):
            law = self.law(pair, alpha[:, None, None])
        num_kept, reached = self._kept(pair, law, draft, keys, alpha)
        rejected = num_kept < draft.length
        last = at_position(pair, num_kept)
        from_p = from_target(draft, bonus)
        with jax.named_scope("rule"):
            bonus_law = self._law_at(last, law, num_kept, alpha)
            replacement = self._replacement(last, bonus_law, alpha[:, None], reached)
        if from_p is not None:
            bonus_law = jnp.where(from_p[:, None], last.p_tilde, bonus_law)
        final_law = jnp.where(rejected[:, None], replacement, bonus_law)
        if from_p is not None:
            law = with_targets_law(law, as_law_pair(pair), draft.length, from_p)
        draw = logit_laws.draw if isinstance(pair, LogitPair) else sample
        return Verdict(num_kept, rejected, draw_behind(final_law, keys, num_kept, rejected, draw), law)

    def _law_at(self, here: LawPair, law: Array, position: Array, alpha: Array) -> Array:
        """Returns `π` `[B, V]` at one position of each row, int32 `[B]`; `here` holds the distributions there."""
        return self.law(here, alpha[:, None])

    def _replacement(self, last: LawPair, law: Array, alpha: Array, reached: Array) -> Array:
        """Returns the distribution of the token after a rejection, `[B, V]`; `reached` is `_kept`'s second output."""
        return self(last, alpha).replacement

    def _kept(self, pair: LawPair, law: Array, draft: Draft, keys: rngs.RoundKeys, alpha: Array) -> tuple[Array, Array]:
        """Returns how many draft tokens are kept, int32 `[B]`, and the argument `reached` of `_replacement`, `[B]`.

        A token `x_j` is kept if `u · q̃_j(x_j) < kept_j(x_j)` and all tokens before it are kept. `reached` is always 1
        here. In joint verification it is the probability of keeping at least that many tokens (`P_i` of `BlockWise`).
        """
        batch, block = draft.tokens.shape
        ones = jnp.ones((batch,), jnp.float32)
        if block == 0:
            return jnp.zeros((batch,), jnp.int32), ones
        # The tokens get a dummy at the bonus position, because cutting that position off `pair` would cost more.
        tokens = jnp.pad(draft.tokens, [(0, 0), (0, 1)])
        with jax.named_scope("rule"):
            kept_at = self.kept_at(pair, alpha[:, None, None], tokens)[:, :block]
        drawn_at = laws.drawn_at(pair, tokens)[:, :block, 0]
        slots = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), (batch, block))
        # the test uses the kept mass and not the ratio π/q̃, which is 0/0 at temperature 0
        keep = (keys.uniform(slots, rngs.ACCEPT) * drawn_at < kept_at) & (slots < draft.length[:, None])
        return jnp.cumprod(keep, -1).sum(-1).astype(jnp.int32), ones

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns the rule's deferral in a block: `η = Σ r q̃` per position, and `r(x_j)` of the draft tokens.

        Args:
            pair: distributions over `[B, W, V]`.
            alpha: `[B]`.
            tokens: int32 `[B, W − 1]`, the draft tokens `x_j`.

        Returns:
            float32 `[B, W]` and `[B, W − 1]`; zeros if the rule has no deferral.
        """
        rows, block = tokens.shape
        if self.rule.deferral is None:
            return jnp.zeros((rows, block + 1)), jnp.zeros((rows, block))
        with jax.named_scope("rule"):
            deferred = self.rule.deferral(pair, alpha[:, None, None])
            eta = jnp.broadcast_to(laws.deferral_mass(deferred, pair)[..., 0], (rows, block + 1))
        everywhere = jnp.broadcast_to(deferred.astype(jnp.float32), pair.q_tilde.shape)[:, :block]
        return eta, jnp.take_along_axis(everywhere, tokens[..., None], -1)[..., 0]


def at_position(pair: LawPair, positions: Array) -> LawPair:
    """Returns a block's distributions at one position of each row, int32 `[B]`, as `[B, V]`."""
    if isinstance(pair, LogitPair):
        return pair.at_position(positions).whole()
    laws_there: LawPair = jax.tree.map(lambda x: jnp.take_along_axis(x, positions[:, None, None], axis=1)[:, 0], pair)
    return laws_there


def entry_at(values: Array, positions: Array) -> Array:
    """Returns the entries of `values` `[B, W]` at one position of each row, `positions` int32 `[B]`."""
    return jnp.take_along_axis(values, positions[:, None], axis=1)[:, 0]


def draw_behind(
    law: Array, keys: rngs.RoundKeys, positions: Array, rejected: Array, draw: Callable[[Array, Array], Array] = sample
) -> Array:
    """Draws the token after the kept ones, int32 `[B]`, from its distribution `law` `[B, V]`.

    Its random bits depend on its position in the block, and on whether it is a replacement or a bonus.
    """
    uniform = keys.uniform(positions, jnp.where(rejected, rngs.REPLACE, rngs.BONUS))
    with jax.named_scope("sampling"):
        return draw(law, uniform)


def with_targets_law(law: Array, pair: LawPair, positions: Array, rows: Array) -> Array:
    """Returns a copy of `law` `[B, W, V]` in which one position of each marked row has the distribution `p̃`.

    Args:
        law: a distribution for each position of each row.
        pair: the distributions of draft and target, among them `p̃`.
        positions: int32 `[B]`, the position in each row.
        rows: bool `[B]`, which rows are marked.
    """
    chosen = (jnp.arange(law.shape[1])[None] == positions[:, None]) & rows[:, None]
    return jnp.where(chosen[..., None], pair.p_tilde, law)


def from_target(draft: Draft, bonus: str) -> Array | None:
    """Returns bool `[B]`: the rows whose bonus comes from `p̃`; `None` if every row's bonus comes from the rule."""
    if bonus == "target":
        return jnp.ones(draft.length.shape, bool)
    return None if draft.lawful is None else ~draft.lawful


@dataclass(frozen=True)
class ByArm:
    """A verifier for several drafters (arms) with different rules: `verifiers[k]` decides blocks of arm `k`.

    `Draft.arm` tells which arm wrote a row's block. Equal verifiers run once.

    A row's rule depends on its drafter. `law` gets only the distributions at a position, from which the drafter cannot
    be told, so it raises an error. Deferrals are not counted.
    """

    verifiers: tuple[Verifier, ...]

    @property
    def name(self) -> str:
        """The names of the verifiers without duplicates, joined by " | "."""
        return " | ".join(dict.fromkeys(verifier.name for verifier in self.verifiers))

    @property
    def reads_q(self) -> bool:
        """Whether any verifier reads the draft's distribution."""
        return any(verifier.reads_q for verifier in self.verifiers)

    @property
    def lossless(self) -> bool:
        """Whether every verifier is lossless."""
        return all(verifier.lossless for verifier in self.verifiers)

    @property
    def defers(self) -> bool:
        """Always False, because deferrals are not counted."""
        return False

    @property
    def reads_logs(self) -> bool:
        """Whether any verifier reads exact logs of the draft's distributions."""
        return any(verifier.reads_logs for verifier in self.verifiers)

    @property
    def joint(self) -> bool:
        """Whether any verifier decides about all tokens of a block jointly."""
        return any(verifier.joint for verifier in self.verifiers)

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """Verifies each row's block with the verifier of the arm (drafter) that wrote the block."""
        assert draft.arm is not None, "Draft.arm must say which arm wrote a block: use SelectedDrafter(tells_arm=True)"
        first, *remaining = dict.fromkeys(self.verifiers)
        merged = first.verify(pair, draft, keys, alpha, bonus)
        for verifier in remaining:
            verdict = verifier.verify(pair, draft, keys, alpha, bonus)
            rows = jnp.isin(draft.arm, jnp.asarray([n for n, v in enumerate(self.verifiers) if v == verifier]))
            merged = _merged(rows, verdict, merged)
        return merged

    def law(self, pair: LawPair, alpha: Array) -> Array:
        """Raises a ValueError, because a row's rule depends on its drafter.

        Raises:
            ValueError: always; an engine inside a drafter needs the same rule for all rows.
        """
        raise ValueError(
            f"the distribution of {self.name!r} depends on which arm drafted: "
            "give all drafters of a level below the target the same rule"
        )

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns zeros, because deferrals are not counted."""
        rows, block = tokens.shape
        return jnp.zeros((rows, block + 1)), jnp.zeros((rows, block))


def _merged(rows: Array, new: Verdict, old: Verdict) -> Verdict:
    """Returns the verdict `new` in rows where `rows` `[B]` is True, and the verdict `old` in the other rows."""
    merged: Verdict = jax.tree.map(lambda x, y: jnp.where(expand(rows, x.ndim), x, y), new, old)
    return merged
