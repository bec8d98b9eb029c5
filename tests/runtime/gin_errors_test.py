"""Errors of gin, in one line."""

import pytest

from speccascade_jax.core import names
from speccascade_jax.runtime import gin_errors, gin_flags

CALL = "\n  In call to configurable 'f' (<function f at 0x7f1234567890>)"


@pytest.mark.parametrize(("error", "said"), [
    (ValueError(f"<object object at 0x7f1234567890> is none{CALL}"), "<object object> is none"),
    (ValueError(f'wrong.\n  In file "a.gin", line 3\n    f.x = 1{CALL}'), "a.gin, line 3: wrong."),
    (KeyError("no such\nname"), r"no such\nname"), (ValueError("one;\n  two\n"), "one; two"),
    (RecursionError("maximum recursion depth exceeded"), gin_errors.DEEP),
    (TypeError(f"sweep() missing 1 required keyword-only argument: 'pair'{CALL}"), "sweep lacks 'pair': add --gin"),
])  # fmt: skip
def test_errors_are_one_line_without_addresses_or_calls(error, said):
    line = gin_errors.explained(error)
    assert line.startswith(said) and "0x" not in line and "configurable" not in line and "\n" not in line


def test_memory_errors_name_the_remedy_and_unexpected_errors_their_type():
    for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        assert gin_flags.said(error).startswith("not enough memory (") and "reduce the batch" in gin_flags.said(error)
    assert gin_flags.said(AttributeError("no x")) == "AttributeError: no x"
    assert gin_flags.said(ValueError()) == "ValueError: "


def test_short_lists_of_names_are_listed_in_full():
    assert names.unknown("rul", ["rule", "task"], "a.TABLE") == "did you mean rule? there are rule, task"
    assert names.unknown("zzz", [], "a.TABLE") == "there are none"
