"""The short flags of a command: shorthands of gin bindings, and the sizes `--quick` and `--full` of a recipe."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gin
from absl import flags

from speccascade_jax.runtime import recipe_header, shorthands

SIZES: Mapping[str, str] = {"quick": "configs/sizes/quick.gin", "full": "configs/sizes/published.gin"}
"""Flags that set the numbers of examples, and the gin files with these numbers, which gin reads last."""
POLICY_SIZES = {"quick": "configs/sizes/quick_policy.gin", "full": "configs/sizes/published_policy.gin"}
"""The same for `experiments.train_policy`: its data determine the examples, so the flags set the number of policies."""
_SIZED = {
    "quick": "a first look: 16 examples, 8 of them timed, or few policies",
    "full": "the published size: 500 examples, all of them timed in 3 trials, or all policies",
}
_FIRST_LOOK = {"Evaluation.task": "tiny_translation", "ModelPair.name": "tatoeba_en_de"}
"""The task and the pair that --quick measures if the gin files leave them open."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The short flags that a command offers, and what they add to its gin files and bindings.

    Attributes:
        function: the function that gin binds.
        sizes: the gin files of `--quick` and `--full`; empty: the command has no such flags.
        default: the gin file of a command line that has short flags but names no file; empty: it must name one.
        without: shorthands that the command uses for something else.
        about: further words for the name of the results.
    """

    function: Callable[..., Any]
    sizes: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    without: Sequence[str] = ()
    about: Sequence[str] = ()

    def define(self) -> None:
        """Declares the flags."""
        for flag in self._shorthands():
            define = flags.DEFINE_multi_string if flag in shorthands.SEVERAL else flags.DEFINE_string
            define(flag, None, shorthands.SHORTHANDS[flag].meaning, module_name=sys.argv[0])
        for size in self.sizes:
            flags.DEFINE_bool(size, False, _SIZED[size], module_name=sys.argv[0])

    def help_text(self) -> str:
        """Returns the lines of `--help` on these flags; empty without any."""
        meanings = {flag: shorthands.SHORTHANDS[flag].meaning for flag in self._shorthands()}
        lines = [f"    --{flag:<9}{meaning}" for flag, meaning in (meanings | self._sized()).items()]
        return "\n".join(["\nShort flags:\n", *lines]) if lines else ""

    def files(self, named: Sequence[str]) -> list[str]:
        """Returns the gin files to read: those of the command line, or the default one, and then that of the size.

        Raises:
            ValueError: both sizes are chosen.
        """
        size = self._size()
        if not (named or ((self._texts() or size) and self.default) or self.about):
            return []
        return [*(named or [self.default]), *filter(None, [self.sizes.get(size, "")])]

    def bindings(self, typed: Sequence[str], again: bool = False) -> list[str]:
        """Returns the gin bindings of the flags, after gin has read the files and the bindings `typed`.

        Args:
            typed: the other bindings of the command line.
            again: whether the command measures a stored record again, for which the results' place is not renamed.
        """
        texts, size = self._texts(), self._size()
        lines = shorthands.bindings(self.function, texts, typed)
        if size == "quick":
            lines += _first_look([*lines, *typed])
        if not ({"output"} & {*texts, *self.without} or again):
            about = [*self.about, *shorthands.words(texts), *filter(None, [size])]
            lines += _remembered(shorthands.renamed(self.function, about, [*lines, *typed]))
        return lines

    def _shorthands(self) -> list[str]:
        return [flag for flag in shorthands.arguments(self.function) if flag not in self.without]

    def _sized(self) -> dict[str, str]:
        return {size: _SIZED[size] for size in self.sizes}

    def _texts(self) -> dict[str, str]:
        """Returns the texts of the shorthands on the command line; a repeated one is one text."""
        values = {flag: flags.FLAGS[flag].value for flag in self._shorthands()}
        joined = {flag: ",".join(value) if isinstance(value, list) else value for flag, value in values.items()}
        return {flag: text for flag, text in joined.items() if text is not None}

    def _size(self) -> str:
        chosen = [size for size in self.sizes if flags.FLAGS[size].value]
        if len(chosen) > 1:
            raise ValueError("--quick and --full exclude each other: leave one of them out")
        return next(iter(chosen), "")


def _remembered(lines: Iterator[str]) -> Iterator[str]:
    """Yields bindings of results' places, and remembers the places, which the command prints after all checks."""
    for line in lines:
        recipe_header.remember_place(ast.literal_eval(line.partition(" = ")[2]))
        yield line


def _first_look(lines: Sequence[str]) -> Iterator[str]:
    """Yields bindings for the task and the pair that gin files leave open (`%gin.REQUIRED`)."""
    for name, value in _FIRST_LOOK.items():
        selector, _, parameter = name.partition(".")
        values = [v for (scope, s), v in gin.config._CONFIG.items() if s.rpartition(".")[2] == selector and not scope]
        open_values = [entry for entry in values if shorthands.is_required(entry.get(parameter))]
        if open_values and not any(shorthands.same(line, name) for line in lines):
            yield f"{name} = {value!r}"
