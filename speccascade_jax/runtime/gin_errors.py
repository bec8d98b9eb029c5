"""One-line versions of gin's error messages: the file and line, what is wrong, and which name was probably intended.

The module also checks every value that gin files bind against the type annotation of its argument, before gin calls
anything.
"""

import contextlib
import inspect
import pkgutil
import re
import sys
import tokenize
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import gin

from speccascade_jax.core import validate_types
from speccascade_jax.core.names import hint, without_addresses
from speccascade_jax.storage.files import expanded

DEEP = "macros, includes or brackets are nested too deeply; does one of them refer to itself?"
_BARE_TEXT = re.compile(r"[^\s\"'()\[\]{}]*[A-Za-z][^\s\"'()\[\]{}]*")
READ = list[str]()
"""The gin files that the last `gin_flags.parse_gin` read, with their includes."""
_SETTING = re.compile(r"(?:[\w/]+\.)*(\w+)=")
"""Matches the beginning of a message about a value, such as `Settings.block_size=`."""
_CALL = re.compile(r"\n  In call to configurable [^\n]*")
_MACRO = re.compile(r"([A-Za-z_][\w/]*)\s*=")
"""Matches the beginning of a setting without a dot in its name, which is a macro."""
_PLACE = re.compile(r"\n  In (?:file \"(.*)\", line (\d+)|bindings string line \d+)\n[^\n]*(?:\n +\^)?")


def explained(error: BaseException, reading: str = "") -> str:
    """Returns a one-line message for an error, without memory addresses such as `at 0x7f…`.

    Args:
        error: the error.
        reading: the text or file that is being read; the message names it if the error itself names no place.
    """
    if isinstance(error, tokenize.TokenError):
        return _line("a bracket or a quotation mark is never closed", _unclosed(reading))
    if isinstance(error, RecursionError):
        return _line(DEEP, reading)
    if isinstance(error, SyntaxError):
        text, file, number = f"{error.msg.rstrip('.')}: {error.text or ''}", error.filename, str(error.lineno)
    else:
        text = _CALL.sub("", str(error))
        file, number = next(iter(_PLACE.findall(text)), (None, ""))
        text = _PLACE.sub("", text)
        if isinstance(error, KeyError):
            text = text.strip("'\"")  # str() of a KeyError is the repr of its message
    text = "; ".join([text, *getattr(error, "__notes__", [])])
    return _line(_better(text, file or reading), f"{file}, line {number}" if file else reading or _set_at(text))


def _set_at(message: str) -> str:
    """Returns file and line of the binding that a message such as "block_size=0 is not …" begins with.

    Gin does not remember where it read a value, so the gin files are searched. The result is "" unless exactly one
    binding has this name and value.
    """
    if not (setting := _SETTING.match(message)):
        return ""
    binding = re.compile(rf"\s*(?:[\w./]+\.)?{setting[1]}\s*=\s*([^#\n]*[^#\s])")
    places = list[str]()
    for file in dict.fromkeys(READ):
        with contextlib.suppress(OSError, ValueError):
            for number, line in enumerate(expanded(file).read_text("utf-8-sig").splitlines(), 1):
                bound = binding.match(line)
                if bound and re.match(re.escape(bound[1]) + r"(?!\.?\w)", message[setting.end() :]):
                    places.append(f"{file}, line {number}")
    return places[0] if len(places) == 1 else ""


def explained_flag(error: BaseException, bindings: Sequence[str]) -> str:
    """Returns a one-line message for an error in a `--gin.NAME=VALUE` flag, and shows the quotes that a string lacks.

    Args:
        error: the error.
        bindings: the settings, each as "NAME = VALUE"; gin counts lines over all settings joined.
    """
    setting = _setting_at(_line_number(error), bindings)
    name, _, value = (part.strip() for part in setting.partition("="))
    if isinstance(error, SyntaxError) and _BARE_TEXT.fullmatch(value):
        quoted = f"--gin.{name}=\"'{value}'\""
        return (
            f"--gin.{name}={value}: {value} is not a value; a string needs quotes inside those of the shell: {quoted}"
        )
    return explained(error, f"--gin.{setting}"[:200])


