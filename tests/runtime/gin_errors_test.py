"""Tests that errors of gin are printed in one line."""

import gin
import pytest

from speccascade_jax.core import names
from speccascade_jax.runtime import gin_errors, gin_flags

CALL = "\n  In call to configurable 'f' (<function f at 0x7f1234567890>)"


@pytest.mark.parametrize(("error", "said"), [
    (ValueError(f"<object object at 0x7f1234567890> is none{CALL}"), "<object object> is none"),
    (ValueError(f'wrong.\n  In file "a.gin", line 3\n    f.x = 1{CALL}'), "a.gin, line 3: wrong."),
    (KeyError("no such\nname"), r"no such\nname"), (ValueError("one;\n  two\n"), "one; two"),
    (RecursionError("maximum recursion depth exceeded"), gin_errors.DEEP),
    (ImportError("x is read through y (No module named 'y'). pip install y"), "x is read through y (No module named"),
    (ModuleNotFoundError("No module named 'no.such'"), "there is no module 'no.such'"),
    (TypeError(f"sweep() missing 1 required keyword-only argument: 'pair'{CALL}"), "sweep lacks 'pair': add --gin"),
])  # fmt: skip
def test_errors_are_one_line_without_addresses_or_calls(error, said):
    line = gin_errors.explained(error)
    assert line.startswith(said) and "0x" not in line and "configurable" not in line and "\n" not in line


@pytest.mark.parametrize("message", [
    "'points' was not provided by an import statement.", "No configurable matching 'Evaluatoin'.",
    "No bindings specified for 'PAIR/gin.macro'", "No module named 'seqio'", "unhashable type: 'list'",
    "malformed node or string on line 1: x\n    Failed to parse token 'mine'",
    "f() missing 1 required positional argument: 'a'",
    "Unable to open file: a.gin. Searched config paths: []", "pair set to `%gin.REQUIRED` but not overridden.",
])  # fmt: skip
def test_a_remedy_that_quotes_a_message_of_gin_or_python_is_not_replaced(message):
    """Only gin's and Python's own messages are put into other words."""
    assert gin_errors.explained(ValueError(message)) != message
    ours = ImportError(f"the data cannot be read ({message}). Install the extra".replace("\n    ", " "))
    assert gin_errors.explained(ours) == str(ours)


@pytest.mark.parametrize(("value", "quoted"), [
    ("mine.csv", """--gin.X="'mine.csv'\""""), ("some/folder", """--gin.X="'some/folder'\""""),
    ("~/models/t5", """--gin.X="'~/models/t5'\""""),
])  # fmt: skip
def test_a_text_without_quotes_is_shown_as_the_shell_needs_it(value, quoted):
    """Names the one setting that is wrong, of several."""
    gin.clear_config()
    with pytest.raises(ValueError, match="is not a value; a string needs quotes inside those of the shell: ") as error:
        gin_flags.parse_gin([], ["A = (1,\n2)", f"X = {value}", "B = 3"])
    assert str(error.value).endswith(quoted) and str(error.value).count("--gin.") == 2


IMPORTS = "from __gin__ import dynamic_registration\nfrom speccascade_jax.evaluation import points\n"
FILES = {
    "a.gin": f"{IMPORTS}include 'b.gin'\npoints.Evaluation.task = %TASK\nTASK = %INNER\nSPARE = 3\n",
    "b.gin": f"{IMPORTS}INNER = 'xsum'\nOTHER = 'one'\npoints.ModelPair.others = {{'other': %OTHER}}\n",
}


@pytest.fixture
def gin_files(tmp_path, monkeypatch):
    """Writes `a.gin`, which includes `b.gin`, to the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.parametrize("binding", [
    "TASK = 'tiny_translation'", "INNER='xsum'", "OTHER = 'two'", "points.Evaluation.quality_batch = %NEW\nNEW = 2",
    "TASK = (%NEW)\nNEW = 'xsum'",
])  # fmt: skip
def test_macros_that_settings_use_also_through_includes_and_other_macros_are_valid(binding, gin_files):
    gin_flags.parse_gin(["a.gin"], binding.split("\n"))


USED = "the macros in use are INNER, OTHER, TASK"


@pytest.mark.parametrize(("binding", "said"), [
    ("TAKS = 'xsum'", f"--gin.TAKS has no effect, because no setting uses %TAKS: did you mean TASK? {USED}"),
    ("task = 'xsum'", f"no setting uses %task: did you mean Evaluation.task? {USED}"),
    ("other = 3", f"no setting uses %other: did you mean OTHER, INNER? {USED}"),
    ("SPARE = 4", f"no setting uses %SPARE: {USED}"),
    ("a/TASK = 'xsum'", f"no setting uses %a/TASK: did you mean TASK? {USED}"),
])  # fmt: skip
def test_a_macro_of_the_command_line_that_no_setting_uses_is_refused(binding, said, gin_files):
    with pytest.raises(ValueError) as error:
        gin_flags.parse_gin(["a.gin"], ["INNER = 'xsum'", binding])
    assert str(error.value).endswith(said) and "\n" not in str(error.value)


@pytest.mark.parametrize(("message", "place"), [
    ("block_size=0 is not a whole number >= 1", "c.gin, line 5: "), ("points.Settings.alpha=1.5 is outside", ""),
    ("block_size=0.5 is not a whole number", ""), ("quality_batch=0 is", ""), ("batch_size=0 is", ""),
    ("top_p='x' is not a finite number", "d.gin, line 3: "),
])  # fmt: skip
def test_a_wrong_value_is_named_with_the_line_that_sets_it(message, place, gin_files, tmp_path):
    """A value of the command line, and one that two lines set, have no place."""
    (tmp_path / "d.gin").write_text(f"{IMPORTS}points.Settings.top_p = 'x'\n", encoding="utf-8")
    (tmp_path / "c.gin").write_text(
        f"{IMPORTS}include 'a.gin'\ninclude 'd.gin'\npoints.Settings.block_size = 0   # γ\n"
        "a/points.Evaluation.quality_batch = 0\nb/points.Evaluation.quality_batch = 0\n", encoding="utf-8"
    )  # fmt: skip
    gin_flags.parse_gin(["c.gin"], ["points.Settings.alpha = 1.5"])
    assert gin_errors.explained(ValueError(message)) == place + message
    gin.clear_config()
    gin_flags.parse_gin([])
    assert gin_errors.explained(ValueError(message)) == message


def test_files_without_macros_say_so(gin_files):
    with pytest.raises(ValueError, match="no setting uses %RESULTS: the gin files use no macros"):
        gin_flags.parse_gin([], ["RESULTS = 'x'"])


def test_notes_of_an_error_are_printed():
    error = ValueError("wrong")
    error.add_note("while importing mine.py")
    assert gin_errors.explained(error) == "wrong; while importing mine.py"


def test_memory_errors_name_the_remedy_and_unexpected_errors_their_type():
    for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        assert gin_flags.said(error).startswith("not enough memory (") and "reduce the batch" in gin_flags.said(error)
    assert gin_flags.said(AttributeError("no x")) == "AttributeError: no x"
    assert gin_flags.said(ValueError()) == "ValueError: "


def test_short_lists_of_names_are_listed_in_full():
    assert names.unknown("rul", ["rule", "task"], "a.TABLE") == "did you mean rule? there are rule, task"
    assert names.unknown("zzz", [], "a.TABLE") == "there are none"
