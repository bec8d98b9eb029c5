"""Tests that every public name has an example, and that every example runs and prints its stated output."""

import ast
import doctest
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import speccascade_jax as sc
from speccascade_jax import extend

PACKAGE = Path(sc.__file__).parent
PUBLIC = {name: owner for owner in (extend, sc) for name in owner.__all__}
"""Public name -> the module that a user takes it from, with the extension API after the package itself."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def documented(tree: ast.AST, place: str = "") -> Iterator[tuple[str, ast.Expr]]:
    """Yields the docstrings below a node, with their places in the module: "", "Class", "Class.method", "TABLE".

    A table is documented by the string after its assignment, which Python itself does not keep.
    """
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            before = tree.body[number - 1] if number else None
            target = getattr(before, "target", None) or getattr(before, "targets", [None])[0]
            if number == 0 or isinstance(target, ast.Name):
                yield place if number == 0 else f"{place}.{target.id}".lstrip("."), node
        elif isinstance(node, DOCUMENTED):
            yield from documented(node, f"{place}.{node.name}".lstrip("."))


@functools.cache
def examples() -> dict[tuple[str, str], doctest.DocTest]:
    """Returns all docstrings of the package with examples, by module and place; nothing is imported.

    An example sees no name of its module: it runs as a reader would paste it.
    """
    parser, tests = doctest.DocTestParser(), {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>> " not in text:
            continue
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for place, node in documented(ast.parse(text)):
            docstring, name = inspect.cleandoc(node.value.value), f"{module}.{place}".rstrip(".")
            if ">>> " in docstring:
                test = parser.get_doctest(docstring, {"__name__": "__main__"}, name, str(path), node.lineno - 1)
                tests[module, place] = test
    return tests


def home(name: str) -> tuple[str, str]:
    """Returns the module that defines a public name, and the name's place in it."""
    value = getattr(PUBLIC[name], name)
    if inspect.ismodule(value):
        return value.__name__, ""
    if hasattr(value, "__qualname__"):
        return value.__module__, value.__qualname__
    return f"speccascade_jax.{sc._NAMES[name]}", name  # a table has no `__name__`


def belongs(place: str, owner: str) -> bool:
    """Returns whether a docstring is that of a name, or of one of its members; a module's members are its functions."""
    return not owner or place == owner or place.startswith(f"{owner}.")


def others() -> list[tuple[str, str]]:
    """Returns the places of all examples that belong to no public name."""
    homes = [home(name) for name in PUBLIC]
    return [
        (module, place)
        for module, place in examples()
        if not any(module == owner and belongs(place, inside) for owner, inside in homes)
    ]


def run(test: doctest.DocTest) -> None:
    """Runs a docstring's examples, and fails with what they printed instead."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append, clear_globs=False)
    assert not runner.failures, f"{test.name}: an example does not print what it says\n{''.join(report)}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Lets examples write files by short names."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(name):
    module, place = home(name)
    called = f"{module}.{place}".rstrip(".")
    assert (module, place) in examples(), (
        f"{PUBLIC[name].__name__}.{name} has no example: end the docstring of {called} with 'Examples:' and a few "
        f"lines of '>>> '"
    )
    section = examples()[module, place].docstring.partition("\nExamples:\n")[2]
    assert section.startswith("    >>> ") and not re.search(r"^\S", section, re.MULTILINE), (
        f"{called}: put its examples last, under 'Examples:'; the docs' site shows only that heading's lines as code"
    )
    for (holder, inside), test in examples().items():
        if holder == module and belongs(inside, place):
            run(test)


def test_a_plug_in_imports_what_it_makes_from_the_extension_api():
    """Checks the results and fields of public types that are types of the package themselves."""
    members = (extend.TokenWise.__call__, "return"), (extend.Draft, "logs"), (extend.Controls, "draft")
    for owner, member in members:
        hint = typing.get_type_hints(owner)[member]
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if kind.__module__.startswith("speccascade_jax")]
        assert kinds and all(getattr(extend, kind.__name__, None) is kind for kind in kinds), member
    assert isinstance(extend.make_controls(2, alpha=0.5).target, extend.Sampling)


@pytest.mark.parametrize("place", others(), ids=".".join)
def test_every_other_example_runs(place):
    run(examples()[place])
