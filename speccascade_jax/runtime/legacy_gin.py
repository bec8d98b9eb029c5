"""Translation of gin texts of version 0.2, so that files, bindings and stored configurations keep working.

The classes `Method` and `Sampling` of `evaluation.points` are now one class, `Settings`, and `Method.name` is now
`Settings.method`. Functions that took `method` and `sampling` now take `settings`. Modules have moved (`moved`).
Comments, quoted strings and line numbers do not change.
"""

import io
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from speccascade_jax.runtime.moved import UNTIL, new_place
from speccascade_jax.storage.files import expanded

_QUOTED = re.compile(r"""\#[^\n]* | ('''|\"\"\"|['"]) (?:\\.|(?!\1).)*? \1""", re.DOTALL | re.VERBOSE)
_STATEMENT = re.compile(r"^(?P<indent>[ \t]*)(?P<key>[A-Za-z_][\w./]*)[ \t]*(?P<sign>[:=])[ \t]*", re.MULTILINE)
_REFERENCE = re.compile(r"@(?P<scope>(?:[\w.]+/)*)(?P<selector>[\w.]+)(?P<call>\(\))?")
_FROM = r"(?:from[ \t]+(?P<package>[\w.]+)[ \t]+)?"
_IMPORT = re.compile(rf"^{_FROM}import[ \t]+(?P<module>[\w.]+)(?P<alias>[ \t]+as[ \t]+\w+)?", re.MULTILINE)
_CLASS = re.compile(r"(?P<module>(?:(?:\w+\.)*points\.)?)(?P<name>Method|Sampling)")
_MAKING = re.compile(r"\bmaking\.make$")
_TOOK = {"method": "Method", "sampling": "Sampling"}
"""Old arguments of functions that now take `settings`, with the old classes of the arguments' values."""
_WARNED = set[str]()


class Edit(NamedTuple):
    """A replacement of the characters from `start` to `end` by `text`; a warning shows the names `old` and `new`."""

    start: int
    end: int
    text: str
    old: str
    new: str


class Translation(NamedTuple):
    """A translated gin text, and the names that were replaced in it.

    Attributes:
        text: the translation; the same object as the original if it contains no old name.
        renamed: the new name and the line of the first use, by old name.
    """

    text: str
    renamed: dict[str, tuple[str, int]]


class Statement(NamedTuple):
    """The beginning of a gin binding, or of a block of bindings.

    Attributes:
        start, end: the position of the statement's key in the text.
        inside: whether the statement is a line of a block.
        scope, selector: the function or class whose argument is bound, and its gin scope.
        argument: the bound argument; empty for the beginning of a block.
        part: match of the value, if it is a reference to `Method` or `Sampling` for an argument `method` or `sampling`;
            otherwise `None`.
    """

    start: int
    end: int
    inside: bool
    scope: str
    selector: str
    argument: str
    part: re.Match[str] | None


def translate(text: str) -> Translation:
    """Translates a gin text of version 0.2 into the current names.

    Raises:
        ValueError: `method` and `sampling` of one function have two scopes that no single `Settings` can have.
    """
    renamed = dict[str, tuple[str, int]]()
    for find in (_joined_parts, _keys, _references, _imports):
        edits = list(find(_code(text)))
        for edit in edits:
            renamed.setdefault(edit.old, (edit.new, text.count("\n", 0, edit.start) + 1))
        for edit in reversed(edits):
            text = text[: edit.start] + edit.text + text[edit.end :]
    return Translation(text, {old: new for old, new in renamed.items() if old != new[0]})


def current(text: str, place: str) -> str:
    """Translates a gin text into the current names, and warns of each old name once per process.

    Args:
        text: the gin text.
        place: the file, or a description of the text, for warnings.
    """
    translation = translate(text)
    for old, (new, line) in translation.renamed.items():
        if old not in _WARNED:
            _WARNED.add(old)
            message = f"{old} is now {new}; the old name works until {UNTIL}"
            warnings.warn_explicit(message, FutureWarning, place, line)
    return translation.text


class _NamedText(io.StringIO):
    """A text in the form of an open file with a name, which gin shows in errors."""

    name = ""


