"""Checkpoints of a training run in a bucket, written in the background by all hosts, and verified when read.

Orbax is not used: a bucket cannot rename objects, so Orbax would need `gcsfs` and files that mark a complete
checkpoint. Here, each process packs the parts of the arrays that its devices hold into objects of up to 64 MB below
`states/<step>-<token>/`. Then it writes an index, which lists the parts and the digest of each of its objects. The
token is a random name of one training process (with several hosts, of one joint start), so objects of different starts
never mix. A checkpoint is complete once the indexes of all processes exist. A deletion therefore removes an index
first.

A process may be suspended while another process continues its run, and may complete a checkpoint when it wakes up.
The object `states/owner` therefore lists which checkpoints count: those with the owner's token, and those that were
complete when the owner read the run. A process becomes the owner by replacing the object before its first checkpoint;
this fails if the object has changed since the process read the run.

A host reads only objects that hold parts of its devices' arrays. On the mesh that wrote the checkpoint, these are the
bytes that the host itself wrote; on another mesh they may be all objects.
"""

from __future__ import annotations

import functools
import json
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from speccascade_jax.checkpoints.slices import Bounds, bounds
from speccascade_jax.runtime import hosts
from speccascade_jax.storage import checksums
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import LockedError
from speccascade_jax.training.states import IN_BUCKET, DamagedError, States, named_leaves

_LARGEST = 1 << 26
"""Largest number of bytes of an object, unless a single row of an array has more."""
_THREADS = 4
"""Number of objects that a process writes or reads at the same time."""
_DAMAGED = "damaged"
"""Object that marks a checkpoint as damaged, so that its step can be saved again."""
_OWNER = "owner"
"""Object that says which checkpoints count."""
_INDEX = re.compile(r"index-(\d+)-of-(\d+)\.json")


class Part(NamedTuple):
    """A part of an array on this host: the array's name, the part's bounds in it, and its values."""

    name: str
    bounds: Bounds
    values: np.ndarray


def open_states(folder: Path, keep: int = 2) -> States:
    """Returns the checkpoints of the run in a folder, which may be in a bucket; arguments are those of `States`."""
    return BucketStates(folder, keep) if isinstance(folder, BucketPath) else States(folder, keep)


