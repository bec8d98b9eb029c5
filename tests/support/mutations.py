"""Damaged copies of files: bits, bytes and slices of any, numbers and types inside those whose format is known."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

ODD = (
    -1, 0, 1, 2, 3.5, 20_000_000, 10**9, 2**31, 2**40, 2**63, 10**30, -(2**40), 1e308, float("nan"), True, None, "",
    "x", "../../x", [], {}, [[]], [1e9], {"x": 1}, "9" * 40,
)  # fmt: skip


def mutated(path: Path, draws: np.random.Generator) -> bytes:
    """The file's content with one thing changed."""
    content, inside = path.read_bytes(), _inside(path)
    if inside is not None and draws.random() < 0.5:
        return inside(content, draws)
    return _bytes(content, draws)


def _inside(path: Path) -> Callable[[bytes, np.random.Generator], bytes] | None:
    kinds = {
        ".json": _json, ".jsonl": _json_line, ".gz": _gzipped, ".npz": _zipped, ".safetensors": _header,
        ".msgpack": _packed, ".zarray": _json,
    }  # fmt: skip
    named = {"_METADATA": _json, "checkpoint": _packed, ".zarray": _json}
    return named.get(path.name, kinds.get(path.suffix))


def _bytes(content: bytes, draws: np.random.Generator) -> bytes:
    at, size = (int(draws.integers(len(content) + 1)) for _ in range(2))
    changed, size = bytearray(content), size % 64 + 1
    match draws.integers(7):
        case 0 | 1:
            for bit in draws.integers(8 * len(content), size=draws.integers(1, 4)) if content else ():
                changed[bit // 8] ^= 1 << (bit % 8)
        case 2:
            del changed[at:]
        case 3:
            changed[at:at] = draws.bytes(size)
        case 4:
            del changed[at : at + size]
        case 5:
            changed[at:at] = changed[at : at + size]
        case _:
            at -= at % 4
            number = int(draws.choice([2**31 - 1, 10**9, 20_000_000, -1, 0, 2**16]))
            changed[at : at + 4] = number.to_bytes(4, "little", signed=True)
    return bytes(changed)


def _json(content: bytes, draws: np.random.Generator) -> bytes:
    return json.dumps(_value(json.loads(content), draws)).encode()


def _json_line(content: bytes, draws: np.random.Generator) -> bytes:
    lines = content.splitlines()
    at = int(draws.integers(len(lines)))
    lines[at] = _json(lines[at], draws)
    return b"\n".join(lines)


def _value(tree: Any, draws: np.random.Generator) -> Any:
    """The tree with one node replaced, or left out."""
    inner = tree if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else []
    if not inner or draws.random() < 0.1:
        return ODD[draws.integers(len(ODD))]
    at = int(draws.integers(len(inner)))
    key = at if isinstance(tree, list) else inner[at]
    if draws.random() < 0.1:
        return [*tree[:at], *tree[at + 1 :]] if isinstance(tree, list) else {k: v for k, v in tree.items() if k != key}
    tree = tree.copy()
    tree[key] = _value(tree[key], draws)
    return tree


def _gzipped(content: bytes, draws: np.random.Generator) -> bytes:
    text = gzip.decompress(content)
    return gzip.compress(_json_line(text, draws) if text.startswith(b"{") else _bytes(text, draws), mtime=0)


def _zipped(content: bytes, draws: np.random.Generator) -> bytes:
    """One member of an archive with a damaged header, or bytes, and right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as made:
        names = archive.namelist()
        chosen = names[draws.integers(len(names))]
        for name in names:
            member = archive.read(name)
            if name == chosen:
                huge = member.replace(b"(7,", b"(9999999999,", 1)
                member = huge if huge != member and draws.random() < 0.5 else _bytes(member[:128], draws) + member[128:]
            made.writestr(name, member)
    return out.getvalue()


def _header(content: bytes, draws: np.random.Generator) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = _json(content[8 : 8 + length], draws)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _packed(content: bytes, draws: np.random.Generator) -> bytes:
    try:
        tree = msgpack.unpackb(content, raw=False, strict_map_key=False)
        return msgpack.packb(_value(tree, draws), use_bin_type=True)
    except (msgpack.ExtraData, OverflowError):  # a digest behind it; a number that it does not know
        return _bytes(content, draws)
