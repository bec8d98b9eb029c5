"""Shorthands of gin bindings: `--task=mine.csv` for `--gin.Evaluation.task="'mine.csv'"`, and four more.

The signature of the function that gin binds says which of them a command has. They become gin bindings after the gin
files are read, because a gin file may bind its pair in a scope, and names the store that a shorthand renames.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import gin

from speccascade_jax.core import validate_types


@dataclass(frozen=True)
class Shorthand:
    """A flag that sets gin parameters.

    Attributes:
        meaning: the flag's help.
        values: turns the flag's text into values by parameter: fields of the argument's class, or "" for the argument.
        fits: whether an argument of this name and type has the flag.
    """

    meaning: str
    values: Callable[[str], dict[str, Any]]
    fits: Callable[[str, Any], bool]


def _models(text: str) -> dict[str, Any]:
    """Returns the fields of a pair that a name or folder alone describes.

    Paths of a gin file's models are reset, because beside them a name would only be a label; `others`, dtypes and mesh
    of the gin file stay.
    """
    return {"name": text, "target": None, "draft": None, "vocabulary": None}


def names(text: str) -> tuple[str, ...]:
    """Returns the names in a text with commas between them.

    Raises:
        ValueError: a name is empty.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError(f"--methods={text}: a name is empty; write --methods=spec_decode,token_v3")
    return parts


def curves(text: str) -> dict[str, tuple[float, ...]]:
    """Returns the α's of every curve in a text such as `token_v3:0.5,0.8,chow:0.3`.

    Raises:
        ValueError: a curve has no name, occurs twice, or has something else than finite numbers.
    """
    alphas, curve = dict[str, tuple[float, ...]](), ""
    for word in text.split(","):
        # the last colon, because a curve's name may contain one: specdecpp:head
        name, colon, number = (part.strip() for part in word.rpartition(":"))
        if colon and name in alphas:
            raise ValueError(f"--alphas={text}: {name} occurs twice: list its numbers after one name")
        curve = name if colon else curve
        value = _number(number)
        if not curve or value is None:
            wrong = f"{number!r} is not a finite number" if curve else f"{word!r} follows no name"
            raise ValueError(f"--alphas={text}: {wrong}; write --alphas=token_v3:0.5,0.8 or token_v3:0.5,0.8,chow:0.3")
        alphas[curve] = (*alphas.get(curve, ()), value)
    return alphas


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _class(name: str) -> Callable[[str, Any], bool]:
    return lambda argument, hint: getattr(hint, "__name__", "") == name


def _argument(names: Sequence[str], kind: type) -> Callable[[str, Any], bool]:
    """Returns the check of an argument's name and type; `survey` has another `alphas`, a number."""
    return lambda argument, hint: argument in names and any(_is(part, kind) for part in (hint, *typing.get_args(hint)))


def _is(hint: Any, kind: type) -> bool:
    return hint is kind or typing.get_origin(hint) is kind


PLACES = ("output", "folder", "run_dir")
"""Arguments that name where a command writes."""
SHORTHANDS: Mapping[str, Shorthand] = {
    "task": Shorthand(
        "a task's name, or your file: --task=mine.csv", lambda text: {"task": text}, _class("Evaluation")
    ),
    "pair": Shorthand(
        "a shipped pair's name, or a pair's folder, instead of the gin file's models", _models, _class("ModelPair")
    ),
    "methods": Shorthand(
        "names of methods and rules, also your own: --methods=spec_decode,my_rules.FAVOURITE",
        lambda text: {"": names(text)},
        _argument(["methods"], Sequence),
    ),
    "alphas": Shorthand(
        "α's of curves, the others have their usual ones: --alphas=token_v3:0.5,0.8,chow:0.3",
        lambda text: {"": curves(text)},
        _argument(["alphas"], Mapping),
    ),
    "output": Shorthand("where the results go", lambda text: {"": text}, _argument(PLACES, str)),
}
SEVERAL = ("methods", "alphas")
"""Shorthands that may be repeated."""


def arguments(function: Callable[..., Any]) -> dict[str, tuple[str, Any]]:
    """Returns the argument of `function`, and its type, that each of its shorthands sets, by flag."""
    hints = validate_types.hints(function)
    typed = [(name, hints.get(name)) for name in inspect.signature(function).parameters]
    fitting = {flag: [entry for entry in typed if row.fits(*entry)] for flag, row in SHORTHANDS.items()}
    return {flag: entries[0] for flag, entries in fitting.items() if entries}


def check(texts: Mapping[str, str]) -> None:
    """Raises ValueError for a shorthand whose text has no meaning."""
    for flag, text in texts.items():
        if not text.strip():
            raise ValueError(f"--{flag} is empty: give it a value, or leave it out")
        SHORTHANDS[flag].values(text)


