"""The class `Rule`, which decides which draft tokens are kept, and `Alpha`, the domain of its trade-off parameter."""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import per_row
from speccascade_jax.core.logit_laws import as_law_pair
from speccascade_jax.core.types import Array, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.laws import DeferralRule, TargetLaw

End = float | str
SLACK = 1e-3
"""The distance by which a number may lie outside its useful range without a warning, as sweeps round to 3 decimals."""


def ends(bounds: tuple[End, End], vocab_size: int) -> tuple[float, float]:
    """Returns the ends of a range as numbers; `"lnV"` and `"-lnV"` mean `± ln V`."""
    words = {"lnV": math.log(vocab_size), "-lnV": -math.log(vocab_size)}
    low, high = (words[x] if isinstance(x, str) else float(x) for x in bounds)
    return low, high


BEYOND = "beyond it hardly anything changes; is this intended?"
"""The end of every warning about a number outside its useful range."""


def beyond(name: str, owner: str, values: Any, useful: tuple[float, float]) -> str:
    """Returns a warning about the first of `values` outside a useful range; an empty text if all are inside."""
    low, high = useful
    numbers = np.ravel(np.asarray(values, np.float64))
    far = numbers[(numbers < low - SLACK) | (numbers > high + SLACK)]
    return f"{name}={far[0]:g} of {owner} lies outside {low:g} … {high:g}" if far.size else ""


@dataclass(frozen=True, kw_only=True)
class Alpha:
    """The domain of a rule's trade-off parameter α, and the values that are worth trying.

    Attributes:
        grid: the range that sweeps cover by default; `"lnV"` and `"-lnV"` mean `± ln V`.
        domain: α must satisfy `domain[0] <= α < domain[1]`.
        closed: whether the upper end belongs to the domain too.
        useful: the range outside which hardly anything changes; `None` means `grid`.
        typical: a value for a first try.
        swept: the default values of a sweep; if empty, sweeps use evenly spaced values over `grid`.

    Examples:
        >>> from speccascade_jax.extend import Alpha
        >>> alpha = Alpha(grid=(0.0, "lnV"), typical=2.0)
        >>> alpha.usual(3, vocab_size=8192)
        (0.0, 4.505, 9.011)
        >>> str(alpha)
        'α from 0 to lnV, for example 2'
    """

    grid: tuple[End, End] = (0.0, 1.0)
    domain: tuple[float, float] = (-math.inf, math.inf)
    closed: bool = False
    useful: tuple[End, End] | None = None
    typical: float | None = None
    swept: tuple[float, ...] = ()

    def check(self, whose: str, values: np.ndarray) -> None:
        """Raises a ValueError for values outside the domain; `whose` is the name of the rule or method in the message.

        Raises:
            ValueError: the message names the first such value and the domain.
        """
        # Values are compared as float32: in float64, the float32 number 0.7 would be outside a domain that begins at
        # 0.7.
        values = np.asarray(values, np.float32)
        low, high = (np.float32(end) for end in self.domain)
        bad = ~((values >= low) & ((values <= high) if self.closed else (values < high)))
        if bad.any():
            value, end = float(values[bad].ravel()[0]), "]" if self.closed else ")"
            domain = f"the domain [{low:g}, {high:g}{end} of {whose}"
            raise ValueError(f"alpha={value:g} is outside {domain}: choose a value inside it")

    def __str__(self) -> str:
        """Returns the range of a sweep and the value for a first try, for readers."""
        low, high = (end if isinstance(end, str) else f"{end:g}" for end in self.grid)
        return f"α from {low} to {high}" + ("" if self.typical is None else f", for example {self.typical:g}")

    def bounds(self, vocab_size: int) -> tuple[float, float]:
        """Returns the ends of `grid` as numbers."""
        return ends(self.grid, vocab_size)

    def useful_bounds(self, vocab_size: int) -> tuple[float, float]:
        """Returns the ends of the useful range as numbers."""
        return ends(self.useful or self.grid, vocab_size)

    def even(self, count: int, vocab_size: int) -> np.ndarray:
        """Returns `count` evenly spaced values over `grid`, ends included, float64."""
        return np.linspace(*self.bounds(vocab_size), count)

    def usual(self, count: int = 7, vocab_size: int = 8192) -> tuple[float, ...]:
        """Returns the default values of a sweep: `swept`, or `count` evenly spaced values rounded to 3 decimals."""
        return self.swept or tuple(float(np.round(alpha, 3)) for alpha in self.even(count, vocab_size))


def checked_alpha(alpha: Alpha | None, owner: str, value: Any, rows: int) -> np.ndarray:
    """Checks α and returns it per row, float32 `[rows]`; 0 if none is given.

    Args:
        alpha: the domain of α; `None` if the rule has no α, in which case `value` is not checked against a domain.
        owner: the name of the rule or method, for the error message.
        value: a number, one number per row, or `None`.
        rows: the number of rows.

    Raises:
        ValueError: the rule needs α and `value` is `None`, or `value` is outside the domain.
    """
    if value is None and alpha is not None:
        typical = "" if alpha.typical is None else f", for example {alpha.typical:g}"
        raise ValueError(f"{owner} needs alpha{typical}; the useful range is {alpha.grid[0]} … {alpha.grid[1]}")
    values = per_row("alpha", 0.0 if value is None else value, rows)
    if alpha is not None:
        alpha.check(owner, values)
    return values


