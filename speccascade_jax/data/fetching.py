"""Fetching of public data sets into the data directory; the first fetch records checksums that later ones enforce."""

import ast
import csv
import gzip
import io
import json
import urllib.request
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import Any

from speccascade_jax.data import directory
from speccascade_jax.data.public_sources import File
from speccascade_jax.data.tasks import hub_data
from speccascade_jax.storage import hub
from speccascade_jax.storage.files import write_atomically
from speccascade_jax.storage.readers import check_unpacked

GITHUB = "https://raw.githubusercontent.com"
_SECONDS = 60  # of silence before a download is given up


class Fetcher:
    """Fetches files into a data directory; downloads a source only once, even if several files are made from it.

    Attributes:
        folder: the data directory.
        github: address of GitHub's raw files, or of a mirror of them.
    """

    def __init__(self, folder: Path, github: str = GITHUB):
        self.folder, self.github = folder, github.rstrip("/")
        self._downloads: dict[str, bytes] = {}

    def fetch(self, name: str, file: File) -> str:
        """Fetches a file if it is absent, and verifies it otherwise; returns a short text that says what was done.

        Args:
            name: the file's name in the data directory, such as "gsm8k/train.jsonl.gz".
            file: the sources, and the function that makes the file from them.

        Raises:
            ValueError: the checksum of the file, or of the rows that its sources now hold, differs from the recorded
                one; a source is damaged; or a folder has the file's name.
            ImportError: a source is on the hub, and the extra `hub` is not installed.
            OSError: a source cannot be reached, or the file cannot be written.
        """
        path, lock = self.folder / name, directory.recorded(self.folder)
        if path.is_dir():
            raise ValueError(f"{path} is a folder, but the data set needs a file of this name: move the folder away")
        if path.exists():
            known = name in lock["sha256"]
            directory.check_recorded(self.folder, name)
            return "unchanged" if known else "kept as it is: this command did not make it"
        rows = self._rows(file, lock["revisions"])
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        except UnicodeEncodeError as error:
            raise _changed(file.sources[0], error) from error
        now = directory.checksum(text)
        if (before := lock["sha256"].setdefault(name, now)) != now:
            again = f"to accept them, delete the entry in {self.folder / directory.RECORD} and run the command again"
            raise ValueError(f"{name}: its sources give sha256 {now}, but {before} was recorded: {again}")
        # The checksum is written first: a file without one would count as a file that this command did not make.
        write_atomically(self.folder / directory.RECORD, json.dumps(lock, indent=1) + "\n")
        write_atomically(path, gzip.compress(text, mtime=0) if name.endswith(".gz") else text)
        return f"{len(rows):,} rows, sha256 {now}"

    def _rows(self, file: File, revisions: dict[str, str]) -> list[dict[str, Any]]:
        contents = [self._content(source, revisions) for source in file.sources]
        try:
            rows = list(file.derive(*contents))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _changed(file.sources[0], error) from error
        if not rows:
            raise _changed(file.sources[0], "it has no rows")
        # The first download's checksum is recorded and trusted later. Without this check, the error page of a mirror
        # would be recorded as the file.
        if other := [row for row in rows if not isinstance(row, dict)]:
            raise _changed(file.sources[0], f"a row is {other[0]!r:.40}, not an object with fields")
        return rows

    def _content(self, source: str, revisions: dict[str, str]) -> Any:
        """Returns the rows, lines or JSON value of a source; adds the commit of a set on the hub to `revisions`."""
        address, _, part = source.partition("#")
        if hub_data.is_name(address):
            if source in revisions:
                repository, _, configuration = address.removeprefix(hub.PREFIX).partition(":")
                address = f"{hub.PREFIX}{repository}@{revisions[source]}:{configuration}"
            columns = list(hub_data.rows(address, part))
            rows = [{name: row[name] for name in row if "." not in name} for row in columns]
            revisions[source] = hub_data.commits(address, part)[address]
            return rows
        url = f"{self.github}/{address}"
        if url not in self._downloads:
            self._downloads[url] = _downloaded(url)
        try:
            return _parsed(part or address, _unpacked(address, part, self._downloads[url]))
        except (EOFError, LookupError, OSError, SyntaxError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise _changed(source, error) from error


def _changed(source: str, reason: object) -> ValueError:
    return ValueError(f"{source} is not in its published form ({reason}): run the command again, or use another mirror")


def _downloaded(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return bytes(answer.read())
    except (OSError, HTTPException, ValueError) as error:
        elsewhere = "or run it with --to FOLDER on another machine, and copy the folder here"
        raise OSError(
            f"{url} cannot be fetched ({error}): run the command again with a connection, {elsewhere}"
        ) from error


def _unpacked(name: str, member: str, content: bytes) -> str:
    if member:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            check_unpacked(archive.getinfo(member).file_size, len(content))
            content = archive.read(member)
    elif name.endswith(".gz"):
        content = gzip.decompress(content)
    return content.decode()


def _parsed(name: str, text: str) -> Any:
    """Returns the value of a JSON file, the rows of a table or of lines with JSON, or else the lines of a text."""
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text, newline="")))
    lines = text.removesuffix("\n").split("\n")
    if ".jsonl" not in name:
        return lines
    # DialogSum's archive writes rows as Python dictionaries with single quotes, which are not valid JSON.
    return [json.loads(line) if line.startswith('{"') else ast.literal_eval(line) for line in lines if line.strip()]
