"""Pairs of a draft and a target that share a vocabulary, from any two checkpoints or shipped with the package."""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.reading import of_the_hub
from speccascade_jax.core import names
from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import DTYPES, STORED, BoundModel
from speccascade_jax.data import directory as data_directory
from speccascade_jax.data.vocabularies.load import FileVocabulary, candidates, first_difference, load_vocabulary
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary
from speccascade_jax.data.vocabularies.tokenizer_files import TokenizerFiles
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.models import fingerprints
from speccascade_jax.pairs import head_files, policy_files
from speccascade_jax.pairs.derived import derive, is_derived, is_encoder_decoder
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.runtime.paths import shipped
from speccascade_jax.storage.files import expanded

PAIRS_DIRECTORY = shipped("pairs")
_PARTS = "vocabulary.model, target/ and draft/ (or tokenizer.json, tokenizer.model, spiece.model for the vocabulary)"


@dataclass(frozen=True)
class Pair:
    """Two models with their parameters, and the text vocabulary that they share (`None`: prompts are token ids).

    Attributes:
        target, draft: bound models of one kind with the same number of real vocabulary entries.
        vocabulary: turns text into ids.
        max_prompt_length: prompts with more tokens are refused.
        name: the pair's name in records.
        head: predicts which of the draft's tokens are accepted, for methods that stop drafting by it (`head_files`).
        others: further drafts by name, for hierarchies of levels and for methods that choose among drafts.
        policy: chooses among drafts for each query (`policy_files`); its first use checks that it fits the pair.

    Raises:
        ValueError: the vocabularies differ in size, only one of the models is an encoder-decoder, or the head belongs
            to another draft.

    Examples:
        >>> import speccascade_jax as sc
        >>> draft, middle = sc.FakeLM(8, noise=0.5, seed=1), sc.FakeLM(8, noise=0.2, seed=1)
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=draft, others={"middle": middle}, name="mine")
        >>> list(pair.models), pair.model("middle").model.noise, pair.encoder_decoder
        (['target', 'draft', 'middle'], 0.2, False)
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
        """Returns one line with the models and their sizes, without their weights."""
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
            raise ValueError(
                f"a further draft is called {taken.pop()!r}, but a model of the pair has this name: rename it"
            )
        for name in self.others:
            names.check_own("a further draft", name)
        whole("max_prompt_length", self.max_prompt_length, 1)
        for name, bound in self.drafts.items():
            self._check_draft("draft" if name == "draft" else f"draft {name!r}", bound)
        if self.vocabulary is not None:
            _check_room("the models", self.vocabulary, self.target.model.vocab_size)
        if self.head is not None:
            self.head.check(self.draft, self.name)

    def _check_draft(self, called: str, bound: BoundModel) -> None:
        kinds = [is_encoder_decoder(model) for model in (self.target, bound)]
        if kinds[0] != kinds[1]:
            said = ["an encoder-decoder" if kind else "a decoder-only model" for kind in kinds]
            raise ValueError(
                f"the target is {said[0]} and the {called} {said[1]}: they read prompts in different ways; choose "
                f"two models of the same kind"
            )
        target, draft = self.target.model.vocab_size, bound.model.vocab_size
        if target != draft:
            raise ValueError(
                f"the {called}'s vocabulary has {draft} entries and the target's {target}: speculation compares the "
                f"two distributions token by token; choose models trained with the same vocabulary. If the models are "
                f"padded to different sizes, give the vocabulary, or its number of ids: Pair.load(vocab_size=…)"
            )

    @property
    def drafts(self) -> dict[str, BoundModel]:
        """The draft and the other drafts, by name."""
        return {"draft": self.draft, **self.others}

    @property
    def models(self) -> dict[str, BoundModel]:
        """All models by name."""
        return {"target": self.target, **self.drafts}

    def model(self, name: str) -> BoundModel:
        """Returns the model of that name.

        Raises:
            ValueError: the pair has no such model; names the existing ones.
        """
        if name not in self.models:
            hint = names.hint(name, self.models)
            raise ValueError(f"the pair {self.name!r} holds no model {name!r}: {hint}it holds {', '.join(self.models)}")
        return self.models[name]

    def require_head(self) -> head_files.Head:
        """Returns the pair's acceptance head.

        Raises:
            ValueError: it has none.
        """
        if self.head is None:
            raise ValueError(
                f"the pair {self.name!r} has no acceptance head, which the policy needs to stop the draft (a head fits "
                "one dtype only): train one (experiments/train_acceptance_head.py), or choose a policy without a head: "
                "stop_confidence, stop_entropy"
            )
        return self.head

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all models, weights and the vocabulary, 32 hex digits.

        Keys of stored records depend on it, so its computation must not change.
        """
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
        """Returns the fingerprint of one of the models (`fingerprints.of_model`), computed once."""
        if name not in self._prints:
            self._prints[name] = fingerprints.of_model(self.models[name])
        return self._prints[name]

    @cached_property
    def _prints(self) -> dict[str, str]:
        return {}

    @property
    def mesh(self) -> Mesh | None:
        """The devices that hold the target; `None`: one device."""
        return getattr(self.target.model, "mesh", None)

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts go to an encoder; if not, outputs continue the prompts."""
        return is_encoder_decoder(self.target)

    @cached_property
    def decoders(self) -> dict[Any, Any]:
        """Cache of the decoders that `methods.build.decoder_for` made for this pair."""
        return {}

    @cached_property
    def max_length(self) -> int | None:
        """The longest sequence, prompt and output together, that all models support; `None`: no limit."""
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
        draft_dtype: str | None = STORED,
        mesh: Sequence[int] | Mesh | None = None,
        draft_whole: bool = False,
        vocab_size: int | None = None,
        max_prompt_length: int = 1024,
        name: str = "custom",
    ) -> Self:
        """Loads a target, a draft and any further drafts as a pair, from checkpoints that `checkpoints.load` reads.

        A model's rows beyond the vocabulary's pieces are padding and never sampled, unless the checkpoint itself knows
        how many of its rows are real (T5's 32,100 of 32,128). Models padded to different sizes therefore fit together.
        A T5 with rows for its sentinels has them as pieces. A draft that lacks a few of the target's rows never
        proposes their ids, and pieces that were only added to a tokenizer may lack rows everywhere.

        Prompts are the target's, and outputs end with the vocabulary's stop ids and with those in the target's own
        `generation_config.json` or `config.json`, wherever the vocabulary lies.

        Args:
            target: a path for `checkpoints.load`.
            draft: a path for `checkpoints.load`, or a word (`pairs.derived`: "exit:2").
            vocabulary: a file or folder for `load_vocabulary`; without it, the vocabularies beside the models. If there
                are several, all are compared; names of control pieces may differ. If there is none, the pair reads and
                returns ids only.
            others: further drafts by name, like `draft`.
            dtype: dtype of the parameters: "float32", "bfloat16", "float16" or "int8" (`checkpoints.load`, prepared).
            draft_dtype: dtype of every checkpoint but the target; `None`: `dtype`; "stored": `dtype`, but drafts that
                are stored in 8 bits stay in 8 bits where this changes no value and costs no time (with float32, on one
                CPU device with the extra `cpu`). Exactness holds for any draft: other values change the acceptance
                rate only, and a lossless rule still samples from the target's distribution.
            mesh: (data, model): the numbers of devices that split the rows, and that split heads, units and the
                vocabulary (`runtime.mesh.make`); batch sizes must be multiples of the first. `None`: one device.
            draft_whole: replicate drafts on every device of the mesh: communication costs a small draft more than a
                split saves.
            vocab_size: the number of ids that are real, for models without a vocabulary whose rows are padded.
            max_prompt_length: prompts with more tokens are refused.
            name: the pair's name in records.

        Raises:
            FileNotFoundError: a path does not exist.
            CheckpointError: a checkpoint cannot be used.
            ValueError: vocabularies differ (names the first difference), or models do not fit each other.
            ImportError: there is a `tokenizer.json`, and `tokenizers` is not installed.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype={names.shown(dtype)} is not one of {', '.join(DTYPES)}")
        small_dtype = _dtype_of_drafts(dtype, draft_dtype)
        paths = {"target": target, "draft": draft, **_further(others)}
        for model, path in paths.items():
            if not isinstance(path, str | os.PathLike) or not str(path):
                raise ValueError(f"{model}={names.shown(path)} is not a path: give a text or a Path")
        words = {name: str(path) for name, path in paths.items() if name != "target" and is_derived(path)}
        read = {name: path for name, path in paths.items() if name not in words}
        text = _shared_vocabulary([expanded(path) for path in read.values()], vocabulary)
        # Before the weights, which may take minutes to read.
        text, entries = _fitted(text, vocab_size, list(read.values()))
        grid = mesh if mesh is None or isinstance(mesh, Mesh) else meshes.make(mesh)
        ways = {name: (dtype, False) if name == "target" else (small_dtype, draft_whole) for name in read}
        models = {name: _bound(path, entries, grid, *ways[name]) for name, path in read.items()}
        large = models.pop("target")
        models |= {name: derive(word, large, text) for name, word in words.items()}
        small = models.pop("draft")
        return cls(large, small, vocabulary=text, max_prompt_length=max_prompt_length, name=name, others=models)


def _dtype_of_drafts(dtype: str, draft_dtype: str | None) -> str:
    """Returns the dtype for `checkpoints.load`; in fewer than 32 bits, the user chose other values than the stored."""
    if draft_dtype not in (None, STORED, *DTYPES):
        known = ", ".join((STORED, *DTYPES))
        raise ValueError(f"draft_dtype={names.shown(draft_dtype)} is not one of {known}; None gives the target's dtype")
    return dtype if draft_dtype is None or (draft_dtype == STORED and dtype != "float32") else draft_dtype


def _further(others: Mapping[str, str | Path] | None) -> dict[str, str | Path]:
    """Returns further drafts; refuses other values, and names of the pair's own models, before anything is read."""
    if not isinstance(others, Mapping | None):
        raise ValueError(f"others={names.shown(others)} is not a dictionary: write others={{'NAME': PATH}}")
    for name in others or {}:
        names.check_own("a further draft", name)
        if name in ("target", "draft"):
            raise ValueError(f"a further draft is called {name!r}, but a model of the pair has this name: rename it")
    return dict(others or {})


def _shared_vocabulary(models: Sequence[Path], vocabulary: str | Path | None) -> FileVocabulary | None:
    """Returns the given vocabulary, or else one from a model's folder, after checking that all of these are equal."""
    loaded = [load_vocabulary(file) for file in dict.fromkeys(_vocabulary_files(models, vocabulary))]
    for later in loaded[1:]:
        if difference := first_difference(loaded[0], later):
            raise ValueError(
                f"the vocabularies differ: {difference}; speculation compares the two distributions token by token, so "
                f"choose models (and a vocabulary file) with the same vocabulary"
            )
    return loaded[0] if loaded else None


def _vocabulary_files(models: Sequence[Path], vocabulary: str | Path | None) -> list[Path]:
    """Returns the given vocabulary file and those in the models' folders.

    A folder with several vocabularies counts only if there is no other vocabulary.
    """
    file_lists = [files for path in models if path.exists() and (files := candidates(path))]
    clear = [files[0] for files in file_lists if len(files) == 1]
    if vocabulary is not None:
        return [expanded(vocabulary), *clear]
    return clear or [files[0].parent for files in file_lists[:1]]


def _fitted(
    vocabulary: FileVocabulary | None, entries: int | None, paths: Sequence[str | Path]
) -> tuple[FileVocabulary | None, int | None]:
    """Returns the target's vocabulary and its number of ids, after checking every model's rows.

    The target's path is the first.
    """
    if vocabulary is None and entries is None:
        return None, None
    target, *drafts = (checkpoints.model_of(path).config for path in paths)
    if vocabulary is not None:
        vocabulary = _for_target(vocabulary, expanded(paths[0]), target)
        entries = _entries(target, vocabulary) if entries is None else entries
    for path, config in zip(paths, (target, *drafts), strict=True):
        _check_entries(path, config, int(entries or 0), vocabulary, is_target=config is target)
    return vocabulary, entries


def _for_target(vocabulary: FileVocabulary, target: Path, config: Any) -> FileVocabulary:
    """Returns the vocabulary with the sentinels that the target has rows for, and with the target's own stop ids."""
    if isinstance(vocabulary, SentencePieceVocabulary) and hasattr(config, "num_encoder_layers"):
        vocabulary = vocabulary.with_sentinels(config.vocab_size)
    # An id without a row ends nothing.
    return vocabulary.ending_with(
        token for token in TokenizerFiles(target).stop_numbers() if 0 <= token < config.vocab_size
    )


def _entries(config: Any, vocabulary: FileVocabulary) -> int:
    """Returns the number of ids that a target draws from: the vocabulary's pieces, or more if its config says so."""
    known = config.vocab_size if config.vocab_size < config.num_embeddings else 0
    return min(max(vocabulary.vocab_size, known), config.num_embeddings)


def _bound(path: str | Path, entries: int | None, mesh: Mesh | None, dtype: str, whole: bool) -> BoundModel:
    model: Any
    model, params = checkpoints.load(path, dtype=dtype, prepared=True, mesh=mesh, whole=whole)
    if entries is not None and entries != model.config.vocab_size:
        sizes = {"vocab_size": entries, "missing_rows": max(0, entries - model.config.num_embeddings)}
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, **sizes))
    return BoundModel(params=params, model=model)


