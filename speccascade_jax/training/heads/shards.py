"""File format of the training data of acceptance heads: writing and reading.

A folder holds `manifest.json` and shards `shard-00000.npz`, `shard-00001.npz`, …, each written completely or not at
all.

`manifest.json` holds `format` (1) and two groups of entries. The entries of the first group (`MEANING`) determine what
a label means: `pair_fingerprint`, `draft_fingerprint`, `rule`, `alpha`, `temperature`, `top_p`, `top_k`,
`draft_temperature`. Those of the second group determine the examples: `pair`, `dtype`, `task`, `split`,
`first_example`, `prompts`, `max_new_tokens`, `batch`, `seed`, `shard_size`, and `code`, a digest of the rule's code.

A shard holds the arrays of `Examples` and `key`, the hash of the manifest, by which a shard from another folder is
refused. The last shard of a folder may have fewer rows. A shard is a zip archive, and reading it checks all checksums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import Prompt
from speccascade_jax.storage import archives
from speccascade_jax.storage.files import claim, expanded, point_key
from speccascade_jax.storage.readers import json_object
from speccascade_jax.training import runs

FORMAT = 1
MANIFEST = "manifest.json"
SAMPLING = ("temperature", "top_p", "top_k", "draft_temperature")
MEANING = ("format", "pair_fingerprint", "draft_fingerprint", "rule", "alpha", *SAMPLING)
"""Manifest entries that must be equal in all folders that are read together."""
_MAKE = "python -m experiments.make_acceptance_data"
Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Examples:
    """Prompts, the target's outputs for them, and one draft proposal at every position of the outputs.

    `N` examples with at most `L` positions, `P` context tokens and `E` encoder tokens; arrays are padded with 0.

    Attributes:
        ids: int32 `[N]`, the task's example ids.
        prompt_tokens, prompt_lengths, encoder_tokens: int32 `[N, P]`, `[N]`, `[N, E]` as in `core.types.Prompt`;
            `E` is 0 for decoder-only models.
        tokens: int32 `[N, L]`, `X`, the target's output with the stop id; lengths: int32 `[N]`, the number of tokens in
            each output.
        proposals: int32 `[N, L]`, `Y_i ~ q̃(· | X_<i)`.
        kept: float32 `[N, L]`, the label `P_i = min(1, π(Y_i)/q̃(Y_i))`, with `π` and `q̃` after the same prefix
            `X_<i`.
        max_q, entropy_q: float32 `[N, L]`, largest probability and entropy (nats) of the draft's raw distribution at
            the same position; q_of_proposal: float32 `[N, L]`, `q̃(Y_i)`.
    """

    ids: np.ndarray
    prompt_tokens: np.ndarray
    prompt_lengths: np.ndarray
    encoder_tokens: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    proposals: np.ndarray
    kept: np.ndarray
    max_q: np.ndarray
    entropy_q: np.ndarray
    q_of_proposal: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """Mask of the positions that are not padding, bool `[N, L]`."""
        return np.arange(self.tokens.shape[1])[None] < self.lengths[:, None]

    def prompt(self) -> Prompt:
        """Returns the prompts in the form that models read."""
        encoder = self.encoder_tokens if self.encoder_tokens.shape[1] else None
        arrays: tuple[Any, ...] = (self.prompt_tokens, self.prompt_lengths, encoder)
        return Prompt(*arrays)

    def rows(self, chosen: np.ndarray) -> Self:
        """Returns the examples with the row numbers `chosen`."""
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))


def prompt_keys(prompt: Prompt) -> list[bytes]:
    """Returns the bytes of each row's context and encoder tokens, without padding, to compare prompts by."""
    tokens, lengths = np.asarray(prompt.tokens), np.asarray(prompt.length)
    encoder = np.zeros((len(lengths), 0)) if prompt.encoder_tokens is None else np.asarray(prompt.encoder_tokens)
    parts = ((tokens[n, :length], [-1], np.trim_zeros(encoder[n], "b")) for n, length in enumerate(lengths))
    return [np.concatenate(part).astype(np.int32).tobytes() for part in parts]


@dataclass(frozen=True)
class Data:
    """Examples of one or several folders, and their common manifest, which defines the meaning of a label."""

    examples: Examples
    manifest: dict[str, Any]

    @property
    def key(self) -> str:
        """Hash of the manifest, which identifies the data in cards of heads and in resumed runs."""
        return point_key(manifest=self.manifest)


