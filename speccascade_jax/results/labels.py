"""Names of methods in tables and legends: paper 1's and paper 2's where they have one. Needs no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable

from speccascade_jax.core.names import DRAFT, TARGET

LABELS = {
    TARGET: "Target alone",
    DRAFT: "Draft alone",
    "seq_cascade": "SeqCascade [sum]",
    "seq_cascade_mean": "SeqCascade [mean]",
    "seq_cascade_quantile": "SeqCascade [quantile]",
    "random_allocation": "Random allocation",
    "token_cascade": "TokenCascade [Chow]",
    "token_cascade_log": "TokenCascade [ChowLog]",
    "oracle_cascade": "Oracle [Diff]",
    "spec_decode": "SpecDecode",
    "lossy": "SpecDecode [Lossy]",
    "lossy_tuned": "SpecDecode [Lossy*]",
    "lossy_greedy": "SpecDecode [Lossy, greedy]",
    "sd_reference": "SD of paper 2's code",
    "bild": "BiLD",
    "bild_star": "BiLD*",
    "chow": "SpecCascade [Chow]",
    "chow_log": "SpecCascade [ChowLog]",
    "diff": "SpecCascade [Diff]",
    "diff_log": "SpecCascade [DiffLog]",
    "opt": "SpecCascade [OPT]",
    "opt_log": "SpecCascade [OPTLog]",
    "token_v1": "SpecCascade [TokenV1]",
    "token_v2": "SpecCascade [TokenV2]",
    "token_v3": "SpecCascade [Token]",
    "fuzzy": "FSD [js]",
    "fuzzy_after_sd": "FSD after SD [js]",
    "random_accept": "Random acceptance",
    "specdecpp": "SpecDec++",
    "specdecpp_lag0": "SpecDec++ [lag 0]",
    "stop_confidence": "SpecDecode [max q]",
    "stop_cumulative_confidence": "SpecDecode [Π max q]",
    "stop_entropy": "SpecDecode [entropy]",
    "stop_oracle": "SpecDecode [oracle]",
}
"""Rows in the order of paper 1's Table 2; other methods follow under their own names."""

SHARES = {
    "rejection_rate": "rejected share of examined draft tokens",
    "rejections_per_token": "rejected draft tokens per generated token",
    "deferral_rate": "share of tokens deferred to the target",
    "target_share": "share of tokens that the target wrote",
    "draft_share": "share of tokens that the draft wrote",
}
"""Measures that qualities are plotted against."""


# "fuzzy[fuzzy_kl]@0.3 (γ = 3)": method, the rule chosen for it, its stop threshold, what tells it apart in a panel; the
# file of a chosen acceptance head stands behind a colon
_CURVE = re.compile(
    r"(?P<method>[^\[:@ ]+)(\[(?P<rule>[^\]]+)\])?(:(?P<head>[^@ ]+))?(@(?P<stop>[^ ]+))?(?P<apart> \(.*\))?"
)


def label(curve: str) -> str:
    """A curve's name for readers: paper 1's of its method, else the method's own, with what was chosen for it."""
    parts = _CURVE.fullmatch(curve)
    if parts is None or parts["method"] not in LABELS:
        return curve
    text = LABELS[parts["method"]]
    if parts["rule"]:
        own = re.search(r"\[(.*)\]", LABELS.get(parts["rule"], ""))
        text = f"{text.partition(' [')[0]} [{own[1] if own else parts['rule'].removeprefix('fuzzy_')}]"
    if parts["head"]:
        text += f" {parts['head']}"
    if parts["stop"]:
        text += f" {'α_f' if parts['method'] == 'bild' else 'h'} {parts['stop']}"
    return text + (parts["apart"] or "")


def ordered(curves: Iterable[str]) -> list[str]:
    """The curves in the order of `LABELS`, others behind, each group by name."""
    places = {name: n for n, name in enumerate(LABELS)}
    return sorted(curves, key=lambda curve: (places.get(re.split(r"[\[:@ ]", curve)[0], len(places)), curve))
