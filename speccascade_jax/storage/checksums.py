"""Digests of whole files, stored in `checksums.json` in their folder or at their end.

A vocabulary or a configuration with a flipped bit is still a valid file, so only a digest can detect the change.
`checksums.json` is in the files' folder; its entry "bytes" maps names to digests (`checkpoints.huggingface` adds
tensors' digests). A folder without it, and a file that it does not list, are read without a check.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.storage.files import rewrite, write_atomically
from speccascade_jax.storage.readers import json_object

CHECKSUMS = "checksums.json"
ALGORITHM = "blake2b-128"
FORMAT = 1
BYTES = "bytes"
REMEDY = f"copy it again, or write {CHECKSUMS} again if it changed (python -m experiments.convert FOLDER --checksums)"
_SEAL = b"\n" + ALGORITHM.encode() + b":"
_SEALED = len(_SEAL) + 32


def digest(content: bytes | memoryview) -> str:
    """Returns the BLAKE2b digest, 128 bits in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """Returns the BLAKE2b digest of an array's bytes, 128 bits in hexadecimal."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return digest(data.data)


def record(folder: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Returns the folder's `checksums.json`, or an empty one if there is none.

    Raises:
        ValueError (or `error`): it is damaged or of another format.
    """
    file = folder / CHECKSUMS
    if not file.is_file():
        return {"format": FORMAT, "algorithm": ALGORITHM}
    contents = json_object(file, "write it again, or copy the folder again", error)
    if (contents.get("format"), contents.get("algorithm")) != (FORMAT, ALGORITHM):
        actual = f"format {contents.get('format')!r} and algorithm {contents.get('algorithm')!r}"
        raise error(f"{file} has {actual}, which are not supported: write it again")
    if not isinstance(contents.get(BYTES, {}), dict):
        raise error(f"{file} is damaged ({BYTES} is {contents[BYTES]!r:.80}): write it again")
    return contents


def write(folder: Path, names: Iterable[str], **more: Any) -> Path:
    """Writes `checksums.json` for files of a folder and returns its path; `more` are further entries."""
    digests = {name: digest((folder / name).read_bytes()) for name in names}
    text = json.dumps({"format": FORMAT, "algorithm": ALGORITHM, BYTES: digests, **more}, indent=1)
    rewrite(folder / CHECKSUMS, text + "\n", f'"{ALGORITHM}"')
    return folder / CHECKSUMS


def update(file: Path) -> None:
    """Adds a newly written file to the `checksums.json` of its folder, which is created if it does not exist."""
    contents = record(file.parent)
    listed = contents.get(BYTES, {}) | {file.name: digest(file.read_bytes())}
    write_atomically(file.parent / CHECKSUMS, json.dumps(contents | {BYTES: listed}, indent=1) + "\n")


def read(path: Path, error: type[ValueError] = ValueError) -> bytes:
    """Reads a file's bytes and compares them with the digest in the `checksums.json` of its folder, if there is one.

    Raises:
        ValueError (or `error`): the bytes differ; names the file.
    """
    content = path.read_bytes()
    listed = record(path.parent, error).get(BYTES, {})
    if path.name in listed and digest(content) != listed[path.name]:
        raise error(f"{path} is damaged: its bytes do not match {CHECKSUMS}: {REMEDY}")
    return content


def seal(content: bytes) -> bytes:
    """Returns the bytes to write after `content`, from which `unsealed` detects changes."""
    return _SEAL + digest(content).encode()


def unsealed(path: Path, content: bytes, remedy: str, error: type[ValueError] = ValueError) -> bytes:
    """Returns the content before its `seal`; content without a seal (from earlier versions) is returned unchanged.

    Raises:
        ValueError (or `error`): the digest differs; names `path`.
    """
    body, end = content[:-_SEALED], content[-_SEALED:]
    if not end.startswith(_SEAL):
        return content
    if digest(body).encode() != end[len(_SEAL) :]:
        raise error(f"{path} is damaged: its bytes have changed: {remedy}")
    return body
