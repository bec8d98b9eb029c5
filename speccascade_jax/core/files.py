"""Files that are whole or not there, and hashes of what determines a record."""

import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def claim(path: Path, settings: dict[str, Any], remedy: str) -> None:
    """Say in `path` (JSON) what its folder is made with; refuse a folder that was begun with other settings.

    Args:
        settings: as JSON gives them back: lists, no tuples.
        remedy: the end of the error's sentence.

    Raises:
        ValueError: names the settings that differ.
    """
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        names = dict.fromkeys([*settings, *begun])
        if changed := [name for name in names if begun.get(name) != settings.get(name)]:
            raise ValueError(f"{path.parent} was begun with another {', '.join(changed)}: {remedy}")
    else:
        write_atomically(path, json.dumps(settings, indent=1).encode())


def point_key(**parts: Any) -> str:
    """Hash (32 hex digits) of everything that determines a record; equal parts give equal keys in every process."""
    text = json.dumps(plain(parts), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON knows it: NumPy scalars and arrays become numbers and lists, nan and inf `None`."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a whole file so that a reader, or a kill, sees the old content or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
