"""For the site: pages that lie beside docs/, the notebook as a page, and links that lead out of it to files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Files of the root -> what they are called in the site."""
FOLDERS = {"Tables": "results", "Decisions": "adr"}
"""Entries of the navigation -> folders of docs/ whose pages they list."""
NOTEBOOK = "afternoon.ipynb"
"""The notebook of docs/, which the site also has as a page."""
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")

_PICTURE = re.compile(r"!\[([^\]]*)\]\(([\w.-]+\.(?:png|svg))\)")

_COMMAND = re.compile(r"^(?:\.venv/bin/)?(python -m (?:.*\\\n)*.*)$|`(python -m [^`]+)`", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Lists every page of a folder in the navigation, in the order of their names, the overview first."""
    config.nav = [_entry(entry) for entry in config.nav]
    return config


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of the navigation, with the pages of its folder, or of those of its entries."""
    ((title, place),) = entry.items()
    if isinstance(place, list):
        return {title: [_entry(inner) for inner in place]}
    if (folder := FOLDERS.get(title)) is None:
        return entry
    names = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
    names.sort(key=lambda name: name != "README.md")
    return {title: [f"{folder}/{name}" for name in names]}


def on_files(files: Files, config: Any) -> Files:
    for name, shown in PAGES.items():
        files.append(File.generated(config, shown, content=_relinked((ROOT / name).read_text(), ROOT, Path(shown))))
    book = json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, Path(NOTEBOOK).stem + ".md", content="\n\n".join(_cells(book))))
    files.append(File.generated(config, "gallery.md", content="\n\n".join(_gallery())))
    for path in sorted(_asked_for()):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def _cells(book: Mapping[str, Any]) -> Iterator[str]:
    """Yields the Markdown of a notebook's cells and of their stored outputs; nbconvert would bring 30 packages."""
    for cell in book["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        yield from map(_output, cell.get("outputs", ()))


def _output(output: Mapping[str, Any]) -> str:
    """Returns the Markdown of an output: HTML if it has some, otherwise its text."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"```text\n{''.join(data.get('text/plain', output.get('text', ''))).rstrip()}\n```"


def _gallery() -> Iterator[str]:
    """Yields the Markdown of the gallery: every picture of a page of results, and the command above it on its page."""
    yield "# Gallery\n\nEvery picture of the [results](results/README.md), with the command above it on its page."
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        for picture in _PICTURE.finditer(text):
            yield f"## [{title}](results/{page.name})\n\n![{picture[1]}](results/{picture[2]})"
            if commands := _COMMAND.findall(text[: picture.start()]):
                yield f"```sh\n{''.join(commands[-1])}\n```"


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
