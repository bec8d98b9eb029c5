"""Estimates of every rule's rejection and deferral rates for every α, from given outputs, without decoding.

Each model scores the given outputs in one call. At every position, the distribution `π` of each rule is compared with
the draft's distribution `q̃` for a grid of α's. This gives the rejection rate `E [1 − Σ min(π, q̃)]` and the deferral
rate `E [η]` of a rule, where `η` is the probability that the rule defers a drafted token to the target. Rates between
two α's of the grid are interpolated. The rates are *estimates*: if the rule itself decoded, it would generate other
prefixes than the given outputs.

The module also compares the divergence between fuzzy decoding and the target with the bound `N · share · τ` of Holsman
et al. (2025, §4.2 and Appendix B). The compared distributions are those of whole outputs, not of single tokens. The
bound is the number of tokens `N`, times the share of tokens that the draft decides, times the threshold `τ`. Whether
the bound holds depends on the divergence (docs/methods.md, section 5;
`tests/evaluation/studies/survey/estimates_test.py` enumerates all outputs of small models):

* Both KL divergences obey the chain rule: the divergence of whole outputs *is* the expected sum of `Div` over the
  tokens that the draft decides. The expectation is over prefixes of the method for `kl_reversed`, and of the target for
  `kl`.
* The total variation `tv` of whole outputs is at most that expected sum, with prefixes of either distribution.
* The Jensen-Shannon divergence `js` has neither property and can exceed the bound: by a fifth for outputs of 2 tokens,
  by a third for 3 tokens, and by three fifths for 8 tokens.
* These statements hold for the distributions that tokens are sampled from. If a rule instead compares the raw
  distributions (before temperature, top-p and top-k), they need not hold. An example is a greedy draft: its sampling
  distribution is a one-hot vector, which may be far from the target even if the draft's raw distribution is close to
  the target's.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.sampling import log_laws, make_law_pair, raw_and_scaled
from speccascade_jax.core.types import Array, Controls, LawPair, Prompt
from speccascade_jax.models.teacher_forcing import along, failing
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral, divergences, laws, measures
from speccascade_jax.rules.divergences import Threshold
from speccascade_jax.rules.rule import Rule


class Estimate(NamedTuple):
    """Estimated rates of a rule at one α: `rejection` and `deferral`.

    `rejection` is the expected share of examined draft tokens that are rejected. `deferral` is the mean of `η` over
    positions, or `None` for rules without a deferral function.
    """

    rejection: float
    deferral: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rates of one rule at every surveyed position: `alphas` `[A]`; `rejection` and `deferral` `[A, N]`."""

    alphas: np.ndarray
    rejection: np.ndarray
    deferral: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Measured quantities, and the rates of every rule, at each position of the given outputs.

    Attributes:
        positions: maps the name of a quantity (`quantities`) to float32 `[N]`, one number per surveyed position.
        curves: maps the name of a rule to its `Curve`.
        rows: int32 `[N]`, the index of the output that each position belongs to.
    """

    positions: dict[str, np.ndarray]
    curves: dict[str, Curve]
    rows: np.ndarray

    def estimate(self, rule: str, alpha: float | None = None) -> Estimate:
        """Returns the rates of a rule at `alpha`, interpolated linearly; ValueError if they were not surveyed."""
        curve = self._curve(rule)
        if len(curve.alphas) == 1:
            alpha = float(curve.alphas[0])
        low, high = curve.alphas[0], curve.alphas[-1]
        if alpha is None or not low <= alpha <= high:
            raise ValueError(
                f"alpha={alpha} of rule {rule!r} is outside the surveyed range {low:g} … {high:g}: choose an α in it"
            )
        rejection = float(np.interp(alpha, curve.alphas, curve.rejection.mean(-1)))
        deferral = None if curve.deferral is None else float(np.interp(alpha, curve.alphas, curve.deferral.mean(-1)))
        return Estimate(rejection, deferral)

    def plan(self, rule: str, count: int) -> tuple[float, ...]:
        """Returns `count` >= 2 α's, evenly spaced in the estimated rejection rate; raises the errors of `estimate`."""
        if count < 2:
            raise ValueError(f"count={count}: a curve needs at least 2 points")
        alphas, rates = self._curve(rule).alphas, self._curve(rule).rejection.mean(-1)
        if len(alphas) == 1:
            return (float(alphas[0]),)
        # the rate may rise and fall with α, so the α's evenly divide the sum of all changes of the rate
        path = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(rates)))])
        path = path + np.arange(len(path)) * 1e-9  # `np.interp` needs strictly increasing values
        chosen = np.interp(np.linspace(0.0, path[-1], count), path, alphas)
        return tuple(float(f"{alpha:.3g}") for alpha in chosen)

    def _curve(self, rule: str) -> Curve:
        if rule not in self.curves:
            raise ValueError(f"rule {rule!r} was not surveyed; surveyed rules: {', '.join(self.curves)}")
        return self.curves[rule]


