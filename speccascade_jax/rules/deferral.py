"""Rules that decide which draft tokens are kept. A new rule is one function here and one row in `RULES` below.

A deferral function `r(pair, alpha)` decides which drafted tokens are replaced by tokens of the target. It returns 1 to
defer to the target and 0 to keep the draft, with shape `[..., 1]` (one decision per position) or `[..., V]` (one per
token). It reads the raw distributions `pair.q` and `pair.p`; `alpha` has shape `[..., 1]`. Comparisons are strict: at
equality the draft is kept. Formulas: docs/methods.md, section 3; Narasimhan et al., 2024, Tables 1 and 3.
"""

import functools
import itertools
import math
from functools import partial

import jax.numpy as jnp

from speccascade_jax.core import names
from speccascade_jax.core.types import Array, LawPair
from speccascade_jax.rules import checking, divergences, laws
from speccascade_jax.rules.measures import entropy, max_of, total_variation
from speccascade_jax.rules.rule import Alpha, Rule


def chow(pair: LawPair, alpha: Array) -> Array:
    """Defers if `max q < 1 − α` (Narasimhan et al., 2024, eq. 2)."""
    return 1.0 - max_of(pair.q) > alpha  # `max q < 1 − α` would fail for a tiny α, because in float32 1 − α is then 1


def chow_log(pair: LawPair, alpha: Array) -> Array:
    """Defers if `H(q) > α`."""
    return entropy(pair.q) > alpha


def diff(pair: LawPair, alpha: Array) -> Array:
    """Defers if `max q < max p − α` (Narasimhan et al., 2024, eq. 5)."""
    return max_of(pair.p) - max_of(pair.q) > alpha


def diff_log(pair: LawPair, alpha: Array) -> Array:
    """Defers if `H(p) < H(q) − α`."""
    return entropy(pair.q) - entropy(pair.p) > alpha


def opt(pair: LawPair, alpha: Array) -> Array:
    """Defers if `max q < max p − α TV(p̃, q̃)` (Narasimhan et al., 2024, eq. 10).

    If α > 0, fewer tokens are deferred the more the two distributions differ.
    """
    return max_of(pair.p) - max_of(pair.q) > alpha * total_variation(pair.p_tilde, pair.q_tilde)


def opt_log(pair: LawPair, alpha: Array) -> Array:
    """Defers if `H(p) < H(q) − α TV(p̃, q̃)`."""
    return entropy(pair.q) - entropy(pair.p) > alpha * total_variation(pair.p_tilde, pair.q_tilde)


def bild_star(pair: LawPair, alpha: Array) -> Array:
    """Defers if `D(q, p) > α`: Big-Little's rejection as a rule (Narasimhan et al., 2024, §B; §F.5 misprints the sign).

    Sampled draft: `D = −Σ q log p`. Greedy draft: `D = −log p(argmax q)`. If `q > 0 = p` for a token, `D` is infinite.
    """
    surprise = -pair.log("p")
    sampled = jnp.where(pair.q > 0, pair.q * surprise, 0.0).sum(-1, keepdims=True)
    # q̃ is the one-hot of argmax q exactly if the draft is greedy
    greedy = jnp.where(pair.q_tilde > 0, surprise, 0.0).sum(-1, keepdims=True)
    return jnp.where(pair.greedy, greedy, sampled) > alpha


def token_v1(pair: LawPair, alpha: Array) -> Array:
    """Defers token `v` if `q(v) < max p − α` (Narasimhan et al., 2024, eq. 13)."""
    return max_of(pair.p) - pair.q > alpha


def token_v2(pair: LawPair, alpha: Array) -> Array:
    """Defers token `v` if `p(v) < max p − α` (Narasimhan et al., 2024, eq. 14)."""
    return max_of(pair.p) - pair.p > alpha


def token_v3(pair: LawPair, alpha: Array) -> Array:
    """Defers token `v` if `p(v) < (1 − α) max p` (Narasimhan et al., 2024, eq. 15)."""
    return pair.p < (1.0 - alpha) * max_of(pair.p)


def lossy_greedy(pair: LawPair, alpha: Array) -> Array:
    """Defers if `p(argmax q) < (1 − α) max p`, at temperature 0 only (Leviathan et al., 2023, App. A.5)."""
    drafted = max_of(jnp.where(pair.q_tilde > 0, pair.p, 0.0))  # q̃ is a one-hot at the drafted token
    return drafted < (1.0 - alpha) * max_of(pair.p)


