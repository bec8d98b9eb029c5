"""Shape of records: what one line of a store holds, entry by entry.

All entries but the key may be missing: an oracle has no latency, a method without levels has no levels, and records of
benchmarks are of no point. Entries that only one method writes are dictionaries of their own shape.
"""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypedDict

FORMAT = 3
"""Format of the records of points that are written. Format 2 is migrated when it is read, others are refused."""


class Point(TypedDict, total=False):
    """Coordinates of a point, flat: pair, evaluation, settings, and the facts that tables need of the method."""

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
    block_size: Any  # a number, or "auto"
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
    """Code behind a record: the digest of rule, stop policy and drafter, and the toolchain it was taken under."""

    code: str | None
    toolchain: dict[str, Any]


class Interval(TypedDict):
    """A value with its confidence interval, and the value of each trial."""

    value: float
    low: float
    high: float
    trials: list[float]
    per_token: NotRequired[float]


class Latency(TypedDict):
    """Times of single examples at batch size 1, per example `[examples, trials]`."""

    ms_per_example: Interval
    ms_per_token: Interval
    per_example_ms: list[list[float]]
    per_example_tokens: list[list[int]]
    per_example_draft_steps: list[list[int]]
    per_example_target_calls: list[list[int]]
    tokens_per_example: float
    examples: int
    trials: int


class Record(TypedDict, total=False):
    """One line of a store, without its checksum.

    Attributes:
        key: identifies the record (`record_key`); judged_key: the same without hardware and latency.
        former_key: the key under which an older version stored it; its outputs lie there.
        supersedes: digest of the code by which the record of this key was measured that this one takes the place of.
        configuration: the gin file that runs the point again.
        fingerprints: hashes of weights, examples, stop ids, acceptance head and policy.
    """

    key: Required[str]
    judged_key: str
    former_key: str
    supersedes: str | None
    format: int
    point: Point
    configuration: str
    fingerprints: dict[str, str]
    provenance: Provenance
    versions: dict[str, str]
    package: dict[str, Any]
    imports: dict[str, Any]
    device: dict[str, Any]
    started: str
    wall_seconds: float
    head: dict[str, Any]
    selection: dict[str, Any]
    counts: dict[str, int]
    measures: dict[str, Any]
    by_position: dict[str, list[int]]
    inconclusive: bool
    quality: dict[str, Any]
    per_example: dict[str, list[Any]]
    levels: list[dict[str, Any]]
    planned: list[dict[str, Any]]
    failed_examples: list[int]
    failure: str
    failed_timings: int
    latency: Latency
    target_latency: Latency
    relative_latency: Interval
    planned_latency: dict[str, Any]
