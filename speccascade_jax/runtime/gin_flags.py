"""Command line of the experiments, with the gin flags of T5X: `--gin_file`, `--gin.NAME=VALUE`, `--gin_search_paths`.

An experiment calls `main(function, example)`. Gin supplies the arguments of `function` from gin files and flags. Short
flags such as `--task` follow from the signature of `function` (`shorthands`).
"""

import contextlib
import dataclasses
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import IO, Any

import gin
from absl import app, flags, logging

from speccascade_jax.core import validate_types
from speccascade_jax.core.names import shown
from speccascade_jax.runtime import (
    arguments,
    gin_errors,
    hosts,
    interrupts,
    legacy_gin,
    own_files,
    recipe_header,
    short_flags,
)
from speccascade_jax.runtime.paths import share_root
from speccascade_jax.storage.buckets import BucketPath, is_bucket
from speccascade_jax.storage.files import expanded

PREFIX = "--gin."


def rewrite_arguments(argv: Sequence[str]) -> list[str]:
    """Returns the arguments, with every `--gin.NAME=VALUE` replaced by `--gin_bindings=NAME = VALUE`.

    Raises:
        ValueError: an argument `--gin.NAME` has no value.
    """
    arguments = list(argv)
    for place, argument in enumerate(arguments):
        if place and argument.startswith(PREFIX):
            name, equals, value = argument.removeprefix(PREFIX).partition("=")
            if not equals:
                raise ValueError(f"{argument} has no value; write {argument}=VALUE (strings in quotes: '\"text\"')")
            arguments[place] = f"--gin_bindings={name} = {value}"
    return arguments


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with a one-line message if the block raises an exception; `--debug` shows the trace instead."""
    try:
        yield
    except Exception as error:
        if "debug" in flags.FLAGS and flags.FLAGS.debug:
            raise
        hint = "\n(--debug shows where)" if "debug" in flags.FLAGS else ""
        sys.exit(f"error: {said(error)}{hint}")


def said(error: Exception) -> str:
    """Returns the one-line message that a program prints when it ends with this error."""
    message = gin_errors.explained(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message:
        return (
            f"not enough memory ({message or 'MemoryError'}): reduce the batch size, max_new_tokens or the block size"
        )
    return message if isinstance(error, _EXPECTED) and message else f"{type(error).__name__}: {message}"


_EXPECTED = (ValueError, TypeError, ArithmeticError, OSError, RuntimeError, ImportError)


def define_flags(short: short_flags.Offered | None = None) -> None:
    """Declares the gin flags of T5X and the short flags, which `--help` then lists.

    Flags that are declared already stay as they are.
    """
    if "gin_file" in flags.FLAGS:
        return
    for define, name, default, text in _FLAGS:
        define(name, default, text, module_name=sys.argv[0])
    if short:
        short.define()
        if "--help" in sys.argv:
            _explain(short)


def _explain(short: short_flags.Offered) -> None:
    """Adds the short flags to the text of `--help`, below its first line."""
    started = sys.modules["__main__"]
    title, _, remaining = (started.__doc__ or "").partition("\n")
    started.__doc__ = "\n".join(filter(None, [title, short.help_text(), remaining]))


_PROCESSES = ("coordinator_address", "process_count", "process_index")
_FLAGS: tuple[tuple[Callable[..., Any], str, Any, str], ...] = (
    (flags.DEFINE_multi_string, "gin_file", [],
     "gin file, also in gs://; may be repeated: later files set what earlier ones leave open"),
    (flags.DEFINE_multi_string, "gin_bindings", [], "NAME=VALUE, strings in quotes; --gin.NAME=VALUE is the same"),
    (flags.DEFINE_list, "gin_search_paths", [],
     "folders of gin files, in addition to the current one and the repository"),
    (flags.DEFINE_multi_string, "import", [],
     "your Python file, for example my_rules.py; gin files name its contents my_rules.NAME"),
    (flags.DEFINE_bool, "debug", False, "show the full trace of an error"),
    (flags.DEFINE_bool, "version", False, arguments.VERSION),
    (flags.DEFINE_bool, "multiprocess", False, "join the other processes; TPU pods and SLURM need no flag"),
    (flags.DEFINE_bool, "multiprocess_gpu", False, "T5X's name for --multiprocess"),
    (flags.DEFINE_string, "coordinator_address", None, "host:port of the first process, if there are several"),
    (flags.DEFINE_integer, "process_count", None, "number of processes"),
    (flags.DEFINE_integer, "process_index", None, "number of this process, from 0"),
    (flags.DEFINE_string, "host_logs", None, "folder for what all processes but the first print: host-<index>.log"),
)  # fmt: skip


def join(together: bool, example: str) -> None:
    """Connects this process to the other processes that the flags or the environment name.

    Raises:
        ValueError: there are several processes, but `together` is False; if the flags or the environment name them,
            before this process waits for the others.
    """
    if not together:
        _check_alone(example)
    asked = flags.FLAGS.multiprocess or flags.FLAGS.multiprocess_gpu
    words = [flags.FLAGS[name].value for name in _PROCESSES]
    hosts.begin(*words, asked=asked, logs=flags.FLAGS.host_logs)
    if hosts.many() and not together:
        raise ValueError(f"{example.partition(' --')[0]} runs in one process only: start one")


def parse_gin(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    text: str = "",
    derived: Callable[[Sequence[str]], list[str]] | None = None,
) -> None:
    """Reads gin files and their includes, then `text`, then bindings, and locks gin's configuration.

    Args:
        files: the gin files.
        bindings: the settings of the command line, each as "NAME = VALUE".
        search_paths: folders of gin files.
        text: a recorded configuration.
        derived: returns further bindings, which may depend on what gin has read by then.

    Raises:
        ValueError: a name is unknown, a required value is missing, a value has the wrong type, the syntax is wrong, or
            nothing uses a macro of `bindings`; the message names the place.
        OSError: a file is in none of the search paths.
    """
    gin_errors.READ.clear()
    folders = (*search_paths, str(share_root()))
    for folder in folders:
        gin.add_config_file_search_path(str(expanded(folder)))
    # Gin treats a missing path as a Python package, and fails on folders without __init__.py. So the paths are checked
    # first.
    paths = [_find(name, (".", *folders)) for name in files]
    for path in paths:
        _check_content(path)
    with _reading_files():
        for path in paths:
            with _explained(path):
                gin.parse_config_file(path)
    if text:
        with _explained(_RECORDED):
            gin.parse_config(legacy_gin.current(text, _RECORDED))
    _parse_bindings(bindings)
    if derived:
        _parse_bindings(derived(bindings))
    with _explained():
        gin.finalize()
        gin_errors.check()
        gin_errors.check_macros(bindings)


def _parse_bindings(bindings: Sequence[str]) -> None:
    try:  # joined, because `bindings` may be the lines of a file, and one statement may span several lines
        gin.parse_config(legacy_gin.current("\n".join(bindings), "--gin"))
    except Exception as error:
        raise ValueError(gin_errors.explained_flag(error, bindings)) from error


_RECORDED = "the record's configuration"


@contextlib.contextmanager
def _reading_files() -> Iterator[None]:
    """Makes gin translate names of version 0.2 in every file that it reads inside the block, and silences gin's log.

    Without this, gin logs an error for every search folder that lacks an included file, before it tries the next
    folder.
    """
    verbosity, readers = logging.get_verbosity(), gin.config._FILE_READERS
    logging.set_verbosity(logging.FATAL)
    # `gin.register_file_reader` would put this reader after gin's own, which would read the file first
    safe = [(reader, _without_error(exists)) for reader, exists in readers]
    gin.config._FILE_READERS = [(_opened, _is_file), *safe]
    try:
        yield
    finally:
        gin.config._FILE_READERS = readers
        logging.set_verbosity(verbosity)


def _opened(path: str) -> IO[str]:
    gin_errors.READ.append(path)
    return legacy_gin.opened(path)


def _is_file(path: str) -> bool:
    """Returns whether there is a file, or an object in a bucket."""
    return expanded(path).is_file() if is_bucket(path) else os.path.isfile(path)


def _without_error(exists: Callable[[str], bool]) -> Callable[[str], bool]:
    """Returns gin's check whether a file exists in a package; it is False for a folder without `__init__.py`.

    Gin's own check raises a TypeError for such a folder, so the next search folder would not be tried.
    """

    def check(path: str) -> bool:
        try:
            return exists(path)
        except TypeError:
            return False

    return check


@contextlib.contextmanager
def _explained(reading: str = "") -> Iterator[None]:
    """Turns errors of gin, and errors of modules that gin files import, into one-line ValueErrors."""
    try:
        yield
    except Exception as error:
        raise ValueError(gin_errors.explained(error, reading)) from error


def _find(name: str, folders: Sequence[str]) -> str:
    path = expanded(name)
    whole = isinstance(path, BucketPath) or path.is_absolute()
    for place in [path] if whole else [expanded(folder) / path for folder in folders]:
        if place.is_file():
            return str(place)
    raise FileNotFoundError(f"no gin file {name!r} in {', '.join(folders)}; --gin_search_paths adds folders")


def _check_content(path: str) -> None:
    """Raises ValueError for a gin file that contains no statement, or that is not UTF-8."""
    try:
        lines = expanded(path).read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}): save it as UTF-8") from error
    if not any(line.strip() and not line.strip().startswith("#") for line in lines):
        raise ValueError(f"{path} is empty: it sets nothing; name another gin file, or write it again")


def read_alone(example: str, short: short_flags.Offered | None = None) -> None:
    """Reads the gin files like `read`, for a command that runs in one process only, such as training.

    Raises:
        ValueError: flags or the environment name other processes, or `read` raises it.
    """
    _check_alone(example)
    read(example, short=short)
    recipe_header.announce(file=sys.stderr)  # stdout has the result alone, as JSON


def _check_alone(example: str) -> None:
    names = ("multiprocess", "multiprocess_gpu", *_PROCESSES)
    hosts.check_alone(example.partition(" --")[0], {name: flags.FLAGS[name].value for name in names})


def read(example: str, recorded: Callable[[], str] | None = None, short: short_flags.Offered | None = None) -> None:
    """Imports the user's own files and reads the gin files that the command line names.

    Args:
        example: a working command line, shown if no gin file is named.
        recorded: returns a recorded configuration, with which no gin file is needed, or "" for none.
        short: the short flags of the command, which become gin bindings.

    Raises:
        ValueError: no gin file is named, `parse_gin` raises it, or another process has read other settings.
        OSError: `parse_gin` or `own_files.load` raises it.
    """
    recipe_header.forget()
    own_files.load_again(flags.FLAGS["import"].value or ())
    text = recorded() if recorded else ""
    files: Sequence[str] = short.files(flags.FLAGS.gin_file) if short else flags.FLAGS.gin_file
    if not text:
        _check_named(files, example)

    def derived(typed: Sequence[str]) -> list[str]:
        lines = short.bindings(typed, again=bool(text)) if short else []
        # `on_command_line` reads them there
        flags.FLAGS["gin_bindings"].value = [*typed, *lines]
        return lines

    parse_gin(files, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths, text, derived)
    if files and not text:
        recipe = _find(files[0], (".", *flags.FLAGS.gin_search_paths, str(share_root())))
        recipe_header.remember(expanded(recipe).read_text("utf-8-sig"))
    if hosts.many():
        values = _settings()
        portable = {name: repr(_portable(value)) for name, value in values.items()}
        hosts.check_same({name: repr(value) for name, value in values.items()}, portable)


def _check_named(files: Sequence[str], example: str) -> None:
    if not files:
        raise ValueError(f"name at least one --gin_file; for example: {example}; --help lists all flags")


_MAY_DIFFER = {
    "gin_file", "gin_bindings", "gin_search_paths", "import", "debug", "multiprocess", "multiprocess_gpu",
    "host_logs", "compilation_cache", *_PROCESSES,
}  # fmt: skip
"""Flags that may differ between processes. Gin's files may, too: `_settings` has what they set."""


