"""Rows of data sets on Hugging Face's hub, by names such as `hf:EdinburghNLP/xsum`, for `FileTask`.

A name is `hf:owner/name`, which `@revision` and `:configuration` may follow. Only the Parquet files of one split are
fetched. They come from the copy that the hub itself makes in the branch `refs/convert/parquet`. If this copy lacks the
split, or the name has a revision, they come from the repository's own branch or revision instead, where they must have
the layout that the library `datasets` writes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.storage import hub

COPY = "refs/convert/parquet"
SPLITS = ("validation", "test", "train")
_ROUGE = ("rouge2", "rouge1", "rougeL")


class Known(NamedTuple):
    """A well-known data set: its usual configuration, its splits, and fields of its `FileTask`."""

    configuration: str
    splits: tuple[str, ...]
    fields: Mapping[str, Any]


KNOWN = {
    "EdinburghNLP/xsum": Known("default", SPLITS, {
        "source": "document", "reference": "summary", "template": "summarize: {source}", "metrics": _ROUGE,
        "max_input_length": 1024, "max_output_length": 64}),
    "abisee/cnn_dailymail": Known("3.0.0", SPLITS, {
        "source": "article", "reference": "highlights", "template": "summarize: {source}", "metrics": _ROUGE,
        "max_input_length": 2048, "max_output_length": 128}),
    "openai/gsm8k": Known("main", ("test", "train"), {
        "source": "question", "reference": "answer", "template": "Question: {source}\nAnswer:",
        "metrics": ("final_number",), "max_output_length": 320}),
    "wmt/wmt14": Known("de-en", SPLITS, {
        "source": "translation.en", "reference": "translation.de",
        "template": "translate English to German: {source}", "max_input_length": 128}),
}  # fmt: skip
"""The data sets, by repository, for which `get_task` sets columns, template and lengths.

For other data sets, a `FileTask` must name the columns.
"""


_CONFIGURATION = re.compile(r"(?!\.+$)[^<>:/\\|?*\[\]@]+")
"""Pattern of a configuration's name: as in the library `datasets`, but without `[`, `]` and `@`.

The brackets have a meaning in patterns of files, and `@` begins a revision.
"""
_PARQUET = re.compile(r"([^/]+)/([^/]+?)(?:/[^/]+|-[\d][^/]*)\.parquet")
_MOST = 20  # configurations that a message lists


class _DataName(NamedTuple):
    name: hub.HubName
    configuration: str


def is_name(path: object) -> bool:
    """Returns whether a task's path is the name of a data set on the hub."""
    return isinstance(path, str) and path.startswith(hub.PREFIX)


def _parsed(path: str) -> _DataName:
    address, _, configuration = path.removeprefix(hub.PREFIX).partition(":")
    name = hub.name_of(f"{hub.PREFIX}{address}", "dataset")
    assert name is not None  # `name_of` returns None only for a text without the prefix
    if "@" in configuration:
        first, _, revision = configuration.partition("@")
        raise ValueError(f"{path}: the revision comes first: write {hub.PREFIX}{name.repository}@{revision}:{first}")
    if configuration and not _CONFIGURATION.fullmatch(configuration):
        raise ValueError(f"{path}: {configuration!r} is no configuration: give one, such as {hub.PREFIX}{name}:default")
    usual = KNOWN[name.repository].configuration if name.repository in KNOWN else "default"
    return _DataName(name, configuration or usual)


_SOURCES: dict[tuple[str, str], hub.HubName] = {}
"""The repository, or its Parquet copy, from which this process read rows, by path and split.

It may differ between the splits of one data set, because the copy may lack a split.
"""


def task_fields(path: str) -> dict[str, Any]:
    """Returns the fields of a `FileTask` that are known for a data set; none for an unknown one."""
    known = KNOWN.get(_parsed(path).name.repository)
    return {} if known is None else dict(known.fields)


def task_name(path: str) -> str:
    """Returns the name of a data set's task in records.

    Examples:
        >>> from speccascade_jax.data.tasks import hub_data
        >>> hub_data.task_name("hf:abisee/cnn_dailymail"), hub_data.task_name("hf:wmt/wmt14:fr-en")
        ('hf_cnn_dailymail', 'hf_wmt14_fr-en')
    """
    data = _parsed(path)
    usual = _parsed(f"{hub.PREFIX}{data.name.repository}").configuration
    return f"hf_{data.name.repository.split('/')[1]}" + f"_{data.configuration}" * (data.configuration != usual)


