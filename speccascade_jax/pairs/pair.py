"""A draft and a target that share a vocabulary, from any two checkpoints, and the shipped ones."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.core import names
from speccascade_jax.core.types import BoundModel
from speccascade_jax.data import directory as data_directory
from speccascade_jax.data.vocabularies.load import FileVocabulary, candidates, first_difference, load_vocabulary
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.models import fingerprints
from speccascade_jax.pairs import head_files, policy_files
from speccascade_jax.pairs.derived import derive, is_derived, is_encoder_decoder
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.runtime.paths import shipped
from speccascade_jax.storage.files import expanded

PAIRS_DIRECTORY = shipped("pairs")
_PARTS = "vocabulary.model, target/ and draft/ (tokenizer.json, tokenizer.model or spiece.model do as well)"


@dataclass(frozen=True)
class Pair:
    """Two bound models and the text vocabulary they share (`None` for models over bare ids).

    Attributes:
        target, draft: bound models of one kind with the same number of real vocabulary entries.
        vocabulary: turns text into ids.
        max_prompt_length: prompts with more tokens are refused.
        name: for records.
        head: predicts which of the draft's tokens are kept, for methods that stop drafting by it (`head_files`).
        others: further drafts by name, for hierarchies of levels and for methods that choose among drafts.
        policy: chooses among drafts for each query (`policy_files`); whose it is shows where it is asked.

    Raises:
        ValueError: the vocabularies differ in size, only one of the models is an encoder-decoder, or the head belongs
            to another draft.
    """

    target: BoundModel
    draft: BoundModel
    vocabulary: TextVocabulary | None = None
    max_prompt_length: int = 1024
    name: str = "custom"
    head: head_files.Head | None = None
    others: Mapping[str, BoundModel] = field(default_factory=dict)
    policy: policy_files.Policy | None = None

    def __repr__(self) -> str:
        """A line: the models and their sizes, without their numbers."""
        parts = [f"{name}={bound!r}" for name, bound in self.models.items()]
        if self.vocabulary is not None:
            parts.append(f"vocabulary of {self.vocabulary.vocab_size}")
        if self.head is not None:
            parts.append("acceptance head")
        if self.policy is not None:
            parts.append("selection policy")
        return f"Pair({self.name!r}: {', '.join(parts)})"

    def __post_init__(self) -> None:
        if taken := {"target", "draft"} & set(self.others):
            raise ValueError(f"a further draft is called {taken.pop()!r}, which is what one of the pair is: rename it")
        for name, bound in self.drafts.items():
            self._check_draft("draft" if name == "draft" else f"draft {name!r}", bound)
        if self.vocabulary is not None:
            _check_room("the models", self.vocabulary.vocab_size, self.target.model.vocab_size)
        if self.head is not None:
            self.head.check(self.draft, self.name)

    def _check_draft(self, called: str, bound: BoundModel) -> None:
        kinds = [is_encoder_decoder(each) for each in (self.target, bound)]
        if kinds[0] != kinds[1]:
            said = ["an encoder-decoder" if kind else "a decoder-only model" for kind in kinds]
            raise ValueError(
                f"the target is {said[0]} and the {called} {said[1]}: one reads prompts that the other does "
                f"not; choose models of one kind"
            )
        target, draft = self.target.model.vocab_size, bound.model.vocab_size
        if target != draft:
            raise ValueError(
                f"the {called}'s vocabulary has {draft} entries and the target's {target}: speculation compares the "
                f"two laws token by token; choose models trained with one vocabulary"
            )

    @property
    def drafts(self) -> dict[str, BoundModel]:
        """The draft and the others."""
        return {"draft": self.draft, **self.others}

    @property
    def models(self) -> dict[str, BoundModel]:
        """All of them by name."""
        return {"target": self.target, **self.drafts}

    def model(self, name: str) -> BoundModel:
        """The model of that name.

        Raises:
            ValueError: the pair holds none; names those it holds.
        """
        if name not in self.models:
            hint = names.hint(name, self.models)
            raise ValueError(f"the pair {self.name!r} holds no model {name!r}: {hint}it holds {', '.join(self.models)}")
        return self.models[name]

    def require_head(self) -> head_files.Head:
        """The pair's own acceptance head.

        Raises:
            ValueError: it has none.
        """
        if self.head is None:
            raise ValueError(
                f"the pair {self.name!r} has no acceptance head, which tells the draft when to stop (a head is of one "
                f"dtype): train one (experiments/train_acceptance_head.py), or choose a policy without: "
                f"stop_confidence, stop_entropy"
            )
        return self.head

    @cached_property
    def fingerprint(self) -> str:
        """All models, all weights, the vocabulary: 32 hex digits. Part of every record's key: it never changes."""
        digest = fingerprints.begin()
        for bound in (self.target, self.draft):
            fingerprints.add(digest, bound)
        if self.vocabulary is not None:
            digest.update(self.vocabulary.fingerprint.encode())
        for name, bound in sorted(self.others.items()):
            digest.update(name.encode())
            fingerprints.add(digest, bound)
        return digest.hexdigest()

    def print_of(self, name: str) -> str:
        """The fingerprint of one of the models (`fingerprints.of_model`), taken once."""
        if name not in self._prints:
            self._prints[name] = fingerprints.of_model(self.models[name])
        return self._prints[name]

    @cached_property
    def _prints(self) -> dict[str, str]:
        return {}

    @property
    def mesh(self) -> Mesh | None:
        """The devices that the target is spread over; `None`: one."""
        return getattr(self.target.model, "mesh", None)

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts go to an encoder; otherwise outputs continue them."""
        return is_encoder_decoder(self.target)

    @cached_property
    def decoders(self) -> dict[Any, Any]:
        """The decoders that `methods.build.decoder_for` made for this pair and need not make again."""
        return {}

    @cached_property
    def max_length(self) -> int | None:
        """The longest sequence, prompt and output together, that all models were made for; `None`: no limit."""
        limits = (getattr(getattr(b.model, "config", None), "max_length", None) for b in self.models.values())
        return min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path,
        vocabulary: str | Path | None = None,
        *,
        others: Mapping[str, str | Path] | None = None,
        dtype: str = "float32",
        draft_dtype: str | None = None,
        mesh: Sequence[int] | Mesh | None = None,
        draft_whole: bool = False,
        max_prompt_length: int = 1024,
        name: str = "custom",
    ) -> Self:
        """Any two checkpoints that `checkpoints.load` reads, or more.

        Rows of the models beyond the vocabulary's pieces are padding and never drawn, unless the checkpoint itself
        knows how many of its rows are real (T5's 32,100 of 32,128): models padded to different sizes go together.

        Args:
            target, draft: paths as `checkpoints.load` takes them; drafts may be words too (`pairs.derived`: "exit:2").
            vocabulary: a file or folder as `load_vocabulary` takes it; without it, what lies beside the models. Where
                there are several, all are compared. With none at all, the pair takes and gives ids only.
            others: further drafts by name, as the draft.
            dtype: of the parameters: "float32", "bfloat16", "float16" or "int8" (`checkpoints.load`, prepared).
            draft_dtype: of those of every checkpoint but the target; `None`: the same. Laws hold for any draft, so
                one in 8 bits can only change how often it is kept, and a lossless rule still writes what the target
                would.
            mesh: (data, model): over how many devices rows are spread, and heads, units and the vocabulary
                (`runtime.mesh.make`); batches are multiples of the first. `None`: one device.
            draft_whole: keep drafts whole on every device of it: small ones gain less by being spread than they wait.
            max_prompt_length, name: as the attributes.

        Raises:
            FileNotFoundError: nothing lies at a path.
            CheckpointError: a checkpoint can't be used.
            ValueError: vocabularies that differ (says where first), or models that do not fit each other.
            ImportError: a `tokenizer.json`, and `tokenizers` is not installed.
        """
        paths = {"target": target, "draft": draft, **(others or {})}
        words = {name: str(path) for name, path in paths.items() if name != "target" and is_derived(path)}
        read = {name: path for name, path in paths.items() if name not in words}
        text = _shared_vocabulary([expanded(path) for path in read.values()], vocabulary)
        if text is not None:
            for path in read.values():  # before minutes of reading weights
                _check_entries(path, checkpoints.model_of(path).config, text)
        grid = mesh if mesh is None or isinstance(mesh, Mesh) else meshes.make(mesh)
        ways = {name: (dtype, False) if name == "target" else (draft_dtype or dtype, draft_whole) for name in read}
        models = {name: _bound(path, text, grid, *ways[name]) for name, path in read.items()}
        large = models.pop("target")
        models |= {name: derive(word, large, text) for name, word in words.items()}
        small = models.pop("draft")
        return cls(large, small, vocabulary=text, max_prompt_length=max_prompt_length, name=name, others=models)


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
        return [expanded(given), *clear]
    return clear or [found[0].parent for found in beside[:1]]


def _bound(
    path: str | Path, vocabulary: FileVocabulary | None, mesh: Mesh | None, dtype: str, whole: bool
) -> BoundModel:
    model: Any
    model, params = checkpoints.load(path, dtype=dtype, prepared=True, mesh=mesh, whole=whole)
    config = model.config
    if vocabulary is not None and vocabulary.vocab_size < config.vocab_size == config.num_embeddings:
        model = dataclasses.replace(model, config=dataclasses.replace(config, vocab_size=vocabulary.vocab_size))
    return BoundModel(params=params, model=model)


def _check_room(whose: str | Path, pieces: int, entries: int) -> None:
    if pieces > entries:
        raise ValueError(
            f"the text vocabulary has {pieces} pieces, {whose} only {entries} entries; give the vocabulary the "
            "models were trained with"
        )


def _check_entries(path: str | Path, config: Any, vocabulary: FileVocabulary) -> None:
    """Models are padded to a multiple of a power of two: a vocabulary that leaves much more unused is another one."""
    _check_room(path, vocabulary.vocab_size, config.vocab_size)
    if config.vocab_size < config.num_embeddings:
        return  # the checkpoint itself knows how many of its rows are real
    rows = config.num_embeddings
    padding, allowed = rows - vocabulary.vocab_size, max(128, rows // 100)
    if padding > allowed:
        raise ValueError(
            f"{path} has {rows} entries and the text vocabulary only {vocabulary.vocab_size} pieces: {padding} rows "
            f"are more than padding ({allowed} at most); give the vocabulary the models were trained with"
        )


_STORIES = ("models", "stories260K")
DATA_PAIRS = {
    "stories": ((*_STORIES, "stories260K.bin"), ("models", "llama2xs", "model.bin"), (*_STORIES, "tok512.bin")),
}
"""Name -> target, draft and vocabulary in the data directory: pairs whose weights are not shipped."""


def shipped_pairs() -> list[str]:
    """Names that `load_pair` knows."""
    return sorted(p.name for p in PAIRS_DIRECTORY.iterdir() if p.is_dir()) if PAIRS_DIRECTORY.exists() else []


def load_pair(
    name: str | Path,
    *,
    others: Mapping[str, str | Path] | None = None,
    dtype: str = "float32",
    draft_dtype: str | None = None,
    mesh: Sequence[int] | Mesh | None = None,
    draft_whole: bool = False,
) -> Pair:
    """A shipped pair by name, one of `DATA_PAIRS`, or one from a directory with a vocabulary, `target/` and `draft/`.

    The vocabulary lies in the directory (`vocabulary.model` or what else `load_vocabulary` finds in a folder), or
    beside the models; an acceptance head, where there is one, in the directory too (`acceptance_head.msgpack`). A head
    belongs to the draft's weights as it was trained on them: in another dtype (`dtype`, `draft_dtype`, as in
    `Pair.load`) the pair has none, and one of other weights is left out with a warning. Every folder in `drafts/` is a
    further draft of that name; `others` adds more; that, `mesh` and `draft_whole` are as in `Pair.load`. A selection
    policy there is the pair's too (`selection_policy.msgpack`).

    Raises:
        ValueError: no such pair; names those there are. Otherwise as `Pair.load`.
        FileNotFoundError: the data directory lacks one of `DATA_PAIRS`.
        CheckpointError: a part of it is damaged or missing.
    """
    more: dict[str, Any] = {"dtype": dtype, "draft_dtype": draft_dtype, "mesh": mesh, "draft_whole": draft_whole}
    if str(name) in DATA_PAIRS:
        target, draft, vocabulary = (data_directory.require(*parts) for parts in DATA_PAIRS[str(name)])
        return Pair.load(target, draft, vocabulary, name=str(name), others=others, **more)
    directory = PAIRS_DIRECTORY / str(name) if str(name) in shipped_pairs() else expanded(name)
    if not directory.is_dir():
        shipped = [*shipped_pairs(), *DATA_PAIRS]
        raise ValueError(
            f"no pair {str(name)!r}: {names.hint(name, shipped)}there are {', '.join(shipped)}; "
            f"or give a directory with {_PARTS}, or two checkpoints to Pair.load(target=…, draft=…)"
        )
    target, draft = directory / "target", directory / "draft"
    for model in (target, draft):
        checkpoints.put_back(model)
    own = bool(candidates(directory))
    known = own or any(candidates(part) for part in (target, draft) if part.is_dir())
    for part, there in (("vocabulary.model", known), ("target", target.exists()), ("draft", draft.exists())):
        if not there:
            raise ValueError(f"the pair in {directory} lacks {part!r}; it needs {_PARTS}")
    beside = {path.name: path for path in sorted(directory.glob("drafts/*")) if path.is_dir()}
    more["others"] = beside | dict(others or {})
    pair = Pair.load(target, draft, directory if own else None, name=directory.name, **more)
    if (policy := directory / policy_files.FILE).is_file():
        pair = dataclasses.replace(pair, policy=policy_files.load(policy))
    head = directory / head_files.FILE
    return _with_head(pair, head, draft_dtype or dtype) if head.is_file() else pair


def _with_head(pair: Pair, file: Path, dtype: str) -> Pair:
    """The pair with the head in `file`, unless that is another draft's: what needs no head can still be done."""
    head = head_files.load(file)  # one that is damaged is no warning
    try:
        return dataclasses.replace(pair, head=head)
    except ValueError as error:
        if dtype == "float32":  # in another dtype there need not be one
            warnings.warn(f"{file} is left out: {error}", stacklevel=3)
        return pair
