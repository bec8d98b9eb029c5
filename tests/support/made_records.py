"""Records with made-up examples, of which a test chooses the gain in quality, the ratio of times, and the noise."""

import copy

import numpy as np

from speccascade_jax.results.analysis import panels
from tests.support import fake_records as fake

HARD = np.random.default_rng(0).normal(50, 15, 64)


SLOW = np.random.default_rng(1).uniform(60, 180, 16)


def point(method, gain=0.0, ratio=1.0, noise=2.0, seed=0, own=None):
    """Returns a record whose examples have the target's score plus `gain`, and its time times `ratio`, up to noise."""
    ends = (panels.TARGET, panels.DRAFT)
    block = {"block_size": None, "bonus": None} if method in ends else {"block_size": 5, "bonus": "rule"}
    record = copy.deepcopy(fake.run({**fake.coordinates()[0], "method": method, "alpha": None, "seed": seed, **block}))
    rng = np.random.default_rng([own if own is not None else len(method), seed])
    scores = HARD + gain + rng.normal(0, noise, 64)
    times = SLOW * ratio * np.exp(rng.normal(0, noise / 50, (3, 16)))
    per_example = {"ids": list(range(64)), "statistics": {"rougeL": scores.tolist()}}
    record["quality"] |= {"metric": "rougeL", "value": float(scores.mean()), "per_example": per_example}
    record["relative_latency"]["value"] = times.sum() / (3 * SLOW.sum())
    record["key"] = f"{method} {seed} {own}"
    record["latency"]["per_example_ms"] = times.tolist()
    record["target_latency"]["per_example_ms"] = [SLOW.tolist()] * 3
    for name in ("tokens", "draft_steps", "target_calls"):
        # without these counts, nobody can tell whether two runs did the same work
        record["latency"].pop(f"per_example_{name}", None)
    return record


def working(record, work):
    """Adds counts of tokens and calls to a record, drawn with the seed `work`: equal seeds mean equal work."""
    counts = np.random.default_rng(work).integers(1, 99, (3, 3, 16)).tolist()
    for name, count in zip(("tokens", "draft_steps", "target_calls"), counts, strict=True):
        record["latency"][f"per_example_{name}"] = count
    return record


TARGET = point(panels.TARGET, noise=0)


def strip(record):
    """Removes the numbers by example from a record, which earlier versions did not write."""
    del record["quality"]["per_example"], record["latency"]["per_example_ms"]
    return record
