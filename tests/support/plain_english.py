"""Measures of the language of code, and every place that breaks the rules: `python -m tests.support.plain_english`.

Three counts per room of the package: vague identifiers among the assigned names, docstrings with an opening that no
English docstring has, and comment lines per code line. `make lint` runs it.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
VAGUE = frozenset({
    "found", "each", "own", "told", "given", "one", "at", "held", "made", "which", "left", "there", "those", "them",
    "this", "that", "it", "beside", "behind", "whose", "what", "where", "these", "both", "another",
    "such", "thing", "things", "stuff",
})  # fmt: skip
"""Identifiers that name nothing: a reader has to look up their meaning."""
OPENINGS = frozenset({"What", "Of", "As", "Those", "Whose", "Where", "How", "Which", "That", "These"})
"""Words that no docstring begins with: a function's begins with a verb, a class's or module's with a noun."""
MOST_VAGUE = 0.005
"""The largest share of vague identifiers among a folder's assigned names."""
COMMENTED = {"core": 0.08, "drafters": 0.08, "engine": 0.08, "models": 0.08}
"""Least number of comment lines per code line, by room, because the code alone does not show these rooms'
invariants."""


@dataclass
class Reading:
    """The counts of one folder.

    Attributes:
        names: assigned identifiers; vague: `path:line name` of those that name nothing.
        openings: `path:line opening words` of docstrings that begin with a word of `OPENINGS`.
        code, comments: lines.
    """

    names: int = 0
    code: int = 0
    comments: int = 0
    vague: list[str] = field(default_factory=list)
    openings: list[str] = field(default_factory=list)

    @property
    def vague_share(self) -> float:
        return len(self.vague) / max(self.names, 1)

    @property
    def comment_share(self) -> float:
        return self.comments / max(self.code, 1)


def read(path: Path, reading: Reading) -> None:
    """Adds one file's counts to a reading."""
    text = path.read_text()
    tree = ast.parse(text)
    place = path.relative_to(ROOT).as_posix()
    for name, line in assigned_names(tree):
        reading.names += 1
        if name in VAGUE:
            reading.vague.append(f"{place}:{line} {name}")
    for line, docstring in docstrings(tree):
        if docstring.split(maxsplit=1)[:1] and docstring.split(maxsplit=1)[0].strip(",.:") in OPENINGS:
            reading.openings.append(f"{place}:{line} {' '.join(docstring.split()[:6])} …")
    comments, code = count_lines(text, tree)
    reading.comments += comments
    reading.code += code


def assigned_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields every name that the code binds to a value, with its line: variables, arguments, fields, loop variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of modules, classes and functions, and the strings that document a name above them."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for number, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            documents = number == 0 or isinstance(body[number - 1], ast.Assign | ast.AnnAssign)
            if documents and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def count_lines(text: str, tree: ast.AST) -> tuple[int, int]:
    """Returns how many lines hold comments, and how many hold code (docstrings and blank lines aside).

    A comment for a tool (`noqa`, `fmt`, `type:`) says nothing to a reader and is not counted.
    """
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code, comments = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.lstrip("# ").startswith(("noqa", "fmt", "type:")):
                comments.add(token.start[0])
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                code -= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return len(comments), len(code)


def readings() -> dict[str, Reading]:
    """Returns the counts of every room of the package, and of the other folders with code."""
    found_readings: dict[str, Reading] = {}
    for folder in ("speccascade_jax", "tests", "benchmarks", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            room = parts[1] if folder == "speccascade_jax" and len(parts) > 2 else folder
            read(path, found_readings.setdefault(room, Reading()))
    return found_readings


def complaints(rooms: dict[str, Reading]) -> list[str]:
    """Returns one line for every rule that a room breaks."""
    lines = []
    for room, reading in rooms.items():
        if reading.vague_share > MOST_VAGUE:
            lines.append(f"{room}: {len(reading.vague)} of {reading.names} identifiers are vague ({top(reading)})")
        lines += [f"{place}: open with a verb (functions) or a noun" for place in reading.openings]
        if reading.comment_share < (least := COMMENTED.get(room, 0.0)):
            lines.append(
                f"{room}: {reading.comment_share:.3f} comment lines per code line, at least {least} are wanted"
            )
    return lines


def top(reading: Reading) -> str:
    """Returns the most frequent vague identifiers of a reading, for a message."""
    counts = Counter(place.rsplit(" ", 1)[1] for place in reading.vague)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(5))


def main() -> None:
    """Prints the counts, and with `--list` every place; exits with 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="rooms or folders to read (default: all)")
    parser.add_argument("--list", action="store_true", help="print every vague identifier and odd opening")
    arguments = parser.parse_args()
    rooms = {name: reading for name, reading in readings().items() if name in arguments.rooms or not arguments.rooms}
    print(f"{'room':<16} {'vague':>7} {'openings':>9} {'comments/code':>14}")
    for name, reading in rooms.items():
        print(f"{name:<16} {reading.vague_share:>7.1%} {len(reading.openings):>9} {reading.comment_share:>14.3f}")
        if arguments.list:
            print("\n".join(f"  {place}" for place in (*reading.vague, *reading.openings)))
    if lines := complaints(rooms):
        print("\n".join(lines[:50]), f"\n{len(lines)} complaints; --list ROOM shows every place", sep="")
        sys.exit(1)


if __name__ == "__main__":
    main()
