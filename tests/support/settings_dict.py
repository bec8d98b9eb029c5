"""The writer of `methods/settings_dict.py`: `python -m tests.support.settings_dict`, which `make format` calls."""

import inspect
from pathlib import Path

from speccascade_jax.methods import settings_dict
from speccascade_jax.methods.settings import Settings

HEAD = '''"""The fields of `Settings` as a dictionary type, which shows editors and type checkers the keyword arguments.

`make format` writes this file from the fields of `Settings`; a test compares the two.
"""

from typing import Any, Literal, TypedDict

from speccascade_jax.methods.settings import Arm, Level


class SettingsDict(TypedDict, total=False):
    """The fields of `Settings`."""

'''


def source() -> str:
    """Returns the module's text for the fields of `Settings`."""
    parameters = inspect.signature(Settings).parameters.values()
    fields = [f"    {p.name}: {p.annotation}\n" for p in parameters]
    return HEAD + "".join(fields).replace("'", '"')


if __name__ == "__main__":
    Path(settings_dict.__file__).write_text(source())
