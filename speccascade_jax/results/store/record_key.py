"""Keys that identify measurement records by the settings of the point, and by the hashes of its weights and data.

A point is one combination of model pair, evaluation, method settings and random seed. Only this file defines keys. A
key covers the settings that differ from their defaults. It does not cover the defaults, modules or code around them: a
new field with a default, a class that moves, another Python or another JAX changes no key. Quality and counts do not
depend on the hardware; the judged key identifies them. Latency also depends on the hardware, so the key of a record
with latencies is a timed key, and the record holds the judged key as well. This file uses the standard library only.
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
"""Fields that affect the latency only, for each part of a point that has such fields."""
KIND = "is"
"""Name of the entry that holds the class name of a nested dataclass, so that an `Arm` never equals a `Level`."""
_PLAIN = str | int | float | tuple | None
"""Types of the fields that enter the key if a dataclass also holds callables, such as a task defined in Python."""


def canonical(value: Any) -> Any:
    """Returns settings as plain JSON values; equal settings give equal JSON values.

    A dataclass becomes a dictionary without the fields that equal their default. A field's metadata may change this:
    `{"omitted": value}` leaves out that value instead of the default, so that a default can change without changing
    keys; `{"beside": True}` excludes the field from the key. The dictionary of a nested dataclass includes the class
    name. If the nested dataclass holds callables, the dictionary instead contains only the fields of plain types.

    Raises:
        ValueError: a number is not finite, or a value has no JSON form.
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
    raise ValueError(f"{value!r:.80} cannot be part of a record's key: give text, numbers or tuples of them")


def _fields(part: Any, plain_only: bool = False) -> dict[str, Any]:
    """Returns a dataclass's fields, without those that equal their default or the value that metadata omits."""
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
    """Returns canonical values, sorted by name, without those that equal the value of the same name in `omitted`."""
    return {
        name: value
        for name, value in sorted(values.items())
        if name not in omitted or _text(value) != _text(omitted[name])
    }


def _text(form: Any) -> str:
    """Returns a canonical value as JSON text, which distinguishes True from 1, as Python's `==` does not."""
    return json.dumps(form, sort_keys=True)


def _inner(value: Any) -> Any:
    """Returns the canonical form of a nested value; a nested dataclass includes its class name."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return canonical(value)
    if any(callable(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init):
        return _fields(value, plain_only=True)
    return {KIND: type(value).__name__, **_fields(value)}


def _number(value: numbers.Real) -> int | float:
    """Returns a number in one form for all equal numbers: 2.0 becomes 2, and -0.0 becomes 0."""
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be part of a record's key: give a finite number")
    return int(number) if number.is_integer() else number


def judged_key(parts: Mapping[str, Any], fingerprints: Mapping[str, str]) -> str:
    """Returns the key of a point's quality, counts and outputs, which do not depend on the hardware.

    Args:
        parts: "pair", "evaluation", "settings" and "seed" of a point, as values or in canonical form.
        fingerprints: hashes of weights, examples, stop ids, acceptance head and policy, without hashes of code.
    """
    judged = {name: _select(name, part, timed=False) for name, part in parts.items()}
    return point_key(parts=judged, fingerprints=canonical(fingerprints))


def timed_key(judged: str, parts: Mapping[str, Any], hardware: Mapping[str, Any] | None) -> str:
    """Returns the key of a record; if `hardware` is given, the key also covers everything that affects the latency.

    Args:
        judged: the point's judged key, which is also the record's key if nothing is timed.
        parts: as in `judged_key`.
        hardware: the hardware on which latencies are comparable; `None` if nothing is timed.
    """
    if hardware is None:
        return judged
    timed = {name: _select(name, parts[name], timed=True) for name in TIMED if name in parts}
    return point_key(judged=judged, parts=timed, hardware=canonical(hardware))


def _select(name: str, part: Any, timed: bool) -> Any:
    """Returns those fields of a point's part that affect the latency only or, if not `timed`, all other fields."""
    form = canonical(part)
    if not isinstance(form, dict):
        return form
    return {field: value for field, value in form.items() if (field in TIMED.get(name, ())) == timed}


def is_stale(record: Mapping[str, Any], code: str | None, toolchain: Mapping[str, Any]) -> bool:
    """Returns whether a record was measured by code that is known to differ from the current code.

    Code digests are comparable only under the same toolchain. A record of another toolchain, or without provenance, is
    not stale.
    """
    provenance = record.get("provenance")
    if provenance is None or canonical(provenance["toolchain"]) != canonical(toolchain):
        return False
    return bool(provenance["code"] != code)
