"""Tasks from a file of rows, a folder that Hugging Face's library `datasets` saved, or a data set on the hub."""

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from speccascade_jax.core.checks import check_text, several, whole
from speccascade_jax.core.names import hint
from speccascade_jax.data import directory
from speccascade_jax.data.tasks import hub_data
from speccascade_jax.data.tasks.task import Example, FewShotTask, Record, Task, Template, json_lines, shuffled
from speccascade_jax.storage import readers
from speccascade_jax.storage.buckets import is_bucket
from speccascade_jax.storage.files import expanded

ENDINGS = (".tsv", ".csv", ".jsonl")
_ENDS = f"{', '.join(ENDINGS)} (or these with .gz)"
_WHOLE = "all"
DIVIDED = ("validation", "train")
"""The two splits of a file whose rows `FileTask.held_out` divides."""
_SPLITS = "dataset_dict.json"  # `datasets` writes this file for several splits, and "state.json" for one split
_LONGEST_FIELD = 1 << 30
_REMEDIES = {
    ".json": "write one object per line (jq -c '.[]' data.json > data.jsonl)",
    ".parquet": "write it as lines (pandas.read_parquet(…).to_json('data.jsonl', orient='records', lines=True))",
}

Row = Mapping[str, Any]


def is_file(name: object) -> bool:
    """Returns whether a task's name is a path that `FileTask` can read.

    Such a path ends in `.csv`, `.tsv` or `.jsonl`, or in one of these and `.gz`. It may also be a folder that
    `datasets` saved, if the path contains a slash, or a name on the hub such as `hf:EdinburghNLP/xsum`.
    """
    if not isinstance(name, str):
        return False
    if hub_data.is_name(name) or name.removesuffix(".gz").endswith(ENDINGS):
        return True
    return "/" in name and any((locate(name) / mark).is_file() for mark in (_SPLITS, "state.json"))


def check_no_path(name: str) -> None:
    """Raises an error if a task's name is clearly meant as a path, but not as one that `FileTask` reads.

    A name counts as a path in three cases: it is an existing file; it has an ending and a slash; or its ending
    resembles one of `ENDINGS` (".cvs"), and the text before the dot is not the name of a Python module.

    Raises:
        FileNotFoundError: there is no such file; the message names the nearest one beside it.
        ValueError: the file is of another kind.
    """
    ending = Path(name.removesuffix(".gz")).suffix.lower()
    if not ending:
        return
    if locate(name).is_file():
        raise ValueError(_other_kind(locate(name)))
    nearly = difflib.get_close_matches(ending, ENDINGS) and not _is_module(name.partition(".")[0])
    if "/" in name or nearly:
        raise FileNotFoundError(f"task {name!r}: {_missing(name)}")


