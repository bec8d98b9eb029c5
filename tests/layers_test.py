"""Tests of the layering: an import goes to a row above only, and no module imports itself indirectly.

See docs/architecture.md.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import speccascade_jax

PACKAGE = Path(speccascade_jax.__file__).parent
ROWS = (
    ("core",),
    ("storage",),
    ("runtime",),
    ("rules", "models", "metrics"),
    ("stopping", "data", "checkpoints", "results"),
    ("engine",),
    ("drafters", "pairs"),
    ("methods",),
    ("api", "extend", "streaming"),
    ("evaluation",),
    ("training",),
    ("hierarchy", "selection"),
    ("preflight",),
)
LATE = {"llvmlite", "matplotlib", "orbax", "ray", "rouge_score", "scipy", "seqio", "tensorflow", "tensorflow_datasets"}
LATE |= {"datasets", "huggingface_hub", "jinja2", "pyarrow", "tensorboardX", "tensorstore", "tokenizers"}
"""Packages that may be imported inside a function: slow to load, or an extra. So may our modules that import them."""
LATE_ROOMS = ("results/report/figures", "runtime/products", "data/tasks/seqio_registry")


def imports(path):
    """Yields every import as `(our module or another package's top-level name, top, late or typing)`."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    typing = {id(node) for block in typed for node in ast.walk(block)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [found(f"{node.module}.{alias.name}") or node.module for alias in node.names]
        for name in names:
            yield name, "top" if id(node) in top else "typing" if id(node) in typing else "late"


def found(name):
    """Returns the name if it is a module of ours."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return name if name.startswith("speccascade_jax") and (path.is_dir() or path.with_suffix(".py").is_file()) else None


@functools.cache
def ours():
    """Returns every module of the package with its room and its imports."""
    modules = ((path, path.relative_to(PACKAGE).with_suffix("")) for path in sorted(PACKAGE.rglob("*.py")))
    return [(path, inside, list(imports(path))) for path, inside in modules if inside.parts != ("__init__",)]


def test_modules_import_only_from_rows_above():
    place = {room: number for number, row in enumerate(ROWS) for room in row}
    wrong = []
    for _, inside, imported in ours():
        room = inside.parts[0]
        for name, _ in imported:
            parts = name.split(".")
            if parts[0] == "speccascade_jax" and len(parts) > 1 and parts[1] != room and place[parts[1]] >= place[room]:
                wrong.append(f"{inside} imports {name}")
    assert not wrong
    assert {inside.parts[0] for _, inside, _ in ours()} == set(place), "a room without a row, or a row without a room"


def test_there_are_no_circular_imports():
    graph = {}
    for _, inside, imported in ours():
        name = ".".join(("speccascade_jax", *inside.parts)).removesuffix(".__init__")
        graph[name] = {target for target, how in imported if target.startswith("speccascade_jax") and target != name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the cycle


def test_late_imports_are_heavy_and_optional():
    for path, inside, imported in ours():
        for name, how in imported:
            late_room = name.removeprefix("speccascade_jax.").replace(".", "/").startswith(LATE_ROOMS)
            late = how == "late" and (name.split(".")[0] in LATE or late_room)
            assert how == "top" or late, (inside, name, how, path)


def test_the_root_holds_only_the_public_functions():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "api.py", "extend.py", "streaming.py"}


LONGEST = 40
"""The most lines of a function's body, docstring aside; most have 5 to 25."""


def test_functions_stay_short():
    long = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                long += [f"{path}: {node.name}"] if body and body[-1].end_lineno - body[0].lineno >= LONGEST else []
    assert not long


def test_there_is_one_loop_over_rounds():
    """The others loop over a block's tokens or its ends, a tree's levels, a cache's gap, a width, and roots."""
    loops = [path for path in PACKAGE.rglob("*.py") if "while_loop(" in path.read_text()]
    assert {path.relative_to(PACKAGE).as_posix() for path in loops} == {
        "engine/loop.py", "drafters/model.py", "models/teacher_forcing.py", "engine/scoring.py", "rules/laws.py",
        "rules/block_wise.py", "rules/branching.py",
    }  # fmt: skip


@pytest.mark.parametrize("room", ["metrics", "results"])
def test_rooms_that_need_no_jax_load_none(room):
    modules = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in (PACKAGE / room).rglob("*.py")]
    code = f"import sys\nfor m in {modules}: __import__(m)\nsys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
