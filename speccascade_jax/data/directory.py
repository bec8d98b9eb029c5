"""The folder of data sets, which one environment variable sets for the whole project."""

import os
from pathlib import Path

from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.files import expanded

VARIABLE = "SPECCASCADE_DATA"


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


def require(*parts: str, instead: str = "the shipped task tiny_translation") -> Path:
    """Returns the path of `parts` inside the data directory.

    Args:
        parts: names of folders, then of the file.
        instead: what the package ships as a substitute, for the error message.

    Raises:
        FileNotFoundError: there is no such file; the message names the path, its origin, and how to set another folder.
    """
    path, name = data_directory().joinpath(*parts), "/".join(parts)
    if path.exists():
        return path
    if name in ORIGINS:
        remedy = f"get it with  curl -L --create-dirs -o '{path}' '{ORIGINS[name]}' "
    elif (folder := name.partition("/")[0]) in ORIGINS:
        remedy = f"its data come from {ORIGINS[folder]} "
    else:
        remedy = ""
    now = os.environ.get(VARIABLE) or "unset"
    raise FileNotFoundError(
        f"{path} does not exist, and the package does not ship it: {remedy or 'copy it there '}(or set {VARIABLE} to "
        f"the folder that holds {name}; now: {now}), or use {instead}, which needs no data directory"
    )
