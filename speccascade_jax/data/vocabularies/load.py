"""Vocabularies, whatever the kind: telling kinds apart, finding one in a model's folder, comparing two.

`TextVocabulary` says what a vocabulary is; each kind has its file.
"""

import re
from pathlib import Path

from speccascade_jax.data.vocabularies.huggingface import TOKENIZER, HuggingFaceVocabulary
from speccascade_jax.data.vocabularies.llama2c import Llama2cVocabulary, read_pieces
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary, Vocabulary, is_sentencepiece, train
from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary, TextVocabulary
from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import expanded

__all__ = ["SentencePieceVocabulary", "TextVocabulary", "Vocabulary", "candidates", "first_difference"]
__all__ += ["load_vocabulary", "train"]

NAMES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocabulary.model")
LOOKED_FOR = f"{', '.join(NAMES)}, or one tokenizer of llama2.c (*.bin)"
# T5's sentinels: pieces of its tokenizer.json, but entries beyond its sentencepiece file
_SENTINEL = re.compile(r"<extra_id_\d+>")


def load_vocabulary(path: str | Path) -> FileVocabulary:
    """The vocabulary in a file, or in the folder of a model; its kind is told by content.

    Args:
        path: a `tokenizer.json` (with its special ids in the files beside it), a sentencepiece model, a tokenizer of
            llama2.c, or a folder that holds one (`NAMES`, the first that is there).

    Raises:
        FileNotFoundError: nothing there; says what was looked for.
        ImportError: a `tokenizer.json`, and `tokenizers` is not installed.
        ValueError: several tokenizers of llama2.c in a folder, or a file that is no vocabulary.
    """
    path = expanded(path)
    found = candidates(path) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        raise FileNotFoundError(f"no vocabulary at {path}: looked for {LOOKED_FOR}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} holds several tokenizers of llama2.c ({names}): name the file of the right one")
    (file,) = found
    content = checksums.read(file)
    if content[:64].lstrip().startswith(b"{"):
        return HuggingFaceVocabulary(file)
    if read_pieces(file) is not None:
        return Llama2cVocabulary(file)
    if is_sentencepiece(content):
        return SentencePieceVocabulary(file)
    kinds = "JSON with a model (tokenizer.json), nor a sentencepiece model, nor a tokenizer of llama2.c"
    raise ValueError(f"{file} is no vocabulary: it is neither {kinds}")


def candidates(path: Path) -> list[Path]:
    """The files that may be the vocabulary of a model at `path`, a folder or a file in one; several are ambiguous."""
    folder = path if path.is_dir() else path.parent
    named = [folder / name for name in NAMES if (folder / name).is_file()]
    if named:
        return named[:1]
    return [file for file in sorted(folder.glob("*.bin")) if file.is_file() and read_pieces(file) is not None]


def first_difference(a: FileVocabulary, b: FileVocabulary) -> str | None:
    """Where two vocabularies differ first, in words: a piece, else their sizes, else a special id; `None` if nowhere.

    T5's sentinels beyond the end of the other vocabulary are no difference.
    """
    if a == b:
        return None
    ours, theirs = a.piece_table(), b.piece_table()
    for token, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"id {token} is {one!r} in {a.path} and {other!r} in {b.path}"
    shared = min(len(ours), len(theirs))
    if _beyond(ours, shared) or _beyond(theirs, shared):
        return f"{a.path} has {len(ours)} pieces and {b.path} {len(theirs)}"
    for name in ("bos_id", "eos_id"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            return f"{name} is {one} in {a.path} and {other} in {b.path}"
    return None


def _beyond(table: list[str], shared: int) -> bool:
    """Whether there are pieces from id `shared` on, sentinels aside."""
    return any(not _SENTINEL.fullmatch(piece) for piece in table[shared:])