def splits(path: str) -> tuple[str, ...]:
    """Returns the names of a data set's splits, the default one first; the usual names for an unknown data set."""
    known = KNOWN.get(_parsed(path).name.repository)
    return SPLITS if known is None else known.splits


def commits(path: str, split: str) -> dict[str, str]:
    """Returns `{path: commit}` with the commit from which this process read a split; `{}` if it has not read it."""
    source = _SOURCES.get((path, split))
    commit = None if source is None else hub.commit_of(source)
    return {} if commit is None else {path: commit}


def rows(path: str, split: str) -> Iterator[dict[str, Any]]:
    """Returns the rows of a split; a column of dictionaries adds one column per key, such as `translation.en`.

    Raises:
        ImportError: `pyarrow` is not installed.
        ValueError: a file is damaged.
        OSError: the files cannot be fetched (`hub.fetched`), or the data set has no such split.
    """
    try:
        import pyarrow  # noqa: F401 (fails early if it is missing: nothing has been fetched yet)
    except ImportError as error:
        raise ImportError(f"{path}: reading data sets of the hub needs pyarrow: {hub.EXTRA}") from error
    return (_with_parts(row) for file in _files(path, split) for row in _rows(path, file))


def _rows(path: str, file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches(_BATCH):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        content = file.resolve()  # `file` is a link in the hub's cache: the damaged content is the link's target
        remedy = f"delete {content}, and run the same command again; if this does not help, the hub's file is damaged"
        raise ValueError(f"{path}: {file.name} is damaged ({error}): {remedy}") from error


_BATCH = 256
"""The number of rows that are decoded at a time; it is small, because evaluations read only a few hundred rows."""


def _with_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        f"{name}.{key}": part for name, value in row.items() if isinstance(value, dict) for key, part in value.items()
    }
    return {**row, **parts}


def _files(path: str, split: str) -> list[Path]:
    """Returns the Parquet files of a split, fetched from the hub's copy of a data set, or else from its repository."""
    name, configuration = _parsed(path)
    patterns = [f"{configuration}/{split}-*.parquet", f"{configuration}/{split}/*.parquet"]
    patterns += [f"data/{split}-*.parquet"] if configuration == "default" else []
    errors: list[FileNotFoundError] = []
    for source in [name] if name.revision else [name._replace(revision=COPY), name]:
        try:
            files = _matching(source, patterns)
        except FileNotFoundError as error:
            errors.append(error)
            continue
        _SOURCES[path, split] = source
        return files
    unanswered = name.revision and not isinstance(errors[-1], hub.NoFileError)
    if unanswered or isinstance(errors[-1], hub.UnreachableError):
        raise errors[0]
    raise FileNotFoundError(
        f"{path}: no split {split!r} of the configuration {configuration!r} ({errors[-1]}); {_present(name)}give "
        f"{hub.PREFIX}owner/name:configuration, or the task FileTask(path=…) of a file that you download"
    ) from errors[-1]


def _present(name: hub.HubName) -> str:
    """Returns a data set's configurations and their splits as words for a message; "" if they are not known."""
    sources = [name] if name.revision else [name._replace(revision=COPY), name]
    matches = (_PARQUET.fullmatch(path) for source in sources for path in hub.paths_of(source))
    present: dict[str, set[str]] = {}
    for match in filter(None, matches):
        present.setdefault("default" if match[1] == "data" else match[1], set()).add(match[2])
    texts = [f"{configuration} ({', '.join(sorted(names))})" for configuration, names in sorted(present.items())]
    more = " …" * (len(texts) > _MOST)
    return f"its configurations and splits are {', '.join(texts[:_MOST])}{more}; " if texts else ""


def _matching(name: hub.HubName, patterns: Sequence[str]) -> list[Path]:
    folder = hub.fetched(name, patterns)
    return sorted(file for pattern in patterns for file in folder.glob(pattern))
