"""A record: one line of a store, without its checksum."""

from typing import Any, TypedDict

FORMAT = 3
"""Format of the records of points that are written. Format 2 is migrated when it is read, others are refused."""

Record = dict[str, Any]
"""A record, entry by entry. All but the key may be missing: an oracle has no latency, a method without levels has no
levels, and records of benchmarks are of no point. Entries that only one method writes have shapes of their own.

- `key` identifies the record (`record_key`); `judged_key` is the same without hardware and latency; `former_key` is the
  key under which an older version stored it, where its outputs lie; `supersedes` is the digest of the code by which the
  record of this key was measured that this one takes the place of; `format`, see `FORMAT`.
- `point`: coordinates, flat: the fields of its pair, evaluation and settings, `seed`, and the facts that tables need of
  its method: `curve`, `family`, `title`, `details`, `rank`, `law`, `lossless`, `swept_block`, `on_rejection`, `symbol`,
  `timed`, `chosen`.
- `configuration`: the gin file that runs the point again; `imports`: files of one's own that it needs.
- `fingerprints`: hashes of weights, examples, stop ids, acceptance head and policy; `provenance`: `Provenance`.
- `versions`, `package`, `device`, `started`, `wall_seconds`: by what, on what and when it was measured.
- `quality`: `metric`, `value`, `low`, `high` and `per_example`; `counts`, `measures`, `by_position` and `per_example`:
  what the engine counted, in all, by position in the block, and example by example.
- `latency`, `target_latency`: times at batch size 1. `ms_per_example` and `ms_per_token` are `value`, `low`, `high` and
  `trials`; `per_example_ms`, `per_example_tokens`, `per_example_draft_steps` and `per_example_target_calls` are
  `[trials, examples]`. `relative_latency`: one over the other. `planned`, `planned_latency`: where blocks were planned.
- `levels`, `head`, `selection`: of stacks, of methods with an acceptance head, and of choices among drafters.
- `inconclusive`: nothing was drafted; `failed_examples`, `failure`, `failed_timings`: where a model failed.
"""


class Provenance(TypedDict):
    """Code behind a record: the digest of rule, stop policy and drafter, and the toolchain it was taken under."""

    code: str | None
    toolchain: dict[str, Any]
