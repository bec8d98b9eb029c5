"""Files that a run writes at its end, in place of those of an earlier run, and of nothing else."""

from pathlib import Path

from speccascade_jax.storage.files import expanded


def check_replaceable(path: str | Path, *marks: str) -> None:
    """Refuse, before anything is measured, to write a report over a file that is none.

    Args:
        marks: texts that stand in every such report.

    Raises:
        ValueError: names the file and the remedy.
    """
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file that a report could be written to: name another output")
    content = path.read_bytes() if path.exists() else b""
    if content.strip() and not all(mark.encode() in content for mark in marks):
        raise ValueError(f"{path} is no report of an earlier run, and is not replaced: name another output, or move it")
