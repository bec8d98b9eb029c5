"""One pass, all rules: what every rule would decide along given outputs, for every α, without decoding with any.

Both models read the same outputs once, in one call each; at every position each rule's law is compared with the draft's
over a grid of α. From that follow a rule's rejection rate `E [1 − Σ min(π, q̃)]` and deferral rate `E [η]` at any α
between. They are *estimates*: a rule that runs writes other prefixes than those surveyed here.
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
from speccascade_jax.rules import deferral as rules
from speccascade_jax.rules import divergences, laws, measures
from speccascade_jax.rules.rule import Rule


class Estimate(NamedTuple):
    """Of a rule at an α: expected share of examined drafts that are rejected, and mean `η` over positions.

    `deferral` is `None` for rules that are no deferral.
    """

    rejection: float
    deferral: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A rule along the surveyed positions: `alphas` `[A]`, `rejection` and `deferral` `[A, N]` at each of them."""

    alphas: np.ndarray
    rejection: np.ndarray
    deferral: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass found.

    Attributes:
        positions: name -> float32 `[N]`, one number per surveyed position: see `quantities`.
        curves: name of a rule -> its `Curve`.
        rows: int32 `[N]`, the output that each position belongs to.
    """

    positions: dict[str, np.ndarray]
    curves: dict[str, Curve]
    rows: np.ndarray

    def estimate(self, rule: str, alpha: float | None = None) -> Estimate:
        """Rejection and deferral rate at `alpha`, linear between the grid's α's; ValueError if it was not surveyed."""
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
        """`count` >= 2 α's, between which the estimated rejection rate moves by equal steps; errors as `estimate`."""
        if count < 2:
            raise ValueError(f"count={count}: a curve has two ends at least")
        alphas, rates = self._curve(rule).alphas, self._curve(rule).rejection.mean(-1)
        if len(alphas) == 1:
            return (float(alphas[0]),)
        # acceptance need not rise with α everywhere: what is divided evenly is the way the curve goes
        way = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(rates)))])
        way = way + np.arange(len(way)) * 1e-9  # a level stretch is still a way
        chosen = np.interp(np.linspace(0.0, way[-1], count), way, alphas)
        return tuple(float(f"{alpha:.3g}") for alpha in chosen)

    def _curve(self, rule: str) -> Curve:
        if rule not in self.curves:
            raise ValueError(f"rule {rule!r} was not surveyed; there are {', '.join(self.curves)}")
        return self.curves[rule]


def survey(
    pair: Pair,
    prompt: Prompt,
    tokens: np.ndarray,
    lengths: np.ndarray,
    controls: Controls,
    grids: Mapping[str, Sequence[float]],
) -> Survey:
    """Survey outputs: every position of every row, the stop id included.

    Rows along which a model gives NaN or infinite logits are left out, and a warning says how many.

    Args:
        pair: the models.
        prompt: `[B, P]`, what the outputs answer.
        tokens: int32 `[B, L]`, whoever wrote them; lengths: int32 `[B]`.
        controls: temperature, top-p and top-k of both models per row; its α is not read.
        grids: rule -> rising α's (one number for rules without α).

    Raises:
        ValueError: an unknown rule, an α outside its domain, an empty or falling grid.
    """
    chosen = {name: (rules.get(name), _grid(rules.get(name), grid)) for name, grid in grids.items()}
    logits = [along(bound, prompt, jnp.asarray(tokens)) for bound in (pair.draft, pair.target)]
    counted = np.arange(tokens.shape[1])[None] < _well(logits, lengths)[:, None]
    pair_of_laws = _laws(*logits, controls)
    found = jax.device_get(quantities(pair_of_laws, jnp.asarray(tokens)))
    curves = {}
    for name, (rule, grid) in chosen.items():
        kept, eta = (np.asarray(x)[:, counted] for x in _along_grid(rule, pair_of_laws, jnp.asarray(grid, jnp.float32)))
        curves[name] = Curve(alphas=grid, rejection=1.0 - kept, deferral=None if rule.deferral is None else eta)
    rows = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)[counted]
    return Survey(positions={name: x[..., 0][counted] for name, x in found.items()}, curves=curves, rows=rows)


def join(parts: Sequence[Survey]) -> Survey:
    """Surveys of different examples under the same settings as one; rows are numbered on."""
    starts = np.cumsum([0, *(int(part.rows.max(initial=-1)) + 1 for part in parts)])
    curves = {}
    for name, curve in parts[0].curves.items():
        each = [part.curves[name] for part in parts]
        deferral = None if curve.deferral is None else np.concatenate([c.deferral for c in each], axis=1)
        rejection = np.concatenate([c.rejection for c in each], axis=1)
        curves[name] = Curve(alphas=curve.alphas, rejection=rejection, deferral=deferral)
    positions = {name: np.concatenate([part.positions[name] for part in parts]) for name in parts[0].positions}
    rows = np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=False)])
    return Survey(positions=positions, curves=curves, rows=rows)


def _well(logits: Sequence[Array], lengths: np.ndarray) -> np.ndarray:
    """The lengths, 0 where the draft's or the target's logits fail along the output."""
    lost = [np.asarray(failing(each, jnp.asarray(lengths))) for each in logits]
    for name, rows in zip(("draft", "target"), lost, strict=True):
        if rows.any():
            said = f"{rows.sum()} outputs are left out: the {name} model gives NaN or infinite logits along them"
            warnings.warn(said, stacklevel=3)
    return np.where(np.logical_or(*lost), 0, lengths)


def _grid(rule: Rule, grid: Sequence[float]) -> np.ndarray:
    values = np.asarray(grid, np.float64)
    if values.ndim != 1 or not len(values) or (np.diff(values) <= 0).any():
        raise ValueError(f"the grid of rule {rule.name!r} must rise: got {tuple(grid)}")
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
    """What rules decide by, and the tokens' own probabilities, float32 `[..., 1]` each; entropies in nats.

    Every divergence twice: `<name>` of `p` and `q`, `<name>_scaled` of `p̃` and `q̃`.
    """
    chosen = laws.at_tokens(pair, tokens)
    found = {"q_of_token": chosen.q, "p_of_token": chosen.p}
    for name, law in (("q", pair.q), ("p", pair.p)):
        found |= {f"max_{name}": measures.max_of(law), f"entropy_{name}": measures.entropy(law)}
    for name in divergences.DIVERGENCES:
        for scaled in (False, True):
            compared = divergences.Threshold(name, scaled=scaled)
            found[f"{name}_scaled" if scaled else name] = compared.of(pair)
    return found


@partial(jax.jit, static_argnames="rule")
def _along_grid(rule: Rule, pair: LawPair, grid: Array) -> tuple[Array, Array]:
    """`Σ min(π, q̃)` and `η`, `[A, B, L]`, α by α: no more laws are alive than one of them needs."""

    def at(alpha: Array) -> tuple[Array, Array]:
        column = jnp.full(pair.greedy.shape, alpha)
        kept = jnp.minimum(rule.target_law(pair, column), pair.q_tilde).sum(-1)
        if rule.deferral is None:
            return kept, jnp.zeros_like(kept)
        eta = laws.deferral_mass(rule.deferral(pair, column), pair)
        return kept, jnp.broadcast_to(eta[..., 0], kept.shape)

    return jax.lax.map(at, grid)
