"""Several processes that decode as one: how they find each other, who writes, what all must agree on, who is gone.

Every process runs the same program on the same examples, and holds its devices' part of the arrays. What would differ
between them is the first one's: what a store holds, what a clock says, who prints. In a single process everything here
does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from speccascade_jax.runtime import interrupts, lost_hosts

HEARTBEAT = 30
"""Seconds without a sign of life after which JAX gives a process up; one whose connection breaks is noticed at once."""


def begin(
    coordinator: str | None = None, count: int | None = None, index: int | None = None, *, asked: bool = False
) -> None:
    """Join the other processes; to be called before anything asks for a device.

    Args:
        coordinator: "host:port" of the first process; count, index: how many there are, and which this is. All three,
            or none: on TPU pods and under SLURM the environment says it, and on one machine there is nothing to join.
        asked: the user says that there are others; if nothing tells where, that is an error.

    Raises:
        ValueError: some of the three without the others, no such process or address, or no others though asked.
    """
    _check(coordinator, count, index)
    if coordinator is None and not (asked or _in_a_cluster() or _may_be_a_pod()):
        return
    try:
        jax.distributed.initialize(
            coordinator, count, index, local_device_ids=_own_devices(), heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        if coordinator is None and not (asked or _in_a_cluster()):
            return  # no pod
        raise ValueError(f"the other processes were not found ({error}): give {_ALL}") from error
    if not first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        warnings.simplefilter("ignore")
    where = None if coordinator is None else coordinator.rpartition(":")[0]
    lost_hosts.watch(jax.process_index(), jax.process_count(), agreed, where)


_ALL = "--coordinator_address, --process_count and --process_index"


def _check(coordinator: str | None, count: int | None, index: int | None) -> None:
    words = {"coordinator_address": coordinator, "process_count": count, "process_index": index}
    missing = [name for name, value in words.items() if value is None]
    if 0 < len(missing) < len(words):
        raise ValueError(f"--{missing[0]} is missing: give {_ALL}, or none of them")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"coordinator_address={coordinator!r}: give host:port of the first process")
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(f"process_index={index} of process_count={count}: give one of 0 to {count - 1}")


def _in_a_cluster() -> bool:
    """Whether the environment says that this is one of several processes."""
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _may_be_a_pod() -> bool:
    """Whether this is a machine for TPUs, where JAX asks the machine itself whether there are others."""
    return find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS", "") in ("", "tpu")


def _own_devices() -> list[int] | None:
    """Under SLURM with one task a node all of the node's GPUs, where JAX would take the first."""
    if os.environ.get("SLURM_NTASKS_PER_NODE") != "1" or "SLURM_GPUS_ON_NODE" not in os.environ:
        return None
    return list(range(int(os.environ["SLURM_GPUS_ON_NODE"])))


def many() -> bool:
    """Whether there are several processes; a process that joined no others is not asked for its devices."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes and prints."""
    return not many() or jax.process_index() == 0


def agreed(value: Any) -> Any:
    """The first process's value, of what JSON can hold, in all of them; all must call it."""
    if not many():
        return value
    told = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    buffer = np.zeros(1 << max(6, (size - 1).bit_length()), np.uint8)  # few lengths: each is a program
    if first():
        buffer[:size] = told
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:size].tobytes())


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends all processes by an error inside the block, and tells the others when this one is done without.

    If the error only says that another process is gone, that is said instead. In a single process errors pass.
    """
    try:
        yield
    except BaseException as error:
        if not many():
            raise
        time.sleep(_PATIENCE)
        # an orderly end would wait for the others, which may wait for this one
        status = _status(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    lost_hosts.leave()


def _status(error: BaseException) -> int:
    """What a process ends with; says why."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt | interrupts.Terminated):
        return interrupts.status(error, interrupts.SAME)
    traceback.print_exception(error)  # under --debug
    return 1


_PATIENCE = 2.0
"""Seconds in which `lost_hosts` would have noticed who is gone."""
