"""Types of measurement records; a line of a store is one record as JSON, with a checksum."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, TypedDict, cast

FORMAT = 3
"""Format number of the records that this version writes. Records of format 2 are migrated when they are read; other
formats are refused."""

Row = dict[str, Any]
"""Any JSON object that is not a record: outputs, Spec-Bench answers, profile rows, benchmark reports."""


class Point(TypedDict, total=False):
    """The settings of a measured point in one flat dictionary, with the properties of its method that tables need.

    Attributes:
        block_size: a number, or `"auto"`.
        curve: name of the method, its choices and its stop threshold; family: the same without the stop threshold.
        title: the method's name in tables; details: words that distinguish methods with the same title.
        rank: the method's position in the order of methods; symbol: the name of its stop threshold in tables.
        law: points with equal text sample from one distribution; lossless: whether this is the target's distribution.
        swept_block: whether sweeps vary the method's block size.
        on_rejection: whether the stop threshold is compared with an estimate of P(some token of the block is rejected).
        timed: whether the latency of its method can be measured; chosen: how the method chooses among drafters.
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
    chat: bool
    template_variables: dict[str, Any]
    cut_thinking: bool
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
    """The code that measured a record: a digest of rule, stop policy and drafter, and the toolchain of this digest."""

    code: str | None
    toolchain: Row


class Bounds(TypedDict):
    """A number with a lower and an upper bound."""

    value: float
    low: float
    high: float


class Quality(Bounds):
    """A corpus score with its confidence interval.

    Attributes:
        interval: description of the bounds; examples: number of scored examples; tokens_per_example: mean output
            length.
        all: the score of every metric; signature: identifies the computation of the first metric.
        per_example: `ids` of the examples, and their `statistics` by metric.
    """

    metric: str
    interval: str
    examples: int
    tokens_per_example: float
    all: dict[str, float]
    signature: str
    per_example: NotRequired[Row]


class RecordInterval(Bounds):
    """The median, the lowest and the highest value over trials, and the value of each trial.

    Attributes:
        per_token: ratio of the times per token, if `value` is a ratio of times.
    """

    trials: list[float]
    per_token: NotRequired[float]


class Latency(TypedDict):
    """Times of single examples at batch size 1; entries `per_example_*` are `[trials][examples]`.

    Attributes:
        tokens_per_second: output tokens over the time of whole generations.
        mfu: share of the devices' peak that the models' operations reach, where both are known
            (`evaluation.speeds`).
    """

    ms_per_example: RecordInterval
    ms_per_token: RecordInterval
    per_example_ms: list[list[float]]
    per_example_tokens: list[list[int]]
    per_example_draft_steps: list[list[int]]
    per_example_target_calls: list[list[int]]
    tokens_per_example: float
    examples: int
    trials: int
    tokens_per_second: NotRequired[float]
    mfu: NotRequired[float]


def hardware_name(device: Row) -> str:
    """Returns the name of a record's hardware: the kind of its devices and, as JAX calls all CPUs "cpu", the processor.

    Records that an accelerator measured name no processor, because their times do not depend on it.

    Example:
        >>> from speccascade_jax.results.store.record import hardware_name
        >>> hardware_name({"kind": "TPU v5 lite", "count": 4})
        'TPU v5 lite'
    """
    return f"{device['kind']} ({device['processor']})" if "processor" in device else str(device["kind"])


def hardware_text(device: Row) -> str:
    """Returns the name of a record's hardware with the number of devices and, for a CPU, of its cores."""
    cores = f" ({device['processor']}, {device['cpus']} CPUs)" if "processor" in device else ""
    return f"{device['kind']} × {device['count']}{cores}"


def speed_text(timed: Latency) -> str:
    """Returns the tokens per second of timed runs, with the model FLOPs utilisation (MFU) where it is known."""
    mfu = f", MFU {timed['mfu']:.2%}" if "mfu" in timed else ""
    return f"{timed['tokens_per_second']:.1f}{mfu}"


Timed = Literal["latency", "target_latency"]
"""Name of a record's entry with times (`TIMES`)."""
TIMES: tuple[Timed, ...] = ("latency", "target_latency")
"""Names of a record's two entries with times: those of the method's runs, and those of the target's runs that
alternated with them."""


