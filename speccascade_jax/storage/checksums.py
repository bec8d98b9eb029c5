"""Digests of whole files, which are stored in a folder's `checksums.json` or at the end of the file itself.

A vocabulary or a configuration with a flipped bit is still a valid file, so only a digest can detect the change. The
entry "bytes" of `checksums.json` maps names of files in the same folder to digests, and `checkpoints.huggingface` adds
the digests of tensors. A file that is not listed, or whose folder has no `checksums.json`, is read without a check.
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
    """Returns the BLAKE2b digest of some bytes, 128 bits in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the digest of a file's bytes, as `digest` does, without holding the whole file in memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """Returns the BLAKE2b digest of an array's bytes, 128 bits in hexadecimal."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return digest(data.data)


def record(folder: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Returns the contents of a folder's `checksums.json`, or contents that list no digests if there is no such file.

    Raises:
        ValueError (or `error`): `checksums.json` is damaged or has another format.
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
    """Writes the digests of a folder's files `names`, and the entries `more`, to `checksums.json`; returns its path."""
    digests = {name: digest((folder / name).read_bytes()) for name in names}
    text = json.dumps({"format": FORMAT, "algorithm": ALGORITHM, BYTES: digests, **more}, indent=1)
    rewrite(folder / CHECKSUMS, text + "\n", f'"{ALGORITHM}"')
    return folder / CHECKSUMS


def update(file: Path) -> None:
    """Adds a file's digest to the `checksums.json` of its folder; creates `checksums.json` if it does not exist."""
    contents = record(file.parent)
    listed = contents.get(BYTES, {}) | {file.name: digest(file.read_bytes())}
    write_atomically(file.parent / CHECKSUMS, json.dumps(contents | {BYTES: listed}, indent=1) + "\n")


def read(path: Path, error: type[ValueError] = ValueError) -> bytes:
    """Returns a file's bytes after comparing them with the digest in its folder's `checksums.json`, if listed there.

    Raises:
        ValueError (or `error`): the bytes do not match the digest; names the file.
    """
    content = path.read_bytes()
    listed = record(path.parent, error).get(BYTES, {})
    if path.name in listed and digest(content) != listed[path.name]:
        raise error(f"{path} is damaged: its bytes do not match {CHECKSUMS}: {REMEDY}")
    return content


def seal(content: bytes) -> bytes:
    """Returns a seal: the bytes to write after `content`, which hold its digest, so that `unsealed` can check it."""
    return _SEAL + digest(content).encode()


def unsealed(path: Path, content: bytes, remedy: str, error: type[ValueError] = ValueError) -> bytes:
    """Returns a file's content without its `seal`, after checking the seal.

    Earlier versions of the package wrote no seal; content without one is returned unchanged.

    Raises:
        ValueError (or `error`): the content does not match the seal's digest; names `path`.
    """
    body, end = content[:-_SEALED], content[-_SEALED:]
    if not end.startswith(_SEAL):
        return content
    if digest(body).encode() != end[len(_SEAL) :]:
        raise error(f"{path} is damaged: its bytes have changed: {remedy}")
    return body
