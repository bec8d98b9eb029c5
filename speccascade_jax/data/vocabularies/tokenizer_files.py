"""Special pieces that the files beside a tokenizer name, number or add, in the layout of Hugging Face."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.storage import checksums
from speccascade_jax.storage.readers import parsed

# files that name the special pieces, and files that number them; the first with an entry counts
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERING = ("generation_config.json", "config.json")
ADDED = "added_tokens.json"
# no tokenizer has as many: a larger id is noise, and tables are as long as the largest
_MOST_ADDED = 1 << 16


class Added(NamedTuple):
    """A piece that is not in the tokenizer's own file.

    Attributes:
        name: its text in prompts; special: outputs do not show it.
        lstrip, rstrip: whether it takes the spaces before it, and those after it, out of a prompt.
    """

    name: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class TokenizerFiles:
    """The files beside a tokenizer or a model.

    Raises:
        ValueError: a file is no JSON object. Methods: a file has an odd entry, or is of another model.
    """

    def __init__(self, path: Path, read: bool = True):
        self.path, folder = path, path if path.is_dir() else path.parent
        files = [folder / name for name in (*NAMING, *NUMBERING, ADDED) if read]
        self._tables = {f.name: parsed(checksums.read(f), str(f), "copy it again") for f in files if f.is_file()}

    def _in(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [self._tables.get(name, {}) for name in names]

    def added(self, ids: Mapping[str, int]) -> dict[int, Added]:
        """Returns the added pieces by id, without those that the tokenizer's own file has too (`ids` by piece)."""
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
        """Returns the id that a text begins with; `None`: nothing.

        It is the `bos_token` if `add_bos_token` is true, nothing if it is false, and otherwise `front`, which the
        tokenizer itself puts before a text. A `bos_token` that is only named begins no text (SmolLM2).
        """
        adds = self._in(NAMING)[0].get("add_bos_token")
        return front if adds is None else self._named("bos_token", ids) if adds else None

    def stop_ids(self, ids: Mapping[str, int], eos: int | None = None) -> tuple[int, ...]:
        """Returns the ids that end an output: the `eos_token` (else `eos`), then every number in `eos_token_id`.

        Raises:
            ValueError: there is no end of sequence, or one that is no piece.
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
        """Returns the ids in `eos_token_id`: of `generation_config.json`, else of `config.json`."""
        value: Any = next((t["eos_token_id"] for t in self._in(NUMBERING) if t.get("eos_token_id") is not None), [])
        numbers = value if isinstance(value, list) else [value]
        if odd := [number for number in numbers if type(number) is not int]:
            raise self._odd(TypeError(f"eos_token_id {odd[0]!r}"))
        return numbers

    def _named(self, entry: str, ids: Mapping[str, int]) -> int | None:
        """Returns the id of the piece that the first table with an entry names; `None` if it names none."""
        value = next((table[entry] for table in self._in(NAMING) if entry in table), None)
        name = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(name, str):
            raise self._odd(TypeError(f"{entry} {value!r}"))
        if name is not None and name not in ids:
            raise ValueError(self._foreign(entry, name))
        return None if name is None else ids[name]

    def _special(self) -> Iterator[str]:
        """Yields the names of all pieces with a role, such as `eos_token`."""
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
