"""Construction of decoders from a pair of models and settings, used by `decode`, `stream` and the experiments."""

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
"""The largest number of decoders that a pair keeps for later calls."""
_PLAIN = (str, int, float, np.generic, Rule, type(None))


def build(
    pair: Pair, settings: Settings, *, stop_ids: Sequence[int] | None = None, head: Head | None = None
) -> Decoder:
    """Builds a decoder for a pair.

    Every decoder is built by this function. It therefore does two more things: it switches the compilation cache on,
    because an import must not do so, and it drops compiled programs if there are too many.

    Args:
        pair: the models.
        settings: the method, its rule and drafters, and how tokens are sampled.
        stop_ids: token ids that end a row; `None`: those of the vocabulary, or none without a vocabulary.
        head: an acceptance head that replaces the pair's own, if the method needs one.

    Raises:
        ValueError: a method, rule, acceptance, stop policy, drafter or bonus is unknown; the block size is below 1, or
            the method does not allow it; a stop id is outside the vocabulary; an acceptance head is missing, or belongs
            to another draft.
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
    """Raises a ValueError if the argument is not a `Pair`, for example if it is the name of one."""
    if not isinstance(pair, Pair):
        raise ValueError(f"pair={shown(pair)} is not a loaded pair: give sc.load_pair({shown(pair)}), or a Pair")


def assemble(
    pair: Pair, *, stop_ids: Sequence[int] | None = None, head: Head | None = None, **settings: Any
) -> tuple[Engine, Params]:
    """Returns the engine of a decoder and its parameters; the method must run a single generation.

    Args:
        pair: the models.
        stop_ids: ids that end a row, as in `build`.
        head: an acceptance head, as in `build`.
        settings: the fields of `Settings`, by name.

    Raises:
        ValueError: as `build` and `Decoder.require_engine`.
    """
    decoder = build(pair, Settings.of("assemble", settings), stop_ids=stop_ids, head=head)
    return decoder.require_engine(), decoder.params


def decoder_for(pair: Pair, caller: str, settings: Mapping[str, Any], stop_ids: Sequence[int] | None = None) -> Decoder:
    """Returns the decoder for a call; the pair keeps it for later calls with the same settings.

    A kept decoder saves about one millisecond of a call, which takes about ten milliseconds on the shipped pair. A new
    decoder is built each time if a setting is an array, a file, or the name of a user's object, because these may have
    changed since the last call.

    Args:
        pair: the models.
        caller: name of the calling function, for error messages.
        settings: the fields of `Settings`, by name.
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
    """Returns whether the names of method and rule in the settings still refer to the objects that the decoder uses."""
    method, settings = decoder.method, decoder.settings
    return table.get(settings.method) is method and method.rule(settings) is decoder.rule


def _key(settings: Mapping[str, Any], stop_ids: Sequence[int] | None) -> Any:
    """Returns the key under which a pair keeps a decoder, or `None` if the decoder must not be kept.

    The key includes the types of all values, because `True == 1` in Python.
    """
    stops = tuple(stop_ids) if isinstance(stop_ids, (list, tuple)) else (stop_ids,)
    parts = [part for value in (*settings.values(), *stops) for part in _parts(value)]
    # A name with a dot refers to a user's object, and may refer to another object at the next call. A file that a
    # setting names may have changed by then. So a decoder with such a name or file is not kept.
    user_named = any(isinstance(part, str) and "." in part for part in parts)
    files = settings.get("policy") is not None or settings.get("head") is not None
    if user_named or files or not all(isinstance(part, _PLAIN) for part in parts):
        return None
    return (*settings, stop_ids is None, *parts, *map(type, parts))


def _parts(value: Any) -> list[Any]:
    """Returns the values inside a setting as a flat list; a container adds its type and its length before them."""
    if not isinstance(value, tuple | Level | Arm):
        return [value]
    inside = value if isinstance(value, tuple) else vars(value).values()
    return [type(value).__name__, len(inside), *(part for entry in inside for part in _parts(entry))]
