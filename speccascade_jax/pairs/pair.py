"""Pairs: a target model and one or more draft models with the same vocabulary, loaded from checkpoints or shipped."""

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
from speccascade_jax.core import names
from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import AttachedModel
from speccascade_jax.core.types import DTYPES, STORED, BoundModel, Params
from speccascade_jax.data import directory as data_directory
from speccascade_jax.data.vocabularies.chat_template import ChatTemplate, require_template
from speccascade_jax.data.vocabularies.load import FileVocabulary, candidates, first_difference, load_vocabulary
from speccascade_jax.data.vocabularies.sentencepiece import SentencePieceVocabulary
from speccascade_jax.data.vocabularies.tokenizer_files import TokenizerFiles
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.models import fingerprints
from speccascade_jax.models.decoder import DecoderLM
from speccascade_jax.pairs import head_files, policy_files
from speccascade_jax.pairs.derived import derive, is_derived, is_encoder_decoder
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.runtime.paths import shipped
from speccascade_jax.storage import hub
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.hub import located

PAIRS_DIRECTORY = shipped("pairs")
_PARTS = "vocabulary.model, target/ and draft/ (or tokenizer.json, tokenizer.model, spiece.model for the vocabulary)"


@dataclass(frozen=True)
class Pair:
    """A target and a draft with their parameters, their shared vocabulary, and optional further drafts.

    Attributes:
        target, draft: models bound to their parameters. Both are encoder-decoders or both are decoder-only, and they
            have the same number of real vocabulary entries.
        vocabulary: encodes texts as token ids and decodes them; `None` if prompts and outputs are token ids only.
        max_prompt_length: largest number of tokens in a prompt; longer prompts raise an error.
        name: the pair's name in stored results.
        head: acceptance head, which predicts whether the target accepts a token of the draft; some stop policies need
            it (`head_files`).
        others: further drafts by name, for hierarchies of several drafts and for methods that choose among drafts.
        policy: selection policy, which chooses among drafts for each prompt (`policy_files`). It is checked against the
            pair's models at its first use.

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
        """Returns one line with the name, the models' sizes and the pair's other parts."""
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
        _check_name(self.name)
        for name in self.others:
            names.check_own("a further draft", name)
        whole("max_prompt_length", self.max_prompt_length, 1)
        for name, bound in self.drafts.items():
            self._check_draft("draft" if name == "draft" else f"draft {name!r}", bound)
        if self.vocabulary is not None:
            check_room("the models", self.vocabulary, self.target.model.vocab_size)
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
        if isinstance(bound.model, AttachedModel):
            _check_attached(bound.model, bound.params, self.target)

    @property
    def drafts(self) -> dict[str, BoundModel]:
        """The draft, named "draft", and the further drafts, by name."""
        return {"draft": self.draft, **self.others}

    @property
    def models(self) -> dict[str, BoundModel]:
        """The target, named "target", and all drafts, by name."""
        return {"target": self.target, **self.drafts}

    def model(self, name: str) -> BoundModel:
        """Returns the pair's model of this name.

        Raises:
            ValueError: the pair has no such model; the message names the models that it has.
        """
        if name not in self.models:
            hint = names.hint(name, self.models)
            raise ValueError(f"the pair {self.name!r} has no model {name!r}: {hint}it has {', '.join(self.models)}")
        return self.models[name]

    def require_head(self) -> head_files.Head:
        """Returns the pair's acceptance head.

        Raises:
            ValueError: the pair has no acceptance head.
        """
        if self.head is None:
            raise ValueError(
                f"the pair {self.name!r} has no acceptance head, which this stop policy needs (a head fits one dtype "
                "only): train one (experiments/train_acceptance_head.py), or choose a policy without a head: "
                "stop_confidence, stop_entropy"
            )
        return self.head

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the pair's models, their weights and the vocabulary, 32 hex digits.

        Keys of stored results contain this hash, so its computation must not change.
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
        """Returns the fingerprint of the model of this name (`fingerprints.of_model`); computes it only once."""
        if name not in self._prints:
            self._prints[name] = fingerprints.of_model(self.models[name])
        return self._prints[name]

    @cached_property
    def _prints(self) -> dict[str, str]:
        return {}

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices that hold the target; `None`: one device."""
        return getattr(self.target.model, "mesh", None)

    @property
    def encoder_decoder(self) -> bool:
        """Whether the models are encoder-decoders, whose encoder reads prompts; otherwise outputs continue prompts."""
        return is_encoder_decoder(self.target)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template in the folder of the vocabulary or else of the target; a `ValueError` if there is none."""
        return require_template(self.vocabulary)

    @cached_property
    def for_chat(self) -> Self:
        """The pair whose outputs also end where the chat template ends an answer (`ChatTemplate.end_of_turn`).

        It is the pair itself if these ids are stop ids already, as `generation_config.json` of most checkpoints says.
        """
        template, vocabulary = self.chat_template, self.vocabulary
        assert isinstance(vocabulary, FileVocabulary)  # `chat_template` refuses others
        ends = [token for token in template.end_of_turn(vocabulary) if token < self.target.model.vocab_size]
        if vocabulary.ending_with(ends) is vocabulary:
            return self
        return dataclasses.replace(self, vocabulary=vocabulary.ending_with(ends))

    @cached_property
    def decoders(self) -> dict[Any, Any]:
        """The decoders that `methods.build.decoder_for` has built for this pair, kept for later calls."""
        return {}

    @cached_property
    def max_length(self) -> int | None:
        """The largest number of tokens, in prompt and output together, that all models support; `None`: no limit."""
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

        A model may have more or fewer embedding rows than the vocabulary has pieces. Rows beyond the vocabulary's
        pieces are padding and are never sampled, unless the checkpoint itself states how many of its rows are real
        (32,100 of T5's 32,128). Models that are padded to different sizes can therefore form a pair. If a T5 has rows
        for sentinels, these are added to the vocabulary. A draft that lacks some of the target's last rows never
        proposes their ids. Pieces that were only added to a tokenizer may lack rows in all models.

        Prompts are built as the target needs them, for example with its start token. Outputs end with the vocabulary's
        stop ids, and with those in the target's own `generation_config.json` or `config.json`, even if the vocabulary
        is in another folder.

        Args:
            target: a path for `checkpoints.load`, or a name on the hub, such as "google/gemma-3-4b-it", as a text. A
                `Path` is local, unless it begins with `hf:`.
            draft: a path or a name, as for the target, or a word that `pairs.derived` lists, such as "exit:2".
            vocabulary: a file, a folder or a name for `load_vocabulary`. If it is `None`, the vocabularies in the
                models' folders are used. Several vocabularies must be equal, except for names of control pieces. If
                there is none, prompts and outputs are token ids only.
            others: further drafts by name, each given by a path or a word, as for `draft`.
            dtype: dtype of the parameters: "float32", "bfloat16", "float16" or "int8" (see `checkpoints.load`, with
                `prepared=True`).
            draft_dtype: dtype of the drafts' parameters; `None` means `dtype`. "stored" means `dtype` too, except that
                drafts stored in 8 bits stay in 8 bits if this changes no value and costs no time. That is the case with
                dtype "float32" on one CPU device with the extra `cpu`. With a lossless rule, the draft's values only
                change the acceptance rate, not the distribution of the output.
            mesh: (data, model), the number of devices that split rows, and the number that split heads, feed-forward
                units and the vocabulary (`runtime.mesh.make`). Batch sizes must be multiples of the first number.
                `None`: one device.
            draft_whole: whether every device of the mesh holds the drafts in full. For a small draft, communication
                costs more time than splitting saves.
            vocab_size: number of real token ids, for models with padded rows and without a vocabulary.
            max_prompt_length: largest number of tokens in a prompt; longer prompts raise an error.
            name: the pair's name in stored results.

        Raises:
            FileNotFoundError: a path does not exist.
            OSError: a model of the hub cannot be fetched (`hub.fetched`).
            CheckpointError: a checkpoint cannot be used.
            ValueError: vocabularies differ (the message names the first difference), or the models cannot form a pair.
            ImportError: a vocabulary is a `tokenizer.json`, and the library `tokenizers` is not installed.
        """
        _check_name(name)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype={names.shown(dtype)} is not one of {', '.join(DTYPES)}")
        small_dtype = _dtype_of_drafts(dtype, draft_dtype)
        paths = {"target": target, "draft": draft, **_further(others)}
        for model, path in paths.items():
            if not isinstance(path, str | os.PathLike) or not str(path):
                raise ValueError(f"{model}={names.shown(path)} is not a path: give a text or a Path")
        words = {name: str(path) for name, path in paths.items() if name != "target" and is_derived(path)}
        read = {name: located(path) for name, path in paths.items() if name not in words}
        text = shared_vocabulary(list(read.values()), vocabulary)
        # Sizes are checked before the weights are read, which may take minutes.
        _check_heads(read["target"], [path for path in read.values() if checkpoints.belongs_to_target(path)])
        text, entries = _fitted(text, vocab_size, list(read.values()))
        grid = mesh if mesh is None or isinstance(mesh, Mesh) else meshes.make(mesh)
        ways = {name: (dtype, False) if name == "target" else (small_dtype, draft_whole) for name in read}
        models = {name: _bound(path, entries, grid, *ways[name]) for name, path in read.items()}
        large = models.pop("target")
        models = {name: fitted_head(bound, large) for name, bound in models.items()}
        models |= {name: derive(word, large, text) for name, word in words.items()}
        small = models.pop("draft")
        return cls(large, small, vocabulary=text, max_prompt_length=max_prompt_length, name=name, others=models)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name={names.shown(name)} is not a name: give the text that stored results call the pair")


