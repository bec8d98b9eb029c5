"""The fields of `Settings` as a dictionary type, which shows editors and type checkers the keyword arguments.

`make format` writes this file from the fields of `Settings`; a test compares the two.
"""

from typing import Any, Literal, TypedDict

from speccascade_jax.methods.settings import Arm, Level


class SettingsDict(TypedDict, total=False):
    """The fields of `Settings`."""

    rule: Any
    alpha: Any
    accept: str | None
    verify: str
    bonus: str | None
    block_size: int | Literal["auto"] | None
    stop: Any
    stop_threshold: Any
    temperature: Any
    top_p: Any
    top_k: Any
    draft_temperature: Any
    drafters: tuple[str | Level | Arm, ...]
    tail: str | None
    tail_size: int
    method: Any
    tree: tuple[int, ...] | None
    choose: str | None
    policy: Any
    lossy_arms: bool
    head: Any
