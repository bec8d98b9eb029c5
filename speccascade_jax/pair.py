"""A draft and a target that share a vocabulary, and the shipped ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speccascade_jax import checkpoints, names
from speccascade_jax.data.vocabularies import Vocabulary
from speccascade_jax.models.base import BoundModel

PAIRS_DIRECTORY = Path(__file__).parent / "assets" / "pairs"


@dataclass(frozen=True)
class Pair:
    """Two bound models and the text vocabulary they share (`None` for models over bare ids).

    Attributes:
        target, draft: bound models with the same number of real vocabulary entries.
        vocabulary: turns text into ids.
        max_prompt_length: prompts with more tokens are refused.
        name: for records.

    Raises:
        ValueError: the vocabularies differ in size.
    """

    target: BoundModel
    draft: BoundModel
    vocabulary: Vocabulary | None = None
    max_prompt_length: int = 1024
    name: str = "custom"

    def __post_init__(self) -> None:
        target, draft = self.target.model.vocab_size, self.draft.model.vocab_size
        if target != draft:
            raise ValueError(
                f"the draft's vocabulary has {draft} entries and the target's {target}: speculation compares the two "
                f"laws token by token; choose models trained with one vocabulary"
            )
        if self.vocabulary is not None and self.vocabulary.vocab_size > target:
            raise ValueError(
                f"the text vocabulary has {self.vocabulary.vocab_size} pieces, the models only {target} entries; "
                f"give the vocabulary the models were trained with"
            )


def shipped_pairs() -> list[str]:
    """Names that `load_pair` knows."""
    return sorted(p.name for p in PAIRS_DIRECTORY.iterdir() if p.is_dir()) if PAIRS_DIRECTORY.exists() else []


def load_pair(name: str | Path) -> Pair:
    """A shipped pair by name, or one from a directory that holds `vocabulary.model`, `target/` and `draft/`.

    Raises:
        ValueError: no such pair; names the shipped ones.
        CheckpointError: a part of it is damaged or missing.
    """
    directory = PAIRS_DIRECTORY / str(name) if str(name) in shipped_pairs() else Path(name)
    if not directory.is_dir():
        shipped = shipped_pairs()
        raise ValueError(
            f"no pair {str(name)!r}: {names.hint(name, shipped)}shipped are {', '.join(shipped) or 'none'}; "
            f"or give a directory with vocabulary.model, target/ and draft/"
        )
    for part in ("vocabulary.model", "target", "draft"):
        if not (directory / part).exists():
            raise ValueError(f"the pair in {directory} lacks {part!r}; it needs vocabulary.model, target/ and draft/")
    target, draft = (_bound(directory / part) for part in ("target", "draft"))
    return Pair(target, draft, vocabulary=Vocabulary(directory / "vocabulary.model"), name=directory.name)


def _bound(directory: Path) -> BoundModel:
    model, params = checkpoints.load(directory)
    return BoundModel(params=model.prepare(params), model=model)