class BucketStates(States):
    """Checkpoints of a run in a bucket, with the methods of `States`."""

    _other_form = re.compile(r"0|[1-9]\d*"), "on a disk"

    def __init__(self, folder: BucketPath, keep: int = 2):
        super().__init__(folder, keep)
        self._place = folder / self.folder.name
        self._token = uuid.uuid4().hex[:8]
        self._places: dict[int, BucketPath] = {}  # places of complete checkpoints by step, when the run was read
        self._generation: bytes | None = None  # generation of `states/owner` at that time
        self._objects: dict[str, dict[str, Any]] = {}  # entries of the verified checkpoint's indexes, by object
        self._writing: Future[None] | None = None

    def save(self, step: int, state: Any, position: dict[str, Any], wait: bool = False) -> None:
        """Does what `States.save` does."""
        super().save(step, state, position, wait)
        if wait and hosts.many():
            hosts.largest(0)  # a checkpoint is complete once all processes have written
            if hosts.first():
                self._delete_old()

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    def _write(self, step: int, state: Any) -> None:
        place = self._place / f"{step}-{hosts.agreed(self._token)}"
        self._writing = self._thread.submit(_write, place, list(_parts(state)), self._record)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _listed(self) -> dict[str, set[str]]:
        """Returns the names of the objects of each checkpoint, complete or not, by the name of its folder."""
        listed: dict[str, set[str]] = {}
        for name in self._place.below():
            folder, _, rest = name.partition("/")
            if rest and IN_BUCKET.fullmatch(folder):
                listed.setdefault(folder, set()).add(rest)
        return listed

    def _names(self) -> list[str]:
        return list(
            dict.fromkeys(folder for folder, slash, _ in (n.partition("/") for n in self._place.below()) if slash)
        )

    def _owner(self) -> tuple[dict[str, Any] | None, bytes]:
        """Returns the content of `states/owner` (`None` if it is absent) and the object's generation."""
        place = self._place / _OWNER
        content, generation = place.read()
        if content is None:
            return None, generation
        try:
            owner = json.loads(checksums.unsealed(place, content, ""))
            return {"run": str(owner["run"]), "kept": list(owner["kept"])}, generation
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{place} is damaged: remove it, and start the run again") from None

    def _complete(self, owner: dict[str, Any] | None) -> dict[int, BucketPath]:
        """Returns the paths of the complete checkpoints that `owner` lists (all if it is `None`), by step."""
        complete = sorted(name for name, objects in self._listed().items() if _is_complete(objects))
        places = [self._place / name for name in complete if owner is None or _counts(name, owner)]
        return {int(place.name.partition("-")[0]): place for place in places}

    def _steps(self) -> list[int]:
        # `states/owner` is read first, so that `_take_over` fails if another process becomes the owner during the list.
        owner, self._generation = self._owner()
        self._places = self._complete(owner)
        return sorted(self._places)

    def _exists(self, step: int) -> bool:
        return step in self._complete(self._owner()[0])

    def _delete_old(self) -> None:
        owner, _ = self._owner()
        if owner is None or owner["run"] != self._token:
            raise self._taken_over()
        places = self._complete(owner)
        for step in sorted(places)[: -self.keep]:
            _delete(places[step])

    def _taken_over(self) -> LockedError:
        return LockedError(f"{self.folder} has changed: another process continues this run; end one of the two")

    def _clean_up(self) -> None:
        """Marks damaged checkpoints, becomes the owner, and deletes checkpoints that are unfinished or do not count."""
        if self._generation is None:
            self._steps()
        for step in self._damaged:
            (self._places[step] / _DAMAGED).write(b"")
        owner = self._take_over()
        for name, objects in self._listed().items():
            if not (_is_complete(objects) and _counts(name, owner)) and _DAMAGED not in objects:
                _delete(self._place / name)

    def _take_over(self) -> dict[str, Any]:
        """Makes this process the owner of the run; returns the new content of `states/owner`.

        From then on, this process's checkpoints count, and of other checkpoints only those that it has seen.
        """
        kept = [place.name for step, place in self._places.items() if step not in self._damaged]
        owner = {"run": self._token, "kept": kept}
        content = json.dumps(owner).encode()
        if not (self._place / _OWNER).swap(content + checksums.seal(content), cast(bytes, self._generation)):
            raise self._taken_over()
        return owner

    def _verified(self, step: int) -> dict[str, Any]:
        """Returns the record of a checkpoint, after all processes have read all its indexes."""
        place = self._places_of_all()[step]
        names = hosts.agreed(sorted(name for name in place.below() if _INDEX.fullmatch(name)))
        if not names:
            raise DamagedError("its indexes are missing")
        indexes = [_index(place / name, content) for name, content in zip(names, place.read_below(names), strict=True)]
        number = max((number for number, index in enumerate(indexes) if index is None), default=-1)
        if (last := hosts.largest(number)) >= 0:
            raise DamagedError(f"{names[last]} has changed or is missing")
        records = cast(list[dict[str, Any]], indexes)
        self._objects = {name: entry for record in records for name, entry in record["objects"].items()}
        if not _covered(records[0]["arrays"], self._objects):
            raise DamagedError("its indexes lack parts of arrays")
        return records[0]

    def _places_of_all(self) -> dict[int, BucketPath]:
        """Returns the paths of the complete checkpoints by step, as the first process has listed them."""
        places = hosts.agreed({str(step): place.name for step, place in self._places.items()})
        self._places = {int(step): self._place / name for step, name in places.items()}
        return self._places

    def _restored(self, step: int, placed: Any) -> Any:
        leaves, structure = named_leaves(placed), jax.tree.structure(placed)
        blocks = {name: _blocks(leaf) for name, leaf in leaves.items()}
        needed = [name for name, entry in self._objects.items() if _is_needed(entry["parts"], blocks)]
        with ThreadPoolExecutor(_THREADS) as threads:
            intact = list(
                threads.map(lambda name: _read(self._places[step], name, self._objects[name], blocks), needed)
            )
        order = list(self._objects)
        damaged = [order.index(name) for name, fine in zip(needed, intact, strict=True) if not fine]
        if (last := hosts.largest(max(damaged, default=-1))) >= 0:
            raise DamagedError(f"{order[last]} has changed or is missing")
        return jax.tree.unflatten(structure, [_array(leaf, blocks[name]) for name, leaf in leaves.items()])


def _parts(state: Any) -> Iterator[Part]:
    """Yields the parts of arrays that this process writes: each part of a replicated array is written once."""
    for name, leaf in named_leaves(state).items():
        if leaf.is_fully_addressable and not hosts.first():
            continue  # not spread over hosts: every process has its own array, with equal values
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                # on a CPU, this is a view of the device's memory, which JAX then keeps even if a step donates the array
                values = np.asarray(shard.data)
                yield from _cut(Part(name, _bounds(shard.index, leaf), values))


