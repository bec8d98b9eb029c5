"""The points of `tests/results/store/golden/format_2.jsonl` as dataclasses, and their keys.

The classes stand in for those of the package. They have only the fields that keys need, with the defaults at the time
when the golden keys were written. They use only the standard library, so that every installed Python interpreter can
compute the keys:

    python3.12 -I -S -c "import sys; sys.path.insert(0, '.'); from tests.support import golden_points as g; g.main()"
"""

import json
import sys
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from speccascade_jax.results.store import migration
from speccascade_jax.results.store.record_key import judged_key, timed_key

FOLDER = Path(__file__).parents[1] / "results/store/golden"


def _part(kind: str, *required: str, **defaults: Any) -> type[Any]:
    """Returns a frozen dataclass of that name: fields without a default, then fields with one."""
    fields = [(name, Any) for name in required] + [(name, Any, value) for name, value in defaults.items()]
    return make_dataclass(kind, fields, frozen=True, kw_only=True)


ModelPair = _part(
    "ModelPair", "name", target=None, draft=None, vocabulary=None, others=field(default_factory=dict), dtype="float32",
    draft_dtype=None, mesh=(1, 1), draft_whole=False,
)  # fmt: skip
Evaluation = _part(
    "Evaluation", "task", split=None, max_new_tokens=None, first_example=0, quality_examples=64, quality_batch=32,
    latency_examples=12, latency_trials=3, resamples=200, execute_code=False,
    keep_traces=field(default=4, metadata={"beside": True}),
)  # fmt: skip
FileTask = _part(
    "FileTask", "path", name="", source="source", reference="reference", shots=0, stop_strings=(),
    read=field(init=False),
)  # fmt: skip
FewShotTask = _part(
    "FewShotTask", "name", "splits", "records", metrics=("bleu",), max_input_length=64, max_output_length=64, shots=0,
    clean=str.strip,
)  # fmt: skip
Level = _part(
    "Level", "model", "budget", rule="spec_decode", alpha=None, block_size=5, stop="fixed", stop_threshold=None,
    temperature=None, drafters=("draft",), tail=None, tail_size=10,
)  # fmt: skip
Arm = _part("Arm", "drafter", block_size=None, name="")
Settings = _part(
    "Settings", method="speculative", rule=None, verify="token", block_size=None, bonus=None, stop=None, tree=None,
    drafters=("draft",), choose=None, tail=None, tail_size=10, alpha=None, stop_threshold=None, temperature=0.0,
    top_p=1.0, top_k=0, draft_temperature=None,
)  # fmt: skip

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
"""Parts of each point, in the order of the file, and the hardware that it is timed on; `None` if it is not timed."""


def old_records() -> list[dict[str, Any]]:
    """Returns the records of format 2 in the file, without their checksums."""
    lines = (FOLDER / "format_2.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "checksum"} for line in lines]


def keys() -> dict[str, dict[str, str]]:
    """Returns the keys of each point, computed from its dataclasses, by the former key of its record."""
    out = {}
    for record, (parts, hardware) in zip(old_records(), POINTS, strict=True):
        fingerprints = {name: text for name, text in record["fingerprints"].items() if name != "code"}
        judged = judged_key(parts, fingerprints)
        out[record["key"]] = {"key": timed_key(judged, parts, hardware), "judged_key": judged}
    return out


def migrated_keys() -> dict[str, dict[str, str]]:
    """Returns each record's keys after migration from format 2, by its former key."""
    records = map(migration.migrated, old_records())
    return {record["former_key"]: {name: record[name] for name in ("key", "judged_key")} for record in records}


def main() -> None:
    """Prints the results of `keys` and `migrated_keys` as JSON."""
    json.dump([keys(), migrated_keys()], sys.stdout)
