"""The table of named methods; every rule is also a method with the same name.

A method fixes how drafts are accepted, the stop policy, the token after a fully kept block, and the default rule. All
methods run in the same loop (`engine.loop`), so a new method is a new row of the table and needs no other code.
Sources: docs/methods.md, sections 2, 4, 5, 6.
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

_CAP = 10  # draft tokens in a row before the target must write one (Narasimhan et al., 2024, section F.1)
_LONGEST = 20  # largest block if a stop policy ends blocks (Huang et al., 2024 (SpecDec++), section 4.1)

_score = partial(Alpha, useful=(-math.inf, 0.0))
_sequence = partial(SequenceMethod, title="SeqCascade")
_fuzzy = partial(Speculation, decides="fuzzy_js", bonus="target", greedy_draft=True)
_stopping = partial(Speculation, block_size=_LONGEST)


def of_rule(name: str, rule: Rule) -> Speculation:
    """Returns the method of a rule; it keeps as many drafts as the rule's target distribution allows."""
    return Speculation(name=name, decides=rule, rules=(rule.name,), bare=True)


_ENDS_AND_CASCADES = (
    Alone(name=names.TARGET, title="Target alone", model="target"),
    Alone(name=names.DRAFT, title="Draft alone", model="draft"),
    # the draft writes the whole output; the target rewrites it if its score is below α (Narasimhan et al., 2024, eq. 1)
    _sequence(name="seq_cascade", score="sum", detail="sum", trade_off=_score(grid=(-30.0, 0.0), typical=-8.0)),
    _sequence(name="seq_cascade_mean", score="mean", detail="mean", trade_off=_score(grid=(-2.0, 0.0), typical=-0.4)),
    _sequence(
        name="seq_cascade_quantile", score="quantile", detail="quantile",
        trade_off=_score(grid=(-5.0, 0.0), typical=-1.5),
    ),
    # a baseline of Holsman et al., 2025: the target writes a randomly chosen share α of the outputs
    SequenceMethod(
        name="random_allocation", title="Random allocation", score="random",
        trade_off=Alpha(domain=(0.0, 1.0), closed=True, typical=0.5),
    ),
    # Narasimhan et al., 2024, Algorithm 2: the rule reads q alone, so it decides before the target runs
    Speculation(
        name="token_cascade", title="TokenCascade", decides="chow", rules=("chow",), accept="deferral",
        stop="confidence", block_size=_CAP, bonus="target", alpha_stops=True, verify_final=False,
    ),
    Speculation(
        name="token_cascade_log", title="TokenCascade", decides="chow_log", rules=("chow_log",), accept="deferral",
        stop="entropy", block_size=_CAP, bonus="target", alpha_stops=True, verify_final=False,
    ),
    # Narasimhan et al., 2024, Algorithm 3: both models run at every token
    Speculation(
        name="oracle_cascade", title="Oracle", decides="diff", accept="deferral", block_size=1, fixed_block=True,
        bonus="none",
    ),
    # Big-Little: the target takes over if the draft is unsure (stop threshold), and replaces drafts with which it
    # disagrees (α)
    Speculation(
        name="bild", title="BiLD", symbol="α_f", decides="bild_star", accept="deferral", stop="confidence",
        block_size=_CAP, bonus="target", verify_final=False,
    ),
)  # fmt: skip
_OTHERS = (
    # this method works with any rule; the setting `rule` names the rule
    Speculation(name="speculative"),
    # Holsman et al., 2025: the rule defers a position whatever its token is, and the target then samples the token;
    # the draft is greedy
    _fuzzy(name="fuzzy", title="FSD", accept="deferral"),
    # a variant of `fuzzy`: lossless acceptance comes first, and the divergence decides only about rejected drafts
    _fuzzy(name="fuzzy_after_sd", title="FSD after SD"),
    # two baselines of Holsman et al., 2025; these rows replace the methods of the rules with the same names
    _fuzzy(name="sd_reference", decides="sd_reference", rules=("sd_reference",), accept="soft_ratio"),
    _fuzzy(name="random_accept", decides="random_accept", rules=("random_accept",), accept="deferral"),
    # Huang et al., 2024 (SpecDec++): the draft stops when a rejection has become likely; any rule can be used
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
"""The named methods by name, in the order of Narasimhan et al., 2024, Table 2.

Examples:
    >>> import speccascade_jax as sc
    >>> sc.METHODS["bild"].title, sc.METHODS["bild"].stop
    ('BiLD', 'confidence')
    >>> [name for name in sc.METHODS if name.startswith("token_cascade")]
    ['token_cascade', 'token_cascade_log']
"""


def get(method: Any) -> Method:
    """Returns the method with a name: a row of `METHODS`, or a user's method or rule given as `module.NAME`.

    A `Method` is returned as it is.

    Raises:
        ValueError: the method is unknown; the message names the nearest ones.
    """
    if isinstance(method, Method):
        return method
    entry = names.look_up("method", method, METHODS, (Method, Rule), "speccascade_jax.METHODS")
    return of_rule(method, entry) if isinstance(entry, Rule) else entry


def rank(method: str) -> int:
    """Returns the position of a method's name in tables; methods that a user defined come last."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)
