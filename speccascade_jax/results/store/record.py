"""Types of records: what one line of a store holds, without its checksum."""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Required, TypedDict

FORMAT = 3
"""Format of the records of points that are written. Format 2 is migrated when it is read; other formats are refused."""

Row = dict[str, Any]
"""Any other JSON object: outputs, Spec-Bench answers, profile rows, benchmark reports."""


class Point(TypedDict, total=False):
    """Coordinates of a point, flat: its pair, evaluation and settings, and the facts that tables need of its method.

    Attributes:
        block_size: a number, or `"auto"`.
        curve: the method with its choices and its stop threshold; family: the same without the stop threshold.
        title: heading of the method; details: lines under it; rank: its place among methods; symbol: its mark in plots.
        law: points with equal text sample from one distribution; lossless: that of the target.
        swept_block: sweeps vary its block size; on_rejection: α acts where a draft is rejected.
        timed: its latency is measured; chosen: how it chooses among drafters.
    """

    pair: str
    target: str | None
    draft: str | None
    vocabulary: str | None
    others: list[str]
    dtype: str
    draft_dtype: str | None
    mesh: list[int]
    draft_whole: bool
    task: str
    split: str | None
    max_new_tokens: int | None
    first_example: int
    quality_examples: int
    quality_batch: int
    latency_examples: int
    latency_trials: int
    resamples: int
    execute_code: bool
    method: str
    rule: str | None
    accept: str | None
    verify: str
    block_size: int | str | None
    bonus: str | None
    stop: str | None
    stop_threshold: float | None
    head: str | None
    tree: list[int] | None
    drafters: list[str]
    choose: str | None
    chosen: str | None
    policy: str | None
    lossy_arms: bool
    tail: str | None
    tail_size: int
    alpha: float | None
    temperature: float
    top_p: float
    top_k: int
    draft_temperature: float | None
    seed: int
    curve: str
    family: str
    title: str
    details: list[str]
    rank: int
    law: str
    lossless: bool
    swept_block: bool
    on_rejection: bool
    symbol: str
    timed: bool


class Provenance(TypedDict):
    """Code that a record was measured by: the digest of rule, stop policy and drafter, and its toolchain."""

    code: str | None
    toolchain: Row


class Bounds(TypedDict):
    """A value and its bounds."""

    value: float
    low: float
    high: float


class Quality(Bounds):
    """A corpus score with its confidence interval.

    Attributes:
        interval: what the bounds are; examples: how many were judged; tokens_per_example: mean output length.
        all: the score of every metric; signature: identifies the computation of the first.
        per_example: `ids`, and by metric the `statistics` of each example.
    """

    metric: str
    interval: str
    examples: int
    tokens_per_example: float
    all: dict[str, float]
    signature: str
    per_example: NotRequired[Row]


class RecordInterval(Bounds):
    """A median over trials, the lowest and the highest trial, and the value of each trial.

    Attributes:
        per_token: ratio of the times per token, where the value is a ratio of times.
    """

    trials: list[float]
    per_token: NotRequired[float]


class Latency(TypedDict):
    """Times of single examples at batch size 1; entries `per_example_*` are `[trials][examples]`."""

    ms_per_example: RecordInterval
    ms_per_token: RecordInterval
    per_example_ms: list[list[float]]
    per_example_tokens: list[list[int]]
    per_example_draft_steps: list[list[int]]
    per_example_target_calls: list[list[int]]
    tokens_per_example: float
    examples: int
    trials: int


Timed = Literal["latency", "target_latency"]
"""A name in `TIMES`."""
TIMES: tuple[Timed, ...] = ("latency", "target_latency")
"""A record's entries with times: of its own runs, and of the target's runs that alternated with them."""


class Record(TypedDict, total=False):
    """A record of a point. All but the key may be missing: an oracle has no latency, most methods have no levels.

    Attributes:
        key: identifies the record (`record_key`); judged_key: the same without hardware and latency.
        former_key: the key under which an older version stored the record; its outputs lie there.
        supersedes: digest of the code by which the record of this key was measured that this one replaces.
        format: `FORMAT`; point: what was measured; configuration: the gin file that measures it again.
        imports: the user's own files that the configuration needs.
        fingerprints: hashes of weights, examples, stop ids, acceptance head and policy.
        versions, package, device, started, wall_seconds: software, hardware and time of the measurement.
        prompts_cut, prompts_skipped: prompts that were too long.
        head, selection: of methods with an acceptance head, and of choices among drafters.
        outputs: what `results.store.outputs` keeps beside the store, on the way there; no line holds it.
        counts, measures: the engine's counts and their ratios; by_position: counts by position in the block.
        per_example: the same for each example, with the examples' `ids`.
        inconclusive: nothing was drafted.
        levels: counts and measures of each level of a stack, from the level below the target down.
        planned, planned_latency: the block lengths that were planned, judged and timed.
        failed_examples, failure: ids of the examples in which a model failed, and the first failure.
        failed_timings: timed runs in which a model failed; with any there is no latency.
        latency, target_latency: of the method, and of the target beside it; relative_latency: one over the other.
    """

    key: Required[str]
    judged_key: str
    former_key: str
    supersedes: str | None
    format: int
    point: Point
    configuration: str
    imports: Row
    fingerprints: dict[str, str]
    provenance: Provenance
    versions: dict[str, str]
    package: Row
    device: Row
    started: str
    wall_seconds: float
    prompts_cut: int
    prompts_skipped: int
    head: Row
    selection: Row
    outputs: list[Any]
    counts: dict[str, int]
    measures: Row
    by_position: dict[str, list[float]]
    per_example: dict[str, list[Any]]
    inconclusive: bool
    quality: Quality
    levels: list[Row]
    planned: list[Row]
    planned_latency: Row
    failed_examples: list[int]
    failure: str
    failed_timings: int
    latency: Latency
    target_latency: Latency
    relative_latency: RecordInterval


def get_entry(part: Mapping[str, Any], name: str) -> Any:
    """Returns an entry of a record, or of a part of one, whose name is known only at run time."""
    return part[name]
