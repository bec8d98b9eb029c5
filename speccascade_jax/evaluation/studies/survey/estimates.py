"""Estimates of what every rule would decide along given outputs, for every α, without decoding with any rule.

Both models read the same outputs in one call each. At every position, each rule's distribution is compared with the
draft's over a grid of α. This gives a rule's rejection rate `E [1 − Σ min(π, q̃)]` and deferral rate `E [η]` at any α
between. They are *estimates*: a running rule generates other prefixes than the surveyed ones.

The divergence of fuzzy decoding from the target is compared with the bound `N · share · τ` of Holsman et al. (2025,
paper 2, §4.2 and Appendix B). The bound concerns the divergence between two distributions of whole outputs, the
target's and the method's: at most the number of tokens `N`, times the share that the draft decides, times the
threshold. These parts of it hold (METHODS section 5; `tests/evaluation/studies/survey/estimates_test.py` enumerates all
outputs of small models):

* Both KLs obey the chain rule: the divergence of outputs *is* the expected sum of `Div` over the tokens that the draft
  decides, under the first argument's distribution of prefixes: the method's for `kl_reversed`, the target's for `kl`.
* `tv` is at most that sum, under either distribution of prefixes.
* `js` obeys neither, and the bound fails: by a fifth for outputs of 2 tokens, a third for 3, three fifths for 8.
* All of this concerns the distributions that are sampled. A decision on the raw distributions says nothing about them,
  least of all for a greedy draft: a one-hot can be at any distance from a target that resembles its soft distribution.
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
    """A rule's rates at an α: the expected share of examined drafts that are rejected, and the mean `η` over positions.

    `deferral` is `None` for rules that are no deferral.
    """

    rejection: float
    deferral: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A rule's values along the surveyed positions: `alphas` `[A]`, `rejection` and `deferral` `[A, N]` for each α."""

    alphas: np.ndarray
    rejection: np.ndarray
    deferral: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Measures and every rule's rates at each surveyed position.

    Attributes:
        positions: name -> float32 `[N]`, one number per surveyed position: see `quantities`.
        curves: name of a rule -> its `Curve`.
        rows: int32 `[N]`, the output that each position belongs to.
    """

    positions: dict[str, np.ndarray]
    curves: dict[str, Curve]
    rows: np.ndarray

    def estimate(self, rule: str, alpha: float | None = None) -> Estimate:
        """Returns the rates at `alpha`, linear between the grid's α's; ValueError if it was not surveyed."""
        curve = self._curve(rule)
        if len(curve.alphas) == 1:
            alpha = float(curve.alphas[0])
        low, high = curve.alphas[0], curve.alphas[-1]
        if alpha is None or not low <= alpha <= high:
            raise ValueError(f"alpha={alpha} of rule {rule!r} is outside the surveyed range {low:g} … {high:g}")
        rejection = float(np.interp(alpha, curve.alphas, curve.rejection.mean(-1)))
        deferral = None if curve.deferral is None else float(np.interp(alpha, curve.alphas, curve.deferral.mean(-1)))
        return Estimate(rejection, deferral)

    def plan(self, rule: str, count: int) -> tuple[float, ...]:
        """Returns `count` >= 2 α's at equal steps of the estimated rejection rate; raises the errors of `estimate`."""
        if count < 2:
            raise ValueError(f"count={count}: a curve needs at least 2 points")
        alphas, rates = self._curve(rule).alphas, self._curve(rule).rejection.mean(-1)
        if len(alphas) == 1:
            return (float(alphas[0]),)
        # acceptance may fall with α in places, so the steps divide the length of the curve's path evenly
        path = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(rates)))])
        path = path + np.arange(len(path)) * 1e-9  # `np.interp` needs rising values, also where the curve is level
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
    """Surveys every position of every output, the stop id included.

    Outputs along which a model gives NaN or infinite logits are left out, and a warning says how many.

    Args:
        pair: the models.
        prompt: `[B, P]`, the prompts of the outputs.
        tokens: int32 `[B, L]`, the outputs of any writer.
        lengths: int32 `[B]`, number of tokens of each output.
        controls: temperature, top-p and top-k of both models per row; its α is ignored.
        grids: rule -> rising α's (one number for rules without α).

    Raises:
        ValueError: an unknown rule, an α outside its domain, an empty or falling grid.
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
    """Joins surveys of different examples under the same settings; continues the numbering of rows."""
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
    """Returns the lengths, but 0 for outputs along which the draft or the target gives NaN or infinite logits."""
    lost = [np.asarray(failing(model_logits, jnp.asarray(lengths))) for model_logits in logits]
    for name, rows in zip(("draft", "target"), lost, strict=True):
        if rows.any():
            message = f"{rows.sum()} outputs are left out: the {name} model gives NaN or infinite logits along them"
            warnings.warn(message, stacklevel=3)
    return np.where(np.logical_or(*lost), 0, lengths)


def _grid(rule: Rule, grid: Sequence[float]) -> np.ndarray:
    values = np.asarray(grid, np.float64)
    if values.ndim != 1 or not len(values) or (np.diff(values) <= 0).any():
        raise ValueError(f"the grid of rule {rule.name!r} must increase, got {tuple(grid)}")
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
    """Computes the quantities that rules decide by, and the tokens' own probabilities, float32 `[..., 1]` each.

    Entropies are in nats. Every divergence appears twice: `<name>` of `p` and `q`, `<name>_scaled` of `p̃` and `q̃`.
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
    """Returns `Σ min(π, q̃)` and `η`, `[A, B, L]`; one α at a time, to bound the memory of distributions."""

    def at(alpha: Array) -> tuple[Array, Array]:
        column = jnp.full(pair.greedy.shape, alpha)
        kept = jnp.minimum(rule.target_law(pair, column), pair.q_tilde).sum(-1)
        if rule.deferral is None:
            return kept, jnp.zeros_like(kept)
        eta = laws.deferral_mass(rule.deferral(pair, column), pair)
        return kept, jnp.broadcast_to(eta[..., 0], kept.shape)

    return jax.lax.map(at, grid)


