"""Decoders that share one compiled program because they differ in their rules alone."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from speccascade_jax.core.types import Controls
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods.method import Decoder
from speccascade_jax.rules.one_of import OneOf, kind
from speccascade_jax.rules.verification import TokenWise
from speccascade_jax.runtime import platforms


class Serving(NamedTuple):
    """The decoder that serves a rule, and the rule's index among its rules (`None` if it serves no other rule)."""

    decoder: Decoder
    place: int | None = None

    def controls(self, controls: Controls) -> Controls:
        """Returns the controls with the rule's index in every row."""
        if self.place is None:
            return controls
        return replace(controls, rule=np.full(controls.alpha.shape[0], self.place, np.int32))  # type: ignore[arg-type]


def shared(decoders: Collection[Decoder]) -> list[Serving]:
    """Joins decoders that differ only in their rules; returns for each decoder the one that takes its place.

    Compiling a program takes most of its time for the models, and little for the rule. So joined decoders compile about
    as fast as one. Only programs for CPUs are joined: on other devices XLA fuses a rule with the sampling before it,
    and a choice between rules would prevent that.
    """
    groups = defaultdict[Hashable, list[Decoder]](list)
    for decoder in decoders:
        groups[_all_but_the_rule(decoder)].append(decoder)
    served = {id(decoder): serving for group in groups.values() for decoder, serving in _joined(group)}
    return [served[id(decoder)] for decoder in decoders]


def _joined(group: list[Decoder]) -> Iterable[tuple[Decoder, Serving]]:
    first, engine = group[0], group[0].engine
    verifiers = [decoder.require_engine().verifier for decoder in group] if len(group) > 1 else []
    if engine is None or len(set(verifiers)) < 2:
        return [(decoder, Serving(decoder)) for decoder in group]
    unique = tuple(verifier for verifier in dict.fromkeys(verifiers) if isinstance(verifier, TokenWise))
    several = cast(Any, OneOf(unique))  # the cast is needed because only engines can use it, by `OneOf.chosen`
    joined = replace(first, program=replace(engine, verifier=several))
    places = {verifier: place for place, verifier in enumerate(unique)}
    return [(decoder, Serving(joined, places[v])) for decoder, v in zip(group, verifiers, strict=True)]  # type: ignore[index]


def _all_but_the_rule(decoder: Decoder) -> Hashable:
    """Returns a key of everything but the rule; decoders with equal keys may be joined.

    The key of a decoder that cannot be joined is unique.
    """
    engine = decoder.engine
    if engine is None or not _is_joinable(engine) or decoder.pair.mesh is not None:
        return id(decoder)
    assert isinstance(engine.verifier, TokenWise)
    parts = tuple(getattr(engine, field.name) for field in fields(engine) if field.name != "verifier")
    leaves, structure = jax.tree.flatten(decoder.params)
    kinds = type(decoder), type(engine), kind(engine.verifier)  # a subclass may decode in another way
    return parts, kinds, structure, tuple(map(id, leaves))


def _is_joinable(engine: Engine) -> bool:
    plain = engine.planner is None and engine.tree is None and engine.block > 0
    return plain and isinstance(engine.verifier, TokenWise) and platforms.platform() == "cpu"
