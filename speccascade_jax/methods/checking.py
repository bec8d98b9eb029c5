"""The function `check_rule`, which tests in seconds that a user's rule gives the output distribution that it promises.

`tests/support/conformance.py` tests more properties of the package's own rules.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import law_pair_of
from speccascade_jax.core.types import LawPair, Prompt
from speccascade_jax.engine import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import TOKEN
from speccascade_jax.models.fake import TableLM
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import checking, deferral
from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.block_wise import JOINT
from speccascade_jax.rules.rule import Rule
from speccascade_jax.rules.verification import TokenWise

_ENTRIES, _ROWS, _LENGTH = 6, 4000, 6
_SAMPLINGS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8))
_GREEDY = ((0.0, 1.0),)
_WORST, _LEAST = 1e-5, 1e-5
_PAIRS = 24
"""The number of pairs of a draft and a target distribution on which the identity is tested."""
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA on a CPU: the check's programs run for less time than it would take to optimise them."""
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later releases do not have this option
    _QUICKLY["xla_cpu_use_fusion_emitters"] = False


def check_rule(rule: Rule | str, alphas: tuple[float, ...] = (), seed: int = 0) -> str:
    """Tests a rule against its target distribution, on small examples and through the engine; takes about ten seconds.

    It tests three properties:

    1. The rule's functions return correct shapes and values (`rules.checking.check`).
    2. The identity `kept + (1 − Σ kept) · replacement = π` holds for every acceptance that fits the rule. It is tested
       on random, equal and disjoint distributions of draft and target, at three values of α. The values at single
       tokens (`kept_at`) must agree with `kept`.
    3. Generated tokens follow the target distribution `π`. They are generated with blocks of 3, verified token by token
       and jointly, from tables of 6 entries, at temperatures 1 and 0.5 and with top-p 0.8. Chi-square tests compare
       them with `π` given the token before. The test fails if a p-value is below 1e-5 after Holm's correction.

    A rule that keeps every draft on these tables passes, whatever it does on other distributions; a warning says so.

    Args:
        rule: a `Rule`, or a name.
        alphas: the values of α to try; by default three values in the rule's usual range.
        seed: the random seed of the sampling.

    Returns:
        A line that says what was tested and how large the deviations were.

    Raises:
        ValueError: a test fails; the message names the test, the values and the size of the deviation.

    Examples:
        >>> import speccascade_jax as sc
        >>> def favourite(pair, alpha):
        ...     return pair.q.max(-1, keepdims=True) < 1.0 - alpha
        >>> sc.check_rule(sc.Rule(name="favourite", deferral=favourite), alphas=(0.5,))
        'favourite at alpha 0.5: shapes correct, ...'
    """
    rule = deferral.get(rule)
    checking.check(rule)
    tried = alphas or _usual(rule)
    samplings = _GREEDY if rule.greedy_only else _SAMPLINGS
    accepts = [Speculative(rule), *([Deferral(rule)] if rule.deferral is not None else [])]
    identities = [_identity(rule, accept, alpha) for accept in accepts for alpha in tried]
    worst, moved = map(max, zip(*identities, strict=True))
    if moved <= _WORST:
        keeps = f"rule {rule.name!r} keeps every draft (π = q̃) on tables of {_ENTRIES} tokens"
        warnings.warn(f"{keeps}, so this check would miss errors: try other alphas", stacklevel=2)
    p_values = np.sort([p for way in (TOKEN, *JOINT) for p in _p_values(rule, way, tried, samplings, seed)])
    least = float(np.minimum(1.0, p_values * np.arange(len(p_values), 0, -1)).min())
    if least < _LEAST:
        raise ValueError(
            f"rule {rule.name!r}: generated tokens do not follow the rule's own distribution π (p-value {least:.1e} in "
            f"{len(p_values)} chi-square tests, with Holm's correction): let its functions depend only on the two "
            "distributions at the token's own position, and on alpha"
        )
    where_tried = "" if rule.alpha is None else f" at alpha {', '.join(f'{alpha:.3g}' for alpha in tried)}"
    tokens = _ROWS * _LENGTH * len(samplings) * len(tried) * (1 + len(JOINT))
    identity = f"shapes correct, identity within {worst:.0e}"
    return f"{rule.name}{where_tried}: {identity}, distribution tested on {tokens:,} tokens (p = {least:.2f})"


def _usual(rule: Rule) -> tuple[float, ...]:
    if rule.alpha is None:
        return (0.0,)
    low, high = rule.alpha.bounds(_ENTRIES)
    return tuple(low + (high - low) * share for share in (0.15, 0.5, 0.85))


def _options() -> dict[str, Any] | None:
    return _QUICKLY if jax.default_backend() == "cpu" else None


@lru_cache
def _laws() -> jax.stages.Compiled:
    """Returns the compiled `law_pair_of` of `_PAIRS` rows, so that the whole check compiles it once."""
    logits = jax.ShapeDtypeStruct((_PAIRS, _ENTRIES), jnp.float32)
    return jax.jit(law_pair_of).lower(logits, logits, make_controls(_PAIRS)).compile(_options())


