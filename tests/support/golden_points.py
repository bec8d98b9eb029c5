"""The points of `tests/results/store/golden/format_2.jsonl` as dataclasses, and their keys.

The classes stand in for those of the package: as small as they can be, with the defaults that they had when the golden
keys were taken. Standard library only, because every interpreter that exists computes the keys:

    python3.12 -I -S -c "import sys; sys.path.insert(0, '.'); from tests.support import golden_points as g; g.main()"
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccascade_jax.results.store import migration
from speccascade_jax.results.store.record_key import judged_key, timed_key

FOLDER = Path(__file__).parents[1] / "results/store/golden"


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    name: str
    target: str | None = None
    draft: str | None = None
    vocabulary: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    draft_dtype: str | None = None
    mesh: tuple[int, int] = (1, 1)
    draft_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    task: Any
    split: str | None = None
    max_new_tokens: int | None = None
    first_example: int = 0
    quality_examples: int = 64
    quality_batch: int = 32
    latency_examples: int = 12
    latency_trials: int = 3
    resamples: int = 200
    execute_code: bool = False
    keep_traces: int = field(default=4, metadata={"beside": True})


@dataclass(frozen=True, kw_only=True)
class FileTask:
    path: str
    name: str = ""
    source: str | int = "source"
    reference: str | int = "reference"
    shots: int = 0
    stop_strings: tuple[str, ...] = ()
    read: Callable[[str], Any] = field(init=False)


@dataclass(frozen=True, kw_only=True)
class FewShotTask:
    name: str
    splits: tuple[str, ...]
    records: Callable[[str], Any]
    metrics: tuple[str, ...] = ("bleu",)
    max_input_length: int = 64
    max_output_length: int = 64
    shots: int = 0
    clean: Callable[[str], str] = str.strip


@dataclass(frozen=True, kw_only=True)
class Level:
    model: str
    budget: int
    rule: str = "spec_decode"
    alpha: Any = None
    block_size: int = 5
    stop: str = "fixed"
    stop_threshold: Any = None
    temperature: Any = None
    drafters: tuple[Any, ...] = ("draft",)
    tail: str | None = None
    tail_size: int = 10


@dataclass(frozen=True, kw_only=True)
class Arm:
    drafter: str | Level
    block_size: int | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    method: str = "speculative"
    rule: str | None = None
    verify: str = "token"
    block_size: int | str | None = None
    bonus: str | None = None
    stop: str | None = None
    tree: tuple[int, ...] | None = None
    drafters: tuple[Any, ...] = ("draft",)
    choose: str | None = None
    tail: str | None = None
    tail_size: int = 10
    alpha: Any = None
    stop_threshold: Any = None
    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0
    draft_temperature: Any = None


PAIR = ModelPair(name="tatoeba_en_de")
SMALL = Evaluation(
    task="tiny_translation", split="test", max_new_tokens=12, quality_examples=4, quality_batch=4, latency_examples=1,
    latency_trials=1, resamples=20,
)  # fmt: skip
CPU = {"platform": "cpu", "kind": "cpu", "cpus": 2, "processor": "AMD EPYC", "products": "own"}


def small(**settings: Any) -> dict[str, Any]:
    """Returns the parts of a point of the small pair."""
    return {"pair": PAIR, "evaluation": SMALL, "settings": Settings(**{"bonus": "rule"} | settings), "seed": 0}


EXIT = Level(model="exit", budget=3, block_size=2, stop="confidence", stop_threshold=0.25)
OWN_MODELS = ModelPair(
    name="mine", target="models/target", draft="models/draft", vocabulary="models/v.model",
    others={"exit": "models/e", "small": "models/s"}, dtype="bfloat16", draft_dtype="int8", mesh=(2, 1),
    draft_whole=True,
)  # fmt: skip
FILE = FileTask(path="data/it's @a/b().tsv", name="b()", reference="target", stop_strings=("\n", "#"))
STACK = Level(
    model="small", budget=8, rule="token_v3", alpha=0.5, temperature=1, drafters=(EXIT,), tail="draft", tail_size=4
)
PYTHON_TASK = FewShotTask(name="mine", splits=("test",), records=lambda split: [], shots=2, max_input_length=300)

POINTS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    (small(method="autoregressive", bonus=None), CPU),
    (small(method="token_v3", alpha=0.3, block_size=3, temperature=1), CPU),
    (small(method="specdecpp", block_size=20, stop_threshold=0.5), CPU),
    (small(rule="chow", alpha=0.3, block_size=6, stop="confidence", stop_threshold=0.4, temperature=1.0), CPU),
    (small(method="fuzzy", rule="fuzzy_kl", alpha=0.4, block_size=3, bonus="target"), CPU),
    (small(method="seq_cascade", alpha=-8.0, bonus=None, temperature=1.0), CPU),
    (small(method="diff", alpha=0.0, block_size=3, verify="block"), CPU),
    (
        small(
            method="spec_decode", temperature=1,
            drafters=(Level(model="draft", budget=4, rule="token_v3", alpha=0.3, block_size=2),),
        ),
        CPU,
    ),
    (
        small(
            method="spec_decode", block_size=3, choose="random",
            drafters=("draft", Arm(drafter="draft", block_size=2, name="two")),
        ),
        CPU,
    ),
    (small(method="spec_decode", tree=(2, 1), temperature=1), CPU),
    (
        {
            "pair": OWN_MODELS,
            "evaluation": Evaluation(task=FILE, split="all", max_new_tokens=128, quality_examples=1000),
            "settings": Settings(
                rule="opt", bonus="rule", drafters=(STACK,), tail="exit", tail_size=3, alpha=-0.0, temperature=0.7,
                top_p=0.95, top_k=40, draft_temperature=1.0,
            ),
            "seed": 7,
        },
        {"platform": "tpu", "kind": "TPU v4", "mesh": [2, 1]},
    ),
    (
        {
            "pair": PAIR,
            "evaluation": Evaluation(task=PYTHON_TASK, split="test", max_new_tokens=64, latency_examples=0),
            "settings": Settings(method="lossy", alpha=0.5, block_size=5, bonus="rule", temperature=1.0),
            "seed": 3,
        },
        None,
    ),
]  # fmt: skip
"""The parts of each point, in the order of the file, and its hardware; `None` where it is not timed."""


def old_records() -> list[dict[str, Any]]:
    """Returns the records of format 2 as they lie in the file, without their checksums."""
    lines = (FOLDER / "format_2.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "checksum"} for line in lines]


def keys() -> dict[str, dict[str, str]]:
    """Returns the former key of each record -> the keys of its point as dataclasses."""
    out = {}
    for record, (parts, hardware) in zip(old_records(), POINTS, strict=True):
        fingerprints = {name: text for name, text in record["fingerprints"].items() if name != "code"}
        judged = judged_key(parts, fingerprints)
        out[record["key"]] = {"key": timed_key(judged, parts, hardware), "judged_key": judged}
    return out


def migrated_keys() -> dict[str, dict[str, str]]:
    """Returns the former key of each record -> its keys after migration."""
    records = map(migration.migrated, old_records())
    return {record["former_key"]: {name: record[name] for name in ("key", "judged_key")} for record in records}


def main() -> None:
    """Print both as JSON."""
    json.dump([keys(), migrated_keys()], sys.stdout)
