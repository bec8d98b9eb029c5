"""What a rule is: the decision about a draft, and what the tools must know of it."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import per_row
from speccascade_jax.core.types import Array, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.laws import DeferralRule, TargetLaw

End = float | str
SLACK = 1e-3
"""By how much a number may lie outside a useful range unremarked: the ends of those that are swept are rounded."""


def ends(given: tuple[End, End], vocab_size: int) -> tuple[float, float]:
    """A range as numbers: `"lnV"` and `"-lnV"` stand for `± ln V`."""
    words = {"lnV": math.log(vocab_size), "-lnV": -math.log(vocab_size)}
    low, high = (words[x] if isinstance(x, str) else float(x) for x in given)
    return low, high


BEYOND = "beyond it hardly anything changes, is it meant?"
"""How warnings of numbers outside their useful range end."""


def beyond(name: str, whose: str, values: Any, useful: tuple[float, float]) -> str:
    """Which of `values`, the first, lies outside a useful range, in words; empty where none does."""
    low, high = useful
    given = np.ravel(np.asarray(values, np.float64))
    far = given[(given < low - SLACK) | (given > high + SLACK)]
    return f"{name}={far[0]:g} of {whose} lies outside {low:g} … {high:g}" if far.size else ""


@dataclass(frozen=True, kw_only=True)
class Alpha:
    """What a trade-off parameter may be, and what is worth trying.

    Attributes:
        grid: the range worth sweeping; `"lnV"` and `"-lnV"` stand for `± ln V`.
        domain: α must satisfy `domain[0] <= α < domain[1]`; closed: the upper end belongs to the domain too.
        useful: beyond these hardly anything changes, if they are not the grid's.
        typical: for a first try. swept: the α's of a sweep that names none, where an even grid would be unwise.
    """

    grid: tuple[End, End] = (0.0, 1.0)
    domain: tuple[float, float] = (-math.inf, math.inf)
    closed: bool = False
    useful: tuple[End, End] | None = None
    typical: float | None = None
    swept: tuple[float, ...] = ()

    def check(self, whose: str, values: np.ndarray) -> None:
        """Refuse values outside the domain; `whose` is the rule or method that an error names.

        Raises:
            ValueError: names the first such value and the domain.
        """
        # α is a float32: 0.7 is not below an end of 0.7
        values = np.asarray(values, np.float32)
        low, high = (np.float32(end) for end in self.domain)
        bad = ~((values >= low) & ((values <= high) if self.closed else (values < high)))
        if bad.any():
            value, end = float(values[bad].ravel()[0]), "]" if self.closed else ")"
            raise ValueError(f"alpha={value:g} is outside the domain [{low:g}, {high:g}{end} of {whose}")

    def bounds(self, vocab_size: int) -> tuple[float, float]:
        """The sweep range as numbers."""
        return ends(self.grid, vocab_size)

    def useful_bounds(self, vocab_size: int) -> tuple[float, float]:
        """The useful range as numbers."""
        return ends(self.useful or self.grid, vocab_size)

    def even(self, count: int, vocab_size: int) -> np.ndarray:
        """`count` values at equal distances over the sweep range, ends included, float64."""
        return np.linspace(*self.bounds(vocab_size), count)

    def usual(self, count: int = 7, vocab_size: int = 8192) -> tuple[float, ...]:
        """What is swept where nobody says otherwise; `ln V` is rounded."""
        return self.swept or tuple(float(np.round(alpha, 3)) for alpha in self.even(count, vocab_size))


def checked_alpha(alpha: Alpha | None, whose: str, given: Any, rows: int) -> np.ndarray:
    """α per row, float32 `[rows]`: the one place where it is checked. Zeros where there is none to give.

    Args:
        alpha: what it may be; `None`: there is none, and any is ignored.
        whose: the rule or method, for the error.

    Raises:
        ValueError: one is needed and missing, or it is outside the domain.
    """
    if given is None and alpha is not None:
        typical = "" if alpha.typical is None else f", say {alpha.typical:g}"
        raise ValueError(f"{whose} needs alpha{typical}; worth sweeping is {alpha.grid[0]} … {alpha.grid[1]}")
    values = per_row("alpha", 0.0 if given is None else given, rows)
    if alpha is not None:
        alpha.check(whose, values)
    return values


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and what the tools must know of it.

    Attributes:
        name: how gin, records and tables call it.
        deferral: `r(pair, alpha)`, or `None` for a law that is no deferral.
        law: `π(pair, alpha)`; by default made from `deferral`.
        kept: `min(q̃, π)`, where it is a function of `q̃(v)` and `p̃(v)` of the same token alone: then a block is
            accepted or not by looking up its tokens, without a pass over the vocabulary.
        at_most: what `π` is at most, if such a function of the same token tells that: with `kept` it tells `π` of many
            tokens, and whole blocks are decided with fewer passes (`block_wise`).
        alpha: what α may be; `None`: the rule has none.
        reads_q: whether `π` depends on the draft's law; if not, no draft pass is spent on the bonus position.
        lossless: whether `π = p̃` for every α.
        reads_logs: whether it reads logs of the draft's laws (`LawPair.log`), which are then carried beside them.
        greedy_only: defined at temperature 0 only.
        title, variant: what tables call it, "SpecCascade" and "Chow"; by default its name.
    """

    name: str
    deferral: DeferralRule | None = None
    law: TargetLaw | None = None
    kept: TargetLaw | None = None
    at_most: TargetLaw | None = None
    alpha: Alpha | None = Alpha()
    reads_q: bool = True
    lossless: bool = False
    reads_logs: bool = False
    greedy_only: bool = False
    title: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        if (self.law is None) == (self.deferral is None):
            raise ValueError(f"rule {self.name!r} needs either a deferral function or a law, not both and not neither")

    def check_temperatures(self, temperature: Any, draft_temperature: Any = None) -> None:
        """Refuse a temperature above 0 under a rule that is defined at 0 only.

        Raises:
            ValueError: names the temperature.
        """
        for name, value in (("temperature", temperature), ("draft_temperature", draft_temperature)):
            if self.greedy_only and value is not None and np.max(np.asarray(value)) > 0:
                raise ValueError(
                    f"rule {self.name!r} is defined at temperature 0 only, got {name}={value}; "
                    f"at other temperatures use 'token_v3'"
                )

    def target_law(self, pair: LawPair, alpha: Array) -> Array:
        """`π`, float32 `[..., V]`; `alpha` is `[..., 1]`."""
        if self.law is not None:
            return self.law(pair, alpha)
        assert self.deferral is not None
        return laws.after_deferral(self.deferral(pair, alpha), pair)

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """`min(q̃, π)` at `tokens` `[...]`, float32: only what its entries need is computed over the vocabulary."""
        chosen = laws.at_tokens(pair, tokens)
        if self.kept is not None:
            return self.kept(chosen, alpha)[..., 0]
        return jnp.minimum(chosen.q_tilde[..., 0], self.law_at(pair, alpha, tokens))

    def law_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """`π` at `tokens` `[...]`, float32: only what its entries need is computed over the vocabulary."""
        chosen = laws.at_tokens(pair, tokens)
        if self.lossless:
            return chosen.p_tilde[..., 0]
        if self.deferral is None:
            return laws.at_tokens(self.target_law(pair, alpha), tokens)[..., 0]
        deferred = self.deferral(pair, alpha)
        left = laws.undeferred(laws.at_tokens(deferred, tokens), chosen)
        return (left + chosen.p_tilde * laws.deferral_mass(deferred, pair))[..., 0]
