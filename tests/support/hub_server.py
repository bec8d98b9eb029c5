"""A server on this machine that speaks the part of the hub's API that `huggingface_hub` calls to fetch a repository.

It answers requests for a repository's commit, for the list of its files, and for files with their digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
Answer = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """The server; `asked` lists the method and the path of each request.

    Attributes:
        commits: files (content by name) of each commit, by repository and commit; data sets begin with `datasets/`.
        branches: commit of each branch, by repository and branch.
        gated: repositories whose files need `token`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[tuple[str, str], Mapping[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def upload(self, repository: str, files: Path | Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit with these files, or those of a folder, to a branch; returns its hash."""
        if isinstance(files, Path):
            paths = (path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        parts = [repository, *(f"{name} {_digest(content)}" for name, content in sorted(files.items()))]
        commit = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        self.commits[repository, commit] = files
        self.branches[repository, branch] = commit
        return commit

    def answer(self, path: str, token: str | None) -> Answer:
        if match := _API.fullmatch(path):
            repository = match[2] if match[1] == "models" else f"datasets/{match[2]}"
            return self._of_commit(repository, match[4] or "main", self._tree if match[3] == "tree" else self._info)
        if match := _FILE.fullmatch(path):
            repository = f"{match[1] or ''}{match[2]}"
            if repository in self.gated and token is None:
                return 401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"}
            return self._of_commit(
                repository, match[3], lambda *commit: self._file(*commit, urllib.parse.unquote(match[4]))
            )
        return 404, b"", {}

    def _of_commit(self, repository: str, revision: str, answer: Any) -> Answer:
        revision = urllib.parse.unquote(revision)
        if not any(repository == name for name, _ in self.commits):
            # the hub's answer to users who are not logged in, whether the repository is private or absent
            return 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        commit = self.branches.get((repository, revision), revision)
        if (repository, commit) not in self.commits:
            return 404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}
        return answer(repository, commit)

    def _info(self, repository: str, commit: str) -> Answer:
        names = [{"rfilename": name} for name in self.commits[repository, commit]]
        return 200, json.dumps({"id": repository, "sha": commit, "siblings": names}).encode(), {}

    def _tree(self, repository: str, commit: str) -> Answer:
        files = self.commits[repository, commit].items()
        rows = [{"type": "file", "path": n, "size": len(content), "oid": _digest(content)} for n, content in files]
        return 200, json.dumps(rows).encode(), {}

    def _file(self, repository: str, commit: str, name: str) -> Answer:
        content = self.commits[repository, commit].get(name)
        if content is None:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        status, body, headers = self.server.answer(path, self.headers.get("Authorization"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD = _answer  # noqa: N815 (names that the standard library calls)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Yields a server that answers in a thread of this process."""
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def on_the_hub(server: Server, cache: Path, offline: bool = False) -> Iterator[None]:
    """Lets this process read from the server and the cache, as the variables of the environment do at its start."""
    import pytest
    from huggingface_hub import constants

    from speccascade_jax.storage import hub

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(hub, "_COMMITS", {})
        patch.setattr(hub, "_READ", set())
        yield
