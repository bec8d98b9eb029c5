"""For the site: pages that lie beside docs/, and links that lead out of it to files of the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Files of the root -> what they are called in the site."""
FOLDERS = {"Results": "results", "Decisions": "adr"}
"""Entries of the navigation -> folders of docs/ whose pages they list."""
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_config(config: Any) -> Any:
    """Lists every page of a folder in the navigation, in the order of their names, the overview first."""
    for entry in config.nav:
        for title, folder in FOLDERS.items():
            if title in entry:
                names = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
                names.sort(key=lambda name: name != "README.md")
                entry[title] = [f"{folder}/{name}" for name in names]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, shown in PAGES.items():
        files.append(File.generated(config, shown, content=_relinked((ROOT / name).read_text(), ROOT, Path(shown))))
    for path in sorted(_asked_for()):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    return _relinked(markdown, ROOT / "docs" / Path(page.file.src_uri).parent, Path(page.file.src_uri))


def _relinked(text: str, folder: Path, page: Path) -> str:
    """A page with its links to files of the repository as the site has them."""

    def replaced(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        place = _place(link, folder)
        return found.group(0) if place is None else before + os.path.relpath(place, page.parent) + after

    return _LINK.sub(replaced, text)


def _place(link: str, folder: Path) -> str | None:
    """Where in the site a link's file lies; `None` if it is no file of the repository."""
    path = Path(os.path.normpath(folder / link))
    if "://" in link or not path.is_relative_to(ROOT) or not path.exists():
        return None
    inside = path.relative_to(ROOT).as_posix()
    if inside in PAGES:
        return PAGES[inside]
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    return f"files/{_file(path).relative_to(ROOT).as_posix()}"


def _file(path: Path) -> Path:
    """A folder is shown by its README, or by its first file."""
    if path.is_file():
        return path
    readme = path / "README.md"
    return readme if readme.is_file() else sorted(each for each in path.rglob("*") if each.is_file())[0]


def _asked_for() -> set[str]:
    """The files of the repository, outside docs/, that pages link to."""
    found = set()
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]
    for page in pages:
        for link in _LINK.findall(page.read_text()):
            place = _place(link[1], page.parent)
            if place and place.startswith("files/"):
                found.add(place.removeprefix("files/"))
    return found
