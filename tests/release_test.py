"""Tests of releasing: version, changelog, citation and tag agree, and the workflow publishes what it has tried."""

import collections
import re
import runpy
import tomllib

import pytest
import yaml

import speccascade_jax as sc
from speccascade_jax.runtime.paths import repository_root

ROOT = repository_root()
NOTES = runpy.run_path(str(ROOT / ".ci" / "release.py"))["notes"]
WORKFLOWS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


@pytest.fixture
def clone(tmp_path):
    """Returns a folder with the four facts of a release."""
    files = {
        "speccascade_jax/__init__.py": '"""Text."""\n__version__ = "1.2.0"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.0\ndate-released: 2030-01-02\n",
        "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.0] - 2030-01-02\n### Breaking\n- a\n\n## [1.1.0]\n- b\n",
    }
    (tmp_path / "speccascade_jax").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_version_of_this_clone_has_a_section_that_begins_with_what_breaks():
    notes = NOTES(f"v{sc.__version__}")
    assert notes.startswith("### Breaking\n") and "\n## " not in notes
    unreleased = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n## [")[2]
    assert unreleased.startswith("Unreleased]\n")


def test_the_notes_are_the_section_of_the_tag_alone(clone):
    assert NOTES("v1.2.0", clone) == "### Breaking\n- a"


@pytest.mark.parametrize(("file", "old", "new", "message"), [
    ("CITATION.cff", "\nversion: 1.2.0", "\nversion: 1.1.0", "the tag is v1.2.0, but the package has version 1.2.0"),
    ("speccascade_jax/__init__.py", "1.2.0", "1.3.0", "but the package has version 1.3.0"),
    ("CHANGELOG.md", "[1.2.0]", "[1.2.1]", "CHANGELOG.md has no section '## [1.2.0] - 2030-01-02'"),
    ("CHANGELOG.md", "2030-01-02", "2030-01-03", "CHANGELOG.md has no section"),
    ("CHANGELOG.md", "### Breaking\n- a\n", "", "the section 1.2.0 of CHANGELOG.md is empty"),
])  # fmt: skip
def test_a_release_whose_parts_disagree_is_refused(clone, file, old, new, message):
    text = (clone / file).read_text("utf-8")
    assert old in text
    (clone / file).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        NOTES("v1.2.0", clone)


def test_a_tag_is_tried_then_published_then_announced():
    workflow = yaml.safe_load(WORKFLOWS["release"])
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert (jobs["publish"]["needs"], jobs["announce"]["needs"]) == ("build", "publish")
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    parts = (".ci/release.py", "pip install build twine", "-m build", "twine check --strict", "install dist/*.whl")
    places = [next(n for n, command in enumerate(commands) if part in command) for part in parts]
    assert places == sorted(places) and "speccascade sweep" in commands[-1]


def test_only_the_publishing_job_may_ask_pypi_for_a_token():
    workflow = yaml.safe_load(WORKFLOWS["release"])
    granted = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    assert workflow["permissions"] == {"contents": "read"}
    assert granted == {"build": {}, "publish": {"id-token": "write"}, "announce": {"contents": "write"}}
    assert workflow["jobs"]["publish"]["environment"] == "pypi"
    assert "password" not in WORKFLOWS["release"] and "secrets." not in WORKFLOWS["release"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_to_a_major_version(name):
    uses = re.findall(r"uses: (\S+)", WORKFLOWS[name])
    assert uses and all(re.search(r"@(release/)?v\d+$", action) for action in uses)


def test_each_marker_of_the_tests_is_declared_once():
    """A marker's second line hides the first one in pytest's list."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    declared = collections.Counter(line.partition(":")[0] for line in options["markers"])
    assert declared and set(declared.values()) == {1}, declared
