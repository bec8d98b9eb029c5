"""A small training run with the parts of a real one: `python -m tests.support.toy_run FOLDER STEPS EVERY [PROCESSES]`.

It takes STEPS steps of Adam on 2,000 numbers that are divided among all devices, and begins to save after each EVERY
steps. The last line of its output is the digest of its final state. PROCESSES is `host:port count index`. FOLDER may be
in a bucket, where the variable TOY_LEASE sets the seconds of a lease.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from speccascade_jax.runtime import gin_flags, hosts, interrupts
from speccascade_jax.storage import leases
from speccascade_jax.storage.files import expanded
from speccascade_jax.training import runs
from speccascade_jax.training.bucket_states import open_states
from speccascade_jax.training.states import States, saved_on_stop

OPTIMIZER = optax.adam(1e-2)
PACE = 0.005
"""Seconds that each step takes at least."""


def mesh(shape: tuple[int, int] | None = None) -> jax.sharding.Mesh:
    shape = shape or (jax.device_count(), 1)
    return jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[: shape[0] * shape[1]])


def sharding(leaf: Any, on: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Returns a sharding that divides matrices along both axes."""
    names = ("data", "model")[: len(leaf.shape)] if len(leaf.shape) == 2 else ()
    return jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*names))


def make() -> runs.TrainState:
    params = {"kernel": jnp.linspace(-1.0, 1.0, 1600).reshape(40, 40), "scale": jnp.ones(400, jnp.bfloat16)}
    return runs.TrainState.fresh(params, OPTIMIZER)


def abstract(on: jax.sharding.Mesh) -> Any:
    types = jax.eval_shape(make)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf, on)), types)


def step(state: runs.TrainState, number: jax.Array) -> tuple[runs.TrainState, jax.Array]:
    """Returns the next state, and the largest error: unlike a sum, it does not depend on the order of devices."""
    errors = jax.tree.map(lambda leaf: leaf - jnp.sin(number).astype(leaf.dtype), state.params)
    largest = jnp.stack([jnp.abs(leaf).max().astype(jnp.float32) for leaf in jax.tree.leaves(errors)]).max()
    return state.updated(OPTIMIZER, errors), largest


def digest(state: Any) -> str:
    whole = multihost_utils.process_allgather(state, tiled=True)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole))).hexdigest()


def train(folder: Path, steps: int, every: int) -> None:
    with contextlib.closing(open_states(folder)) as states:  # after an error, too, the last write is finished
        train_in(folder, states, steps, every)


def train_in(folder: Path, states: States, steps: int, every: int) -> None:
    like = abstract(mesh())
    saved = states.latest(like)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    state, position = saved or (jax.jit(make, out_shardings=shardings)(), {"draws": 0, "logged": None})
    begin = int(state.step)
    print(f"begins at {begin}", flush=True)
    log = runs.MetricsLog(folder / runs.METRICS_FILE, begin, position["logged"])
    take = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def save(wait: bool) -> None:
        log.flush()
        states.save(int(state.step), state, position | {"logged": log.logged}, wait)

    with saved_on_stop(lambda: save(True)) as stop_if_asked:
        for number in range(begin + 1, steps + 1):
            position["draws"] += number
            state, loss = take(state, np.float32(position["draws"]))
            log.append({"step": number, "loss": float(loss)})
            time.sleep(PACE)
            if number % every == 0:
                save(False)
            stop_if_asked()
    save(True)
    print(json.dumps({"digest": digest(state), "position": position["draws"]}), flush=True)


if __name__ == "__main__":
    folder, steps, every, *processes = sys.argv[1:]
    with interrupts.told(interrupts.SAVED), hosts.together(), gin_flags.one_line_errors():
        if processes:
            hosts.begin(processes[0], int(processes[1]), int(processes[2]))
        leases.SECONDS = float(os.environ.get("TOY_LEASE", leases.SECONDS))
        with runs.alone(expanded(folder)):
            train(expanded(folder), int(steps), int(every))
