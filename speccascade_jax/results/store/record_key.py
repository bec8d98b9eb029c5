"""Identity of a record: the settings of its point and the hashes of what it was measured on.

This file alone says what a key is. It covers settings that differ from their defaults, never the defaults, modules or
code around them: a new field with a default, a class that moves, another Python or another JAX leaves every key as it
was. Quality and counts have the judged key. Latency depends on the hardware too, so a timed record has the timed key,
and the judged key beside it. Standard library only.
"""

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

from speccascade_jax.storage.files import point_key

TIMED: Mapping[str, tuple[str, ...]] = {
    "evaluation": ("latency_examples", "latency_trials"),
    "pair": ("mesh", "draft_whole"),
}
"""Part of a point -> its fields that only the latency depends on."""
KIND = "is"
"""Entry that names the class of a dataclass inside another one: an `Arm` is no `Level`."""
_PLAIN = str | int | float | tuple | None
"""Types of the fields that count of a dataclass which holds callables: a task that was made in Python."""


def canonical(value: Any) -> Any:
    """Returns settings as plain JSON values; equal settings have equal forms.

    A dataclass becomes a dictionary without the fields that equal their default. A field's metadata may say more:
    `{"omitted": value}` is left out in place of the default, so that a default can change and keys stay, and
    `{"beside": True}` marks a field that is no part of the identity. A dataclass inside another value carries its class
    name, unless it holds callables; then its plain fields alone count.

    Raises:
        ValueError: a number that is not finite, or a value that JSON has no form for.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _inner(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_inner(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _number(value)
    if isinstance(value, str | bool | None):
        return value
    raise ValueError(f"{value!r:.80} has no place in a record's key: give text, numbers or tuples of them")


def _fields(part: Any, plain_only: bool = False) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from what is left out."""
    values, omitted = dict[str, Any](), dict[str, Any]()
    for field in dataclasses.fields(part):
        if not field.init or field.metadata.get("beside"):
            continue
        value = getattr(part, field.name)
        if plain_only and not isinstance(value, _PLAIN):
            continue
        values[field.name] = _inner(value)
        if "omitted" in field.metadata:
            omitted[field.name] = _inner(field.metadata["omitted"])
        elif field.default is not dataclasses.MISSING:
            omitted[field.name] = _inner(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            omitted[field.name] = _inner(field.default_factory())
    return leave_out(values, omitted)


def leave_out(values: Mapping[str, Any], omitted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns canonical values, sorted by name, without those that equal the value of their name in `omitted`."""
    return {
        name: value
        for name, value in sorted(values.items())
        if name not in omitted or _text(value) != _text(omitted[name])
    }


def _text(form: Any) -> str:
    """Returns a form as text: Python's True equals 1, and JSON's does not."""
    return json.dumps(form, sort_keys=True)


def _inner(value: Any) -> Any:
    """Returns the form of a value inside another one, where a dataclass says which class it is of."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return canonical(value)
    if any(callable(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init):
        return _fields(value, plain_only=True)
    return {KIND: type(value).__name__, **_fields(value)}


def _number(value: numbers.Real) -> int | float:
    """Returns the one number that stands for all that are equal to it: 2.0 is 2, and -0.0 is 0."""
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} has no place in a record's key: give a finite number")
    return int(number) if number.is_integer() else number


def judged_key(parts: Mapping[str, Any], fingerprints: Mapping[str, str]) -> str:
    """Returns the key of what is judged: quality, counts and outputs, on whatever hardware they were computed.

    Args:
        parts: "pair", "evaluation", "settings" and "seed" of a point, as values or already canonical.
        fingerprints: hashes of weights, examples, stop ids, acceptance head and policy; none of code.
    """
    judged = {name: _select(name, part, timed=False) for name, part in parts.items()}
    return point_key(parts=judged, fingerprints=canonical(fingerprints))


def timed_key(judged: str, parts: Mapping[str, Any], hardware: Mapping[str, Any] | None) -> str:
    """Returns the key of a record.

    Args:
        judged: the point's judged key, which is the record's where nothing is timed; parts: as there.
        hardware: what makes two latencies comparable; `None` where nothing is timed.
    """
    if hardware is None:
        return judged
    timed = {name: _select(name, parts[name], timed=True) for name in TIMED if name in parts}
    return point_key(judged=judged, parts=timed, hardware=canonical(hardware))


def _select(name: str, part: Any, timed: bool) -> Any:
    """Returns the fields of a point's part that only the latency depends on, or all others."""
    form = canonical(part)
    if not isinstance(form, dict):
        return form
    return {field: value for field, value in form.items() if (field in TIMED.get(name, ())) == timed}


def is_stale(record: Mapping[str, Any], code: str | None, toolchain: Mapping[str, Any]) -> bool:
    """Tells whether a record was measured by other code than today's, as far as that can be known.

    Digests of code can be compared under one toolchain only. A record of another one, or without provenance, is kept.
    """
    provenance = record.get("provenance")
    if provenance is None or canonical(provenance["toolchain"]) != canonical(toolchain):
        return False
    return bool(provenance["code"] != code)