def lossy(beta: float = 1.0) -> Rule:
    """Returns the rule `lossy` with a given `β`.

    The rule keeps a drafted token with probability `min(1, p̃ / ((1 − α) q̃))`; a replacement is drawn from
    `norm(max(0, p̃/β − q̃))`. Sources: docs/methods.md, section 3; Narasimhan et al., 2024, Table 1 and Lemma 2.

    Args:
        beta: the scale of the residual; α must satisfy `max(0, 1 − β) <= α < 1`.

    Returns:
        A `Rule`, "lossy" for `β = 1`.

    Raises:
        ValueError: `β <= 0`.

    Examples:
        >>> import speccascade_jax as sc
        >>> rule = sc.lossy(beta=0.5)
        >>> rule.name, rule.alpha.domain
        ('lossy_beta_0.5', (0.5, 1.0))
    """
    if not beta > 0:
        raise ValueError(f"beta={beta} must be positive; 1 is the usual choice")
    name = "lossy" if beta == 1.0 else f"lossy_beta_{beta:g}"
    # If β > 1, the residual may be 0 everywhere. Replacements then come from p̃, so π can exceed the ceiling p̃/(1 − α)
    # on which the two shortcuts rely.
    kept, at_most = (laws.kept_below_ceiling, laws.lossy_at_most(beta)) if beta <= 1.0 else (None, None)
    alpha = Alpha(grid=(0.0, 0.9), domain=(max(0.0, 1.0 - beta), 1.0), useful=(0.0, 1.0), typical=0.4)
    law, variant = laws.lossy_with(beta), "Lossy" if beta == 1.0 else f"Lossy, β {beta:g}"
    return Rule(name=name, law=law, kept=kept, at_most=at_most, alpha=alpha, title="SpecDecode", variant=variant)


def random_accept(pair: LawPair, alpha: Array) -> Array:
    """Defers every token with probability `1 − α`: the random baseline of Holsman et al., 2025."""
    return (1.0 - alpha) + 0.0 * pair.greedy


_cascade = partial(Rule, title="SpecCascade")
_ANY, _POSITIVE = (-math.inf, math.inf), (0.0, math.inf)

# The largest τ of default sweeps: the largest value of a bounded divergence, or a practical value for an unbounded one.
_LARGEST = {"js": 1.0, "js_reference": 2.0, "kl": 10.0, "kl_reversed": 10.0, "tv": 1.0}


def fuzzy(divergence: str = "js", top_k: int = 0, scaled: bool = False) -> Rule:
    """Returns the rule of fuzzy speculative decoding, which defers if `Div(p, q) >= τ`; its α is τ.

    Sources: docs/methods.md, section 5; Holsman et al., 2025.

    Args:
        divergence: a key of `divergences.DIVERGENCES`.
        top_k: if positive, the divergence compares the target's `top_k` most likely tokens, and all others as one
            token; 0 compares all tokens.
        scaled: whether `p̃` and `q̃` are compared instead of the raw distributions.

    Returns:
        A `Rule`, the same object for the same arguments.

    Raises:
        ValueError: the divergence is unknown, or `top_k` is negative.

    Examples:
        >>> import speccascade_jax as sc
        >>> rule = sc.fuzzy("tv", top_k=50)
        >>> rule.name, rule.alpha.grid
        ('fuzzy_tv_top50', (0.0, 1.0))
        >>> rule is sc.fuzzy("tv", top_k=50)  # so both calls use one compiled program
        True
    """
    if divergence not in divergences.DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}: choose one of {', '.join(divergences.DIVERGENCES)}")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} is negative; 0 compares the whole vocabulary")
    return _fuzzy(divergence, int(top_k), bool(scaled))


@functools.cache  # jit treats rules as static, so a new rule per call would compile a new program per call
def _fuzzy(divergence: str, top_k: int, scaled: bool) -> Rule:
    name = f"fuzzy_{divergence}" + (f"_top{top_k}" if top_k else "") + ("_scaled" if scaled else "")
    deferral = divergences.Threshold(divergence, top_k, scaled)
    useful = None if divergence in ("js", "tv") else _POSITIVE
    alpha = Alpha(grid=(0.0, _LARGEST.get(divergence, 1.0)), useful=useful, typical=0.3)
    logs, variant = divergences.DIVERGENCES[divergence].reads_logs, name.removeprefix("fuzzy_")
    return _cascade(name=name, deferral=deferral, alpha=alpha, variant=variant, reads_logs=logs)


