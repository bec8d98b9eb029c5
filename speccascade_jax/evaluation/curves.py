"""Names of curves in tables and plots, and the facts that tables need about them.

A curve consists of the points of one method with the same non-default settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccascade_jax.methods import table
from speccascade_jax.methods.build_selection import lossy_arms
from speccascade_jax.methods.settings import AUTO, DRAFT_MODEL, TOKEN, Settings, chosen_text, tree_text


def curve(settings: Settings) -> str:
    """Returns the name of a point's curve: the method, its non-default settings, and its stop threshold."""
    return family(settings) + ("" if settings.stop_threshold is None else f"@{settings.stop_threshold:g}")


def family(settings: Settings) -> str:
    """Returns the curve's name without the stop threshold."""
    method_rule = table.get(settings.method).rule(Settings()).name
    parts = (
        "" if settings.rule == method_rule else settings.rule,
        settings.accept,
        "" if settings.verify == TOKEN else settings.verify,
        settings.stop,
        AUTO if settings.block_size == AUTO else tree_text(settings.tree),
        chosen_text(settings),
    )
    chosen = "".join(f"[{part}]" for part in parts if part)
    return f"{settings.method}{chosen}" + ("" if settings.head is None else f":{Path(settings.head).stem}")


def facts(settings: Settings) -> dict[str, Any]:
    """Returns properties of a method with these settings, such as its title and whether it is lossless.

    Records store them, so that tables and plots need not import the methods.
    """
    method = table.get(settings.method)
    rule, trade_off = method.rule(settings), method.alpha(settings)
    distribution = rule.name if trade_off is rule.alpha else settings.method
    lossless = rule.lossless and trade_off is None and not method.draft_alone and not lossy_arms(settings)
    # the output distribution of a lossy method depends on its drafters, so its name includes them
    if not lossless:
        greedy = ["greedy"] * getattr(method, "greedy_draft", False)
        chosen = [] if settings.choose is None else [f"{settings.choose} {settings.policy or ''}".strip()]
        parts = [*chosen, *map(str, settings.drafters), *greedy]
        distribution += "".join(f"[{part}]" for part in parts if part != DRAFT_MODEL)
    return {
        "title": method.heading(settings),
        "details": [*method.details(settings)],
        "rank": table.rank(settings.method),
        "law": distribution,
        "lossless": lossless,
        "swept_block": method.sweeps_block(settings),
        "on_rejection": method.on_rejection(settings),
        "symbol": method.symbol,
        "timed": method.timed,
    }