def join(parts: Sequence[Rows]) -> Rows:
    """Joins the rows of all parts, padded to the widest part; leaves out fields that are `None` in some part.

    Args:
        parts: dataclasses of one type, whose fields are arrays with a row for each example.
    """
    kind: Any = type(parts[0])
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(kind)}
    whole = {name: arrays for name, arrays in columns.items() if all(array is not None for array in arrays)}
    return kind(**{name: _stacked(arrays) for name, arrays in whole.items()})


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    return np.concatenate([np.pad(array, [(0, 0), (0, width - array.shape[1]), *rest]) for array in arrays])


def begin(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest; refuses a folder with another manifest (`ValueError`: names the differences)."""
    claim(folder / MANIFEST, manifest, "name another output, or remove the folder")


def shard_path(folder: Path, number: int) -> Path:
    """Returns the path of the shard with this number."""
    return folder / f"shard-{number:05}.npz"


def write_shard(folder: Path, number: int, manifest: dict[str, Any], examples: Examples) -> None:
    """Writes a shard completely or not at all; equal examples give equal bytes."""
    arrays = {field.name: getattr(examples, field.name) for field in fields(examples)}
    archives.write(shard_path(folder, number), point_key(manifest=manifest), arrays)


def read_shard(path: Path, manifest: dict[str, Any]) -> Examples:
    """Returns the examples of one shard.

    Raises:
        ValueError: the shard is damaged, or belongs to another folder.
    """
    again = f"remove it and make it again with {_MAKE}"
    foreign = f"was made with settings other than its folder's {MANIFEST}: remove it and make it again"
    return runs.read_shard(path, _checked, "damaged", again, point_key(manifest=manifest), foreign)


def _checked(**arrays: np.ndarray) -> Examples:
    examples = Examples(**arrays)
    rows, width = len(examples.ids), examples.tokens.shape[1]
    for field in fields(examples):
        shape = getattr(examples, field.name).shape
        free = field.name in ("prompt_tokens", "encoder_tokens") and len(shape) == 2
        flat = field.name in ("ids", "prompt_lengths", "lengths")
        if shape[:1] != (rows,) or not free and shape[1:] != (() if flat else (width,)):
            raise ValueError(f"{field.name} has shape {shape}, but there are {rows} examples of {width} positions")
    return examples


def read(folders: str | Path | Sequence[str | Path]) -> Data:
    """Returns the examples of one or several folders.

    Raises:
        FileNotFoundError: a folder has no manifest.
        ValueError: a folder is unfinished, a shard is damaged or belongs to another folder, or the labels of the
            folders differ in meaning (the message names the entries).
    """
    paths = [expanded(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    if not paths:
        raise ValueError(f"no folder of acceptance data is named: make one with {_MAKE}")
    manifests = [_manifest(path) for path in paths]
    for path, entries in zip(paths, manifests, strict=True):
        if wrong := [name for name in MEANING if entries.get(name) != manifests[0].get(name)]:
            said = ", ".join(f"{name} is {entries.get(name)!r}, not {manifests[0].get(name)!r}" for name in wrong)
            raise ValueError(
                f"{path} cannot be combined with {paths[0]}: {said}; train on one of them, or make it again"
            )
    parts = [part for path, manifest in zip(paths, manifests, strict=True) for part in _parts(path, manifest)]
    shared = {name: manifests[0][name] for name in (*MEANING, "pair")}
    return Data(join(parts), shared | {"folders": [point_key(manifest=manifest) for manifest in manifests]})


def check_draft(data: Data, draft: str, name: str) -> None:
    """Refuses data whose proposals come from another draft (`ValueError`: names both drafts)."""
    used = data.manifest["draft_fingerprint"]
    if used != draft:
        raise ValueError(
            f"the data were made with the draft {used} of pair {data.manifest['pair']!r}, but the draft of pair "
            f"{name!r} is {draft}: make data with pair {name!r}, or train a head for the other pair"
        )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no acceptance data (no {MANIFEST}): make some with {_MAKE}")
    manifest = json_object(path, "make the folder again")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}, but this version reads {FORMAT}: make it again"
        )
    for name in ("prompts", "shard_size"):
        if not isinstance(manifest.get(name), int):
            raise ValueError(f"{path} is damaged ({name} is {manifest.get(name)!r}): make the folder again")
        whole(f"{path}: {name}", manifest[name], 1)
    return manifest


def _parts(folder: Path, manifest: dict[str, Any]) -> list[Examples]:
    count = -(-manifest["prompts"] // manifest["shard_size"])
    present = {path.name for path in folder.glob("shard-*.npz")}
    # stop at the first missing name: a damaged manifest may claim any number of shards
    missing = next((name for n in range(count) if (name := shard_path(folder, n).name) not in present), None)
    if missing:
        lacking = f"lacks {count - len(present)} of {count} shards ({missing})"
        raise ValueError(f"{folder} {lacking}: finish it with {_MAKE}")
    return [read_shard(shard_path(folder, number), manifest) for number in range(count)]
