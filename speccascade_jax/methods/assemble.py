"""From a pair and arguments to an engine and its controls: what `decode`, `stream` and the experiments share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.checks import per_row
from speccascade_jax.core.controls import make_controls, own_temperature
from speccascade_jax.core.protocols import StopPolicy
from speccascade_jax.core.types import Controls, Params
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.engine.loop import Engine
from speccascade_jax.evaluation import heads as checking
from speccascade_jax.methods import recipes
from speccascade_jax.methods.oracle import OracleStopping
from speccascade_jax.methods.sequence import Program, SequenceCascade
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules import deferral
from speccascade_jax.rules.acceptance import ACCEPT_FNS, Speculative
from speccascade_jax.rules.deferral import Rule
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.stopping.policies import AcceptanceHead, Oracle


def assemble(
    pair: Pair,
    *,
    rule: str | Rule | None = None,
    block_size: int | None = None,
    bonus: str | None = None,
    method: str = "speculative",
    stop_ids: Sequence[int] | None = None,
    accept: str | None = None,
    stop_policy: StopPolicy | None = None,
    head: Head | None = None,
) -> tuple[Engine, Params]:
    """An engine for a pair and the parameters to pass beside it.

    Whoever decodes comes through here first, so it is here that the compilation cache is switched on
    (`compilation_cache.switch_on`), and not by an import.

    Arguments as in `decode`; what is `None` is the method's own (`methods.METHODS`). `stop_policy` replaces the
    method's; `head` the pair's own acceptance head, where the policy asks one.

    Raises:
        ValueError: unknown method, rule, acceptance or bonus, a block size below 1, or one it does not have; an
            acceptance head that is missing, or of another draft.
    """
    recipe = recipes.get(method)
    oracle = recipe.oracle or isinstance(stop_policy, Oracle)
    if recipe.score is not None or oracle:
        does = "knows its output beforehand" if oracle else "decides about whole outputs"
        raise ValueError(f"method {method!r} {does} and is no engine: call decode")
    return _engine(pair, recipe, rule, block_size, bonus, stop_ids, accept, stop_policy, head)


def _engine(
    pair: Pair,
    recipe: recipes.Recipe,
    rule: str | Rule | None = None,
    block_size: int | None = None,
    bonus: str | None = None,
    stop_ids: Sequence[int] | None = None,
    accept: str | None = None,
    stop_policy: StopPolicy | None = None,
    head: Head | None = None,
) -> tuple[Engine, Params]:
    accept = recipe.accept if accept is None else accept
    if accept not in ACCEPT_FNS:
        raise ValueError(f"unknown acceptance {accept!r}: choose one of {', '.join(ACCEPT_FNS)}")
    stops = _stop_ids(pair, stop_ids)
    compilation_cache.switch_on()
    if recipe.alone is not None:
        alone = getattr(pair, recipe.alone)
        lossless = Speculative(deferral.RULES["spec_decode"])
        engine = Engine(target=alone.model, drafter=NoDrafter(), accept=lossless, stop_ids=stops, bonus="target")
        return engine, {"target": alone.params, "drafter": {}}
    policy = stop_policy or recipe.policy(recipes.block_size(recipe, block_size))
    drafter_params = {"model": pair.draft.params}
    if isinstance(policy, AcceptanceHead):
        drafter_params["stop"] = _head_params(pair, head)
    engine = Engine(
        target=pair.target.model,
        drafter=ModelDrafter(pair.draft.model, policy),
        accept=ACCEPT_FNS[accept](recipes.rule_of(recipe, rule)),
        stop_ids=stops,
        bonus=recipe.bonus if bonus is None else bonus,
        verify_final=recipe.verify_final,
        adaptive=policy.adaptive,
    )
    return engine, {"target": pair.target.params, "drafter": drafter_params}


def _head_params(pair: Pair, head: Head | None) -> Params:
    if head is None:
        return checking.own(pair).params
    if head is not pair.head:
        head.check(pair.draft, pair.name)
    return head.params


def build(
    pair: Pair, *, method: str = "speculative", stop_ids: Sequence[int] | None = None, **parts: Any
) -> tuple[Program, Params]:
    """What `sequence.run` takes: an engine, a sequence cascade where whole outputs are decided about, or an oracle.

    Arguments and errors as in `assemble`.
    """
    recipe = recipes.get(method)
    if recipe.score is None:
        engine, params = _engine(pair, recipe, stop_ids=stop_ids, **parts)
        return (OracleStopping(engine) if recipe.oracle else engine), params
    draft, of_draft = assemble(pair, method="autoregressive_draft", stop_ids=stop_ids)
    target, of_target = assemble(pair, method="autoregressive", stop_ids=stop_ids)
    cascade = SequenceCascade(draft=draft, target=target, score=recipe.score)
    return cascade, {"draft": of_draft, "target": of_target}


def method_controls(
    method: str,
    rule: str | Rule | None,
    rows: int,
    *,
    alpha: Any = None,
    temperature: Any = 0.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
    stop_threshold: Any = None,
) -> Controls:
    """The numbers of a generation, one value per row, checked against what the method and its rule allow.

    Raises:
        ValueError: as `check_alpha` and `make_controls`; a rule that is greedy only at another temperature; a stop
            threshold that the method needs and lacks, has no use for, or that means nothing to it.
    """
    recipe = recipes.get(method)
    sampling = {"top_p": top_p, "top_k": top_k}
    if recipe.alone is not None:
        own = own_temperature(method, temperature, draft_temperature)
        return make_controls(rows, temperature=own, draft_temperature=draft_temperature, **sampling)
    if recipe.greedy_draft and draft_temperature is None:
        draft_temperature = 0.0
    recipes.check_sampling(recipe, temperature, draft_temperature)
    chosen = recipes.rule_of(recipe, rule)
    alpha = check_alpha(chosen, alpha, rows)
    deferral.check_greedy(chosen, temperature, draft_temperature)
    return make_controls(
        rows,
        alpha=alpha,
        temperature=temperature,
        draft_temperature=draft_temperature,
        stop_threshold=recipes.stop_threshold(recipe, alpha, stop_threshold),
        **sampling,
    )


def check_alpha(rule: Rule, alpha: Any, rows: int) -> np.ndarray:
    """α per row, refused outside the rule's domain; rules without an α take any.

    Raises:
        ValueError: the rule needs an α and got none, or it is outside the domain.
    """
    if alpha is None:
        if rule.grid is not None:
            raise ValueError(f"rule {rule.name!r} needs alpha; worth sweeping is {rule.grid[0]} … {rule.grid[1]}")
        alpha = 0.0
    values = per_row("alpha", alpha, rows)
    deferral.check_alpha(rule, values)
    return values


def check_example_ids(example_ids: Any, rows: int) -> np.ndarray:
    """The ids that the rows' random bits hang on: `[rows]` whole numbers, by default `0 … rows − 1`.

    Raises:
        ValueError: another number of ids than rows, or no whole numbers below 2³¹.
    """
    ids = np.arange(rows) if example_ids is None else np.asarray(example_ids)
    if ids.shape != (rows,):
        raise ValueError(f"example_ids have shape {ids.shape}, but the batch has {rows} rows; give one id per row")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"example_ids={ids.tolist()[:3]}… must be whole numbers from 0 to {2**31 - 1}")
    return ids


def _stop_ids(pair: Pair, stop_ids: Sequence[int] | None) -> tuple[int, ...]:
    if stop_ids is None:
        return () if pair.vocabulary is None else tuple(int(stop) for stop in pair.vocabulary.stop_ids)
    size = pair.target.model.vocab_size
    for stop in np.atleast_1d(np.asarray(stop_ids)).tolist():
        if stop != int(stop) or not 0 <= stop < size:
            raise ValueError(f"stop id {stop} is outside the vocabulary of {size}; ids are whole numbers below {size}")
    return tuple(int(s) for s in np.atleast_1d(np.asarray(stop_ids)))