def bindings(function: Callable[..., Any], texts: Mapping[str, str], typed: Sequence[str]) -> list[str]:
    """Returns the gin bindings of shorthands.

    Args:
        function: the function that gin binds.
        texts: the texts of the flags on the command line, by name.
        typed: the other bindings of the command line, "NAME = VALUE".

    Raises:
        ValueError: a text has no meaning, or the command line also has the parameter as `--gin.NAME`.
    """
    check(texts)
    lines = list[str]()
    for flag, (argument, hint) in arguments(function).items():
        for field, value in SHORTHANDS[flag].values(texts[flag].strip()).items() if flag in texts else ():
            scope = _scope(function, argument) if field else ""
            name = f"{scope}{hint.__name__}.{field}" if field else f"{_selector(function)}.{argument}"
            if twice := next((line for line in typed if same(line, name)), None):
                written = f"--{flag}={texts[flag]} and --gin.{twice.partition('=')[0].strip()}"
                raise ValueError(f"{written} set the same parameter: leave one of them out")
            lines.append(f"{name} = {value!r}")
            lines += _unneeded(hint, field, scope) if field else ()
    return lines


def _unneeded(owner: type, field: str, scope: str) -> list[str]:
    """Returns bindings of the macros that a field no longer uses, because gin demands a value of all macros."""
    value, macros = bound(owner, field, scope.rstrip("/"))
    return [f"{macro} = None" for macro in macros if is_required(value)]


def same(binding: str, name: str) -> bool:
    """Returns whether a binding sets the parameter of this name; modules and scopes do not count."""
    short = [text.partition("=")[0].strip().rpartition("/")[2].split(".")[-2:] for text in (binding, name)]
    return short[0] == short[1]


def _selector(function: Callable[..., Any]) -> str:
    """Returns gin's full name of a function, as two modules may have a `make`; its own if no gin file mentions it."""
    entries = (gin.config._REGISTRY[selector] for _, selector in gin.config._CONFIG)
    return next((entry.selector for entry in entries if entry.wrapped is function), function.__name__)


def _scope(function: Callable[..., Any], argument: str) -> str:
    """Returns the scope in which the gin files bind an argument's class, such as `selected/`; empty if they do not."""
    reference, _ = bound(function, argument)
    scope = reference.config_key[0] if isinstance(reference, gin.config.ConfigurableReference) else ""
    return f"{scope}/" if scope else ""


def bound(function: Callable[..., Any], argument: str, scope: str = "") -> tuple[Any, list[str]]:
    """Returns the value that gin has for an argument, and the macros on the way to it; else the default."""
    default = inspect.signature(function).parameters[argument].default
    value = gin.config._CONFIG.get((scope, _selector(function)), {}).get(argument, default)
    macros = list[str]()
    while isinstance(value, gin.config.ConfigurableReference) and value.configurable.selector == "gin.macro":
        macros.append(value.config_key[0])
        value = gin.config._CONFIG.get(value.config_key, {}).get("value")
    return value, macros


def is_required(value: Any) -> bool:
    """Returns whether a value that gin has is `%gin.REQUIRED`, which a gin file leaves open."""
    constant = isinstance(value, gin.config.ConfigurableReference) and value.configurable.selector == "gin.constant"
    return constant and value.scoped_configurable_fn() is gin.REQUIRED


def renamed(function: Callable[..., Any], words: Sequence[str], typed: Sequence[str]) -> Iterator[str]:
    """Yields the binding of a place beside the gin files' own, `results/a_mine_quick.jsonl` for `results/a.jsonl`.

    So no table mixes a recipe's points with those of other settings. A place on the command line stays.

    Args:
        function: the function that gin binds.
        words: what is special about the command, for the name.
        typed: the bindings of the command line, "NAME = VALUE".
    """
    for argument in [name for name in inspect.signature(function).parameters if name in PLACES]:
        place, macros = bound(function, argument)
        name = f"{_selector(function)}.{argument}"
        chosen = any(same(line, name) or line.partition("=")[0].strip() in macros for line in typed)
        if words and not chosen and place and isinstance(place, str):
            stem, suffix = os.path.splitext(place.rstrip("/"))
            yield f"{name} = {'_'.join([stem, *words]) + suffix!r}"


def words(texts: Mapping[str, str]) -> list[str]:
    """Returns what shorthands say about a command, as words of a file's name."""
    chosen = [_stem(texts[flag]) for flag in ("task", "pair") if flag in texts]
    return chosen + ["selected"] * any(flag in texts for flag in SEVERAL)


def _stem(text: str) -> str:
    name = re.sub(r"\.(csv|tsv|jsonl)(\.gz)?$", "", PurePath(text.strip()).name)
    return re.sub(r"[^\w-]+", "_", name)
