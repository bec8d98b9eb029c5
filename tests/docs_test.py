"""Tests that the documentation's walkthroughs run from a user's files, and that its commands can be read."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import gin
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation import experiment
from speccascade_jax.metrics import quality
from speccascade_jax.pairs import drafter_files
from speccascade_jax.runtime import cli, gin_flags
from speccascade_jax.runtime.paths import repository_root
from tests.support import conformance, tiny_pair

ROOT = repository_root()
DOCS = ROOT / "docs"
IDEAS, HEAD = "my_rules", "my_head"


def blocks(mark):
    """Returns the code blocks of docs/extending.md after a comment."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    return re.findall(rf"<!-- {re.escape(mark)} -->\n```\w*\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def ideas(tmp_path, monkeypatch):
    """Writes the page's files to a folder that Python finds, and imports one."""
    for name in (f"{IDEAS}.py", f"{IDEAS}.gin", f"{HEAD}.py"):
        (tmp_path / name).write_text("\n\n".join(blocks(f"file: {name}")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module(IDEAS)
    for name in (IDEAS, HEAD):
        sys.modules.pop(name, None)


def test_a_rule_takes_ten_lines_and_decodes(ideas, capsys):
    definition = blocks(f"file: {IDEAS}.py")[0].split("import speccascade_jax as sc\n")[1].strip()
    assert len([line for line in definition.splitlines() if line.strip()]) <= 10  # the page promises ten lines
    decoding, _ = blocks("executed by tests/docs_test.py")
    exec(decoding, namespace := {})
    assert namespace["out"].tokens.shape == (2, 12)
    assert capsys.readouterr().out.startswith("[[")


@pytest.mark.laws
def test_the_pages_check_of_the_rule_passes(ideas):
    exec(blocks("executed by tests/docs_test.py")[1], {})


UNTRAINED = {"mix": (6, 3), "wi": (6, 6), "wo": (6, 3)}


@pytest.mark.laws
@pytest.mark.parametrize(("chosen", "most"), [
    ({"stop": "my_rules.Surprise", "stop_threshold": 0.5, "block_size": 4}, 1),
    ({"drafters": ("my_rules.repeats",)}, 1),
    ({"drafters": ("my_head.head",), "block_size": 3}, 0.95),
])  # fmt: skip
def test_the_pages_policy_and_drafters_keep_the_targets_distribution(ideas, chosen, most):
    """The head is untrained, on a tabular pair, whose states of every layer are its rows."""
    q_table, p_table = conformance.tables(3, seed=61)
    pair, draws = conformance.tabular_pair(q_table, p_table), np.random.default_rng(0)
    params = {name: draws.normal(size=shape).astype(np.float32) for name, shape in UNTRAINED.items()}
    drafter_files.save("my_head.msgpack", params, pair, layers=(0, 1))
    out = sc.decode(pair, [[0, 1, 0]] * 20_000, **chosen, temperature=1.0, max_new_tokens=6)
    assert 0.05 < out.stats["acceptance_rate"] < most
    law = conformance.law_by_rule(sc.RULES["spec_decode"], q_table, p_table, 0.0, 1.0, 1.0)
    assert conformance.sequence_p_value(out.tokens, law) > 1e-3


def test_the_pages_task_is_found_by_name(ideas):
    task = get_task("my_rules.SMALL_TALK")
    assert task is ideas.SMALL_TALK and len(task.load()) == 10
    examples = task.load()
    outputs = [task.postprocess(f"{example.reference}. ") for example in examples]
    assert quality.score(task.metrics, outputs, [example.reference for example in examples])[task.metrics[1]] == 100


@pytest.mark.laws
def test_the_pages_gin_file_sweeps_tabulates_and_plots_everything(ideas, tmp_path, capsys):
    """Runs the page's file on a very small pair, untimed."""
    small = {"points.ModelPair.name": str(tiny_pair.write(tmp_path)), "Evaluation.max_new_tokens": 8}
    bindings = [f"{name} = {value!r}" for name, value in (small | {"Evaluation.latency_examples": 0}).items()]
    gin.clear_config()
    gin_flags.parse_gin([f"{IDEAS}.gin"], bindings)
    gin.get_configurable(experiment.sweep)()
    gin.clear_config()
    records = [json.loads(line) for line in (tmp_path / "results/my_rules.jsonl").read_text().splitlines()]
    curves = {record["point"]["curve"] for record in records}
    assert curves == {
        "autoregressive", "autoregressive_draft", "spec_decode", "my_rules.FAVOURITE",
        "speculative[my_rules.Surprise]@0.3", "speculative[my_rules.Surprise]@0.7", "spec_decode[my_rules.repeats]",
    }  # fmt: skip
    said = capsys.readouterr().out
    for name in ("favourite", "SpecDecode [Surprise]", "SpecDecode [my_rules.repeats]"):
        assert name in said, name
    assert (tmp_path / "results/my_rules.png").read_bytes().startswith(b"\x89PNG")
    lossless = [r for r in records if r["point"]["lossless"] or r["point"]["method"] == "autoregressive"]
    # greedy decoding, so all lossless methods have the same quality
    assert len(lossless) == 5 and len({r["quality"]["value"] for r in lossless}) == 1


@pytest.mark.parametrize(("given", "said"), [
    ({"rule": "my_rules.favourit"}, "module 'my_rules' has no 'favourit'"),
    ({"rule": "my_idea.FAVOURITE"}, "there is no module 'my_idea'; its file must be in the folder that you start from"),
    ({"rule": "my_rules.favourite"}, "it must be a Rule"),
    ({"stop": "my_rules.Surprises", "stop_threshold": 0.1}, "module 'my_rules' has no 'Surprises'"),
    ({"drafters": ("my_rules.Repeats",)}, "it must be a function"),
    ({"stop": "my_rules.FAVOURITE", "stop_threshold": 0.1}, "stop policy 'my_rules.FAVOURITE' is not a policy"),
])  # fmt: skip
def test_errors_name_mistakes_in_settings(ideas, given, said):
    pair = conformance.tabular_pair(*conformance.tables(3, seed=61))
    with pytest.raises(ValueError, match=said):
        sc.decode(pair, [[0]], **given, max_new_tokens=3)


def test_an_error_in_a_users_file_is_raised_unchanged(tmp_path, monkeypatch):
    (tmp_path / "mistaken.py").write_text("import math\nRULE = math.no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="no_such_thing"):
        get_task("mistaken.RULE")


@pytest.mark.sample(0)
@pytest.mark.laws
def test_the_pages_head_trains_loads_and_keeps_the_targets_output(ideas, capsys):
    (code,) = blocks("trained by tests/docs_test.py")
    exec(code, {})
    same, rate = capsys.readouterr().out.split()
    assert same == "True" and float(rate) > 0.1
    with pytest.raises(ValueError, match="my_head.msgpack holds a drafter for the target .* of pair 'tatoeba_en_de'"):
        importlib.import_module(HEAD).head(conformance.tabular_pair(*conformance.tables(3, seed=61)), 2)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_every_page_names_files_that_exist():
    for page in PAGES:
        for path in re.findall(r"`([\w/]+\.(?:py|gin|md))`", page.read_text(encoding="utf-8")):
            exists = (ROOT / path).exists() or (ROOT / "speccascade_jax" / path).exists()
            assert exists or path.startswith(IDEAS), f"{page.name} names {path}"


WORDS = 19_100
"""The most words that the pages of docs/ may have together; measurements in docs/results/ are not counted.

Raised by 1,450 for finetuning.md and reproduce_t5.md, because training had no page before, by 550 for buckets,
scales, and launching on spot machines, and by 900 for names on the hub, chat, heads, assistants and the table of
families.
"""
UNWANTED = {
    r"\blaws?\b": "'distribution', or 'exactness tests'",
    r"\bpapers? [1-5]\b": "authors and year, with a link on the first mention",
}
"""Words of prose -> their replacement. Code, where names such as `target_law` stay, is not read."""


def prose(page):
    """Returns a page without its fenced code, its code spans and the targets of its links."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`]+`|\]\([^)]*\)", "", text)


def test_the_pages_stay_within_their_budget():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")}
    assert sum(words.values()) <= WORDS, f"move measurements to docs/results/, and delete repetition: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    for word, instead in UNWANTED.items():
        lines = [line.strip() for line in prose(page).splitlines() if re.search(word, line, re.IGNORECASE)]
        assert not lines, f"{page.name}: write {instead} in {lines}"


# --- every command on a page: its program and files exist, and its settings can be set; incomplete commands ("…") are
# skipped, and placeholders for a reader's own files are not looked up

_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
OWN = (f"{IDEAS}.gin", f"{IDEAS}.py")
"""Files that a reader writes."""


def commands(page: Path) -> list[str]:
    """Returns the commands of a page, each in one line."""
    text = page.read_text(encoding="utf-8")
    candidates = []
    for block in _FENCED.findall(text):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        candidates += [line.split("     ")[0].partition(" #")[0].strip() for line in lines]
    candidates += _INLINE.findall(_FENCED.sub("", text))
    return [command for command in candidates if re.match(r"(env \S+ )?python -m experiments\.\w+", command)]


ALL = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL)
def test_the_program_and_files_of_a_command_exist(page, command):
    name = re.search(r"experiments\.(\w+)", command)[1]
    assert name in cli.commands(), command
    for file in re.findall(r"--gin_file[= ](\S+\.gin)", command):
        assert file in OWN or (ROOT / file).is_file(), f"{page}: {file}"


MAKES = {"make_acceptance_data": "heads.make_data.make", "make_selection_data": "selection.make_data.make"}
"""Programs -> their own `make`: each command imports one, and this process, through other tests, perhaps both."""


def _settings(command: str) -> tuple[list[str], list[str]] | None:
    """Returns gin files and bindings of a command that is complete as written; otherwise `None`."""
    if any(mark in command for mark in ("…", "$", " -- ")) or "--gin_file" not in command:
        return None
    words = shlex.split(command)
    files = [word.partition("=")[2] for word in words if word.startswith("--gin_file=")]
    make_name = next((making for name, making in MAKES.items() if f"experiments.{name} " in command), "make")
    renamed = [re.sub(r"^--gin\.make\.", f"--gin.{make_name}.", word) for word in words]
    bindings = [word.removeprefix("--gin.").replace("=", " = ", 1) for word in renamed if word.startswith("--gin.")]
    return None if set(files) & set(OWN) else (files, bindings)


READ = [(page, command) for page, command in ALL if _settings(command)]


@pytest.mark.parametrize(("page", "command"), READ)
def test_the_settings_of_a_command_resolve(page, command):
    files, bindings = _settings(command)
    gin.clear_config()
    try:
        gin_flags.parse_gin([str(ROOT / file) for file in files], bindings)
    finally:
        gin.clear_config()
