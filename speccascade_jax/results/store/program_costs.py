"""Descriptions of the programs that records ran, and the file that holds the costs of these programs on other hardware.

`preflight.costs` compiles the programs and writes the file; `results.analysis.prediction` reads it. Needs no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.store.record import Point, Record, Row, get_entry
from speccascade_jax.storage.files import expanded, rewrite
from speccascade_jax.storage.readers import json_object

KIND = "costs of compiled programs"
"""Name of the only entry of a file of costs, by which such a file is recognized."""

PARTS = ("memory", "compute", "collectives", "ops")
"""The four parts of a predicted time: memory traffic, compute, waiting for other devices, and starting ops."""

_STRUCTURE = (
    "method", "rule", "accept", "verify", "bonus", "block_size", "stop", "tree", "drafters", "tail", "tail_size",
    "head",
)  # fmt: skip
"""Settings that determine the program of a round."""
_NUMBERS = ("alpha", "stop_threshold")
"""Settings that are inputs of a program, so that one program serves all their values; `ANY` takes their place."""
ANY = 0.5
_DEFAULTS = {"verify": "token", "drafters": ["draft"], "tail_size": 10}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The hardware of a prediction, and how the models are distributed over it.

    Attributes:
        topology: "CHIP:SIZES" such as "v5e:2x4", as for `preflight.report`.
        mesh: (data, model), the numbers of devices over which rows and models are split; `None` for the mesh of the
            record.
        dtype: the dtype of target and draft. A draft in 8 bits, which is faster on CPUs only, has this dtype too.
        prompt_length: number of tokens that prompts are padded to, for records that do not contain this length.
        models: a target and a draft whose shapes replace those of the record's models, as for `preflight.report`; `()`
            for the record's models.
    """

    topology: str
    mesh: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    prompt_length: int = 128
    models: tuple[str, ...] = ()


def refusal(record: Record) -> str:
    """Returns the reason why a record's latency cannot be predicted from one program and its counts, or ""."""
    point = record["point"]
    if not point.get("timed", True):
        return "an oracle has no latency"
    if record.get("failed_examples"):
        return "some of its examples failed"
    if point["block_size"] == "auto":
        return "its block lengths are chosen from measured times"
    if record.get("levels"):
        return "the calls of its levels are not counted by example"
    if "head" in record["fingerprints"]:
        return "its acceptance head is not part of any compiled program"
    if point.get("choose") or len(point["drafters"]) > 1:
        return "its drafters are chosen for each query"
    return ""


def programs(record: Record, hardware: Hardware) -> dict[str, Row]:
    """Returns the descriptions of a record's two programs, "prefill" and "round" (drafting and verifying), as JSON.

    Records with equal descriptions run the same program.
    """
    point = record["point"]
    settings = {name: value for name in _STRUCTURE if (value := point.get(name)) not in (None, _DEFAULTS.get(name))}
    inputs = {name: ANY for name in _NUMBERS if point.get(name) is not None}
    reads = ("drafters", "tail") if point["method"] not in (TARGET, DRAFT) else ("method",)
    shared = {"topology": hardware.topology, **_models(point, hardware), "dtype": hardware.dtype}
    shared |= {"mesh": list(hardware.mesh or point["mesh"]), "max_new_tokens": point["max_new_tokens"]}
    shared |= {"prompt_length": record.get("prompt_length") or hardware.prompt_length}
    return {
        "prefill": {**shared, "part": "prefill", "settings": {n: settings[n] for n in reads if n in settings}},
        "round": {**shared, "part": "round", "settings": settings | inputs | _sampling(point)},
    }


def _models(point: Point, hardware: Hardware) -> Row:
    """Returns the entries of a description that name models; the draft is left out for the target alone."""
    names = ("pair", "target", "draft", "others", "draft_whole")
    models: Row = {name: value for name in names if (value := get_entry(point, name))}
    if hardware.models:
        models = {"target": hardware.models[0], "draft": hardware.models[-1]}
    if point["method"] == TARGET:
        models = {name: value for name, value in models.items() if name in ("pair", "target")}
    return models


def _sampling(point: Point) -> Row:
    """Returns sampling settings for a description: fixed values that take the same branches as the point's settings."""
    drafts = point["draft_temperature"]
    chosen: Row = {"temperature": same_branch(point["temperature"])}
    chosen |= {"draft_temperature": same_branch(drafts)} if drafts is not None else {}
    chosen |= {"top_p": 0.9} if point["top_p"] < 1 else {}
    return chosen | ({"top_k": 40} if point["top_k"] else {})


def same_branch(temperature: float) -> float:
    """Returns the temperature for which programs are compiled: all but 0 and 1 take the same branch of sampling."""
    return temperature if temperature in (0, 1) else 0.5


def key(program: Mapping[str, Any]) -> str:
    """Returns a program's description as text, by which its costs are found."""
    return json.dumps(program, sort_keys=True)


def path_of(store: str | Path) -> Path:
    """Returns the path of the costs of a store's programs: `<store>.costs.json` beside it."""
    return expanded(store).with_suffix(".costs.json")


def read(path: Path) -> dict[str, Row]:
    """Returns the entries of a file of costs by `key`; no entries if there is no file.

    An entry holds "program" (its description), and either "refused" (the reason why there are no costs) or the values
    of a `preflight.Report`: "stages" and "more" with seconds for each of `PARTS`, "complete", "versions" of the
    compilers, "peak_bytes" of memory, and "launch", the largest cost of starting an op in seconds.

    Raises:
        ValueError: the file is not a file of costs.
    """
    if not path.exists():
        return {}
    content = json_object(path, "move it away, and predict again")
    if KIND not in content:
        raise ValueError(f"{path} holds no {KIND}: move it away, and predict again")
    return {key(entry["program"]): entry for entry in content[KIND]}


def write(path: Path, costs: Mapping[str, Row]) -> None:
    """Writes a file of costs; replaces an earlier file of costs atomically, but never a file of another kind."""
    rewrite(path, json.dumps({KIND: [*costs.values()]}, indent=1) + "\n", start=rf'\{{\s*"{KIND}"')


def missing(records: Iterable[Record], hardware: Iterable[Hardware], costs: Mapping[str, Row]) -> list[Row]:
    """Returns the descriptions of those programs of records that have no costs, each once."""
    all_hardware = tuple(hardware)
    wanted = {
        key(program): program
        for record in records
        if not refusal(record)
        for place in all_hardware
        for program in programs(record, place).values()
    }
    return [program for name, program in wanted.items() if name not in costs]
