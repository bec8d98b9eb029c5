"""Every command that pages show: its program is there, its files are, and what it sets can be set.

Commands with gin files are read as the program would read them, up to where models are loaded; what is left open ("…")
is passed over, and placeholders that stand for a reader's own files are not looked up.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import gin
import pytest

from speccascade_jax.runtime import cli, gin_flags
from speccascade_jax.runtime.paths import repository_root

ROOT = repository_root()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
OWN = ("my_ideas.gin", "my_rules.py")
"""Files that a reader writes."""


def commands(page: Path) -> list[str]:
    """The commands of a page, each in one line."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _FENCED.findall(text):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found += [line.split("     ")[0].partition(" #")[0].strip() for line in lines]
    found += _INLINE.findall(_FENCED.sub("", text))
    return [each for each in found if re.match(r"(env \S+ )?python -m experiments\.\w+", each)]


ALL = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)]


def test_there_are_some():
    assert len(ALL) > 60 and {"README.md", "docs/experiments.md", "docs/pods.md"} <= {page for page, _ in ALL}


@pytest.mark.parametrize(("page", "command"), ALL)
def test_its_program_and_its_files_are_there(page, command):
    name = re.search(r"experiments\.(\w+)", command)[1]
    assert name in cli.commands(), command
    for file in re.findall(r"--gin_file[= ](\S+\.gin)", command):
        assert file in OWN or (ROOT / file).is_file(), f"{page}: {file}"


DATED = re.compile(r"(EPYC|Xeon)[^\n]{0,60}20\d\d-\d\d-\d\d|20\d\d-\d\d-\d\d[^\n]{0,60}(EPYC|Xeon)")


@pytest.mark.parametrize("page", sorted({page for page, _ in ALL}))
def test_a_page_with_commands_says_when_and_where_they_ran(page):
    assert DATED.search((ROOT / page).read_text(encoding="utf-8")), f"{page} names no machine and day of its commands"


MAKES = {"make_acceptance_data": "heads.make_data.make", "make_selection_data": "selection.make_data.make"}
"""Programs -> their own `make`: each command imports one, and this process, by other tests, perhaps both."""


def _settings(command: str) -> tuple[list[str], list[str]] | None:
    """Gin files and bindings of a command that can be read as it stands."""
    if any(each in command for each in ("…", "$", " -- ")) or "--gin_file" not in command:
        return None
    words = shlex.split(command)
    files = [word.partition("=")[2] for word in words if word.startswith("--gin_file=")]
    own = next((making for name, making in MAKES.items() if f"experiments.{name} " in command), "make")
    told = [re.sub(r"^--gin\.make\.", f"--gin.{own}.", word) for word in words]
    bindings = [word.removeprefix("--gin.").replace("=", " = ", 1) for word in told if word.startswith("--gin.")]
    return None if set(files) & set(OWN) else (files, bindings)


READ = [(page, command) for page, command in ALL if _settings(command)]


@pytest.mark.parametrize(("page", "command"), READ)
def test_what_it_sets_can_be_set(page, command):
    files, bindings = _settings(command)
    gin.clear_config()
    try:
        gin_flags.parse_gin([str(ROOT / file) for file in files], bindings)
    finally:
        gin.clear_config()
