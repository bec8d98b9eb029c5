"""The folder of data sets, which one environment variable sets for the whole project."""

import contextlib
import gzip
import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

from speccascade_jax.data.public_sources import DATA_SETS
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.readers import json_object

VARIABLE = "SPECCASCADE_DATA"
RECORD = "fetched.json"
"""File in the data directory with the checksums of the files that `experiments.fetch_data` made."""


def data_directory() -> Path:
    """Returns the folder of data sets: `$SPECCASCADE_DATA` if set, else `../shared/data` next to the repository.

    The folder need not exist; only `require` raises an error if a file is missing.
    """
    named = os.environ.get(VARIABLE)
    return expanded(named) if named else repository_root().parent / "shared" / "data"


_GITHUB, _STORIES = "https://github.com", "https://huggingface.co/karpathy/tinyllamas/resolve/main/stories260K"
ORIGINS = {
    "models/stories260K/stories260K.bin": f"{_STORIES}/stories260K.bin",
    "models/stories260K/tok512.bin": f"{_STORIES}/tok512.bin",
    "models/llama2xs/model.bin": f"{_GITHUB}/saltyduckegg/llama2xs.c/raw/31ec9eb758c41319858bbba19e5a0202e155b87f/"
    "out/model.bin",
    "cnn_dailymail_100": f"{_GITHUB}/EileenFeng/Text-Summarization-NLP",
    "commonsenseqa": f"{_GITHUB}/lionzwarrior/llm-benchmark",
    "dialogsum": f"{_GITHUB}/cylnlp/dialogsum",
    "gsm8k": f"{_GITHUB}/openai/grade-school-math",
    "humaneval": f"{_GITHUB}/openai/human-eval",
    "mbpp": f"{_GITHUB}/muitiiifruckt/ASE",
    "mmlu": f"{_GITHUB}/OpenNMT/OpenNMT-py",
    "multi30k": f"{_GITHUB}/multi30k/dataset",
    "nq_open": f"{_GITHUB}/google-research-datasets/natural-questions",
    "spec_bench": f"{_GITHUB}/hemingkx/Spec-Bench",
    "squad2": f"{_GITHUB}/chrischute/squad",
    "tatoeba_en_de": f"{_GITHUB}/jhamburg/dats6450_nlp",
    "triviaqa": "https://nlp.cs.washington.edu/triviaqa",
    "webquestions": f"{_GITHUB}/brmson/dataset-factoid-webquestions",
    "wmt22_en_de": f"{_GITHUB}/wmt-conference/wmt22-news-systems",
    "xsum_1000": f"{_GITHUB}/FMInference/H2O",
}
"""Files and folders of the data directory, each with its origin: the file's address, or the folder's repository."""


def checksum(content: bytes) -> str:
    """Returns the SHA-256 digest of a file's unpacked content."""
    return hashlib.sha256(content).hexdigest()


def recorded(folder: Path) -> dict[str, Any]:
    """Returns the checksums of fetched files by their names in a data directory, and the commits of their sources.

    Raises:
        ValueError: the record is damaged.
    """
    path, remedy = folder / RECORD, "correct or delete it"
    contents = {"sha256": {}, "revisions": {}} | (json_object(path, remedy) if path.exists() else {})
    if not all(isinstance(contents[name], dict) for name in ("sha256", "revisions")):
        raise ValueError(f"{path} is damaged: {remedy}")
    return contents


def check_recorded(folder: Path, name: str) -> None:
    """Raises `ValueError` if a fetched file of a data directory no longer has the checksum that was recorded for it."""
    if (before := recorded(folder)["sha256"].get(name)) is None:
        return
    content = (folder / name).read_bytes()
    if name.endswith(".gz"):
        # The raw bytes of a damaged archive have another checksum too, so the error below is raised.
        with contextlib.suppress(OSError, EOFError, zlib.error):
            content = gzip.decompress(content)
    if (now := checksum(content)) != before:
        again = f"delete it and run  python -m experiments.fetch_data {name.partition('/')[0]} --to '{folder}'"
        mine = f"or delete its entry in {folder / RECORD} if you changed it yourself"
        raise ValueError(
            f"{folder / name} has changed: its sha256 is {now}, but {before} was recorded: {again}  , {mine}"
        )


def require(*parts: str, instead: str = "the shipped task tiny_translation") -> Path:
    """Returns the path of `parts` inside the data directory.

    Args:
        parts: names of folders, then of the file.
        instead: what the package ships as a substitute, for the error message.

    Raises:
        FileNotFoundError: there is no such file; the message names the path, its origin, and how to set another folder.
        ValueError: the file was fetched, and has changed since.
    """
    path, name = data_directory().joinpath(*parts), "/".join(parts)
    if path.exists():
        check_recorded(data_directory(), name)
        return path
    if name in ORIGINS:
        remedy = f"get it with  curl -L --create-dirs -o '{path}' '{ORIGINS[name]}' "
    elif (folder := name.partition("/")[0]) in ORIGINS:
        fetch = f"and python -m experiments.fetch_data {folder} fetches them "
        remedy = f"its data come from {ORIGINS[folder]} {fetch if folder in DATA_SETS else ''}"
    else:
        remedy = ""
    now = os.environ.get(VARIABLE) or "unset"
    raise FileNotFoundError(
        f"{path} does not exist, and the package does not ship it: {remedy or 'copy it there '}(or set {VARIABLE} to "
        f"the folder that holds {name}; now: {now}), or use {instead}, which needs no data directory"
    )
