"""How far fuzzy decoding goes from the target: the divergence it incurs, beside the bound `N · share · τ` of paper 2.

Paper 2 (§4.2, Appendix B) bounds the divergence between two laws of whole outputs, the target's and the method's, by
the number of tokens `N` times the share that the draft decides times the threshold. What of that holds (METHODS
section 5, and `tests/evaluation/studies/survey/bounds_test.py` by enumerating all outputs of small models):

* Both KLs obey the chain rule: the divergence of outputs *is* the expected sum of `Div` over the tokens that the draft
  decides, under the first argument's law of prefixes: the method's for `kl_reversed`, the target's for `kl`.
* `tv` is at most that sum, under either law of prefixes.
* `js` obeys neither, and the bound fails: by a fifth for outputs of 2 tokens, a third for 3, three fifths for 8.
* All of it is about the laws that are sampled. A decision on the raw laws says nothing about them, least of all where
  the draft is greedy: a one-hot may lie anywhere from a target that its soft law resembles.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.evaluation.studies.survey.estimates import Survey
from speccascade_jax.rules import deferral
from speccascade_jax.rules.divergences import Threshold

OUTPUTS = {"tv": ("rule", "target"), "kl_reversed": ("rule",), "kl": ("target",), "js": ("rule",)}
"""Divergence -> whose outputs its share must be taken along, the method's own first where both will do."""
HEURISTIC = "heuristic (may fail by a fifth, on long outputs by more)"


class Bound(NamedTuple):
    """A fuzzy rule at a threshold, along given outputs.

    Attributes:
        tokens: `N`, mean positions per output, the stop id included.
        share: of these positions, those with `Div < τ`: there the law is the draft's.
        incurred: mean over outputs of the sum of `Div(p̃, q̃)` over these positions, in the divergence's unit.
        bound: `N · share · τ`; standing: what it is worth, in words.
    """

    tokens: float
    share: float
    incurred: float
    bound: float
    standing: str


def bound(found: Survey, rule: str, tau: float, along: str = "rule", greedy: bool = False) -> Bound:
    """The bound and what is really incurred.

    Args:
        found: a survey with `rule` at `tau` in its grid.
        rule: a fuzzy rule's name.
        along: who wrote the surveyed outputs: "rule" (the fuzzy method itself, `bonus="rule"`, at this `tau`),
            "target", or anyone else.
        greedy: whether the draft was greedy.

    Raises:
        ValueError: no fuzzy rule, or one that was not surveyed at `tau`.
    """
    form = threshold(rule)
    curve = found.curves.get(rule)
    if curve is None or curve.deferral is None or tau not in curve.alphas:
        raise ValueError(f"rule {rule!r} was not surveyed at τ = {tau:g}: put it into the grid of the survey")
    kept = curve.deferral[list(curve.alphas).index(tau)] == 0  # what the rule itself decided: δ is 0 or 1
    outputs = int(found.rows.max()) + 1
    tokens, share = len(kept) / outputs, float(kept.mean())
    # whatever the rule compares, the laws that differ are the scaled ones; elsewhere it may be infinite
    incurred = float(np.where(kept, found.positions[f"{form.name}_scaled"], 0.0).sum()) / outputs
    return Bound(tokens, share, incurred, tokens * share * tau, standing(form, along, greedy))


def threshold(rule: str) -> Threshold:
    """What a fuzzy rule compares with τ; ValueError if there is no such rule, or it is not a fuzzy one."""
    decision = deferral.get(rule).deferral
    if not isinstance(decision, Threshold):
        raise ValueError(f"rule {rule!r} compares no divergence with a threshold: name one of fuzzy_…")
    return decision


def is_fuzzy(rule: str) -> bool:
    """Whether the rule compares a divergence with a threshold."""
    return isinstance(deferral.get(rule).deferral, Threshold)


def outputs_of(form: Threshold) -> str:
    """Whose outputs to survey for the bound: "rule" or "target"."""
    return OUTPUTS.get(form.name, ("rule",))[0]


def standing(form: Threshold, along: str, greedy: bool) -> str:
    """What `N · share · τ` is worth for a decision: "proven", "heuristic …", or why it is no bound.

    A greedy draft under a decision on the scaled laws is no exception: `q̃` is then the one-hot that is drawn from.
    """
    if not form.scaled:
        read = "it reads the raw laws, but tokens come from the scaled ones"
        return "false for greedy drafts: it reads the soft law, not the one-hot" if greedy else f"no bound: {read}"
    if form.top_k:
        return f"no bound: over the top {form.top_k} a divergence is smaller than it is"
    if form.name not in OUTPUTS:
        return f"no bound: {form.name} of outputs may be twice as large"
    if along not in OUTPUTS[form.name]:
        return f"no bound: the share must be along outputs of the {' or '.join(OUTPUTS[form.name])}"
    if form.name == "js":
        return HEURISTIC
    return "proven (q̃ is the greedy draft's one-hot)" if greedy else "proven"


HEADS = {
    "rule": "rule", "tau": "τ", "along": "along", "tokens": "tokens per\noutput", "share": "share",
    "incurred": "divergence\nincurred", "bound": "N · share\n· τ", "standing": "standing",
}  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]], outputs: int) -> None:
    """Print rows (`Bound`'s fields, `rule`, `tau` and `along`) as a table."""
    note = (
        f"Means over {outputs:,} outputs. Share: of tokens, those with Div < τ. Incurred: Div(p̃, q̃) summed over those; "
        "its mean is the divergence of whole outputs for the KLs, and no less than it for tv. tv and js of outputs are "
        "at most 1 anyway: a larger bound says nothing."
    )
    table = Table(title="Divergence from the target", caption=note, title_justify="left", caption_justify="left")
    for name, head in HEADS.items():
        text = name in ("rule", "along", "standing")
        table.add_column(head, justify="left" if text else "right", no_wrap=name == "rule")
    for row in rows:
        table.add_row(*(row[name] if isinstance(row[name], str) else f"{row[name]:.3g}" for name in HEADS))
    Console(width=120).print(table)
