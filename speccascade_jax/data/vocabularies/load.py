"""Functions for vocabularies of any kind: detect the kind, find a vocabulary in a model's folder, and compare two.

`TextVocabulary` defines a vocabulary; each kind has its own file.
"""

from pathlib import Path

from speccascade_jax.data.vocabularies.huggingface import TOKENIZER, HuggingFaceVocabulary
from speccascade_jax.data.vocabularies.llama2c import Llama2cVocabulary, read_pieces
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary, Vocabulary, is_sentencepiece, train
from speccascade_jax.data.vocabularies.vocabulary import SENTINEL, FileVocabulary, TextVocabulary
from speccascade_jax.storage import checksums, hub
from speccascade_jax.storage.errors import POINTER, PULL

__all__ = ["SentencePieceVocabulary", "TextVocabulary", "Vocabulary", "candidates", "first_difference"]
__all__ += ["load_vocabulary", "train"]

NAMES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocabulary.model")
LOOKED_FOR = f"{', '.join(NAMES)}, or one tokenizer of llama2.c (*.bin)"


def load_vocabulary(path: str | Path) -> FileVocabulary:
    """Returns the vocabulary in a file or in the folder of a model; the file's content determines its kind.

    Args:
        path: a `tokenizer.json` (with its special ids in the files next to it), a sentencepiece model, a tokenizer of
            llama2.c, a folder, or a name on the hub (`storage.hub`). In a folder, the first existing file of `NAMES` is
            used, or else a tokenizer of llama2.c.

    Raises:
        FileNotFoundError: there is no vocabulary; the message names the files that were tried.
        ImportError: the file is a `tokenizer.json`, and the library `tokenizers` is not installed.
        ValueError: a folder holds several tokenizers of llama2.c, or the file is not a vocabulary.
    """
    path = hub.located(path, hub.VOCABULARY)
    files = candidates(path) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        place = f"{path}: {hub.hint(path)}it must hold {LOOKED_FOR}{_conversion(path)}"
        raise FileNotFoundError(f"no vocabulary found at {place}")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds several tokenizers of llama2.c ({names}): give the path of the right file")
    (file,) = files
    content = checksums.read(file)
    if content.startswith(POINTER):
        raise ValueError(f"{file} {PULL}")
    if content[:64].lstrip().startswith(b"{"):
        return HuggingFaceVocabulary(file)
    if read_pieces(file) is not None:
        return Llama2cVocabulary(file)
    if is_sentencepiece(content):
        return SentencePieceVocabulary(file)
    kinds = "JSON with a model (tokenizer.json), nor a sentencepiece model, nor a tokenizer of llama2.c"
    raise ValueError(f"{file} is not a vocabulary: it is neither {kinds}")


def _conversion(folder: Path) -> str:
    """Returns the remedy for a folder with byte-level BPE in two files, which do not say how texts are split."""
    if not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        return ""
    call = f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
    reason = "vocab.json and merges.txt do not say how a text is split into words"
    return f". {reason}; write {TOKENIZER} with transformers: {call}"


def candidates(path: Path) -> list[Path]:
    """Returns the files that may be the vocabulary of a model at `path`, a folder or a file in it.

    Several files are returned only if all of them are tokenizers of llama2.c. Then it is unknown which one is the
    model's.
    """
    folder = path if path.is_dir() else path.parent
    named = [folder / name for name in NAMES if (folder / name).is_file()]
    if named:
        return named[:1]
    return [file for file in sorted(folder.glob("*.bin")) if file.is_file() and read_pieces(file) is not None]


def first_difference(a: FileVocabulary, b: FileVocabulary) -> str | None:
    """Describes the first difference of two vocabularies, in a piece or else in their size; `None` if they are equal.

    Three differences do not count, because the target's output distribution does not depend on how the draft interprets
    an id. Control pieces may have different names, because texts do not contain them. They may be missing at the end of
    one vocabulary. Special ids may differ, because prompts and stop ids are those of the target.
    """
    if a == b:
        return None
    ours, theirs = a.piece_table(), b.piece_table()
    for token, (our_value, their_value) in enumerate(zip(ours, theirs, strict=False)):
        if our_value != their_value and not (token in a.controls and token in b.controls):
            return f"id {token} is {our_value!r} in {a.path} and {their_value!r} in {b.path}"
    longer, shared = max((a, b), key=lambda vocabulary: vocabulary.vocab_size), min(len(ours), len(theirs))
    if all(n in longer.controls or SENTINEL.fullmatch(longer.piece(n)) for n in range(shared, longer.vocab_size)):
        return None
    return f"{a.path} has {len(ours)} pieces and {b.path} {len(theirs)}"
