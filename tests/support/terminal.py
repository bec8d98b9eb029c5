"""A stream in place of a terminal or a log file, for tests of what commands print while they work."""

import io
import threading


class Terminal(io.StringIO):
    """A stream that signals every write."""

    def __init__(self, isatty=True):
        super().__init__()
        self._isatty, self.written = isatty, threading.Event()

    def isatty(self):
        return self._isatty

    def write(self, text):
        count = super().write(text)
        self.written.set()
        return count
