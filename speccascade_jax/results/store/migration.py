"""Conversion of records of format 2 to the current format, in memory, when they are read.

Format 2 hashed the text of a point's configuration, with all defaults and module paths, the digest of the code and the
hardware into one key. This module parses the configuration into the canonical parts of `record_key`. As a result, an
old record gets the same key as a new measurement of its point. `DEFAULTS` contains the defaults that the classes of
format 2 had. This file uses the standard library only.
"""

import ast
import functools
import re
from collections.abc import Mapping
from typing import Any

from speccascade_jax.results.store.record import FORMAT, Provenance, Row
from speccascade_jax.results.store.record_key import KIND, canonical, judged_key, leave_out, timed_key

FORMER = 2
"""The format that this module converts."""
Blocks = Mapping[str, Mapping[str, Any]]
"""Values that each block of a configuration binds, by `scope/module.Class`. A reference to another block is `bytes`, a
type that no setting has."""

_SHARED: dict[str, Any] = {"verify": "token", "drafters": ["draft"], "tail": None, "tail_size": 10, "alpha": None}
_SHARED |= {"stop_threshold": None, "draft_temperature": None}
_TASK: dict[str, Any] = {"metrics": ["bleu"], "prefix": "", "max_input_length": 64, "max_output_length": 64}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ModelPair": {
        "target": None, "draft": None, "vocabulary": None, "others": {}, "dtype": "float32", "draft_dtype": None,
        "mesh": [1, 1], "draft_whole": False,
    },
    "Evaluation": {
        "split": None, "max_new_tokens": None, "first_example": 0, "quality_examples": 64, "quality_batch": 32,
        "latency_examples": 12, "latency_trials": 3, "resamples": 200, "execute_code": False,
    },
    "Settings": _SHARED | {
        "method": "speculative", "rule": None, "accept": None, "block_size": None, "bonus": None, "stop": None,
        "head": None, "tree": None, "choose": None, "policy": None, "lossy_arms": False, "temperature": 0, "top_p": 1,
        "top_k": 0,
    },
    "Level": _SHARED | {
        "rule": "spec_decode", "accept": "speculative", "block_size": 5, "bonus": "rule", "stop": "fixed",
        "temperature": None, "top_p": None, "top_k": None,
    },
    "Arm": {"block_size": None, "rule": None, "name": ""},
    "Task": _TASK,
    "FewShotTask": _TASK | {"shots": 0, "stop_strings": []},
    "FileTask": {
        "source": "source", "reference": "reference", "template": "{source}", "pool": None, "shots": 0,
        "answer": " {answer}", "separator": "\n\n", "stop_strings": [], "too_long": "cut", "shuffle": False, "name": "",
        "metrics": ["bleu"], "max_input_length": 512, "max_output_length": 128,
    },
    "SeqioTask": {
        "splits": ["validation", "test", "train"], "module": "", "registered": "", "metrics": ["bleu"], "prefix": "",
    },
}  # fmt: skip
"""Defaults of the fields of each class in format 2. They never change; the current defaults are in the classes
themselves."""

_REFERENCE = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|@([\w./]+)\(\)""")
"""Pattern of a quoted string (in which nothing is replaced) or of a gin reference."""
_HOLE = "%gin.REQUIRED  # a Task made in Python"
_HARDWARE = ("platform", "kind", "cpus", "processor", "products")
"""Entries of a record's `device` that were part of its key in format 2."""


class _MadeInPython(dict[str, Any]):
    """Fields of plain types of a task that was defined in Python; format 2 recorded no other fields of such a task."""


