"""Check that a tag can be released, and print the changelog's section: python .ci/release.py v0.3.0 > notes.md."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """Returns the changelog's section of the version that a tag names.

    Raises:
        ValueError: the package or CITATION.cff has another version, or the changelog has no such section, an empty one,
            or another date than CITATION.cff.
    """
    version = _match(root / "speccascade_jax/__init__.py", r'^__version__ = "([^"\n]+)"', "__version__")
    fields = ("version", "date-released")
    cited, date = (_match(root / "CITATION.cff", rf"^{field}: ([^\n]+)", field) for field in fields)
    if not tag == f"v{version}" == f"v{cited}":
        raise ValueError(f"the tag is {tag}, but the package has version {version} and CITATION.cff {cited}")
    title = f"## [{version}] - {date}"
    text = _match(root / "CHANGELOG.md", rf"^{re.escape(title)}\n(.*?)(?=^## |\Z)", f"section {title!r}").strip()
    if not text:
        raise ValueError(f"the section {version} of CHANGELOG.md is empty: move the entries of Unreleased into it")
    return text


def _match(path: Path, pattern: str, noun: str) -> str:
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"{path.name} has no {noun}")
    return match[1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: give the tag: python .ci/release.py vX.Y.Z")
    try:
        print(notes(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