def _cut(part: Part) -> Iterator[Part]:
    """Cuts a part along its first axis into pieces that fit into one object each, and yields them."""
    if part.values.nbytes <= _LARGEST or not part.bounds:
        yield part
        return
    (first, _), *rest = part.bounds
    rows = max(1, _LARGEST * len(part.values) // part.values.nbytes)
    for start in range(0, len(part.values), rows):
        values = part.values[start : start + rows]
        yield Part(part.name, ((first + start, first + start + len(values)), *rest), values)


def _packed(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yields groups of consecutive parts, each of which fits into one object."""
    group: list[Part] = []
    size = 0
    for part in parts:
        if group and size + part.values.nbytes > _LARGEST:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.values.nbytes
    if group:
        yield group


def _write(place: BucketPath, parts: Sequence[Part], record: dict[str, Any]) -> None:
    """Writes the parts of this process, and then their index."""
    process, count = (jax.process_index(), jax.process_count()) if hosts.many() else (0, 1)

    def put(numbered: tuple[int, list[Part]]) -> tuple[str, dict[str, Any]]:
        number, group = numbered
        content = b"".join(part.values.tobytes() for part in group)
        (place / f"{process}-{number}").write(content)
        entry = {"digest": checksums.digest(content), "parts": [[part.name, part.bounds] for part in group]}
        return f"{process}-{number}", entry

    with ThreadPoolExecutor(_THREADS) as threads:
        objects = dict(threads.map(put, enumerate(_packed(parts))))
    content = json.dumps(record | {"objects": objects}).encode()
    (place / f"index-{process}-of-{count}.json").write(content + checksums.seal(content))


def _is_complete(names: set[str]) -> bool:
    """Returns whether a checkpoint's objects include the indexes of all processes, and no mark of damage."""
    indexes = [match for name in names if (match := _INDEX.fullmatch(name))]
    return bool(indexes) and len(indexes) == int(indexes[0][2]) and _DAMAGED not in names


def _counts(name: str, owner: dict[str, Any]) -> bool:
    """Returns whether the checkpoint in folder `name` was written by the owner or was complete when the owner began."""
    return name.partition("-")[2] == owner["run"] or name in owner["kept"]


def _delete(place: BucketPath) -> None:
    """Deletes a checkpoint, its indexes first, so that it is never taken for complete."""
    names = place.below()
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    place.remove_below(indexes)
    place.remove_below([name for name in names if name not in indexes])


def _index(place: BucketPath, content: bytes | None) -> dict[str, Any] | None:
    """Returns the content of an index, or `None` if it is damaged or missing."""
    try:
        index = json.loads(checksums.unsealed(place, content or b"", ""))
        return dict(index) if {"position", "arrays", "objects"} <= index.keys() else None
    except (ValueError, AttributeError, TypeError):
        return None


def _volume(part: Bounds) -> int:
    return math.prod(stop - start for start, stop in part)


def _covered(arrays: dict[str, list[Any]], objects: dict[str, dict[str, Any]]) -> bool:
    """Returns whether the parts in the objects, which do not overlap, together hold all values of all arrays."""
    sizes = dict.fromkeys(arrays, 0)
    for entry in objects.values():
        for name, part in entry["parts"]:
            sizes[name] += _volume(part)
    return all(sizes[name] == math.prod(shape) for name, (shape, *_) in arrays.items())


def _bounds(index: Any, leaf: Any) -> Bounds:
    """Returns the bounds of a device's part of an array from the index that JAX gives."""
    return bounds(index, leaf.shape)


def _blocks(leaf: jax.ShapeDtypeStruct) -> dict[Bounds, np.ndarray]:
    """Allocates empty arrays for the distinct parts of an array that this process's devices hold, by their bounds."""
    sharding = cast(jax.sharding.Sharding, leaf.sharding)
    wanted = {_bounds(index, leaf) for index in sharding.addressable_devices_indices_map(leaf.shape).values()}
    return {part: np.empty([stop - start for start, stop in part], leaf.dtype) for part in wanted}


def _common(left: Bounds, right: Bounds) -> Bounds | None:
    """Returns the bounds of the values that two parts of an array share, or `None` if there are none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _is_needed(parts: Sequence[Any], blocks: dict[str, dict[Bounds, np.ndarray]]) -> bool:
    return any(_common(part, block) is not None for name, part in parts for block in blocks[name])


def _read(place: BucketPath, name: str, entry: dict[str, Any], blocks: dict[str, dict[Bounds, np.ndarray]]) -> bool:
    """Copies the parts in an object into `blocks`; returns False if the object is damaged or missing."""
    content, _ = (place / name).read()
    if content is None or checksums.digest(content) != entry["digest"]:
        return False
    offset = 0
    for array, part in entry["parts"]:
        dtype = next(iter(blocks[array].values())).dtype
        values = np.frombuffer(content, dtype, _volume(part), offset).reshape([stop - start for start, stop in part])
        offset += values.nbytes
        for block, into in blocks[array].items():
            if (common := _common(part, block)) is not None:
                into[_inside(block, common)] = values[_inside(part, common)]
    return True


def _inside(part: Bounds, common: Bounds) -> tuple[slice, ...]:
    """Returns the slices of a part that hold the common values."""
    return tuple(slice(start - first, stop - first) for (first, _), (start, stop) in zip(part, common, strict=True))


def _array(leaf: jax.ShapeDtypeStruct, blocks: dict[Bounds, np.ndarray]) -> jax.Array:
    sharding = cast(jax.sharding.Sharding, leaf.sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: blocks[_bounds(index, leaf)])
