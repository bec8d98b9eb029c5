"""A storage server on this machine: the part of Google Cloud Storage's JSON API that tensorstore calls.

It checks preconditions on generations (version numbers of objects), serves one request at a time, and keeps the objects
in memory. Before it answers a request, it calls `fault`, which may return a failure to simulate. Run as a program, it
prints its address and serves until it is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

URL, TOKEN = "TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"
"""Environment variables that give tensorstore the server's address and a token for access."""
Answer = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """The server; `objects` maps names (bucket/key) to contents and generations, `asked` lists the requests.

    A request is listed with its method and name. `sent` counts the bytes of answers by the reader's token and the name.
    `caller.token` is the token of the request that the current thread answers.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.asked: list[tuple[str, str]] = []
        self.sent = Counter[tuple[str, str]]()
        self.fault: Callable[[str, str], str | None] = lambda method, name: None
        self.one_at_a_time = threading.Lock()
        self.caller = threading.local()
        self.generations = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing, because clients are killed and faults close connections on purpose."""

    def upload(self, name: str, query: dict[str, str], body: bytes) -> Answer:
        if not self._matches(name, query):
            return 412, b"{}", {}
        self.objects[name] = body, next(self.generations)
        return 200, self._metadata(name), {}

    def read(self, name: str, query: dict[str, str], span: str | None) -> Answer:
        if name not in self.objects:
            return 404, b"", {}
        content, generation = self.objects[name]
        if query.get("ifGenerationNotMatch") == str(generation):
            return 304, b"", {}
        if query.get("alt") != "media":
            return 200, self._metadata(name), {}
        headers = {"X-Goog-Generation": str(generation)}
        if span is None:
            return 200, content, headers
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", span).groups()
        start = int(first) if first else len(content) - int(last)
        stop = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return 416, b"", {}
        return 206, content[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}

    def delete(self, name: str, query: dict[str, str]) -> Answer:
        if not self._matches(name, query):
            return 412, b"{}", {}
        return (204 if self.objects.pop(name, None) else 404), b"", {}

    def listing(self, bucket: str, query: dict[str, str]) -> Answer:
        """Returns a page of at most 100 names, as buckets do with 1,000."""
        keys = sorted(name.partition("/")[2] for name in self.objects if name.startswith(f"{bucket}/"))
        start, end = query.get("startOffset", ""), query.get("endOffset", chr(0x10FFFF))
        keys = [key for key in keys if key.startswith(query.get("prefix", "")) and start <= key < end]
        begin = int(query.get("pageToken", 0))
        page: dict[str, Any] = {
            "items": [json.loads(self._metadata(f"{bucket}/{k}")) for k in keys[begin : begin + 100]]
        }
        if begin + 100 < len(keys):
            page["nextPageToken"] = str(begin + 100)
        return 200, json.dumps(page).encode(), {}

    def _matches(self, name: str, query: dict[str, str]) -> bool:
        current = self.objects[name][1] if name in self.objects else 0
        return query.get("ifGenerationMatch") in (None, str(current))

    def _metadata(self, name: str) -> bytes:
        content, generation = self.objects[name]
        fields = {"name": name.partition("/")[2], "size": str(len(content)), "generation": str(generation)}
        return json.dumps(fields).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        places = address.path.removeprefix("/upload").split("/")
        bucket, key = places[4], query.get("name") or urllib.parse.unquote("/".join(places[6:]))
        name = f"{bucket}/{key}"
        self.server.caller.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        fault = self.server.fault(self.command, name)
        if fault == "slow":
            time.sleep(2)
        if fault == "reset":  # the connection breaks before the request is served
            return self._close()
        if fault and fault.isdigit():
            return self._send(int(fault), b"{}", {})
        with self.server.one_at_a_time:
            self.server.asked.append((self.command, name))
            answer = self._done(address.path, bucket, key, query, body)
            self.server.sent[self.server.caller.token, name] += len(answer[1])
        if fault == "lost":  # the connection breaks after the request is served
            return self._close()
        return self._send(*answer)

    def _done(self, path: str, bucket: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        if path.startswith("/upload"):
            return self.server.upload(f"{bucket}/{key}", query, body)
        if self.command == "DELETE":
            return self.server.delete(f"{bucket}/{key}", query)
        if not key:
            return self.server.listing(bucket, query)
        return self.server.read(f"{bucket}/{key}", query, self.headers.get("Range"))

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _close(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 (names that the standard library calls)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Yields a server that answers in a thread of this process."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with serving() as served:
        print(served.url, flush=True)
        threading.Event().wait()
