"""Construction of decoders from a pair and settings, shared by `decode`, `stream` and the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.names import shown
from speccascade_jax.core.types import Params
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods import table
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.pairs import head_files
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import checked_stop_ids
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import Rule
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.runtime.program_memory import release_when_crowded

_KEPT = 64
"""The number of decoders that a pair keeps."""
_PLAIN = (str, int, float, np.generic, Rule, type(None))


def build(
    pair: Pair, settings: Settings, *, stop_ids: Sequence[int] | None = None, head: Head | None = None
) -> Decoder:
    """Builds a decoder for a pair.

    Every call that decodes calls this first. So it switches the compilation cache on, which an import does not, and
    drops programs when too many are alive.

    Args:
        pair: the models.
        settings: how tokens are made.
        stop_ids: ids that end a row; `None`: the vocabulary's, or none without a vocabulary.
        head: replaces the pair's own acceptance head, if the method asks one.

    Raises:
        ValueError: unknown method, rule, acceptance, stop policy, drafter or bonus, a block size below 1, or one that
            the method does not have; a stop id outside the vocabulary; an acceptance head that is missing, or of
            another draft.
    """
    check_pair(pair)
    method = table.get(settings.method)
    if isinstance(settings.rule, str) and settings.rule in table.METHODS and settings.rule not in RULES:
        raise ValueError(f"rule={settings.rule!r} is a method's name: give method={settings.rule!r}")
    if settings.head is not None and not method.needs_head(settings):
        raise ValueError(f"method {method.name!r} uses no acceptance head: leave head={settings.head!r} out")
    if head is None and settings.head is not None:
        head = head_files.load(settings.head)
    decoder = method.build(pair, settings, checked_stop_ids(pair, stop_ids), head)
    compilation_cache.switch_on()
    release_when_crowded()
    return decoder


def check_pair(pair: Any) -> None:
    """Refuses anything but a pair, such as the name of one, with a ValueError."""
    if not isinstance(pair, Pair):
        raise ValueError(f"pair={shown(pair)} is not a loaded pair: give sc.load_pair({shown(pair)}), or a Pair")


def assemble(
    pair: Pair, *, stop_ids: Sequence[int] | None = None, head: Head | None = None, **settings: Any
) -> tuple[Engine, Params]:
    """Returns the engine of a decoder and its parameters, if the method is one generation.

    Args:
        pair: the models.
        stop_ids: ids that end a row, as in `build`.
        head: an acceptance head, as in `build`.
        settings: `Settings` by name.

    Raises:
        ValueError: as `build` and `Decoder.require_engine`.
    """
    decoder = build(pair, Settings.of("assemble", settings), stop_ids=stop_ids, head=head)
    return decoder.require_engine(), decoder.params


def decoder_for(pair: Pair, caller: str, settings: Mapping[str, Any], stop_ids: Sequence[int] | None = None) -> Decoder:
    """Returns the decoder for a call; the pair keeps it for later calls with the same settings.

    A call on the shipped pair takes about ten milliseconds; checking and building takes one more. Settings with an
    array, or with the name of a user's object, whose meaning may change, build a new decoder each time.

    Args:
        pair: the models.
        caller: the function's name, for errors.
        settings: `Settings` by name.
        stop_ids: as in `build`.

    Raises:
        ValueError, TypeError: as `Settings.of` and `build`.
    """
    check_pair(pair)
    key = _key(settings, stop_ids)
    kept: Decoder | None = pair.decoders.get(key)
    if kept is not None and _is_current(kept):
        kept.drop_programs_when_crowded()
        return kept
    decoder = build(pair, Settings.of(caller, dict(settings)), stop_ids=stop_ids)
    if key is not None:
        if len(pair.decoders) >= _KEPT:
            del pair.decoders[next(iter(pair.decoders))]
        pair.decoders[key] = decoder
    return decoder


def _is_current(decoder: Decoder) -> bool:
    """Returns whether the settings' names of method and rule still stand for the decoder's method and rule."""
    method, settings = decoder.method, decoder.settings
    return table.get(settings.method) is method and method.rule(settings) is decoder.rule


def _key(settings: Mapping[str, Any], stop_ids: Sequence[int] | None) -> Any:
    """Returns a key that distinguishes calls, types included (`True` is not 1); `None`: the decoder is not kept."""
    stops = tuple(stop_ids) if isinstance(stop_ids, (list, tuple)) else (stop_ids,)
    parts = [part for value in (*settings.values(), *stops) for part in _parts(value)]
    # a user's name may mean another object next time, and a file may change
    user_named = any(isinstance(part, str) and "." in part for part in parts)
    files = settings.get("policy") is not None or settings.get("head") is not None
    if user_named or files or not all(isinstance(part, _PLAIN) for part in parts):
        return None
    return (*settings, stop_ids is None, *parts, *map(type, parts))


def _parts(value: Any) -> list[Any]:
    """Returns the values that a setting consists of; those of a container follow its kind and their number."""
    if not isinstance(value, tuple | Level | Arm):
        return [value]
    inside = value if isinstance(value, tuple) else vars(value).values()
    return [type(value).__name__, len(inside), *(part for entry in inside for part in _parts(entry))]
