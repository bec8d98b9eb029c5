"""Special pieces that files next to a tokenizer name, number or add, in a folder with the layout of Hugging Face."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.storage import checksums
from speccascade_jax.storage.readers import parsed

# Files that name the special pieces, and files that give their ids. The first file that has an entry is used.
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERING = ("generation_config.json", "config.json")
ADDED = "added_tokens.json"
# Entries whose names and pieces a chat template may read too, such as {"image_token": "<image>"}.
_NAMED = ("extra_special_tokens", "model_specific_special_tokens")
# The largest plausible number of added pieces. A larger id is an error: it would make tables of pieces very long.
_MOST_ADDED = 1 << 16


class Added(NamedTuple):
    """A piece that is not in the tokenizer's own file.

    Attributes:
        name: the piece's text in prompts.
        special: whether outputs leave the piece out.
        lstrip, rstrip: whether the piece removes the spaces before it, and those after it, from a prompt.
    """

    name: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class TokenizerFiles:
    """The files next to a tokenizer or a model that describe its special pieces.

    Raises:
        ValueError: a file is not a JSON object. The methods raise it if an entry of a file is invalid, or a file
            belongs to another model.
    """

    def __init__(self, path: Path, read: bool = True):
        self.path, self.folder = path, path if path.is_dir() else path.parent
        files = [self.folder / name for name in (*NAMING, *NUMBERING, ADDED) if read]
        self._tables = {f.name: parsed(checksums.read(f), str(f), "copy it again") for f in files if f.is_file()}

    def _in(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [self._tables.get(name, {}) for name in names]

    def added(self, ids: Mapping[str, int]) -> dict[int, Added]:
        """Returns the added pieces by id, without pieces that the tokenizer's own file has too.

        `ids` maps each piece of the tokenizer's own file to its id.
        """
        special = set(self._special())
        try:
            table = {int(token): Added(name, name in special) for name, token in self._tables.get(ADDED, {}).items()}
            for token, entry in (self._in(NAMING)[0].get("added_tokens_decoder") or {}).items():
                name, *flags = (entry.get(key, False) for key in ("content", "special", "lstrip", "rstrip"))
                table[int(token)] = Added(name, *map(bool, flags))
            table = {token: table[token] for token in sorted(table) if ids.get(table[token].name) != token}
        except (TypeError, AttributeError, ValueError) as error:
            raise self._odd(error) from error
        if wrong := [token for token in table if not 0 <= token < len(ids) + _MOST_ADDED]:
            raise ValueError(f"an added piece in the folder of {self.path} has id {wrong[0]:,}: copy the files again")
        return table

    def bos_id(self, ids: Mapping[str, int], front: int | None) -> int | None:
        """Returns the id with which a text begins, or `None` if it begins with no special id.

        If the entry `add_bos_token` is true, the result is the id of `bos_token`; if it is false, `None`. Without this
        entry, it is `front`, the id that the tokenizer itself puts before a text. So a `bos_token` that the files name,
        but that the tokenizer does not put there, does not begin a text (SmolLM2).
        """
        adds = self._in(NAMING)[0].get("add_bos_token")
        return front if adds is None else self._named("bos_token", ids) if adds else None

    def prefixes_only_the_beginning(self) -> bool:
        """Returns whether the text after a special piece gets no space before its first word (`"legacy": false`)."""
        return self._in(NAMING)[0].get("legacy") is False

    def stop_ids(self, ids: Mapping[str, int], eos: int | None = None) -> tuple[int, ...]:
        """Returns the ids that end an output: that of `eos_token` (or else `eos`), then all ids in `eos_token_id`.

        Raises:
            ValueError: there is no end of sequence, or an end of sequence is not a piece.
        """
        named = self._named("eos_token", ids)
        ends = [eos if named is None else named, *self.stop_numbers()]
        stops = tuple(dict.fromkeys(token for token in ends if token is not None))
        if not stops:
            entries = f"eos_token in {NAMING[0]}, or eos_token_id in {NUMBERING[1]}"
            raise ValueError(f"no file in the folder of {self.path} defines the end of sequence: add {entries}")
        if wrong := sorted({*stops} - {*ids.values()}):
            raise ValueError(self._foreign("eos_token_id", wrong[0]))
        return stops

    def stop_numbers(self) -> list[int]:
        """Returns the ids in the entry `eos_token_id` of `generation_config.json`, or else of `config.json`."""
        value: Any = next((t["eos_token_id"] for t in self._in(NUMBERING) if t.get("eos_token_id") is not None), [])
        numbers = value if isinstance(value, list) else [value]
        if odd := [number for number in numbers if type(number) is not int]:
            raise self._odd(TypeError(f"eos_token_id {odd[0]!r}"))
        return numbers

    def chat_templates(self) -> tuple[Path, dict[str, str]] | None:
        """Returns the file of the entry `chat_template`, and its templates by name; a single one is called "default".

        Only the templates "default" and "tool_use" are read.

        Raises:
            ValueError: there are several templates, and none is called "default"; or the entry is not a template.
        """
        file, entry = self.folder / NAMING[0], self._in(NAMING)[0].get("chat_template")
        if isinstance(entry, list) and all(isinstance(part, dict) for part in entry):
            entry = {part.get("name"): part.get("template") for part in entry}
        if isinstance(entry, dict) and "default" not in entry:
            names = ", ".join(map(str, entry)) or "nothing"
            raise ValueError(f'{file} has chat templates called {names}: rename the right one to "default"')
        templates = entry if isinstance(entry, dict) else {} if entry is None else {"default": entry}
        texts = {name: templates[name] for name in ("default", "tool_use") if name in templates}
        if odd := [text for text in texts.values() if not isinstance(text, str)]:
            raise self._odd(TypeError(f"chat_template {odd[0]!r:.40}"))
        return (file, texts) if texts else None

    def named_pieces(self, usual: Mapping[str, str]) -> dict[str, str]:
        """Returns the text of each piece that a chat template may name, such as "bos_token" or "image_token".

        `usual` maps roles to the pieces that have these roles if no file mentions the role.
        """
        roles = dict[str, Any](usual)
        for table in reversed(self._in(NAMING)):  # the first file's entries replace those of the second
            groups = (table[entry] for entry in _NAMED if isinstance(table.get(entry), dict))
            roles |= {role: value for group in groups for role, value in group.items()}
            roles |= {role: value for role, value in table.items() if role.endswith("_token")}
        names = {role: value.get("content") if isinstance(value, dict) else value for role, value in roles.items()}
        return {role: name for role, name in names.items() if isinstance(name, str)}

    def _named(self, entry: str, ids: Mapping[str, int]) -> int | None:
        """Returns the id of the piece that `entry` names in the first file that has it; `None` if it names no piece."""
        value = next((table[entry] for table in self._in(NAMING) if entry in table), None)
        name = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(name, str):
            raise self._odd(TypeError(f"{entry} {value!r}"))
        if name is not None and name not in ids:
            raise ValueError(self._foreign(entry, name))
        return None if name is None else ids[name]

    def _special(self) -> Iterator[str]:
        """Yields the names of all pieces that have a role, such as that of `eos_token`."""
        for table in self._in(NAMING):
            for entry in (table[key] for key in table if key.endswith(("_token", "_tokens"))):
                for value in entry if isinstance(entry, list) else [entry]:
                    yield str(value.get("content") if isinstance(value, dict) else value)

    def _foreign(self, entry: str, value: object) -> str:
        models = "is not one of its pieces: the files belong to different models"
        return f"{entry} {value!r} in the folder of {self.path} {models}"

    def _odd(self, error: Exception) -> ValueError:
        names = ", ".join(self._tables)
        return ValueError(
            f"a file in the folder of {self.path} ({names}) has an invalid entry ({error!r}): copy it again"
        )
