"""Look-up of names in tables, import of users' own objects by name, and hints for unknown names in error messages."""

import difflib
import importlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

TARGET = "autoregressive"
DRAFT = "autoregressive_draft"

SOURCES = ("draft", "replaced", "bonus", "target")
"""The possible sources of a committed token.

"draft" is a draft token that was kept. "replaced" is the replacement of a rejected draft token. "bonus" is the token
that follows a block of draft tokens that were all kept. "target" is a token of the target in a round without drafts.
"""

PER_EXAMPLE = ("committed", "target_calls", "discarded", "draft_steps", "drafted")
"""The counts that results store for every example; confidence intervals of rates and times are computed from them."""


SYNONYMS = {
    **dict.fromkeys(("gamma", "lookahead", "num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens",
                     "speculation_length"), "block_size"),
    **dict.fromkeys(("max_tokens", "max_length", "max_decode_len", "max_decode_length"), "max_new_tokens"),
    **dict.fromkeys(("assistant", "assistant_model", "draft_model", "drafter"), "drafters"),
    **dict.fromkeys(("eos_token_id", "eos_id", "stop_token_ids"), "stop_ids"),
    **dict.fromkeys(("lenience", "leniency"), "alpha"),
    "do_sample": "temperature", "random_seed": "seed", "threshold": "stop_threshold", "top_n": "top_k",
    "verifier": "verify",
}  # fmt: skip
"""A map from parameter names in papers and other libraries to this package's names."""


def hint(name: object, known: Iterable[str]) -> str:
    """Returns `"did you mean a, b? "` for an unknown name, or an empty text if no known name is similar.

    The text gives the name that `SYNONYMS` has for the word, or else up to three of the most similar known names.
    """
    known = list(known)
    synonym = SYNONYMS.get(str(name))
    if meant := next((word for word in (synonym, f"{synonym}s") if synonym and word in known), None):
        return f"did you mean {meant}? "
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    return f"did you mean {', '.join(near)}? " if near else ""


def natural(text: str) -> tuple[tuple[float, str], ...]:
    """Returns a sort key that compares the numbers in names: `token_v2` before `token_v10`, "γ = 8" before "γ = 10"."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    # `split` with one group alternates text and number, so odd indices are numbers. Texts sort before numbers.
    return tuple((float(part), "") if n % 2 else (-math.inf, part) for n, part in enumerate(parts))


def unknown(name: object, known: Iterable[str], table_name: str = "") -> str:
    """Returns an error's hint about an unknown name: similar names, and the known names or where to find them."""
    known = list(known)
    if len(known) > _FEW and table_name:
        return f"{hint(name, known)}all {len(known)} are in {table_name}"
    more = ", …" if len(known) > _FEW else ""
    return f"{hint(name, known)}there are {', '.join(known[:_FEW]) or 'none'}{more}"


_FEW = 12
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxlist, _SHORT.maxdict = 4, 8, 8, 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Returns a short text of a value for error messages, without memory addresses."""
    return without_addresses(_SHORT.repr(value))


def without_addresses(text: str) -> str:
    """Returns a text without the memory addresses that Python prints for objects."""
    return _ADDRESS.sub("", text)


def check_own(noun: str, name: object) -> None:
    """Raises a `ValueError` if the name of a user's model or drafter is not a string or has another meaning already."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{noun} has the name {shown(name)}: give it a string as its name")
    # The settings `drafters` and `others` also accept names of methods and `module.NAME`, so these would be ambiguous.
    if name in (TARGET, DRAFT) or "." in name:
        meaning = "a dot separates module.NAME of an imported drafter" if "." in name else "this is a method's name"
        raise ValueError(f"{noun} has the name {name!r}, but {meaning}: rename it")


def look_up(noun: str, name: str, table: Mapping[str, Any], kind: Any, table_name: str = "", also: str = "") -> Any:
    """Looks a name up in a table, or imports the user's own object if the name has the form `module.NAME`.

    Args:
        noun: what the name denotes ("rule", "task", …), for error messages.
        name: the name.
        table: a map from known names to entries.
        kind: the class of the user's object, or a tuple of allowed classes.
        table_name: the table's name, for error messages.
        also: a further remedy, for error messages.

    Raises:
        ValueError: the table, the module or the attribute does not exist, or the object has another class. The message
            gives the most similar names.
    """
    if not isinstance(name, str):
        names = table_name or ", ".join(table)
        known = f"one of {names}, or " if names else ""
        raise ValueError(f"{noun}={shown(name)} is not a name: give a string, {known}module.NAME of your own")
    if name in table:
        return table[name]
    if not all(name.split(".")) or "." not in name:
        near = unknown(name, table, table_name)
        raise ValueError(f"unknown {noun} {shown(name)}: {near}; name your own as module.NAME{also}")
    value = _imported(noun, name)
    if not isinstance(value, kind):
        wanted = " or a ".join(option.__name__ for option in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{noun} {name!r} is {shown(value)}: it must be a {wanted}")
    return value


MODULES: dict[str, ModuleType] = {}
"""The user's own modules that names of the form `module.NAME` have led to."""


def _imported(noun: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the user's file may raise anything
        # If the module or a package above it does not exist, the name is misspelt. Any other error comes from the
        # user's file.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = "its file must be in the folder that you start from, or in a folder of PYTHONPATH"
            raise ValueError(f"{noun} {name!r}: there is no module {error.name!r}; {remedy}") from error
        error.add_note(f"{noun} {name!r}: module {module!r} cannot be imported")
        raise
    if not hasattr(imported, attribute):
        raise ValueError(f"{noun} {name!r}: module {module!r} has no {attribute!r}: define it there")
    MODULES[module] = imported
    return getattr(imported, attribute)