def _check_room(owner: str | Path, vocabulary: TextVocabulary, rows: int, is_target: bool = True) -> None:
    """Checks that pieces without a row are few and only added to the tokenizer, and that no row of a target ends it."""
    lacking = range(rows, vocabulary.vocab_size)
    controls: frozenset[int] = getattr(vocabulary, "controls", frozenset())
    spare = controls.difference(vocabulary.stop_ids if is_target else ())
    if len(lacking) > _padding(rows) or not spare.issuperset(lacking):
        raise ValueError(
            f"the text vocabulary has {vocabulary.vocab_size} pieces, but {owner} only {rows} entries; give the "
            "vocabulary that the models were trained with"
        )


def _padding(rows: int) -> int:
    """Returns how many rows padding may be, at most: models are padded to a multiple of a power of two."""
    return max(128, rows // 100)


def _check_entries(
    path: str | Path, config: Any, entries: int, vocabulary: FileVocabulary | None, is_target: bool
) -> None:
    """Checks that a model has rows for its `entries`, and few more: many more are a sign of a wrong vocabulary."""
    rows, lacking = config.num_embeddings, entries - config.num_embeddings
    if vocabulary is not None:
        _check_room(path, vocabulary, rows, is_target)
    elif lacking > (0 if is_target else _padding(rows)):
        raise ValueError(f"vocab_size is {entries}, but {path} has {rows} rows: give the number of real ones")
    # A checkpoint may itself know how many of its rows are real.
    if config.vocab_size == rows and -lacking > _padding(rows):
        raise ValueError(
            f"{path} has {rows} entries, but the text vocabulary only {entries} pieces: {-lacking} rows are too many "
            f"for padding (at most {_padding(rows)}); give the vocabulary that the models were trained with"
        )


_STORIES = ("models", "stories260K")
DATA_PAIRS = {
    "stories": ((*_STORIES, "stories260K.bin"), ("models", "llama2xs", "model.bin"), (*_STORIES, "tok512.bin")),
}
"""Name -> target, draft and vocabulary in the data directory, for pairs whose weights are not shipped."""


def shipped_pairs() -> list[str]:
    """Returns the names of the shipped pairs, sorted. `load_pair` also reads those of `DATA_PAIRS`.

    Examples:
        >>> import speccascade_jax as sc
        >>> sc.shipped_pairs()
        ['tatoeba_en_de', 'tatoeba_en_de_large', 'tatoeba_two_ways']
    """
    return sorted(p.name for p in PAIRS_DIRECTORY.iterdir() if p.is_dir()) if PAIRS_DIRECTORY.exists() else []


def load_pair(
    name: str | Path,
    *,
    others: Mapping[str, str | Path] | None = None,
    dtype: str = "float32",
    draft_dtype: str | None = STORED,
    mesh: Sequence[int] | Mesh | None = None,
    draft_whole: bool = False,
) -> Pair:
    """Loads a pair that is shipped, that lies in the data directory, or that a directory of yours holds.

    The directory holds `target/` and `draft/`. The directory, or the models' folders, hold the vocabulary
    (`vocabulary.model` or another file that `load_vocabulary` accepts). The directory may also hold:

    - an acceptance head (`acceptance_head.msgpack`), which belongs to the values of the draft's weights. In a dtype
      with other values (`dtype`, `draft_dtype`, as in `Pair.load`) the pair has no head. A head of other weights is
      ignored with a warning;
    - further drafts, one in each folder of `drafts/` and with the folder's name. `others` adds more, as in `Pair.load`;
    - a selection policy (`selection_policy.msgpack`).

    Args:
        name: a name of `shipped_pairs()` or of `DATA_PAIRS`, or a directory.
        others: further drafts, name -> checkpoint, as in `Pair.load`.
        dtype: the type that parameters are held in.
        draft_dtype: the type of the drafts' parameters; `None`: as in `Pair.load`.
        mesh: (data, model), as in `Pair.load`.
        draft_whole: whether every device of the mesh holds the whole draft.

    Returns:
        A `Pair` of that name, or of the directory's.

    Raises:
        ValueError: there is no such pair (names the existing ones), or as `Pair.load`.
        FileNotFoundError: the data directory lacks the files of a pair of `DATA_PAIRS`.
        CheckpointError: a part of the pair is damaged or missing.

    Examples:
        >>> import speccascade_jax as sc
        >>> pair = sc.load_pair("tatoeba_en_de")
        >>> pair.target, pair.draft, pair.vocabulary.vocab_size
        (BoundModel(T5, 10,574,400 parameters), BoundModel(T5, 2,180,864 parameters), 4096)
    """
    more: dict[str, Any] = {"dtype": dtype, "draft_dtype": draft_dtype, "mesh": mesh, "draft_whole": draft_whole}
    if str(name) in DATA_PAIRS:
        target, draft, vocabulary = find_data_pair(str(name))
        return Pair.load(target, draft, vocabulary, name=str(name), others=others, **more)
    directory, has_vocabulary = find_pair(name)
    target, draft = directory / "target", directory / "draft"
    drafts = {path.name: path for path in sorted(directory.glob("drafts/*")) if path.is_dir()}
    more["others"] = drafts | _further(others)
    pair = Pair.load(target, draft, directory if has_vocabulary else None, name=directory.name, **more)
    if (policy := directory / policy_files.FILE).is_file():
        pair = dataclasses.replace(pair, policy=policy_files.load(policy))
    head = directory / head_files.FILE
    return _with_head(pair, head, _dtype_of_drafts(dtype, draft_dtype)) if head.is_file() else pair


def find_data_pair(name: str) -> tuple[Path, Path, Path]:
    """Returns target, draft and vocabulary of a pair of `DATA_PAIRS`; FileNotFoundError if one is missing."""
    instead = f"a shipped pair ({', '.join(shipped_pairs())})"
    target, draft, vocabulary = (data_directory.require(*parts, instead=instead) for parts in DATA_PAIRS[name])
    return target, draft, vocabulary


def find_pair(name: str | Path) -> tuple[Path, bool]:
    """Returns a pair's directory, and whether the directory itself holds a vocabulary.

    Raises:
        ValueError: there is no such pair, or it lacks a part.
    """
    directory = PAIRS_DIRECTORY / str(name) if str(name) in shipped_pairs() else expanded(name)
    if not directory.is_dir():
        shipped = shipped_pairs()
        near = names.hint(name, [*shipped, *DATA_PAIRS])
        raise ValueError(
            f"no pair {str(name)!r}: {near}the known pairs are {', '.join(shipped)}, and in the data directory "
            f"{', '.join(DATA_PAIRS)}; {of_the_hub(Path(name))}give one of them, a directory with "
            f"{_PARTS}, or two checkpoints to Pair.load(target=…, draft=…)"
        )
    target, draft = directory / "target", directory / "draft"
    for model in (target, draft):
        checkpoints.put_back(model)
    has_vocabulary = bool(candidates(directory))
    known = has_vocabulary or any(candidates(part) for part in (target, draft) if part.is_dir())
    for part, present in (("vocabulary.model", known), ("target", target.exists()), ("draft", draft.exists())):
        if not present:
            raise ValueError(f"the pair in {directory} lacks {part!r}; it needs {_PARTS}")
    return directory, has_vocabulary


def _with_head(pair: Pair, file: Path, dtype: str) -> Pair:
    """Returns the pair with the head in `file`, or without a head if it belongs to another draft.

    Methods that need no head still work then.
    """
    head = head_files.load(file)  # A damaged file is an error, not a warning.
    try:
        return dataclasses.replace(pair, head=head)
    except ValueError as error:
        if dtype in ("float32", STORED):  # In another dtype the pair is not expected to have a head.
            warnings.warn(f"{file} is ignored: {error}", stacklevel=3)
        return pair
