"""Tests that gin files of version 0.2 keep their meaning, and that each old name is reported once."""

import re
import sys
import warnings
from pathlib import Path

import gin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.runtime import gin_flags, legacy_gin
from speccascade_jax.runtime.paths import repository_root

OLD_FILES = Path(__file__).parent / "legacy"
TODAYS_FILES = sorted(path for folder in ("gin", "configs") for path in (repository_root() / folder).rglob("*.gin"))

TRANSLATED = [
    ("Method.name = 'chow'", "Settings.method = 'chow'"),
    ("points.Method.alpha=0.3", "points.Settings.alpha=0.3"),
    ("hot/evaluation.points.Sampling.top_p = 1", "hot/evaluation.points.Settings.top_p = 1"),
    ("a/points.Method:\n  name = 'bild'\n  rule = 'x'", "a/points.Settings:\n  method = 'bild'\n  rule = 'x'"),
    ("points.Sampling:  # name = 1\n  top_k = 2", "points.Settings:  # name = 1\n  top_k = 2"),
    ("run.method = @points.Method()", "run.settings = @points.Settings()"),
    ("survey.sampling = @hot/Sampling()", "survey.settings = @hot/Settings()"),
    ("sweep.methods = ('a', @js/points.Method(),\n  @points.Method)",
     "sweep.methods = ('a', @js/points.Settings(),\n  @points.Settings)"),
    ("run:\n  sampling = @points.Sampling()  # T\n  method = @points.Method()\n  seed = 1",
     "run:\n    # T\n  settings = @points.Settings()\n  seed = 1"),
    ("run.method = @a/points.Method()\nrun.sampling = @points.Sampling()", "run.settings = @a/points.Settings()\n"),
    ("run.method = @points.Method()\nrun.sampling = @a/b/points.Sampling()", "run.settings = @a/b/points.Settings()\n"),
    ("from speccascade_jax.evaluation.survey import surveying as s",
     "from speccascade_jax.evaluation.studies.survey import surveying as s"),
    ("from speccascade_jax.selection import making\nmaking.make:\n  size = 1",
     "from speccascade_jax.selection import make_data\nmake_data.make:\n  size = 1"),
    ("import speccascade_jax.methods.costs\nspeccascade_jax.methods.costs.timed.turns = 3",
     "import speccascade_jax.methods.block_costs\nspeccascade_jax.methods.block_costs.timed.turns = 3"),
    ("from speccascade_jax.methods import costs\ncosts.timed.turns = 3",
     "from speccascade_jax.methods import block_costs as costs\ncosts.timed.turns = 3"),
]  # fmt: skip
KEPT = [
    "", "points.Settings.method = 'chow'", "run.settings = @points.Settings()", "mine.Method.name = 1", "Method = 3",
    "mine.method = 'points.Method'  # and points.Sampling", "mine.method = @mine.Method()", "x.y = %Method",
    "points.Evaluation:\n  name = 'x'\n", "x.y = '''\npoints.Method:\n  name = 1\n'''",
    "mine.sampling = @points.Evaluation()",
    "from speccascade_jax.evaluation import points\nfrom os import path", "x.y = {\n  Method: 1}",
    "points.Methods.name = 1",
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), TRANSLATED)
def test_old_names_are_translated_to_current_ones(old, new):
    text, renamed = legacy_gin.translate(old)
    assert text == new and renamed
    assert text.count("\n") == old.count("\n")  # the translation keeps line numbers, because errors name them


@pytest.mark.parametrize("text", KEPT)
def test_foreign_and_current_text_is_unchanged(text):
    assert legacy_gin.translate(text).text is text and not legacy_gin.translate(text).renamed


@pytest.mark.parametrize("file", [*sorted(OLD_FILES.glob("*.gin")), *TODAYS_FILES], ids=lambda file: file.name)
def test_a_translated_file_needs_no_translation(file):
    old = file.read_text()
    text = legacy_gin.translate(old).text
    assert legacy_gin.translate(text).text is text
    comments = re.compile("#.*")
    assert comments.findall(text) == comments.findall(old)
    assert not re.search(r"points\.(Method|Sampling)\b", comments.sub("", text))


def test_method_and_sampling_in_different_scopes_are_refused():
    with pytest.raises(
        ValueError, match="^run takes its method from scope 'a/' and its sampling from scope 'b/': both are settings"
    ):
        legacy_gin.translate("run.method = @a/points.Method()\nrun.sampling = @b/points.Sampling()")


_words = st.sampled_from([
    *"\n\n\n  =:@./()'\"#,", " = ", ":\n  ", "name", "method", "sampling", "points.", "Method", "Sampling", "()", "run",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([old for old, _ in TRANSLATED]), _words), max_size=12).map("".join))
def test_translation_is_idempotent(text):
    once = legacy_gin.translate(text).text
    assert legacy_gin.translate(once).text is once


POINTS = """
def recorded(settings=None, seed=0):
    return settings, seed

class Settings:
    def __init__(self, method=None, alpha=None, temperature=0.0):
        self.values = (method, alpha, temperature)
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns `(file, bindings, text) -> result of its function`, for a module `points` that has `Settings`."""
    monkeypatch.setattr(legacy_gin, "_WARNED", set())
    for registry in ("_REGISTRY", "_INVERSE_REGISTRY"):  # registrations made by a test are removed afterwards
        monkeypatch.setattr(gin.config, registry, getattr(gin.config, registry).copy())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "points.py").write_text(POINTS)

    def call(files, bindings=(), text=""):
        gin.clear_config()
        gin_flags.parse_gin([str(tmp_path / name) for name in files], bindings, text=text)
        settings, seed = gin.get_configurable(sys.modules["points"].recorded)()
        return settings.values, seed

    yield call
    gin.clear_config()
    sys.modules.pop("points", None)


HEAD = "from __gin__ import dynamic_registration\nimport points\n"
RUN = "points.recorded:\n  method = @points.Method()\n  sampling = @points.Sampling()\n"
SAID = "points.Method.name is now points.Settings.method; the old name works until 0.4"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_names_work_in_files_includes_bindings_and_records(read, tmp_path):
    (tmp_path / "method.gin").write_text(f"{HEAD}points.Method:\n  name = 'chow'\n")
    (tmp_path / "run.gin").write_text(f"{HEAD}include 'method.gin'\n{RUN}")
    bindings = ["points.Method.alpha = 0.3", "points.Sampling.temperature = 1.0", "recorded.seed = 7"]
    gin.add_config_file_search_path(str(tmp_path))
    assert read(["run.gin"], bindings) == (("chow", 0.3, 1.0), 7)
    assert read([], text=f"{HEAD}{RUN}points.Method.name = 'opt'\n") == (("opt", None, 0.0), 0)


def test_each_old_name_is_reported_once_with_its_place(read, tmp_path):
    (tmp_path / "run.gin").write_text(f"{HEAD}{RUN}points.Method.name = 'chow'\nhot/points.Method.name = 'opt'\n")
    with pytest.warns(FutureWarning) as said:
        read(["run.gin"])
    texts = [str(warning.message) for warning in said]
    assert SAID in texts and len(texts) == len(set(texts)) and not any("\n" in text for text in texts)
    place = next(warning for warning in said if str(warning.message) == SAID)
    assert (place.filename, place.lineno) == (str(tmp_path / "run.gin"), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(["run.gin"])


def test_errors_name_the_line_of_the_users_file(read, tmp_path):
    (tmp_path / "run.gin").write_text(f"{HEAD}{RUN}points.Method.nothing = 1\n")
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"run\.gin, line 6: .* has no 'nothing'"):
        read(["run.gin"])