def migrated(record: Row) -> Row:
    """Converts a point's record of format 2 to the current format and key; returns any other record unchanged.

    A record whose configuration cannot be parsed keeps its key: tables show the record, and its point is measured
    again.
    """
    if "point" not in record or record.get("format") != FORMER:
        return record
    fingerprints = _mapping(record, "fingerprints")
    # No current toolchain has an entry "format". So the digests of a migrated record are never compared with current
    # ones, and the record never counts as stale.
    toolchain = {"format": FORMER, **_mapping(record, "versions")}
    provenance = Provenance(code=fingerprints.pop("code", None), toolchain=toolchain)
    judged, key = _keys(record, fingerprints)
    keys = {"key": key, "format": FORMAT, "judged_key": judged, "former_key": record["key"]}
    return record | keys | {"fingerprints": fingerprints, "provenance": provenance}


def _mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return dict(value) if isinstance(value, dict) else {}


def _keys(record: Row, fingerprints: Mapping[str, str]) -> tuple[str, str]:
    """Returns a record's keys in the current format: `judged_key` for quality and counts, and the record's `key`."""
    try:
        parts = parts_of(record["configuration"])
        judged = judged_key(parts, fingerprints)
        timed = record["point"].get("timed", True) and parts["evaluation"].get("latency_examples") != 0
        hardware = _hardware(record["device"], parts["pair"].get("mesh")) if timed else None
        return judged, timed_key(judged, parts, hardware)
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
        return record["key"], record["key"]


def _hardware(device: Mapping[str, Any], mesh: list[int] | None) -> dict[str, Any]:
    """Returns the hardware part of a key, as format 2 defined it; `mesh` is set for several devices only."""
    hardware = {name: device[name] for name in _HARDWARE if name in device}
    if mesh is not None:
        hardware |= {"mesh": mesh} | ({"products": "xla"} if "products" in hardware else {})
    return hardware


def parts_of(configuration: str) -> dict[str, Any]:
    """Returns the canonical parts of the point that a configuration of format 2 describes.

    Raises:
        KeyError, ValueError, SyntaxError: the text is not the configuration of a point.
    """
    blocks = _blocks(configuration)
    run = blocks["experiment.run"]
    pair, evaluation, method, sampling = (
        {name: _form(value, blocks) for name, value in blocks[run[part].decode()].items()}
        for part in ("pair", "evaluation", "method", "sampling")
    )
    method["method"] = method.pop("name")
    return {
        "pair": leave_out(pair, DEFAULTS["ModelPair"]),
        "evaluation": leave_out(evaluation, DEFAULTS["Evaluation"]),
        "settings": leave_out(method | sampling, DEFAULTS["Settings"]),
        "seed": canonical(run["seed"]),
    }


def _blocks(configuration: str) -> dict[str, dict[str, Any]]:
    """Returns the blocks of a recorded gin file; a block is a selector with a colon, followed by indented bindings."""
    blocks, block = dict[str, dict[str, Any]](), dict[str, Any]()
    for line in configuration.split("\n"):
        if line.startswith("  "):
            name, _, text = line.strip().partition(" = ")
            block[name] = _literal(text)
        elif line.endswith(":"):
            block = blocks.setdefault(line[:-1], {})
    return blocks


@functools.lru_cache(maxsize=4096)  # most lines are the same in all configurations of a store
def _literal(text: str) -> Any:
    """Returns the value of a binding; gin references inside the value become `bytes`."""
    if text.startswith(_HOLE):
        return _MadeInPython(ast.literal_eval(text.partition("; it had ")[2]))
    return ast.literal_eval(_REFERENCE.sub(lambda match: match[1] or repr(match[2].encode()), text))


def _form(value: Any, blocks: Blocks) -> Any:
    """Returns the canonical form of a binding's value, with the fields of referenced blocks."""
    if isinstance(value, bytes):
        kind = value.decode().rpartition(".")[2]
        fields = {name: _form(inner, blocks) for name, inner in blocks[value.decode()].items()}
        return {KIND: kind, **leave_out(fields, DEFAULTS[kind])}
    if isinstance(value, _MadeInPython):
        return leave_out(canonical(value), DEFAULTS["FewShotTask" if "shots" in value else "Task"])
    return [_form(inner, blocks) for inner in value] if isinstance(value, tuple) else canonical(value)