def _settings() -> dict[str, Any]:
    """Returns all values that gin has read, and those of the flags of the command line, by name."""
    values = {
        _parameter(scope, selector, name): value
        for (scope, selector), parameters in gin.config._CONFIG.items()
        for name, value in parameters.items()
    }
    named = {f"--{name}": flags.FLAGS[name].value for name in flags.FLAGS if flags.FLAGS[name].present}
    return values | {name: value for name, value in named.items() if name.removeprefix("--") not in _MAY_DIFFER}


def _portable(value: Any) -> Any:
    """Returns a value with local paths replaced by their last parts: hosts may have a file in different folders."""
    if isinstance(value, str) and _is_local_path(value):
        return f"…/{PurePath(value).name}"
    if isinstance(value, Mapping):
        return {key: _portable(entry) for key, entry in value.items()}
    return [_portable(entry) for entry in value] if isinstance(value, list | tuple) else value


_ROOTED = re.compile(r"(/|\.\.?/|~[\w.-]*/)\S*")
"""A text that is a local path, whether it exists or not."""
_NO_PATH = re.compile(r"[^{\n]*[{\n]|\w+:")
"""Beginning of a text that is a template, an address such as `gs://b` or a name on the hub (`hf:owner/name`)."""


def _is_local_path(text: str) -> bool:
    """Returns whether a text is a local path; one that could also be a name on the hub or a sentence must exist."""
    if _NO_PATH.match(text):
        return False
    return _ROOTED.fullmatch(text) is not None or ("/" in text and os.path.exists(text))


