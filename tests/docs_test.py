"""The walkthroughs of the documentation run."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def executed_blocks(name):
    """The Python blocks of a page that are marked as executed here."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(r"<!-- executed by tests/docs_test.py -->\n```python\n(.*?)```", text, flags=re.DOTALL)


def test_extending_walkthrough_adds_a_rule_that_conforms(capsys):
    blocks = executed_blocks("extending.md")
    assert len(blocks) == 3
    definition = blocks[0].split("import speccascade_jax as sc\n")[1].strip()
    assert len([line for line in definition.splitlines() if line.strip()]) <= 10  # "ten lines" is a promise
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["out"].tokens.shape == (2, 12)
    assert capsys.readouterr().out.startswith("[[")


PAGES = [*DOCS.rglob("*.md"), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))]


def test_every_page_names_files_that_exist():
    root = DOCS.parent
    for page in PAGES:
        for path in re.findall(r"`([\w/]+\.(?:py|gin|md))`", page.read_text(encoding="utf-8")):
            assert (root / path).exists() or (root / "speccascade_jax" / path).exists(), f"{page.name} names {path}"


def test_no_number_is_still_to_be_measured():
    for page in PAGES:
        assert not re.search(r"\b[A-Z]+_(TIME|OUTPUT|TABLE)\b", page.read_text(encoding="utf-8")), page.name