def _line_number(error: BaseException) -> int:
    """Returns the line number (from 1) that gin's error message contains, or 1 if it contains none."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    match = re.search(r"In bindings string line (\d+)", str(error))
    return int(match[1]) if match else 1


def _setting_at(line: int, bindings: Sequence[str]) -> str:
    """Returns the setting at line `line` (from 1) of all settings joined; one setting may have several lines."""
    for setting in bindings:
        line -= setting.count("\n") + 1
        if line <= 0:
            return setting
    return ", ".join(bindings)


def _unclosed(reading: str) -> str:
    """Returns a file's name and the line of its unclosed bracket or string; only the name if the line is unknown."""
    opened = list[int]()
    try:
        with expanded(reading).open() as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type == tokenize.OP and token.string in "([{":
                    opened.append(token.start[0])
                elif token.type == tokenize.OP and token.string in ")]}":
                    del opened[-1:]
    except tokenize.TokenError as error:
        return f"{reading}, line {opened[-1] if opened else error.args[1][0]}"
    except (OSError, SyntaxError, ValueError):  # the unclosed bracket is in a binding or an included file
        pass
    return reading


def unfilled(name: str) -> str:
    """Returns the error message for a gin name without a value; the message says how to set a value."""
    name = re.sub(r"/(gin\.)?macro\.value$", "", name)
    return (
        f"{name} has no value (%gin.REQUIRED): add --gin.{name}=VALUE (strings in quotes), or a gin file that sets it"
    )


def _line(message: str, place: str) -> str:
    lines = [line.strip() for line in without_addresses(message).splitlines()]
    said = "; ".join(line.rstrip(";") for line in lines if line)
    return f"{place}: {said}" if place else said


def _better(text: str, file: str) -> str:
    """Replaces gin's messages about wrong names by messages that list valid names; returns other messages unchanged.

    The patterns match only at the beginning of a message, so a message of this package that quotes gin or Python is
    returned unchanged.
    """
    for pattern, words in _WORDS.items():
        if match := re.match(pattern, text, re.DOTALL):
            return words(file, *match.groups())
    return text


def _no_import(file: str, symbol: str) -> str:
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = expanded(file).read_text()
    known = re.findall(r"^\s*(?:from\s+[\w.]+\s+)?import\s+(?:\S+\s+as\s+)?(\w+)", text, re.MULTILINE)
    imported = f"it imports {', '.join(known) or 'nothing'}"
    return f"the file does not import {symbol!r}: {hint(symbol, known)}{imported}"


def _no_attribute(file: str, selector: str, module: str, name: str) -> str:
    values = vars(sys.modules[module]) if module in sys.modules else {}
    known = [known for known, value in values.items() if callable(value) and not known.startswith("_")]
    return f"{selector}: {module} has no {name!r}; {hint(name, known) or 'no name in it is similar'}".rstrip("; ")


def _nothing_called(file: str, name: str) -> str:
    parts = 2 if "." in name else 1
    keys = [key for key, _ in gin.config._REGISTRY.items() if not key.startswith("gin.")]
    known = [".".join(key.split(".")[-parts:]) for key in keys]
    return f"unknown name {name!r}: {hint(name, known)}use a name that one of the gin files uses"


def _no_parameter(file: str, owner: str, name: str) -> str:
    known = inspect.signature(gin.config._REGISTRY.get_match(owner.rpartition("/")[2]).wrapped).parameters
    return f"{owner} has no {name!r}: {hint(name, known) or 'it has ' + ', '.join(known)}".strip()


def _no_macro(file: str, name: str) -> str:
    known = [scope for scope, selector in gin.config._CONFIG if selector == "gin.macro"]
    return f"%{name} is used but never set: {hint(name, known)}add --gin.{name}=VALUE"