def survey(
    pair: Pair,
    prompt: Prompt,
    tokens: np.ndarray,
    lengths: np.ndarray,
    controls: Controls,
    grids: Mapping[str, Sequence[float]],
) -> Survey:
    """Computes the quantities and rates at every position of every output, the stop id included.

    Outputs along which a model gives NaN or infinite logits are left out, and a warning gives their number.

    Args:
        pair: the models.
        prompt: `[B, P]`, the prompts of the outputs.
        tokens: int32 `[B, L]`, the outputs, written by any method.
        lengths: int32 `[B]`, number of tokens of each output.
        controls: temperature, top-p and top-k of both models per row; its α is ignored.
        grids: maps a rule to increasing α's (one number for rules without α).

    Raises:
        ValueError: a rule is unknown, an α is outside its domain, or a grid is empty or does not increase.
    """
    chosen = {name: (deferral.get(name), _grid(deferral.get(name), grid)) for name, grid in grids.items()}
    logits = [along(bound, prompt, jnp.asarray(tokens)) for bound in (pair.draft, pair.target)]
    counted = np.arange(tokens.shape[1])[None] < _well(logits, lengths)[:, None]
    pair_of_laws = _laws(*logits, controls)
    values = jax.device_get(quantities(pair_of_laws, jnp.asarray(tokens)))
    curves = {}
    for name, (rule, grid) in chosen.items():
        kept, eta = (np.asarray(x)[:, counted] for x in _along_grid(rule, pair_of_laws, jnp.asarray(grid, jnp.float32)))
        curves[name] = Curve(alphas=grid, rejection=1.0 - kept, deferral=None if rule.deferral is None else eta)
    rows = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)[counted]
    return Survey(positions={name: x[..., 0][counted] for name, x in values.items()}, curves=curves, rows=rows)


def join(parts: Sequence[Survey]) -> Survey:
    """Joins surveys of different examples under the same settings, and numbers their rows consecutively."""
    starts = np.cumsum([0, *(int(part.rows.max(initial=-1)) + 1 for part in parts)])
    curves = {}
    for name, curve in parts[0].curves.items():
        rule_curves = [part.curves[name] for part in parts]
        deferral = None if curve.deferral is None else np.concatenate([c.deferral for c in rule_curves], axis=1)
        rejection = np.concatenate([c.rejection for c in rule_curves], axis=1)
        curves[name] = Curve(alphas=curve.alphas, rejection=rejection, deferral=deferral)
    positions = {name: np.concatenate([part.positions[name] for part in parts]) for name in parts[0].positions}
    rows = np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=False)])
    return Survey(positions=positions, curves=curves, rows=rows)