def _parameter(scope: str, selector: str, name: str) -> str:
    """Returns a parameter's name as gin files write it: `ModelPair.name`, and `PAIR` for a macro."""
    if selector == "gin.macro":
        return scope
    return f"{scope}/" * bool(scope) + f"{selector.rpartition('.')[2]}.{name}"


def on_command_line(parameter: str) -> bool:
    """Returns whether the command line sets a parameter of this name, as `--gin.sweep.methods=…` sets `methods`."""
    bindings = flags.FLAGS.gin_bindings if "gin_bindings" in flags.FLAGS and flags.FLAGS.is_parsed() else ()
    return any(text.partition("=")[0].strip().rpartition(".")[2] == parameter for text in bindings or ())


def main(
    function: Callable[..., Any],
    example: str,
    resume: str = interrupts.SAME,
    numbers: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    switches: Mapping[str, str] | None = None,
    together: bool = False,
    recorded: Callable[[], str] | None = None,
    after: Callable[[Any], None] | None = None,
    **offered: Any,
) -> None:
    """Parses the command line and calls `function` with gin's arguments; an error prints one line, not a traceback.

    Args:
        function: the function whose arguments the gin files bind, for instance `experiment.run`.
        example: a working command line, shown if no gin file is named.
        resume: advice on how to continue, printed after Ctrl-C.
        numbers: help texts, by name, of integer arguments of `function` that also have flags of their own.
        texts: the same of arguments that are texts.
        switches: the same of arguments that are `True` or `False`.
        together: whether several connected processes may run `function`; if not, several processes are an error.
        recorded: returns a recorded configuration, with which no gin file is needed, or "" for none.
        after: called with the result of `function`.
        offered: fields of `short_flags.Offered`, such as a default gin file.
    """
    short = short_flags.Offered(function=function, **offered)
    define_flags(short)
    if "--help" in sys.argv:
        started = sys.modules["__main__"]
        started.__doc__ = (started.__doc__ or "") + settings(function)
    for name, text in (numbers or {}).items():
        flags.DEFINE_integer(name, None, text, module_name=sys.argv[0])
    for name, text in (texts or {}).items():
        flags.DEFINE_string(name, None, text, module_name=sys.argv[0])
    for name, text in (switches or {}).items():
        flags.DEFINE_boolean(name, None, text, module_name=sys.argv[0])

    def run(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        if len(argv) > 1:
            sys.exit(f"error: unexpected argument {argv[1]!r}; for example: {example}; --help lists all flags")
        with hosts.together(), one_line_errors():
            if recorded is None:
                _check_named(short.files(flags.FLAGS.gin_file), example)
            join(together, example)
            read(example, recorded, short)
            named = (*(numbers or {}), *(texts or {}), *(switches or {}))
            asked = {name: flags.FLAGS[name].value for name in named}
            result = _bound(function, example)(**{name: value for name, value in asked.items() if value is not None})
            recipe_header.announce_places()  # of a function that does not do so itself
            if after:
                after(result)

    run_app(run, resume)


def _bound(function: Callable[..., Any], example: str) -> Callable[..., Any]:
    try:
        bound: Callable[..., Any] = gin.get_configurable(function)
    except ValueError as error:  # gin knows only functions that its files mention
        files = ", ".join(flags.FLAGS.gin_file)
        raise ValueError(f"{files} sets nothing of {function.__name__}: name a file that does: {example}") from error
    return bound


def run_app(run: Callable[[list[str]], Any], resume: str) -> None:
    """Runs absl's `app.run` for a command line with gin settings; Ctrl-C and SIGTERM print one line and end it."""
    with interrupts.told(resume):
        app.run(run, flags_parser=_parse_flags)


def _parse_flags(args: Sequence[str]) -> list[str]:
    arguments.print_version(args)
    try:
        rest: list[str] = flags.FLAGS(rewrite_arguments(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except flags.Error as error:
        sys.exit(f"error: {' '.join(str(error).split()).replace(' ?', '?')}; --help lists all flags")
    return rest


def settings(function: Callable[..., Any]) -> str:
    """Returns the help text that lists the arguments of `function` and the fields of dataclasses among their types."""
    hints, lines, inside = validate_types.hints(function), list[str](), dict[str, type]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name == "self":
            continue
        inside |= {kind.__name__: kind for kind in _kinds(hints.get(name)) if dataclasses.is_dataclass(kind)}
        if not dataclasses.is_dataclass(hints.get(name)):
            lines.append(_line(f"{function.__name__}.{name}", parameter.default))
    for title, kind in inside.items():
        fields = (field for field in dataclasses.fields(kind) if field.init)
        lines += [_line(f"{title}.{field.name}", _default(field)) for field in fields]
    return "\n\nSettings, each as --gin.NAME=VALUE (strings in quotes), with their defaults:\n\n" + "\n".join(lines)


def _kinds(hint: Any) -> Iterator[type]:
    """Yields every class that a type annotation contains."""
    if isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _kinds(inner)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _line(name: str, default: Any) -> str:
    needed = default is inspect.Parameter.empty
    return f"  {name:<36} {'(no default; most gin files set it)' if needed else shown(default)}"