@partial(jax.jit, static_argnames="accept")
def _implied(accept: TokenWise, pair: LawPair, alpha: Any) -> tuple[Any, Any]:
    """Returns two stacks of two arrays each, which must be equal if the rule is correct.

    The first stack contains the distribution that acceptance and replacement imply, and the kept mass. The second
    stack contains the rule's `π`, and the kept mass as `kept_at` computes it for single tokens.
    """
    kept, replacement = accept(pair, alpha)
    tokens = jnp.broadcast_to(jnp.arange(_ENTRIES), kept.shape)
    alone = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (len(kept), _ENTRIES, x.shape[-1])), pair)
    of_each = accept.kept_at(alone, jnp.broadcast_to(alpha[:, None], (*tokens.shape, 1)), tokens)
    law = kept + (1.0 - kept.sum(-1, keepdims=True)) * replacement
    return jnp.stack([law, kept]), jnp.stack([accept.law(pair, alpha), of_each])


def _identity(rule: Rule, accept: TokenWise, alpha: float) -> tuple[float, float]:
    """Returns the largest deviation from the identity of `check_rule`, and the largest difference of π from q̃.

    Raises:
        ValueError: the deviation is larger than rounding explains.
    """
    rng = np.random.default_rng(0)
    p = rng.normal(size=(_PAIRS, _ENTRIES)).astype(np.float32) * 2
    q = p + rng.normal(size=p.shape).astype(np.float32)
    q[0], p[1, :3], q[1, 3:] = p[0], -np.inf, -np.inf
    temperature = np.tile(np.asarray([0.0] if rule.greedy_only else [0.0, 0.5, 1.0], np.float32), _PAIRS)[:_PAIRS]
    pair = _laws()(q, p, make_controls(_PAIRS, temperature=temperature))
    implied, law = (np.asarray(x) for x in _implied(accept, pair, jnp.full((_PAIRS, 1), alpha, jnp.float32)))
    worst = float(np.abs(implied - law).max())
    if not worst <= _WORST:
        raise ValueError(
            f"rule {rule.name!r} at alpha={alpha:g}: kept + (1 - Σ kept) · replacement, or kept of single tokens, is "
            f"up to {worst:.1e} away from what π requires under {type(accept).__name__}: "
            f"correct its deferral, law or kept"
        )
    return worst, float(np.abs(law[0] - np.asarray(pair.q_tilde)).max())


def _p_values(rule: Rule, verify: str, alphas: Sequence[float], samplings: Any, seed: int) -> list[float]:
    """Returns a p-value for each α and sampling, of a chi-square test that generated tokens follow `π`.

    The tokens are grouped by the token before them, because the tables give a distribution for each of these.
    """
    rng = np.random.default_rng(3)
    p = (rng.normal(size=(_ENTRIES, _ENTRIES)) * 1.2).astype(np.float32)
    q = p + (rng.normal(size=p.shape) * 0.9).astype(np.float32)
    engine, params = assemble(Pair(target=TableLM(p), draft=TableLM(q)), rule=rule, block_size=3, verify=verify)
    # Each sampling has a call of its own, because top-p in one row makes the whole batch compute thresholds.
    rows = _ROWS * len(alphas)
    alpha = np.repeat(np.asarray(alphas, np.float32), _ROWS)
    controls = [make_controls(rows, alpha=alpha, temperature=heat, top_p=share) for heat, share in samplings]
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32))
    program = generate.compiled_for(engine, params, prompt, controls[0], max_new_tokens=_LENGTH, options=_options())
    p_values = list[float]()
    for numbers, sampling in zip(controls, samplings, strict=True):
        output = program(params, prompt, np.uint32(seed), numbers, generate.row_ids(None, prompt))
        parts = np.asarray(output.tokens).reshape(len(alphas), _ROWS, _LENGTH)
        laws = [_law(rule, q, p, number, *sampling) for number in alphas]
        p_values += map(_p_value, parts, laws)
    return p_values


def _law(rule: Rule, q: np.ndarray, p: np.ndarray, alpha: float, temperature: float, top_p: float) -> np.ndarray:
    """Returns the rule's `π` in float64 for every row of the tables, `[_ENTRIES, _ENTRIES]`."""
    missing = [(0, _PAIRS - _ENTRIES), (0, 0)]
    controls = make_controls(_PAIRS, temperature=temperature, top_p=top_p)
    pair = _laws()(np.pad(q, missing), np.pad(p, missing), controls)
    law = np.asarray(rule.target_law(pair, jnp.full((_PAIRS, 1), alpha, jnp.float32)), np.float64)[:_ENTRIES]
    return np.asarray(law / law.sum(-1, keepdims=True))


def _p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    before = np.concatenate([np.zeros((len(tokens), 1), int), tokens[:, :-1]], axis=1)
    counts = np.zeros_like(law)
    np.add.at(counts, (before, tokens), 1)
    expected = law * counts.sum(-1, keepdims=True)
    if ((expected < 1e-9) & (counts > 0)).any():
        return 0.0  # a token with probability 0 was generated
    large = expected >= 5
    rest = [np.where(large, 0.0, table).sum(-1) for table in (counts, expected)]
    statistic = ((counts - expected) ** 2 / np.where(large, expected, np.inf)).sum()
    statistic += sum((o - e) ** 2 / e for o, e in zip(*rest, strict=True) if e >= 1)
    freedom = int(sum(max(row.sum() - 1 + (e >= 1), 0) for row, e in zip(large, rest[1], strict=True)))
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