def _first_line(function: Any) -> str:
    """Returns the first line of the docstring of a function, or of a callable object's class; "" without one."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _source_name(function: Any) -> str:
    """Returns the module and the name of a function, or of a callable object's class."""
    # a `functools.partial` is replaced by the function in it, and an object, which has no name, by its class
    function = getattr(function, "func", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__.partition('.<locals>')[0]}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule that decides which draft tokens are kept, with the properties that engines, sweeps and tables need.

    Attributes:
        name: the name in gin, records and tables.
        deferral: the deferral function `r(pair, alpha)`; `None` if the rule is defined by `law`.
        law: the target distribution `π(pair, alpha)`; `None` if it follows from `deferral`.
        kept: an optional function `min(q̃, π)(pair, alpha)`, for rules whose value at a token `v` depends on `q̃(v)`,
            `p̃(v)` and α alone. Draft tokens are then verified without a pass over the vocabulary.
        at_most: an optional upper bound of `π`, with the same arguments and the same condition. Together with `kept` it
            often determines `π(v)`, so block verification makes fewer passes over the vocabulary (`block_wise`).
        alpha: the domain of α; `None` if the rule has no α.
        reads_q: whether `π` depends on the draft's distribution; if not, the draft makes no pass for the bonus
            position.
        lossless: whether `π = p̃` for every α.
        reads_logs: whether the rule reads exact logs of the draft's distributions (`LawPair.log`), which drafters then
            compute.
        greedy_only: whether the rule is defined at temperature 0 only.
        title, variant: the two parts of the rule's name in tables, such as "SpecCascade" and "Chow"; by default `name`.

    Raises:
        ValueError: both `deferral` and `law` are given, or neither.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> def unlikely(pair, alpha):
        ...     return pair.p < alpha  # [..., V]: defers the tokens that the target finds unlikely
        >>> rule = sc.Rule(name="unlikely", deferral=unlikely)
        >>> q, p = np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.2, 0.7])
        >>> print(np.asarray(sc.target_law(rule, q, p, alpha=0.15)).round(2))
        [0.05 0.4  0.55]
        >>> sc.RULES["chow"]
        Rule('chow': Defers if `max q < 1 − α` (Narasimhan et al., 2024, eq. 2). α from 0 to 1, for example 0.5. \
Source: speccascade_jax.rules.deferral.chow)
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
            raise ValueError(f"rule {self.name!r} needs exactly one of a deferral function and a law: give one of them")

    def __repr__(self) -> str:
        """Returns one line: the name, the first sentence of the function's docstring, α's values, the function."""
        function = self.law if self.deferral is None else self.deferral
        parts = [_first_line(function), str(self.alpha or "No α"), f"Source: {_source_name(function)}"]
        return f"Rule({self.name!r}: {'. '.join(part.rstrip('.') for part in parts if part)})"

    def check_temperatures(self, temperature: Any, draft_temperature: Any = None) -> None:
        """Raises a ValueError for a temperature above 0 if the rule is defined at temperature 0 only.

        Raises:
            ValueError: the message names the temperature.
        """
        for name, value in (("temperature", temperature), ("draft_temperature", draft_temperature)):
            if self.greedy_only and value is not None and np.max(np.asarray(value)) > 0:
                raise ValueError(
                    f"rule {self.name!r} is defined at temperature 0 only, got {name}={value}; "
                    f"at other temperatures use 'token_v3'"
                )

    def target_law(self, pair: LawPair, alpha: Array) -> Array:
        """Returns `π`, float32 `[..., V]`; `alpha` is `[..., 1]`."""
        if self.law is not None:
            return self.law(pair, alpha)
        assert self.deferral is not None
        return laws.after_deferral(self.deferral(pair, alpha), pair)

    def kept_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns `min(q̃, π)` at `tokens` `[...]`, float32; sums over the vocabulary only if the rule requires it."""
        chosen = laws.at_tokens(pair, tokens)
        if self.kept is not None:
            return self.kept(chosen, alpha)[..., 0]
        return jnp.minimum(chosen.q_tilde[..., 0], self.law_at(pair, alpha, tokens))

    def law_at(self, pair: LawPair, alpha: Array, tokens: Array) -> Array:
        """Returns `π` at `tokens` `[...]`, float32; sums over the vocabulary only if the rule requires it."""
        chosen = laws.at_tokens(pair, tokens)
        if self.lossless:
            return chosen.p_tilde[..., 0]
        if self.deferral is None:
            return laws.at_tokens(self.target_law(as_law_pair(pair), alpha), tokens)[..., 0]
        pair = as_law_pair(pair)
        deferred = self.deferral(pair, alpha)
        drafted_mass = laws.undeferred(laws.at_tokens(deferred, tokens), chosen)
        return (drafted_mass + chosen.p_tilde * laws.deferral_mass(deferred, pair))[..., 0]