OUTPUTS = {"tv": ("rule", "target"), "kl_reversed": ("rule",), "kl": ("target",), "js": ("rule",)}
"""Divergence -> the outputs along which its share is valid; the method's own come first if both are."""
HEURISTIC = "heuristic (may be exceeded by a fifth, and by more on long outputs)"


class Bound(NamedTuple):
    """The bound of a fuzzy rule at a threshold, along given outputs.

    Attributes:
        tokens: `N`, mean positions per output, the stop id included.
        share: the share of these positions with `Div < τ`, where tokens have the draft's distribution.
        incurred: mean over outputs of the sum of `Div(p̃, q̃)` over these positions, in the divergence's unit.
        bound: `N · share · τ`; standing: whether it is proven, in words.
    """

    tokens: float
    share: float
    incurred: float
    bound: float
    standing: str


def bound(surveyed: Survey, rule: str, tau: float, along: str = "rule", greedy: bool = False) -> Bound:
    """Returns the bound of a fuzzy rule at threshold `tau`, and the divergence that is incurred.

    Args:
        surveyed: a survey with `rule` at `tau` in its grid.
        rule: a fuzzy rule's name.
        tau: the rule's threshold τ.
        along: the writer of the surveyed outputs: "rule" (the fuzzy method itself, `bonus="rule"`, at this `tau`),
            "target", or any other.
        greedy: whether the draft was greedy.

    Raises:
        ValueError: no fuzzy rule, or one that was not surveyed at `tau`.
    """
    form = threshold(rule)
    curve = surveyed.curves.get(rule)
    if curve is None or curve.deferral is None or tau not in curve.alphas:
        raise ValueError(f"rule {rule!r} was not surveyed at τ = {tau:g}: add this τ to the grid of the survey")
    kept = curve.deferral[list(curve.alphas).index(tau)] == 0  # the rule's own decision: δ is 0 or 1
    outputs = int(surveyed.rows.max()) + 1
    tokens, share = len(kept) / outputs, float(kept.mean())
    # Tokens are drawn from the scaled distributions, whatever the rule compares. Other positions may have an
    # infinite divergence.
    incurred = float(np.where(kept, surveyed.positions[f"{form.name}_scaled"], 0.0).sum()) / outputs
    return Bound(tokens, share, incurred, tokens * share * tau, standing(form, along, greedy))


def threshold(rule: str) -> Threshold:
    """Returns the comparison of a fuzzy rule with τ; ValueError for an unknown rule or one that is not fuzzy."""
    decision = deferral.get(rule).deferral
    if not isinstance(decision, Threshold):
        raise ValueError(f"rule {rule!r} compares no divergence with a threshold: choose a fuzzy_ rule")
    return decision


def is_fuzzy(rule: str) -> bool:
    """Returns whether the rule compares a divergence with a threshold."""
    return isinstance(deferral.get(rule).deferral, Threshold)


def outputs_of(form: Threshold) -> str:
    """Returns whose outputs to survey for the bound: "rule" (the method's own) or "target"."""
    return OUTPUTS.get(form.name, ("rule",))[0]


def standing(form: Threshold, along: str, greedy: bool) -> str:
    """Returns the status of the bound `N · share · τ` for a decision: "proven", "heuristic …", or why it is no bound.

    A greedy draft under a decision on the scaled distributions is no exception: `q̃` is then the one-hot that tokens
    are drawn from.
    """
    if not form.scaled:
        read = "it reads the raw distributions, but tokens come from the scaled ones"
        soft = "false for greedy drafts: it reads the soft distribution, not the one-hot"
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
