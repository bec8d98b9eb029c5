"""★ The methods that have a name. A new one is a row here; every rule is one already.

A method fixes an acceptance, a stop policy, what follows a kept block, and which rule decides if none is named. All of
them run in the same loop (`engine.loop`); a paper's method is the row, not code. Sources: METHODS sections 2, 4, 5, 6.
"""

import math
from functools import partial
from typing import Any

from speccascade_jax.core import names
from speccascade_jax.methods.generations import Alone, OracleMethod, SequenceMethod
from speccascade_jax.methods.method import Method
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import Alpha, Rule

_CAP = 10  # draft tokens in a row before the target must write one (paper 1, section F.1)
_LONGEST = 20  # draft tokens in a block that ends when its policy says so (paper 3, section 4.1)

_score = partial(Alpha, useful=(-math.inf, 0.0))
_sequence = partial(SequenceMethod, title="SeqCascade")
_fuzzy = partial(Speculation, decides="fuzzy_js", bonus="target", greedy_draft=True)
_stopping = partial(Speculation, block_size=_LONGEST)


def of_rule(name: str, rule: Rule) -> Speculation:
    """The method that a rule is: its drafts kept as often as its law allows."""
    return Speculation(name=name, decides=rule, rules=(rule.name,), bare=True)


_ENDS_AND_CASCADES = (
    Alone(name=names.TARGET, title="Target alone", model="target"),
    Alone(name=names.DRAFT, title="Draft alone", model="draft"),
    # the draft writes the whole output, the target writes anew where its score is below α (paper 1, eq. 1)
    _sequence(name="seq_cascade", score="sum", detail="sum", trade_off=_score(grid=(-30.0, 0.0), typical=-8.0)),
    _sequence(name="seq_cascade_mean", score="mean", detail="mean", trade_off=_score(grid=(-2.0, 0.0), typical=-0.4)),
    _sequence(
        name="seq_cascade_quantile", score="quantile", detail="quantile",
        trade_off=_score(grid=(-5.0, 0.0), typical=-1.5),
    ),
    # paper 2's baseline: the target writes a share α of the outputs, whatever they are
    SequenceMethod(
        name="random_allocation", title="Random allocation", score="random",
        trade_off=Alpha(domain=(0.0, 1.0), closed=True, typical=0.5),
    ),
    # paper 1, Algorithm 2: the rule reads q alone, so it is asked before the target is
    Speculation(
        name="token_cascade", title="TokenCascade", decides="chow", rules=("chow",), accept="deferral",
        stop="confidence", block_size=_CAP, bonus="target", alpha_stops=True, verify_final=False,
    ),
    Speculation(
        name="token_cascade_log", title="TokenCascade", decides="chow_log", rules=("chow_log",), accept="deferral",
        stop="entropy", block_size=_CAP, bonus="target", alpha_stops=True, verify_final=False,
    ),
    # paper 1, Algorithm 3: both models at every token
    Speculation(
        name="oracle_cascade", title="Oracle", decides="diff", accept="deferral", block_size=1, fixed_block=True,
        bonus="none",
    ),
    # Big-Little: fallback where the draft is unsure (stop threshold), rollback where the target disagrees (α)
    Speculation(
        name="bild", title="BiLD", symbol="α_f", decides="bild_star", accept="deferral", stop="confidence",
        block_size=_CAP, bonus="target", verify_final=False,
    ),
)  # fmt: skip
_OTHERS = (
    # any rule, as its `rule`
    Speculation(name="speculative"),
    # paper 2: all tokens of a position or none, replaced from the target; the draft is greedy, the target sampled
    _fuzzy(name="fuzzy", title="FSD", accept="deferral"),
    # its variant: lossless first, and by divergence only what that rejects
    _fuzzy(name="fuzzy_after_sd", title="FSD after SD"),
    # two of its baselines; the rules of these names are other methods, so that theirs are the rows
    _fuzzy(name="sd_reference", decides="sd_reference", rules=("sd_reference",), accept="soft_ratio"),
    _fuzzy(name="random_accept", decides="random_accept", rules=("random_accept",), accept="deferral"),
    # paper 3: the draft stops when its tokens have become unlikely to be kept; whatever decides that, any rule fits
    _stopping(name="specdecpp", title="SpecDec++", stop="acceptance_head"),
    _stopping(name="specdecpp_lag0", title="SpecDec++", detail="lag 0", stop="acceptance_head_lag0"),
    _stopping(name="stop_confidence", title="SpecDecode", detail="max q", stop="confidence"),
    _stopping(name="stop_cumulative_confidence", title="SpecDecode", detail="Π max q", stop="cumulative_confidence"),
    _stopping(name="stop_entropy", title="SpecDecode", detail="entropy", stop="entropy"),
    OracleMethod(
        name="stop_oracle", title="SpecDecode", detail="oracle", rules=("spec_decode",), stop="oracle",
        block_size=_LONGEST,
    ),
)  # fmt: skip

METHODS: dict[str, Method] = {
    **{row.name: row for row in _ENDS_AND_CASCADES},
    **{name: of_rule(name, rule) for name, rule in RULES.items()},
    **{row.name: row for row in _OTHERS},
}
"""Name -> method, in the order of paper 1's Table 2."""


def get(method: Any) -> Method:
    """The method of that name: of the table, or `module.NAME`, a method or a rule of your own; or the method itself.

    Raises:
        ValueError: no such method; the message names the nearest ones.
    """
    if isinstance(method, Method):
        return method
    found = names.look_up("method", method, METHODS, (Method, Rule), "speccascade_jax.METHODS")
    return of_rule(method, found) if isinstance(found, Rule) else found


def rank(method: str) -> int:
    """The place of a method's name in tables; those of one's own come last."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)