def fitted_head(bound: BoundModel, target: BoundModel) -> BoundModel:
    """Returns a draft model; one that belongs to a target (`AttachedModel`) is attached to it.

    Raises:
        ValueError: the model does not fit the target.
    """
    if not isinstance(bound.model, AttachedModel):
        return bound
    _check_kind(target)
    return bound.model.attached(bound.params, target)


def _check_kind(target: BoundModel) -> None:
    """Raises a `ValueError` if no draft can belong to the target."""
    if not isinstance(target.model, DecoderLM):
        raise ValueError(
            f"the draft is a head that reads a decoder-only target, but the target is a {type(target.model).__name__}: "
            "choose the head's own target"
        )


def _check_attached(model: AttachedModel, params: Params, target: BoundModel) -> None:
    """Raises a `ValueError` if a draft does not fit its target, or lacks parameters that the target lends it."""
    _check_kind(target)
    model.check(target)
    if lacking := model.attached(params, target).params.keys() - params.keys():
        raise ValueError(f"the draft lacks {', '.join(lacking)}, which its target lends it: load both with Pair.load")


def _check_heads(target: str | Path, heads: Sequence[str | Path]) -> None:
    """Raises a `ValueError` if one of these heads does not fit the target; reads no weights."""
    if heads:
        without_weights = BoundModel(params={"token_embedder": {}}, model=checkpoints.model_of(target))
        for path in heads:
            fitted_head(BoundModel(params={}, model=checkpoints.model_of(path)), without_weights)


