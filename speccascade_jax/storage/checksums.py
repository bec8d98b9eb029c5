"""Digests of whole files: in `checksums.json` beside them, or at their end.

A flipped bit in a vocabulary or a configuration is a valid file of something else, so nothing but a digest can see it.
`checksums.json` lies in the files' folder; its entry "bytes" maps names to digests (`checkpoints.huggingface` adds
those of tensors). A folder without it, or a file that it does not list, is read as it is.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.storage.files import write_atomically
from speccascade_jax.storage.readers import json_object

CHECKSUMS = "checksums.json"
ALGORITHM = "blake2b-128"
FORMAT = 1
BYTES = "bytes"
REMEDY = f"copy it again, or write {CHECKSUMS} again (python -m experiments.convert FOLDER --checksums) if it was meant"
_SEAL = b"\n" + ALGORITHM.encode() + b":"
_SEALED = len(_SEAL) + 32


def digest(content: bytes | memoryview) -> str:
    """BLAKE2b, 128 bits in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """BLAKE2b of an array's bytes, 128 bits in hexadecimal."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return digest(data.data)


def record(folder: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The folder's `checksums.json`; an empty one where there is none.

    Raises:
        ValueError (or `error`): it is damaged or of another format.
    """
    file = folder / CHECKSUMS
    if not file.is_file():
        return {"format": FORMAT, "algorithm": ALGORITHM}
    found = json_object(file, "write it again, or copy the folder again", error)
    if (found.get("format"), found.get("algorithm")) != (FORMAT, ALGORITHM):
        raise error(f"{file} has format {found.get('format')!r}, {found.get('algorithm')!r}: write it again")
    if not isinstance(found.get(BYTES, {}), dict):
        raise error(f"{file} is damaged ({BYTES} is {found[BYTES]!r:.80}): write it again")
    return found


def write(folder: Path, names: Iterable[str], **more: Any) -> Path:
    """Write `checksums.json` for files of a folder; returns it. `more`: further entries."""
    found = {name: digest((folder / name).read_bytes()) for name in names}
    text = json.dumps({"format": FORMAT, "algorithm": ALGORITHM, BYTES: found, **more}, indent=1)
    write_atomically(folder / CHECKSUMS, text + "\n")
    return folder / CHECKSUMS


def update(file: Path) -> None:
    """List a file that was written in the `checksums.json` beside it, which is made if there is none."""
    found = record(file.parent)
    listed = found.get(BYTES, {}) | {file.name: digest(file.read_bytes())}
    write_atomically(file.parent / CHECKSUMS, json.dumps(found | {BYTES: listed}, indent=1) + "\n")


def read(path: Path, error: type[ValueError] = ValueError) -> bytes:
    """A file's bytes, compared with the digest in the `checksums.json` beside it where there is one.

    Raises:
        ValueError (or `error`): they are others; names the file.
    """
    content = path.read_bytes()
    listed = record(path.parent, error).get(BYTES, {})
    if path.name in listed and digest(content) != listed[path.name]:
        raise error(f"{path} is damaged: its bytes are not those of {CHECKSUMS}: {REMEDY}")
    return content


def seal(content: bytes) -> bytes:
    """What is written behind `content`, so that `unsealed` sees whether it changed."""
    return _SEAL + digest(content).encode()


def unsealed(path: Path, content: bytes, remedy: str, error: type[ValueError] = ValueError) -> bytes:
    """The content before its `seal`; content without one as it is (files of earlier versions).

    Raises:
        ValueError (or `error`): the digest is another; names `path`.
    """
    body, end = content[:-_SEALED], content[-_SEALED:]
    if not end.startswith(_SEAL):
        return content
    if digest(body).encode() != end[len(_SEAL) :]:
        raise error(f"{path} is damaged: its bytes are not those written: {remedy}")
    return body
