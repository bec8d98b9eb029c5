"""Models from checkpoints, and the one vocabulary that they share."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data.vocabularies.load import FileVocabulary, candidates, first_difference, load_vocabulary


def load_models(
    paths: Mapping[str, str | Path], vocabulary: str | Path | None, dtype: str
) -> tuple[dict[str, BoundModel], FileVocabulary | None]:
    """Models by name, and the vocabulary that they share; arguments and errors as of `Pair.load`."""
    text = _shared_vocabulary([Path(path).expanduser() for path in paths.values()], vocabulary)
    return {name: _bound(path, dtype, text) for name, path in paths.items()}, text


def _shared_vocabulary(models: Sequence[Path], given: str | Path | None) -> FileVocabulary | None:
    """The given vocabulary, or the one beside a model, once all of them are known to be the same."""
    loaded = [load_vocabulary(file) for file in dict.fromkeys(_vocabulary_files(models, given))]
    for other in loaded[1:]:
        if difference := first_difference(loaded[0], other):
            raise ValueError(
                f"the vocabularies differ: {difference}; speculation compares the two laws token by token, so choose "
                f"models (and a vocabulary) trained with one"
            )
    return loaded[0] if loaded else None


def _vocabulary_files(models: Sequence[Path], given: str | Path | None) -> list[Path]:
    """The given one and those beside the models; a folder with several counts only where nothing else is there."""
    beside = [found for path in models if path.exists() and (found := candidates(path))]
    clear = [found[0] for found in beside if len(found) == 1]
    if given is not None:
        return [Path(given), *clear]
    return clear or [found[0].parent for found in beside[:1]]


def _bound(path: str | Path, dtype: str, vocabulary: FileVocabulary | None) -> BoundModel:
    model: Any
    model, params = checkpoints.load(path, dtype=dtype, prepared=True)
    config = model.config
    if vocabulary is not None and vocabulary.vocab_size < config.vocab_size == config.num_embeddings:
        _check_padding(path, config.num_embeddings, vocabulary)
        model = dataclasses.replace(model, config=dataclasses.replace(config, vocab_size=vocabulary.vocab_size))
    return BoundModel(params=params, model=model)


def _check_padding(path: str | Path, rows: int, vocabulary: FileVocabulary) -> None:
    """Models are padded to a multiple of a power of two: a vocabulary that leaves much more unused is another one."""
    padding, allowed = rows - vocabulary.vocab_size, max(128, rows // 100)
    if padding > allowed:
        raise ValueError(
            f"{path} has {rows} entries and the text vocabulary only {vocabulary.vocab_size} pieces: {padding} rows "
            f"are more than padding ({allowed} at most); give the vocabulary the models were trained with"
        )