def _dtype_of_drafts(dtype: str, draft_dtype: str | None) -> str:
    """Returns the dtype of the drafts for `checkpoints.load`, from the arguments of `Pair.load`.

    "stored" stays "stored" only if `dtype` is "float32". In another dtype, the user has chosen to change the weights'
    values, so the drafts get that dtype too.
    """
    if draft_dtype not in (None, STORED, *DTYPES):
        known = ", ".join((STORED, *DTYPES))
        raise ValueError(f"draft_dtype={names.shown(draft_dtype)} is not one of {known}; None gives the target's dtype")
    return dtype if draft_dtype is None or (draft_dtype == STORED and dtype != "float32") else draft_dtype


def _further(others: Mapping[str, str | Path] | None) -> dict[str, str | Path]:
    """Returns the further drafts as a dict; raises `ValueError` for an invalid name, before anything is read."""
    if not isinstance(others, Mapping | None):
        raise ValueError(f"others={names.shown(others)} is not a dictionary: write others={{'NAME': PATH}}")
    for name in others or {}:
        names.check_own("a further draft", name)
        if name in ("target", "draft"):
            raise ValueError(f"a further draft is called {name!r}, but a model of the pair has this name: rename it")
    return dict(others or {})


def shared_vocabulary(models: Sequence[Path], vocabulary: str | Path | None) -> FileVocabulary | None:
    """Returns the vocabulary of all models, or `None` if there is no vocabulary file.

    It is read from `vocabulary` if that path is given, and otherwise from a model's folder.

    Raises:
        ValueError: vocabulary files differ; the message names the first difference.
    """
    loaded = [load_vocabulary(file) for file in dict.fromkeys(_vocabulary_files(models, vocabulary))]
    for later in loaded[1:]:
        if difference := first_difference(loaded[0], later):
            raise ValueError(
                f"the vocabularies differ: {difference}; speculation compares the two distributions token by token, so "
                f"choose models (and a vocabulary file) with the same vocabulary"
            )
    return loaded[0] if loaded else None


