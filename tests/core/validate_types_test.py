"""Tests of values against annotations: the error names the value, its place, and the expected type."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest

from speccascade_jax.core import checks, names, validate_types
from speccascade_jax.runtime import gin_flags


@dataclasses.dataclass
class Held:
    """A class that holds values."""

    text: str = ""


def takes(
    *,
    names: Sequence[str | Held] = (),
    grids: Mapping[str, Sequence[float]] | None = None,
    temperatures: Sequence[float | None] = (),
    pair: tuple[int, str] = (0, ""),
    several: tuple[int, ...] = (),
    count: int = 0,
    size: int | Literal["auto"] = 0,
    share: float = 0.0,
    allowed: bool = False,
    called: Callable[[int], int] | None = None,
    held: Held | None = None,
) -> None:
    """Takes values of many types."""


WRONG = [
    ("names", "bild", r"names='bild' is one value where a tuple is meant; write \('bild',\)$"),
    ("names", 3, r"names=3 is one value where a tuple is meant; write \(3,\)$"),
    ("names", (("a",),), r"names\[0\]=\('a',\) is not a text or a Held$"),
    ("names", {"a": 1}, "names={'a': 1} is not a tuple$"),
    ("grids", ("a",), r"grids=\('a',\) is not a dictionary or None$"),
    ("grids", {"opt": 0.1}, r"grids\['opt'\]=0.1 is one value where a tuple is meant; write \(0.1,\)$"),
    ("grids", {"opt": (0.1, "x")}, r"grids\['opt'\]\[1\]='x' is not a finite number; write it without quotes$"),
    ("grids", {"opt": (math.nan,)}, r"grids\['opt'\]\[0\]=nan is not a finite number$"),
    ("grids", {"opt": (True,)}, r"grids\['opt'\]\[0\]=True is not a finite number$"),
    ("grids", {1: (0.1,)}, "a key of grids=1 is not a text$"),
    ("temperatures", (None, math.inf), r"temperatures\[1\]=inf is not a finite number or None$"),
    ("temperatures", (10**400,), r"temperatures\[0\]=10+\.\.\.0+ is not a finite number or None$"),
    ("pair", (1, "a", 2), r"pair=\(1, 'a', 2\) has 3 entries, but 2 are expected$"),
    ("pair", (1, 2), r"pair\[1\]=2 is not a text$"),
    ("several", (1, 2.5), r"several\[1\]=2.5 is not a whole number$"),
    ("count", "3", "count='3' is not a whole number; write it without quotes$"),
    ("size", "Auto", r"size='Auto' is not a whole number or 'auto'; did you mean auto\?$"),
    ("size", "3", "size='3' is not a whole number or 'auto'; write it without quotes$"),
    ("pair", 2, r"pair=2 is one value where a tuple is meant; write \(2, …\)$"),
    ("count", True, "count=True is not a whole number$"),
    ("count", 3.0, "count=3.0 is not a whole number; write 3$"),
    ("share", "high", "share='high' is not a finite number; write it without quotes$"),
    ("allowed", "False", "allowed='False' is not True or False; write it without quotes$"),
    ("allowed", 1, "allowed=1 is not True or False$"),
    ("called", 3, "called=3 is not a Callable or None$"),
    ("held", object(), "held=<object object> is not a Held or None$"),
    ("held", validate_types.Later("@x()", int), r"held=@x\(\) is not a Held or None$"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_an_error_names_a_value_of_the_wrong_type(name, value, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        validate_types.check(takes, {name: value})


def test_values_of_the_right_type_pass():
    right = {
        "names": ["a", Held()], "grids": {"opt": (0, np.float32(0.5))}, "temperatures": (None, 1),
        "pair": (np.int64(1), "a"), "several": [], "count": 10**9, "share": 1, "allowed": np.bool_(True),
        "called": len, "held": validate_types.Later("@x()", Held), "unknown": object(),
    }  # fmt: skip
    validate_types.check(takes, right)
    validate_types.check(takes, {"grids": None, "held": validate_types.Later("@anything()")})
    validate_types.check(Held, {"text": ""})
    with pytest.raises(ValueError, match=r"^scope/Held.text=0 is not a text"):
        validate_types.check(Held, {"text": 0}, "scope/Held.")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -1, 0.5, True, "3", None, (3,), 1e308, 2**31, [], np.nan]
)
def test_values_that_are_not_whole_numbers_are_refused(value):
    with pytest.raises(ValueError, match="^n=.* is (not a whole number >= 0|too large: give at most 2147483647)$"):
        checks.whole("n", value, 0)


@pytest.mark.parametrize("value", ["0.5", True, None, [None], [[0.1], [0.1, 0.2]], ["a"], [True, False], 1j])
def test_values_per_row_that_are_not_numbers_are_refused(value):
    with pytest.raises(ValueError, match="^alpha=.* is not a number; give a float, or one per row$"):
        checks.per_row("alpha", value, 2)


def test_an_error_shows_a_number_beyond_float32_as_given():
    with pytest.raises(ValueError, match=r"^top_k=1e\+308 is not finite"):
        checks.per_row("top_k", [1.0, 1e308], 2)


def test_errors_do_not_list_many_names():
    many = {f"name{n}": n for n in range(60)}
    for table_name, end in (("a.TABLE", r"all 60 are in a\.TABLE"), ("", r"there are (name\d+, ){12}…")):
        with pytest.raises(ValueError, match=rf"^unknown thing 'nam7': did you mean (name\d+,? ?)+\? {end};"):
            names.look_up("thing", "nam7", many, int, table_name)
    with pytest.raises(
        ValueError, match=r"^thing=\(1,\) is not a name: give a string, one of a\.TABLE, or module.NAME of your own$"
    ):
        names.look_up("thing", (1,), many, int, "a.TABLE")


def test_an_error_names_a_users_file_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_rule.py").write_text("nothing.here = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    # the error is raised unchanged, because the user needs its traceback
    with pytest.raises(NameError, match="'nothing' is not defined") as raised:
        names.look_up("rule", "broken_rule.mine", {}, int)
    said = gin_flags.said(raised.value)
    assert said.startswith("NameError: name 'nothing' is not defined")
    assert said.endswith("; rule 'broken_rule.mine': module 'broken_rule' cannot be imported")
    with pytest.raises(ValueError, match=r"^rule 'os.getcwd' is <built-in function getcwd>: it must be a int$"):
        names.look_up("rule", "os.getcwd", {}, int)


def test_errors_show_no_memory_address():
    assert names.shown(test_errors_show_no_memory_address) == "<function test_errors_show_no_memory_address>"
    assert len(names.shown(("x" * 1000,) * 1000)) < 1000


def test_names_with_numbers_sort_as_numbers():
    texts = ["9", "10", "T5 γ = 3, h 2", "T5 γ = 3, h 12", "h 0.75", "h 0.8", "token", "token_v2", "token_v10"]
    texts += ["γ = 8", "γ = 10"]
    assert sorted(reversed(texts), key=names.natural) == texts
