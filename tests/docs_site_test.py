"""Tests of the documentation as a site without dead links, and of the notebook from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from speccascade_jax.runtime.paths import repository_root

pytestmark = pytest.mark.laws
ROOT = repository_root()


class Links(HTMLParser):
    """A page's links and the places that can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_no_link_is_dead(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html") if "files" not in path.parts}
    assert len(pages) > 30
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith(("//", "data:")) or path.name == "404.html":
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not to.exists():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids:
                dead.append(f"{path.relative_to(site)}: {link} (no such place)")
    assert dead == []


def test_the_notebook_and_all_pictures_have_pages(site):
    notebook, gallery = ((site / name).read_text() for name in ("afternoon.html", "gallery.html"))
    assert "load_pair" in notebook and "Das Wetter war kalt" in notebook and 'class="sc"' in notebook
    shown = {Path(link).name for link in Links(gallery).links}
    linked = "".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md"))
    pictures = {path.name for path in (ROOT / "docs" / "results").iterdir() if path.suffix in (".png", ".svg")}
    assert shown >= {name for name in pictures if f"({name})" in linked} and "configs/paper1_figure2.gin" in gallery


def test_the_reference_has_every_public_name(site):
    import speccascade_jax as sc

    page = (site / "api.html").read_text()
    # names of tables and types, which the reference does not document one by one
    tables = {"METHODS", "RULES", "BoundModel", "FakeLM", "checkpoints", "shipped_pairs"}
    missing = [name for name in sc.__all__ if name not in tables and f'.{name}"' not in page]
    assert missing == []


def test_docstrings_name_existing_sections(site):
    page = Links((site / "methods.html").read_text())
    numbers = {name.partition("-")[0] for name in page.ids if name[:1].isdigit()}
    assert {str(number) for number in range(1, 10)} <= numbers


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    needed = "pip install -e '.[docs]'"
    nbformat, nbclient = (pytest.importorskip(name, reason=needed) for name in ("nbformat", "nbclient"))
    book = nbformat.read(ROOT / "docs" / "afternoon.ipynb", as_version=4)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    done = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = "".join(out.get("text", "") for cell in done.cells for out in cell.get("outputs", []))
    assert "Das Wetter war kalt" in texts and "my_rules.FAVOURITE     0.9" in texts
    data = [out.get("data", {}) for cell in done.cells for out in cell.get("outputs", [])]
    html = [entry["text/html"] for entry in data if "text/html" in entry]
    assert any('class="sc"' in entry for entry in html)
    assert (tmp_path / "results" / "mine.html").is_file()
    if kept := os.environ.get("SPECCASCADE_KEEP_NOTEBOOK"):  # keeps the executed notebook, for reading or a commit
        nbformat.write(done, Path(kept))
