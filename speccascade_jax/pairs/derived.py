"""Drafts without a checkpoint of their own: the target's first layers, copies from the context, or bigram counts.

Arguments that accept a draft's path (`Pair.load`, `load_pair(others=…)`, `ModelPair` in gin) also accept these words:

    exit:2               the target's first two layers with the target's output head (`models.early_exit`)
    exit:2:FILE          the same layers with an output head from a file of `experiments.train_exit_heads`
    lookup, lookup:8     copies the token after the longest earlier match of at most 8 last tokens (`models.ngrams`)
    bigrams:FILE         samples from a table of bigrams in a file of `experiments.count_bigrams`
    max_gram:FILE        copies as `lookup` does if there is a match, and otherwise samples from the table
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from speccascade_jax.core.types import BoundModel, Params
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.models import ngrams
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.models.products import held
from speccascade_jax.pairs import exit_files
from speccascade_jax.storage import archives
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import check_replaceable, expanded

LONGEST = 8
"""Default for the largest number of last tokens that "lookup" matches; "max_gram" always uses it."""
MOST_MATCHED = 128
"""Largest number of last tokens that "lookup" accepts; more would compile slowly, as the search is unrolled."""
_COUNT = "make a table with experiments.count_bigrams"


def is_derived(spec: object) -> bool:
    """Returns whether `spec` is one of the words of this module, such as "exit:2", and not an existing path."""
    return isinstance(spec, str) and spec.partition(":")[0] in _MAKERS and not Path(spec).exists()


def derive(spec: str, target: BoundModel, vocabulary: TextVocabulary | None) -> BoundModel:
    """Returns the draft for `target` that a word such as "exit:2" describes.

    Args:
        spec: the word.
        target: the target model.
        vocabulary: the vocabulary of target and draft; `None` if they have none.

    Raises:
        ValueError: the layer or length is not a number or out of range, or the table was counted with another
            vocabulary.
        CheckpointError: the file is damaged or of another kind.
        FileNotFoundError: the file does not exist.
    """
    kind, _, rest = spec.partition(":")
    return _MAKERS[kind](spec, rest, target, vocabulary)


def save_bigrams(path: str | Path, table: dict[str, np.ndarray], vocabulary: TextVocabulary) -> None:
    """Writes a table of `ngrams.count_bigrams` to a file, with the fingerprint of the vocabulary of its ids."""
    check_replaceable(path, f"{archives.KEY}.npy", *(f"{name}.npy" for name in table))
    archives.write(expanded(path), vocabulary.fingerprint, table)


def _exit(spec: str, rest: str, target: BoundModel, vocabulary: TextVocabulary | None) -> BoundModel:
    number, _, path = rest.partition(":")
    layer = _number(spec, number)
    if not path:
        return early_exit(target, layer)
    heads = exit_files.load(path)
    heads.check(target, path)
    # This call raises an error if the model lacks the layer. Without it, `heads.kernel` would wrongly blame the file.
    early_exit(target, layer)
    kernel = held("decoder/logits_dense/kernel", heads.kernel(layer, path), target.model.config)
    return early_exit(target, layer, kernel)


def _lookup(spec: str, rest: str, target: BoundModel, vocabulary: TextVocabulary | None) -> BoundModel:
    longest = _number(spec, rest) if rest else LONGEST
    if not 1 <= longest <= MOST_MATCHED:
        raise ValueError(f"{spec!r} must match 1 to {MOST_MATCHED} tokens: write lookup:{LONGEST}")
    return ngrams.prompt_lookup(target.model.vocab_size, longest, encoder_decoder=is_encoder_decoder(target))


def _counted(longest: int) -> Callable[[str, str, BoundModel, TextVocabulary | None], BoundModel]:
    def make(spec: str, rest: str, target: BoundModel, vocabulary: TextVocabulary | None) -> BoundModel:
        path, size, reads_encoder = expanded(rest), target.model.vocab_size, is_encoder_decoder(target)
        if not rest or not path.is_file():
            raise FileNotFoundError(f"{spec!r}: table of bigrams {rest!r} does not exist; {_COUNT}")
        return ngrams.max_gram(_table(path, size, vocabulary), size, longest, encoder_decoder=reads_encoder)

    return make


def _table(path: Path, size: int, vocabulary: TextVocabulary | None) -> Params:
    """Returns the table of bigrams in a file, extended to the model's `size` ids if the vocabulary has fewer."""
    try:
        of, table = archives.read(path)
    except Exception as error:  # `archives.read` can raise any type of error for a damaged file.
        raise CheckpointError(f"{path} is not a table of bigrams, or it is damaged ({error!r}): {_COUNT}") from error
    if vocabulary is not None and of != vocabulary.fingerprint:
        raise ValueError(f"the bigrams in {path} were counted with another vocabulary than the target's: {_COUNT}")
    try:
        # The table was counted with the ids of the vocabulary's file, to which a T5 may add sentinels.
        return ngrams.widened(table, size if vocabulary is None else len(table.get("next", ())), size)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _number(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{spec!r} has no number: write {spec.partition(':')[0]}:2")
    return int(text)


def is_encoder_decoder(bound: BoundModel) -> bool:
    """Returns whether a model is an encoder-decoder, which reads prompts with its encoder."""
    return bool(getattr(bound.model, "is_encoder_decoder", False))


_MAKERS = {"exit": _exit, "lookup": _lookup, "bigrams": _counted(0), "max_gram": _counted(LONGEST)}