def _is_module(name: str) -> bool:
    return name in sys.modules or bool(name) and importlib.util.find_spec(name) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    r"""A task whose examples are the rows of a file.

    All fields are plain values, so that gin can bind the task and a record can store it. The records of the task depend
    on the path as given, and on the content of the file when it is read.

    Attributes:
        path: a `.csv`, `.tsv` or `.jsonl` file (or one of these with `.gz`), or a folder written by `save_to_disk` of
            `datasets`; relative to the current folder or to the data directory. Or a data set on the hub
            (`data.tasks.hub_data`).
        source, reference: the columns of the input and of the reference: a name in the header, a JSON field, or a
            number from 0 in a file without a header. A JSON field may be a list, which gives several references.
        template: the model's input; `{source}` is replaced by the source, `{column}` by any column of the file, and
            `{c0}` by the first column of a file without a header.
        pool: a file of the same form, or a folder, whose first split is then used; its first rows are the exemplars,
            which are not evaluated.
        shots: the number of exemplars in a prompt.
        answer: the text after the template in an exemplar.
        separator: the text between exemplars.
        stop_strings: strings before which an output ends, as in `FewShotTask`.
        too_long: what happens to a prompt of more than `max_input_length` tokens: "cut" (its beginning is kept, or its
            end if it has exemplars) or "skip" (the next example replaces it). Cut and skipped prompts are counted and
            reported.
        shuffle: whether the rows are taken in a fixed random order, for sorted files.
        held_out: share of the rows that are kept from training; 0 does not divide the rows. Otherwise the splits are
            "validation" and "train". A hash of a row's prompt decides (`divided`), so rows with the same prompt are in
            the same split, and the order of rows does not matter.
        name: the name in records; by default the file's name without its ending.
        splits: the splits of a folder with several splits; "validation" and "train" if rows are held out; otherwise
            "all".

    Raises:
        ValueError: a value is invalid; this is checked before any file is read. `load` raises it if the file is
            damaged, a column is missing (the message names the line and the columns), or the pool is too small.
        FileNotFoundError: there is no such file.
        ImportError: the path is a folder, and `datasets` is not installed.

    Examples:
        >>> from pathlib import Path
        >>> from speccascade_jax.extend import FileTask
        >>> _ = Path("capitals.csv").write_text("country,city\nFrance,Paris\nItaly,Rome\n")
        >>> template = "What is the capital of {country}?"
        >>> task = FileTask(path="capitals.csv", source="country", reference="city", template=template)
        >>> task.load(limit=1)
        [Example(id=0, source='What is the capital of France?', reference='Paris')]
    """

    path: str
    source: str | int = "source"
    reference: str | int = "reference"
    template: str = "{source}"
    pool: str | None = None
    shots: int = 0
    answer: str = " {answer}"
    separator: str = "\n\n"
    stop_strings: tuple[str, ...] = ()
    too_long: Literal["cut", "skip"] = "cut"
    shuffle: bool = False
    held_out: float = 0.0
    name: str = ""
    max_input_length: int = 512
    max_output_length: int = 128
    splits: tuple[str, ...] = dataclasses.field(init=False, default=(_WHOLE,))
    read: Callable[[str], Iterable[Example]] = dataclasses.field(init=False, repr=False, compare=False)
    prefix: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        path = os.fspath(self.path)
        fields: dict[str, Any] = {name: several(name, getattr(self, name)) for name in ("metrics", "stop_strings")}
        self._check()
        fields |= {"path": path, "name": self.name or _default_name(path)}
        splits = _splits(path)
        if self.held_out and splits != (_WHOLE,):
            raise ValueError(
                f"{path} has the splits {', '.join(splits)}: set held_out to 0, and choose one of these splits"
            )
        fields["splits"] = DIVIDED if self.held_out else splits
        for name, value in (fields | {"read": self._read}).items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        if isinstance(self.source, int) != isinstance(self.reference, int):
            remedy = "give two names for a file with a header, or two numbers for a file without one"
            raise ValueError(f"source={self.source!r} and reference={self.reference!r} do not match: {remedy}")
        self._check_fields()
        for field, low in (("shots", 0), ("max_input_length", 1), ("max_output_length", 1)):
            whole(field, getattr(self, field), low)
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} is not a share: give a number from 0 up to 1, such as 0.1")
        if self.shots and self.pool is None:
            raise ValueError(f"shots={self.shots} needs a file of exemplars: set pool to the path of that file")
        if self.too_long not in ("cut", "skip"):
            raise ValueError(f"too_long={self.too_long!r} is unknown: give 'cut' or 'skip'")

    def _check_fields(self) -> None:
        """Checks that a template gives different prompts for different rows, and that exemplars have answers."""
        needed = {"template": "{source}"} | ({"answer": "{answer}"} if self.shots else {})
        for name, field in needed.items():
            if not _has_field(text := getattr(self, name)):
                effect = f"so all rows would give the same text: write {field} where the row's text belongs"
                raise ValueError(f"{name}={text!r} names no column, {effect}")

    @property
    def _shown(self) -> FewShotTask:
        template = Template(question="{question}", answer=self.answer, separator=self.separator)
        names = ("name", "splits", "shots", "stop_strings")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names} | {"template": template}
        return FewShotTask(records=lambda split: self._records(self.path, split), pool=self._exemplars, **fields)

    def _exemplars(self) -> Iterable[Record]:
        return () if self.pool is None else itertools.islice(self._records(self.pool), self.shots)

    def _read(self, split: str) -> Iterable[Example]:
        return self._shown.read(split)

    def _records(self, path: str, split: str | None = None) -> Iterable[Record]:
        """Returns the records of a file, or of a split of a folder; without a named split, those of the first split."""
        part = split if self.held_out and path == self.path else None
        name = _WHOLE if part else split or _splits(path)[0]
        place, rows = _opened(path, name, isinstance(self.source, str))
        records: Iterable[Record] = (
            self._record(number, row, f"{place}, row {number}") for number, row in enumerate(rows)
        )
        if part:
            records = divided(list(records), self.held_out)[DIVIDED.index(part)]
        return shuffled(list(records)) if self.shuffle else records

    def _record(self, number: int, row: Row, location: str) -> Record:
        source, reference = (_column(row, column, location) for column in (self.source, self.reference))
        # pandas writes NaN into empty cells of a table.
        source, reference = (None if _is_nan(value) else value for value in (source, reference))
        many = isinstance(reference, list | tuple)
        listed: Sequence[Any] = reference if isinstance(reference, list | tuple) else [reference]
        texts = tuple(str(text) for text in listed if text is not None)
        if isinstance(source, list | tuple):
            raise ValueError(f"{location}: the source is a list, not a text: {source!r:.80}")
        if source is None or not any(text.strip() for text in texts):
            raise ValueError(f"{location} has no source or no reference: remove the row, or write the missing text")
        references = texts if many else texts[0]
        for name, text in (("source", str(source)), *(("reference", text) for text in texts)):
            check_text(f"{location}: the {name}", text)
        try:
            numbered = {f"c{name}": value for name, value in row.items()}  # a template's field cannot be named `0`
            question = self.template.format_map({**numbered, **row, "source": source})
        except (KeyError, IndexError, ValueError) as error:
            known = f"the columns are {', '.join(row)} and source; write {{{{ and }}}} for braces"
            raise ValueError(f"template={self.template!r} cannot be filled ({error}): {known}") from error
        if not question.strip():
            raise ValueError(f"{location} gives an empty prompt: remove the row, or give a template")
        first = references if isinstance(references, str) else references[0]
        return Record(id=number, question=question, answer=first, reference=references)

    def cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the beginning of a prompt; with exemplars its end, because the question comes last."""
        return self._shown.cut(ids, room) if self.shots else super().cut(ids, room)

    def build_answer(self, example: Example) -> str:
        """Returns the text after the prompt, in the form that exemplars have."""
        if not _has_field(self.answer):
            raise ValueError(f"answer={self.answer!r} names no column: write {{answer}} where the reference belongs")
        return self._shown.build_answer(example)

    def postprocess(self, text: str) -> str:
        """Returns the output up to the first stop string."""
        return self._shown.postprocess(text)


def divided(records: Sequence[Record], share: float) -> tuple[list[Record], list[Record]]:
    """Divides records into those for validation and those for training, both in the order of the file.

    The records whose prompts have the smallest hashes are for validation: a fraction `share` of all records, but at
    least one record. Records with the same prompt have the same hash, so no prompt is in both parts.
    """
    hashes = [hashlib.blake2b(record.question.encode(), digest_size=8).digest() for record in records]
    last = sorted(hashes)[max(1, round(share * len(hashes))) - 1] if hashes else b""
    small = [number <= last for number in hashes]
    kept = [record for record, is_small in zip(records, small, strict=True) if not is_small]
    return [record for record, is_small in zip(records, small, strict=True) if is_small], kept


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _has_field(template: str) -> bool:
    try:
        return any(name is not None for _, name, *_ in string.Formatter().parse(template))
    except ValueError:  # a malformed template raises an error later, when the first row is filled in
        return True


def locate(path: str) -> Path:
    """Returns the path of a file: the given path if it exists, otherwise the path inside the data directory."""
    here = expanded(path)
    return here if here.exists() or here.is_absolute() else directory.data_directory() / path


def _default_name(path: str) -> str:
    return hub_data.task_name(path) if hub_data.is_name(path) else Path(path.removesuffix(".gz")).stem


def _splits(path: str) -> tuple[str, ...]:
    """Returns the splits of a data set on the hub, or those that a folder of `datasets` lists; "all" for a file."""
    if hub_data.is_name(path):
        return hub_data.splits(path)
    split_list = locate(path) / _SPLITS
    if not split_list.is_file():
        return (_WHOLE,)
    return tuple(readers.json_object(split_list, "save the data again").get("splits", ())) or (_WHOLE,)


def _opened(path: str, split: str, header: bool) -> tuple[str | Path, Iterator[Row]]:
    """Returns the place of a path, for error messages, and its rows."""
    if hub_data.is_name(path):
        return path, hub_data.rows(path, split)
    place = locate(path)
    if not place.exists():
        raise FileNotFoundError(_missing(path))
    return place, _rows(place, split, header)


def _missing(path: str) -> str:
    """Returns the error message for a file that does not exist; it names the nearest file in its folder."""
    place, beside = expanded(path), list[str]()
    if not is_bucket(path):
        with contextlib.suppress(OSError):
            beside = [entry.name for entry in place.parent.iterdir() if is_file(entry.name)]
    near = [str(Path(path).with_name(name)) for name in difflib.get_close_matches(place.name, beside, n=1)]
    remedy = f"did you mean {near[0]}?" if near else f"files end in {_ENDS}, data sets on the hub are hf:owner/name"
    return f"file {path} does not exist, neither here nor in {directory.data_directory()}: {remedy}"


def _other_kind(path: Path) -> str:
    remedy = _REMEDIES.get(path.suffix, "save the table as one of these")
    return f"{path} is neither a file that ends in {_ENDS} nor a folder saved by datasets: {remedy}"


def _rows(path: Path, split: str, header: bool) -> Iterator[Row]:
    """Yields the rows of a file or a folder; the columns of a file without a header have numbers as names."""
    if path.is_dir():
        yield from _rows_of_folder(path, split)
    elif ".jsonl" in path.suffixes[-2:]:
        yield from json_lines(path)
    elif is_file(path.name):
        yield from _rows_of_table(path, header)
    else:
        raise ValueError(_other_kind(path))


def _rows_of_table(path: Path, header: bool) -> Iterator[Row]:
    tabs = ".tsv" in path.suffixes[-2:]
    texts = (line + "\n" for _, line in readers.lines(path))
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    csv.field_size_limit(_LONGEST_FIELD)
    table, names = csv.reader(texts, **style), list[str]()
    try:
        for fields in filter(None, table):  # the filter drops empty lines
            if not names:
                names = fields if header else [str(number) for number in range(len(fields))]
                if header:
                    _check_header(names, path)
                    continue
            if len(fields) != len(names):
                counts = f"{len(fields)} columns, but the first line has {len(names)}"
                quotes = "" if tabs else ", or its quotes"
                raise ValueError(f"{path}:{table.line_num} has {counts}: correct the line{quotes}")
            yield dict(zip(names, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}:{table.line_num} is not valid {path.suffix} ({error}): correct the line") from error


def _check_header(names: Sequence[str], path: Path) -> None:
    try:
        readers.check_unique(names)
    except ValueError as error:
        raise ValueError(f"{path}:1: {error}, and only one could be read: rename the others") from error


def _rows_of_folder(path: Path, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{path} is a folder: install the library datasets to read it (pip install datasets)"
        ) from error
    data = datasets.load_from_disk(str(path))
    yield from data if split == _WHOLE else data[split]


def _column(row: Row, wanted: str | int, location: str) -> Any:
    name = str(wanted)
    if name not in dict(row):
        names_from = "columns are counted from 0" if name.isdecimal() else "the first line names the columns"
        (only, *more), separators = row, {";": "semicolons", "\t": "tabs"}
        if not more and (other := next((word for sign, word in separators.items() if sign in only), None)):
            remedy = "save the file with commas, or with tabs as .tsv"
            raise ValueError(f"{location} has one column, {only!r}, because it has {other}, not commas: {remedy}")
        say = "FileTask's source and reference choose the columns, by number for a file without a header"
        known = f"{hint(name, row)}its columns are {', '.join(row)} ({names_from}; {say})"
        raise ValueError(f"{location} has no column {name!r}: {known}")
    value = row[name]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