def opened(path: str) -> io.StringIO:
    """Opens a gin file, translated into the current names; gin calls this function as one of its file readers."""
    with expanded(path).open(
        encoding="utf-8-sig"
    ) as file:  # skips the byte order mark with which some editors begin a file
        stream = _NamedText(current(file.read(), path))
    stream.name = path
    return stream


def _code(text: str) -> str:
    """Returns the text with comments and quoted strings replaced by blanks, so that positions stay the same."""
    return _QUOTED.sub(lambda quoted: re.sub(r"[^\n]", " ", quoted[0]), text)


def _statements(code: str) -> Iterator[Statement]:
    block = ""
    for match in _STATEMENT.finditer(code):
        key, begins_block = match["key"], match["sign"] == ":"
        if begins_block and match["indent"]:  # an entry of a dictionary, not a block
            continue
        inside = bool(match["indent"] and block)
        if not inside:
            block = key if begins_block else ""
        scope, slash, selector = (block if inside else key).rpartition("/")
        argument = key if inside else ""
        if not inside and not begins_block:
            selector, _, argument = selector.rpartition(".")
        part = _REFERENCE.match(code, match.end())
        bound = part and part["call"] and _CLASS.fullmatch(part["selector"])
        if not bound or bound["name"] != _TOOK.get(argument):
            part = None
        yield Statement(match.start("key"), match.end("key"), inside, scope + slash, selector, argument, part)


def _joined_parts(code: str) -> Iterator[Edit]:
    """Yields edits that join a function's bindings of `method` and `sampling` into one.

    The binding of `method` stays, with the narrower of the two scopes; the binding of `sampling` is removed.
    """
    parts = [(statement, statement.part) for statement in _statements(code) if statement.part is not None]
    scopes = dict[str, dict[str, str]]()
    for statement, part in parts:
        scopes.setdefault(statement.scope + statement.selector, {})[statement.argument] = part["scope"]
    for statement, part in parts:
        argument_scopes = scopes[statement.scope + statement.selector]
        if len(argument_scopes) < len(_TOOK):
            continue
        old, new = f"{statement.selector}.{statement.argument}", f"{statement.selector}.settings"
        if statement.argument == "sampling":
            yield Edit(statement.start, part.end(), "", old, new)
        else:
            yield Edit(*part.span("scope"), _narrower(statement.selector, **argument_scopes), old, new)


def _narrower(function: str, method: str, sampling: str) -> str:
    wide, narrow = sorted((method, sampling), key=len)
    if not narrow.startswith(wide):
        remedy = "both are settings now and need one scope"
        raise ValueError(
            f"{function} takes its method from scope {method!r} and its sampling from scope {sampling!r}: {remedy}"
        )
    return narrow


def _keys(code: str) -> Iterator[Edit]:
    for statement in _statements(code):
        selector, argument = _selector_today(statement.selector), statement.argument
        old_class = _CLASS.fullmatch(statement.selector)
        if statement.part:
            argument = "settings"
        elif old_class and (old_class["name"], argument) == ("Method", "name"):
            argument = "method"
        names = (statement.selector, statement.argument), (selector, argument)
        old, new = (".".join(filter(None, name)) for name in names)
        if statement.inside and argument != statement.argument:
            yield Edit(statement.start, statement.end, argument, old, new)
        elif not statement.inside and old != new:
            yield Edit(statement.start, statement.end, statement.scope + new, old, new)


def _references(code: str) -> Iterator[Edit]:
    for reference in _REFERENCE.finditer(code):
        old = reference["selector"]
        if (new := _selector_today(old)) != old:
            yield Edit(*reference.span("selector"), new, old, new)


def _imports(code: str) -> Iterator[Edit]:
    for match in _IMPORT.finditer(code):
        package, module, alias = match["package"], match["module"], match["alias"] or ""
        old = f"{package}.{module}" if package else module
        new = new_place(old)
        if new == old:
            continue
        text = f"import {new}"
        if package:
            package, _, last = new.rpartition(".")
            kept = alias or last == module or _MAKING.match(f"{module}.make")
            text = f"from {package} import {last}" + ("" if kept else f" as {module}")
        yield Edit(*match.span(), text + alias, old, new)


def _selector_today(selector: str) -> str:
    """Returns the current name of a class or function that a gin text refers to."""
    if old_class := _CLASS.fullmatch(selector):
        return old_class["module"] + "Settings"
    return new_place(_MAKING.sub("make_data.make", selector))
