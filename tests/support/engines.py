"""Engines with tiny models whose next token depends on the whole prefix, and generations with them."""

from __future__ import annotations

import jax.numpy as jnp

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed

LOSSLESS = Speculative(RULES["spec_decode"])
FAKE = {"model": ()}
"""Parameters of a drafter with one fake model."""


def prompts(*rows):
    """Returns token lists as a `Prompt`."""
    return Prompt(jnp.asarray(right_pad(rows, max(map(len, rows)))), jnp.asarray([len(row) for row in rows], jnp.int32))


THREE = prompts([3, 4, 5], [7], [2, 2, 9, 1])


def drafting(model, block):
    """Returns a drafter that uses `model` and drafts `block` tokens in every round."""
    return ModelDrafter(model, Fixed(block))


def engine(target, drafter, verifier=LOSSLESS, **more):
    """Returns an engine; a verifier may be the name of a rule."""
    accept = Speculative(RULES[verifier]) if isinstance(verifier, str) else verifier
    return Engine(target=target, drafter=drafter, verifier=accept, **more)


def stacked(models, blocks, **more):
    """Returns a drafter in which each of `models` drafts for the next one, and its (empty) parameters."""
    drafter, params = drafting(models[0], blocks[0]), FAKE
    for model, block in zip(models[1:], blocks[1:], strict=True):
        drafter = NestedDrafter(engine(model, drafter, **more), block)
        params = {"target": (), "drafter": params}
    return drafter, params


def controls(rows, levels=0, **numbers):
    """Returns `make_controls` for a stack of models, with the same numbers for the engines at `levels` levels below."""
    return make_controls(rows, **numbers, inner=(controls(rows, levels - 1, **numbers),) if levels else ())


def generated(built, params, prompt=THREE, length=24, *, target=(), numbers=None, seed=5, **more):
    """Runs an engine; `params` are the drafter's parameters, `numbers` are arguments of `controls`, or controls."""
    if numbers is None or isinstance(numbers, dict):
        numbers = controls(len(prompt.length), **numbers or {})
    params = {"target": target, "drafter": params}
    return generate(built, params, prompt, seed, controls=numbers, max_new_tokens=length, **more)