def _vocabulary_files(models: Sequence[Path], vocabulary: str | Path | None) -> list[Path]:
    """Returns the path `vocabulary`, if given, and the vocabulary files in the models' folders.

    A folder with several vocabulary files is used only if there is no other vocabulary.
    """
    file_lists = [files for path in models if path.exists() and (files := candidates(path))]
    clear = [files[0] for files in file_lists if len(files) == 1]
    if vocabulary is not None:
        return [located(vocabulary, hub.VOCABULARY), *clear]
    return clear or [files[0].parent for files in file_lists[:1]]


def _fitted(
    vocabulary: FileVocabulary | None, entries: int | None, paths: Sequence[Path]
) -> tuple[FileVocabulary | None, int | None]:
    """Returns the vocabulary for the target and the number of real ids, after checking every model's number of rows.

    Args:
        vocabulary: the models' vocabulary, or `None`.
        entries: the number of real ids, if the user gives it.
        paths: the checkpoints of all models; the target's is the first.
    """
    if vocabulary is None and entries is None:
        return None, None
    target, *drafts = (checkpoints.model_of(path).config for path in paths)
    if vocabulary is not None:
        vocabulary = for_target(vocabulary, paths[0], target)
        entries = _entries(target, vocabulary) if entries is None else entries
    for path, config in zip(paths, (target, *drafts), strict=True):
        _check_entries(path, config, int(entries or 0), vocabulary, is_target=config is target)
    return vocabulary, entries


def for_target(vocabulary: FileVocabulary, target: Path, config: Any) -> FileVocabulary:
    """Returns the vocabulary with the target's stop ids, and with sentinels if the target is a T5 with rows for them.

    For a T5Gemma, the encoder's inputs begin and end as the inputs of a decoder-only model do.

    Args:
        vocabulary: the vocabulary, as its file defines it.
        target: the target's checkpoint, which may name stop ids.
        config: the target's configuration.
    """
    if isinstance(vocabulary, SentencePieceVocabulary) and hasattr(config, "num_decoder_layers"):
        vocabulary = vocabulary.with_sentinels(config.vocab_size)
    if getattr(config, "encoder", None) is not None:
        vocabulary = vocabulary.for_gemma()
    # Stop ids without a row are dropped, because the target can never draw them.
    return vocabulary.of_target(target).ending_with(
        token for token in TokenizerFiles(target).stop_numbers() if 0 <= token < config.vocab_size
    )


def _entries(config: Any, vocabulary: FileVocabulary) -> int:
    """Returns the number of ids that a target can draw.

    It is the number of the vocabulary's pieces, or of the real rows in the target's configuration if there are more.
    """
    known = config.vocab_size if config.vocab_size < config.num_embeddings else 0
    return min(max(vocabulary.vocab_size, known), config.num_embeddings)


def _bound(path: str | Path, entries: int | None, mesh: Mesh | None, dtype: str, whole: bool) -> BoundModel:
    model: Any
    model, params = checkpoints.load(path, dtype=dtype, prepared=True, mesh=mesh, whole=whole)
    if entries is not None and entries != model.config.vocab_size:
        sizes = {"vocab_size": entries, "missing_rows": max(0, entries - model.config.num_embeddings)}
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, **sizes))
    return BoundModel(params=params, model=model)


def check_room(owner: str | Path, vocabulary: TextVocabulary, rows: int, is_target: bool = True) -> None:
    """Checks that a model with `rows` rows has enough rows for a vocabulary.

    A few pieces may lack a row if they are control pieces that were added to the tokenizer. A target must have rows for
    all stop ids.

    Raises:
        ValueError: too many pieces lack a row, or pieces of another kind do.
    """
    lacking = range(rows, vocabulary.vocab_size)
    controls: frozenset[int] = getattr(vocabulary, "controls", frozenset())
    spare = controls.difference(vocabulary.stop_ids if is_target else ())
    if len(lacking) > _padding(rows) or not spare.issuperset(lacking):
        raise ValueError(
            f"the text vocabulary has {vocabulary.vocab_size} pieces, more than the {rows} rows of {owner}; give the "
            "vocabulary that the models were trained with"
        )