def _no_module(file: str, name: str) -> str:
    parent, _, last = name.rpartition(".")
    known = [module.name for module in pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", []))]
    return f"there is no module {name!r}: {hint(last, known)}".strip(": ")


def _lacks(file: str, owner: str, names: str) -> str:
    return f"{owner} lacks {names}: add --gin.{owner}.NAME=VALUE (strings in quotes), or a gin file that sets it"


_WORDS: dict[str, Callable[..., str]] = {
    r"'(\w*)' was not provided by an import statement": _no_import,
    r"Couldn't resolve selector ([\w.]+); <module '([\w.]+)'.*> has no attribute (\w+)": _no_attribute,
    r"No configurable matching (?:reference )?'@?([\w./]+)": _nothing_called,
    r"Configurable '([\w./]+)' doesn't have a parameter named '(\w+)'": _no_parameter,
    r"(\S+) set to `%gin.REQUIRED`": lambda file, name: unfilled(name),
    r"No bindings specified for '(.+?)/(?:gin\.)?macro'": _no_macro,
    r"No module named '([\w.]+)'$": _no_module,
    r"Unable to open file: (.*?)\. Searched config paths": lambda file, name: (
        f"there is no gin file {name!r} in this folder or in the repository; --gin_search_paths adds folders"
    ),
    r"unhashable type: '(\w+)'": lambda file, kind: f"a {kind} is a key of a dictionary, but keys must be strings",
    r"malformed node or string.*Failed to parse token '(.*?)'": lambda file, token: (
        f"{token} is not a value: strings need quotes, numbers must be finite, macros begin with %"
    ),
    r"(\w+)(?:\.__init__)?\(\) missing \d+ required [\w-]+ arguments?: ([^\n]*)": _lacks,
}


def check() -> None:
    """Checks all values that gin has bound against the type annotations of their arguments.

    Raises:
        ValueError: a value has the wrong type; the message names the binding, the value and the expected type.
    """
    for (scope, selector), bound in gin.config._CONFIG.items():
        if selector != "gin.macro":
            name = ".".join(selector.split(".")[-2:])
            prefix = f"{scope}/{name}." if scope else f"{name}."
            values = {argument: _value(value, prefix + argument) for argument, value in bound.items()}
            validate_types.check(gin.config._REGISTRY[selector].wrapped, values, prefix)


def check_macros(bindings: Sequence[str]) -> None:
    """Checks that gin uses each macro that the command line sets; gin itself silently ignores unused macros.

    Args:
        bindings: the settings, each as "NAME = VALUE".

    Raises:
        ValueError: neither a setting nor a macro in use refers to the macro.
    """
    names = (match[1] for match in map(_MACRO.match, bindings) if match)
    used = _macros_in_use()
    for name in names:
        if name not in used:
            raise ValueError(_unused(name, used))


def _macros_in_use() -> list[str]:
    """Returns the sorted names of the macros that settings refer to, also through other macros."""
    macros = gin.get_configurable(gin.config.macro)
    pending = [bound for (_, selector), bound in gin.config._CONFIG.items() if selector != "gin.macro"]
    used = set[str]()
    while pending:
        for reference in gin.config.iterate_references(pending.pop(), to=macros):
            if reference.config_key[0] not in used:
                used.add(reference.config_key[0])
                pending.append(gin.config._CONFIG[reference.config_key])
    return sorted(used)


def _unused(name: str, used: Sequence[str]) -> str:
    """Returns the error message for an unused macro, whose name may be misspelt or be the name of an argument."""
    owners = {selector for _, selector in gin.config._CONFIG if selector != "gin.macro"}
    meant = sorted(
        f"{owner.rpartition('.')[2]}.{name}"
        for owner in owners
        if name in inspect.signature(gin.config._REGISTRY[owner].wrapped).parameters
    )
    near = f"did you mean {', '.join(meant)}? " if meant else hint(name, used) or hint(name.upper(), used)
    known = f"the macros in use are {', '.join(used)}" if used else "the gin files use no macros"
    return f"--gin.{name} has no effect, because no setting uses %{name}: {near}{known}"


def _value(value: Any, name: str) -> Any:
    """Replaces macros and constants by their values, and references that gin calls later by `validate_types.Later`."""
    if isinstance(value, dict):
        return {key: _value(entry, name) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_value(entry, name) for entry in value)
    if not isinstance(value, gin.config.ConfigurableReference):
        return value
    called = value.configurable
    if called.selector == "gin.macro" and value.evaluate:
        return _value(gin.config._CONFIG[value.config_key]["value"], name)
    if called.selector == "gin.constant" and value.evaluate:
        if (constant := value.scoped_configurable_fn()) is gin.REQUIRED:
            raise ValueError(unfilled(name))
        return constant
    if not value.evaluate:
        return validate_types.Later(f"{value!r} (to call it: {value!r}())", FunctionType)
    return validate_types.Later(repr(value), called.wrapped if isinstance(called.wrapped, type) else None)


def operative() -> str:
    """Returns the settings that gin used in this process, as the text of a gin file; empty if there are none."""
    return str(gin.operative_config_str()).strip()