class Record(TypedDict, total=False):
    """The record of one measured point; every entry except the key may be missing.

    For example, an oracle has no latency, and most methods have no levels.

    Attributes:
        key: identifies the record (`record_key`); judged_key: identifies only its quality and counts, which do not
            depend on the hardware.
        former_key: the key under which an older version stored the record and its outputs.
        supersedes: digest of the code that measured the earlier record with this key, which this record replaces.
        format: `FORMAT`; point: what was measured; configuration: the gin file that measures it again.
        imports: the user's own files that the configuration needs.
        fingerprints: hashes of weights, examples, stop ids, acceptance head and policy.
        versions, package, device, started, wall_seconds: software, hardware and time of the measurement.
        revisions: commits of the models and data sets that were fetched from the hub, by name, if there are any.
        prompts_cut, prompts_skipped: numbers of prompts that were cut or skipped because they were too long.
        head, selection: description of the acceptance head, and of the choice among drafters, if the method has them.
        outputs: outputs of the examples; `results.store.outputs` writes them to files of their own, not to the record's
            line.
        outputs_file: the name of the file with these outputs, in records that were written into a bucket.
        counts, measures: the engine's counts and their ratios; by_position: counts by position in the block.
        per_example: counts of each example, with the examples' `ids`.
        inconclusive: whether nothing was drafted.
        levels: counts and measures of each level of a stack, from the level below the target down.
        planned, planned_latency: planned block lengths, in the runs for quality and in the timed runs.
        failed_examples, failure: ids of the examples in which a model failed, and a description of the first failure.
        failed_timings: number of timed runs in which a model failed; if there are any, the record has no latency.
        latency, target_latency: times of the method, and of the target's runs that alternated with the method's.
        relative_latency: the ratio of `latency` to `target_latency`.
        peak_memory: the highest peak of the devices' memory in bytes, and that device's limit, if devices report it.
        prompt_length: number of tokens that all prompts are padded to.
        predicted: only in copies whose latencies are predicted, never in a store (`results.analysis.prediction`).
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
    revisions: dict[str, str]
    device: Row
    started: str
    wall_seconds: float
    peak_memory: dict[str, int | None]
    prompts_cut: int
    prompts_skipped: int
    head: Row
    selection: Row
    outputs: list[Any]
    outputs_file: str
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
    prompt_length: int
    predicted: Row


def get_entry(part: Mapping[str, Any], name: str) -> Any:
    """Returns an entry of a record, or of a dictionary inside it, for a name that is known only at run time."""
    return part[name]


def curve_title(point: Mapping[str, Any], *, threshold: bool = True) -> str:
    """Returns the name of a point's curve in tables and progress lines, such as "SpecCascade [Token]".

    Args:
        point: the point's coordinates.
        threshold: whether the name includes the stop threshold.
    """
    text: str = point["title"]
    if point["details"]:
        text += f" [{', '.join(point['details'])}]"
    if point["head"]:
        text += f" {Path(point['head']).stem}"
    if threshold and point["stop_threshold"] is not None:
        text += f" {point['symbol']} {point['stop_threshold']:g}"
    return text


def point_title(point: Mapping[str, Any]) -> str:
    """Returns the name of a point's curve in tables, then α and the other numbers that distinguish its points."""
    return " ".join([curve_title(point), *_numbers(point)])


def one_line(record: Record) -> str:
    """Returns a record's point and its main numbers in one line, with the words of the tables."""
    point, quality = record["point"], record["quality"]
    parts = [f"{point_title(point):<36}", f"{quality['metric']} {quality['value']:6.2f}"]
    if relative := record.get("relative_latency"):
        parts.append(f"speed-up {1 / relative['value']:5.2f}")
    rejection = record["measures"].get("rejection_rate")
    if rejection is not None:
        parts.append(f"rejected {rejection:4.0%}")
    if record.get("inconclusive") and point["block_size"] is not None:
        parts.append("inconclusive: nothing was drafted")
    if lost := record.get("failed_examples"):
        parts.append(f"{len(lost)} examples left out, {record['failure']}")
    if early := record.get("failed_timings"):
        parts.append(f"no latency: NaN or infinite logits in {early} timed runs")
    return "  ".join(parts)


_SWEPT = {"block_size": "γ", "top_p": "top-p", "top_k": "top-k", "draft_temperature": "draft T", "seed": "seed"}
"""Names in printed lines of settings that a sweep varies. A line leaves out usual values (`_USUAL`)."""
_USUAL = {"top_p": 1, "top_k": 0, "seed": 0}


def _numbers(point: Mapping[str, Any]) -> list[str]:
    """Returns the settings that distinguish the points of a sweep: α, temperature, and others with unusual values."""
    values = {"α": point["alpha"], "T": point["temperature"]}
    values |= {word: value for name, word in _SWEPT.items() if (value := get_entry(point, name)) != _USUAL.get(name)}
    known = {name: value for name, value in values.items() if value is not None}
    return [f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in known.items()]


class StoredRecord(dict[str, Any]):
    """A record in a store: a dictionary that prints as one line, not as all its examples.

    Example:
        >>> from speccascade_jax.results.store.record import StoredRecord
        >>> StoredRecord(key="22808b2853d1", counts={"rounds": 3})
        <record 22808b28 with key, counts>
    """

    def __repr__(self) -> str:
        """Returns the beginning of the key, and the main numbers of a point, or else the names of the entries."""
        if {"point", "quality", "measures"} <= self.keys():
            return f"<record {self['key'][:8]}: {' '.join(one_line(cast(Record, self)).split())}>"
        return f"<record {self.get('key', '')[:8]} with {', '.join(self)}>"