def _padding(rows: int) -> int:
    """Returns the largest plausible number of padding rows; models are padded to a multiple of a power of two."""
    return max(128, rows // 100)


def _check_entries(
    path: str | Path, config: Any, entries: int, vocabulary: FileVocabulary | None, is_target: bool
) -> None:
    """Checks that a model has rows for `entries` real ids, and not many more rows than that.

    Raises:
        ValueError: there are too few rows, or so many that the vocabulary must belong to another model.
    """
    rows, lacking = config.num_embeddings, entries - config.num_embeddings
    if vocabulary is not None:
        check_room(path, vocabulary, rows, is_target)
    elif lacking > (0 if is_target else _padding(rows)):
        raise ValueError(f"vocab_size is {entries}, but {path} has {rows} rows: give the number of real token ids")
    # The check is skipped if the checkpoint itself states how many of its rows are real.
    if config.vocab_size == rows and -lacking > _padding(rows):
        raise ValueError(
            f"{path} has {rows} rows, but the text vocabulary has only {entries} pieces: {-lacking} are too many "
            f"for padding (at most {_padding(rows)}); give the vocabulary that the models were trained with"
        )


_STORIES = ("models", "stories260K")
DATA_PAIRS = {
    "stories": ((*_STORIES, "stories260K.bin"), ("models", "llama2xs", "model.bin"), (*_STORIES, "tok512.bin")),
}
"""The pairs that are not shipped: name, and paths of target, draft and vocabulary in the data directory."""


def shipped_pairs() -> list[str]:
    """Returns the sorted names of the pairs that are shipped with the package.

    `load_pair` also loads the pairs of `DATA_PAIRS`, whose files are in the data directory.

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
    """Loads a pair that is shipped with the package, a pair in the data directory, or a pair in a directory of yours.

    The pair's directory holds the folders `target` and `draft`. The vocabulary (`vocabulary.model` or another file that
    `load_vocabulary` accepts) is in this directory or in the models' folders. The directory may also hold:

    - an acceptance head (`acceptance_head.msgpack`), which fits only the draft's weights that it was trained for. If
      `dtype` or `draft_dtype` changes their values, the pair has no head. If the weights differ otherwise, the head is
      ignored with a warning;
    - further drafts, one in each folder of `drafts/`, whose names are the folders' names. `others` adds more;
    - a selection policy (`selection_policy.msgpack`).

    Args:
        name: a name of `shipped_pairs()` or of `DATA_PAIRS`, or a directory.
        others: further drafts by name, each given by a path or a word, as in `Pair.load`.
        dtype: dtype of the parameters, as in `Pair.load`.
        draft_dtype: dtype of the drafts' parameters, as in `Pair.load`.
        mesh: (data, model), as in `Pair.load`.
        draft_whole: whether every device of the mesh holds the drafts in full.

    Returns:
        A `Pair` with this name, or with the directory's name.

    Raises:
        ValueError: there is no such pair (the message names the existing ones), or `Pair.load` raises the error.
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
    """Returns the paths of target, draft and vocabulary of a pair of `DATA_PAIRS`.

    Raises:
        FileNotFoundError: one of the files is missing.
    """
    instead = f"a shipped pair ({', '.join(shipped_pairs())})"
    target, draft, vocabulary = (data_directory.require(*parts, instead=instead) for parts in DATA_PAIRS[name])
    return target, draft, vocabulary


def find_pair(name: str | Path) -> tuple[Path, bool]:
    """Returns a pair's directory, and whether the directory itself holds a vocabulary.

    Raises:
        ValueError: there is no such pair, or its directory lacks a part.
    """
    directory = PAIRS_DIRECTORY / str(name) if str(name) in shipped_pairs() else expanded(name)
    if not directory.is_dir():
        shipped = shipped_pairs()
        near = names.hint(name, [*shipped, *DATA_PAIRS])
        raise ValueError(
            f"no pair {str(name)!r}: {near}the known pairs are {', '.join(shipped)}, and in the data directory "
            f"{', '.join(DATA_PAIRS)}; give one of them, a directory with "
            f"{_PARTS}, or two checkpoints or names on the hub to Pair.load(target=…, draft=…)"
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
    """Returns the pair with the acceptance head in `file`, or without a head if the file's head is for another draft.

    The pair without a head works with all methods that need none.
    """
    head = head_files.load(file)  # This raises an error for a damaged file, which is never ignored.
    try:
        return dataclasses.replace(pair, head=head)
    except ValueError as error:
        if dtype in ("float32", STORED):  # Other dtypes change the weights, so a head is not expected to fit.
            warnings.warn(f"{file} is ignored: {error}", stacklevel=3)
        return pair
