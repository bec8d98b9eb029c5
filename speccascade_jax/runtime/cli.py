"""The command-line program `speccascade`, which runs experiments by name, from a clone or from an installed wheel."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax.core.names import hint
from speccascade_jax.runtime import progress
from speccascade_jax.runtime.arguments import print_version
from speccascade_jax.runtime.paths import share_root


def commands() -> dict[str, Path]:
    """Returns a dictionary that maps the name of each experiment to its Python file."""
    folder = share_root() / "experiments"
    paths = {path.stem: path for path in folder.glob("*.py") if not path.stem.startswith("_")}
    paths |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    return dict(sorted(paths.items()))


def about(path: Path) -> str:
    """Returns the first paragraph of the docstring in a Python file, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def listing() -> str:
    """Returns the text that `speccascade --help` prints: the usage, and every command with a short description."""
    lines = [f"  {name:<22} {about(path)}" for name, path in commands().items()]
    begin = "speccascade COMMAND [arguments]; speccascade COMMAND --help describes a command. Gin files such as "
    begin += f"configs/quickstart.gin are looked up in the current folder, then in {share_root()}.\n"
    return "\n".join([begin, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the experiment that the first argument names, as `python -m experiments.NAME` does in a clone."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = commands()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(listing())
        return
    print_version(arguments[:1])
    name, *rest = arguments
    if name not in known:
        sys.exit(f"error: unknown command {name!r}: {hint(name, known)}speccascade --help lists all commands")
    # python -m also adds the current folder, so that users can import their own modules
    sys.path.insert(0, os.getcwd())
    sys.path.append(str(share_root()))
    sys.argv = [str(known[name]), *rest]
    with progress.shown():
        if known[name].stem == "__main__":
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(known[name]), run_name="__main__")