def get(rule: str | Rule) -> Rule:
    """Returns the rule of a given name: an entry of `RULES`, or a user's rule given as `module.NAME`.

    Raises:
        ValueError: there is no such rule; the message gives the most similar names.
    """
    chosen: Rule = rule if isinstance(rule, Rule) else names.look_up("rule", rule, RULES, Rule, "speccascade_jax.RULES")
    if RULES.get(chosen.name) is not chosen:
        checking.check(chosen)
    return chosen


_SIGNED = partial(Alpha, grid=(-1.0, 1.0))
_TOLERANCE = Alpha(grid=(0.0, 0.9), domain=(0.0, 1.0), useful=(0.0, 1.0), typical=0.4)
_ROWS = (
    Rule(
        name="spec_decode", law=laws.spec_decode, kept=laws.kept_lossless, alpha=None, reads_q=False, lossless=True,
        title="SpecDecode",
    ),
    lossy(),
    Rule(
        name="lossy_tuned", law=laws.lossy_tuned, kept=laws.kept_below_ceiling, at_most=laws.lossy_at_most(),
        alpha=_TOLERANCE, title="SpecDecode", variant="Lossy*",
    ),
    Rule(
        name="lossy_greedy", deferral=lossy_greedy, alpha=Alpha(typical=0.4), greedy_only=True, title="SpecDecode",
        variant="Lossy, greedy",
    ),
    Rule(name="sd_reference", law=laws.sd_reference, alpha=None, title="SD of Holsman et al.'s code"),
    Rule(
        name="bild_star", deferral=bild_star, alpha=Alpha(grid=(0.0, 10.0), useful=_POSITIVE, typical=2.0),
        title="BiLD*",
    ),
    _cascade(name="chow", deferral=chow, alpha=Alpha(typical=0.5), variant="Chow"),
    _cascade(name="chow_log", deferral=chow_log, alpha=Alpha(grid=(0.0, "lnV"), typical=2.0), variant="ChowLog"),
    _cascade(name="diff", deferral=diff, alpha=_SIGNED(typical=0.1), variant="Diff"),
    _cascade(name="diff_log", deferral=diff_log, alpha=Alpha(grid=("-lnV", "lnV"), typical=0.5), variant="DiffLog"),
    _cascade(name="opt", deferral=opt, alpha=_SIGNED(typical=0.2), variant="OPT"),
    _cascade(name="opt_log", deferral=opt_log, alpha=_SIGNED(useful=_ANY, typical=0.2), variant="OPTLog"),
    _cascade(name="token_v1", deferral=token_v1, alpha=_SIGNED(typical=0.3), variant="TokenV1"),
    _cascade(name="token_v2", deferral=token_v2, alpha=Alpha(typical=0.3), variant="TokenV2"),
    # the values are not evenly spaced, because the output hardly changes over most of the range of α
    _cascade(
        name="token_v3", deferral=token_v3, variant="Token",
        alpha=Alpha(typical=0.9, swept=(0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)),
    ),
    Rule(
        name="random_accept", deferral=random_accept, alpha=Alpha(domain=(0.0, 1.0), closed=True, typical=0.7),
        title="Random acceptance",
    ),
    *(fuzzy(*choice) for choice in itertools.product(divergences.DIVERGENCES, (0, 50), (False, True))),
)  # fmt: skip
RULES: dict[str, Rule] = {row.name: row for row in _ROWS}
"""The rules by name: `rule` takes these names in `decode`, gin and `Level`.

Every rule is also a method of the same name (`METHODS`). Sources of the formulas: docs/methods.md, section 3
(Narasimhan et al., 2024, Tables 1 and 3) and section 5 (Holsman et al., 2025).

Examples:
    >>> import speccascade_jax as sc
    >>> list(sc.RULES)[:3]
    ['spec_decode', 'lossy', 'lossy_tuned']
    >>> sc.RULES["chow_log"].alpha.grid, sc.RULES["chow_log"].alpha.typical
    ((0.0, 'lnV'), 2.0)
    >>> sc.RULES["chow"].reads_q, sc.RULES["chow"].lossless
    (True, False)
"""