def _well(logits: Sequence[Array], lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths, with 0 for outputs along which the draft or the target gives NaN or infinite logits."""
    lost = [np.asarray(failing(model_logits, jnp.asarray(lengths))) for model_logits in logits]
    for name, rows in zip(("draft", "target"), lost, strict=True):
        if rows.any():
            message = f"{rows.sum()} outputs are left out: the {name} model gives NaN or infinite logits along them"
            warnings.warn(message, stacklevel=3)
    return np.where(np.logical_or(*lost), 0, lengths)


def _grid(rule: Rule, grid: Sequence[float]) -> np.ndarray:
    values = np.asarray(grid, np.float64)
    if values.ndim != 1 or not len(values) or (np.diff(values) <= 0).any():
        raise ValueError(f"the grid of rule {rule.name!r} is {tuple(grid)}: give one or more α's in increasing order")
    if rule.alpha is not None:
        rule.alpha.check(f"rule {rule.name!r}", values)
    return values


@jax.jit
def _laws(q_logits: Array, p_logits: Array, controls: Controls) -> LawPair:
    q, q_tilde, _ = raw_and_scaled(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    return make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)


@jax.jit
def quantities(pair: LawPair, tokens: Array) -> dict[str, Array]:
    """Computes the quantities that rules base decisions on, and the probabilities of the tokens.

    All results are float32 `[..., 1]`. Entropies are in nats. Every divergence has two entries: `<name>` compares `p`
    with `q`, and `<name>_scaled` compares `p̃` with `q̃`.
    """
    chosen = laws.at_tokens(pair, tokens)
    values = {"q_of_token": chosen.q, "p_of_token": chosen.p}
    for name, law in (("q", pair.q), ("p", pair.p)):
        values |= {f"max_{name}": measures.max_of(law), f"entropy_{name}": measures.entropy(law)}
    for name in divergences.DIVERGENCES:
        for scaled in (False, True):
            compared = divergences.Threshold(name, scaled=scaled)
            values[f"{name}_scaled" if scaled else name] = compared.of(pair)
    return values


@partial(jax.jit, static_argnames="rule")
def _along_grid(rule: Rule, pair: LawPair, grid: Array) -> tuple[Array, Array]:
    """Returns `Σ min(π, q̃)` and `η`, `[A, B, L]` each, computed for one α at a time to limit the memory."""

    def at(alpha: Array) -> tuple[Array, Array]:
        column = jnp.full(pair.greedy.shape, alpha)
        kept = jnp.minimum(rule.target_law(pair, column), pair.q_tilde).sum(-1)
        if rule.deferral is None:
            return kept, jnp.zeros_like(kept)
        eta = laws.deferral_mass(rule.deferral(pair, column), pair)
        return kept, jnp.broadcast_to(eta[..., 0], kept.shape)

    return jax.lax.map(at, grid)


OUTPUTS = {"tv": ("rule", "target"), "kl_reversed": ("rule",), "kl": ("target",), "js": ("rule",)}
"""Map from a divergence to the outputs that may determine the bound's share of tokens; the first is preferred."""
HEURISTIC = "heuristic (may be exceeded by a fifth, and by more on long outputs)"


class Bound(NamedTuple):
    """Bound on the divergence of a fuzzy rule from the target at one threshold, measured along given outputs.

    Attributes:
        tokens: `N`, mean number of positions per output, the stop id included.
        share: the share of these positions with `Div < τ`, where tokens have the draft's distribution.
        incurred: sum of `Div(p̃, q̃)` over these positions, mean over outputs, in the unit of the divergence.
        bound: `N · share · τ`; standing: the status of the bound in words, such as "proven".
    """

    tokens: float
    share: float
    incurred: float
    bound: float
    standing: str


def bound(surveyed: Survey, rule: str, tau: float, along: str = "rule", greedy: bool = False) -> Bound:
    """Returns the bound on the divergence of a fuzzy rule at threshold `tau`, and the divergence actually incurred.

    Args:
        surveyed: a survey with `rule` at `tau` in its grid.
        rule: a fuzzy rule's name.
        tau: the rule's threshold τ.
        along: the method that wrote the surveyed outputs: "rule" (the fuzzy method itself, `bonus="rule"`, at this
            `tau`), "target", or any other.
        greedy: whether the draft was greedy.

    Raises:
        ValueError: the rule is not fuzzy, or was not surveyed at `tau`.
    """
    form = threshold(rule)
    curve = surveyed.curves.get(rule)
    if curve is None or curve.deferral is None or tau not in curve.alphas:
        raise ValueError(f"rule {rule!r} was not surveyed at τ = {tau:g}: add this τ to the grid of the survey")
    # positions at which the rule keeps the draft's distribution: its deferral is 0 there, and 1 elsewhere
    kept = curve.deferral[list(curve.alphas).index(tau)] == 0
    outputs = int(surveyed.rows.max()) + 1
    tokens, share = len(kept) / outputs, float(kept.mean())
    # Tokens are drawn from the scaled distributions, even if the rule compares the raw ones. `np.where` excludes the
    # other positions, because their divergence may be infinite.
    incurred = float(np.where(kept, surveyed.positions[f"{form.name}_scaled"], 0.0).sum()) / outputs
    return Bound(tokens, share, incurred, tokens * share * tau, standing(form, along, greedy))


def threshold(rule: str) -> Threshold:
    """Returns the comparison of a divergence with τ that a fuzzy rule makes; ValueError if the rule is not fuzzy."""
    decision = deferral.get(rule).deferral
    if not isinstance(decision, Threshold):
        raise ValueError(f"rule {rule!r} compares no divergence with a threshold: choose a fuzzy_ rule")
    return decision


def is_fuzzy(rule: str) -> bool:
    """Returns whether the rule compares a divergence with a threshold."""
    return isinstance(deferral.get(rule).deferral, Threshold)


def outputs_of(form: Threshold) -> str:
    """Returns which outputs to survey for the bound: "rule" (those of the fuzzy method) or "target"."""
    return OUTPUTS.get(form.name, ("rule",))[0]


def standing(form: Threshold, along: str, greedy: bool) -> str:
    """Returns the status of the bound `N · share · τ`: "proven", "heuristic …", or the reason why it is no bound.

    If the rule compares the scaled distributions, the status is the same for a greedy draft: `q̃` is then the one-hot
    vector that tokens are drawn from.
    """
    if not form.scaled:
        read = "the rule compares raw distributions, but tokens are drawn from the scaled ones"
        soft = "no bound for a greedy draft: the rule compares its raw distribution, not the one-hot"
        return soft if greedy else f"no bound: {read}"
    if form.top_k:
        return f"no bound: over the top {form.top_k} tokens a divergence is underestimated"
    if form.name not in OUTPUTS:
        return f"no bound: {form.name} of whole outputs may be twice as large"
    if along not in OUTPUTS[form.name]:
        return f"no bound: the share must be along outputs of the {' or '.join(OUTPUTS[form.name])}"
    if form.name == "js":
        return HEURISTIC
    return "proven (q̃ is the greedy draft's one-hot)" if greedy else "proven"
