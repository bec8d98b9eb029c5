"""Models and data sets by their names on Hugging Face's hub, fetched by `huggingface_hub` into its cache.

A name is `owner/name` or `owner/name@revision`. A local path that exists takes precedence, and `owner/name` is looked
up on the hub only if the current directory has no folder `owner`. `hf:owner/name` is always a name on the hub, and
`./owner/name` never is. A `Path` is local unless it begins with `hf:`, because `pathlib` removes the `./`. Once this
process has read `owner/name` from the hub, the text keeps this meaning, even if a folder `owner` is made later.

The environment variables of `huggingface_hub` apply: `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`. Its locks
let one of several processes on a host fetch a file while the others wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import CheckpointError
from speccascade_jax.storage.files import expanded

PREFIX = "hf:"
EXTRA = "pip install 'speccascade_jax[hub]'"
CONFIGURATION = ("config.json", "generation_config.json")
VOCABULARY = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocabulary.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
DESCRIPTION = (*CONFIGURATION, *VOCABULARY)
"""Patterns of a model's files without its weights. They match in every model's repository: one without a vocabulary
still has a configuration."""
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "checksums.json")
MODEL = (*DESCRIPTION, *WEIGHTS)
"""Patterns of all files of a model that are fetched: no pickles, and no second copy of weights in another format."""
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_ADDRESS = re.compile(
    r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/@]+)(?:/tree/([^/]+))?/?"
)
_FILES = (".bin", ".csv", ".gguf", ".json", ".jsonl", ".model", ".msgpack", ".safetensors", ".tsv")
"""Endings of paths that mean local files, never names on the hub."""


class HubName(NamedTuple):
    """Name of a repository on the hub; `revision` is a branch, a tag or a commit, and `kind` "model" or "dataset"."""

    repository: str
    revision: str | None = None
    kind: str = "model"

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


class NoFileError(FileNotFoundError):
    """Error for a repository that has none of the files that this package reads."""


class UnreachableError(FileNotFoundError):
    """Error for a repository whose files are not in the cache while the hub gives no answer."""


_COMMITS: dict[HubName, str] = {}
"""Commits to which this process has resolved names, so that it reads the same commit of a name every time."""

_READ: set[str] = set()
"""Texts that this process has taken for names on the hub, and has fetched."""


def name_of(path: str | os.PathLike[str], kind: str = "model") -> HubName | None:
    """Returns the name on the hub that a path spells, or `None` if it is a local path or an address.

    Raises:
        ValueError: the text after `hf:` has not the form of a name, the revision is invalid, or the text is the URL of
            a page on the hub.

    Examples:
        >>> from speccascade_jax.storage import hub
        >>> hub.name_of("hf:google/gemma-3-270m-it@main")
        HubName(repository='google/gemma-3-270m-it', revision='main', kind='model')
        >>> hub.name_of("./google/gemma-3-270m-it") is None
        True
    """
    if isinstance(path, BucketPath) or not isinstance(path, str | Path):
        return None
    text = str(path)
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if text.startswith(PREFIX):
        if match is None:
            raise ValueError(f"{text!r} is no name on the hub: write {PREFIX}owner/name or {PREFIX}owner/name@revision")
    elif match is None or isinstance(path, Path) or _is_local(text):
        _check_address(text)
        return None
    if match[2] and any(part.startswith(".") or ".." in part for part in match[2].split("/")):
        raise ValueError(f"{text}: {match[2]!r} is no revision: give a branch, a tag or a commit after the @")
    return HubName(match[1], match[2], kind)


def _is_local(text: str) -> bool:
    """Returns whether a text that has the form of a name is a local path."""
    place = Path(text)
    return text.endswith(_FILES) or place.exists() or (place.parent.exists() and text not in _READ)


def _check_address(text: str) -> None:
    if (match := _ADDRESS.fullmatch(text)) and not Path(text).exists():
        name = f"{PREFIX}{match[1]}" + f"@{match[2]}" * bool(match[2])
        raise ValueError(f"{text} is the address of a page: give the name on the hub, {name}")


def located(path: str | os.PathLike[str], patterns: Sequence[str] = MODEL) -> Path:
    """Returns the local path of a checkpoint or vocabulary; fetches the files of a name on the hub first.

    Args:
        path: a local path, which may be absent, an address in a bucket, or a name on the hub.
        patterns: patterns of the repository's files that are needed.

    Raises:
        ValueError: the path or the text after `hf:` is invalid (see `expanded` and `name_of`).
        OSError: the files of a name on the hub cannot be fetched (`fetched`).
    """
    name = name_of(path)
    if name is None:
        return expanded(path)
    folder = fetched(name, patterns)
    _READ.add(str(path))
    return folder


def fetched(name: HubName, patterns: Sequence[str]) -> Path:
    """Returns the folder with the files of a repository that match `patterns`, from the cache or fetched now.

    Without a connection, the files in the cache are used.

    Raises:
        FileNotFoundError: the library is missing; the repository, its revision or such files do not exist; or the files
            are not in the cache and the hub cannot be reached.
        PermissionError: the repository is gated, and this user has no access.
        CheckpointError: the repository has no weights in safetensors files.
        OSError: the files cannot be fetched for another reason. All messages say what to do.
    """
    commit = _COMMITS.get(_spelling(name), name.revision)
    folder = _snapshot(name, commit, patterns)
    # The folder may exist and lack these files, because an earlier call with other patterns has made it.
    if not any(next(folder.glob(pattern), None) for pattern in patterns):
        wanted = ", ".join(patterns[:9])
        raise NoFileError(f"{name} on the hub has none of the files that can be read ({wanted}): give another name")
    if WEIGHTS[0] in patterns and not any(folder.glob("*.safetensors")):
        again = "load it with transformers, save_pretrained it, and give that folder"
        raise CheckpointError(f"{name} on the hub has no {WEIGHTS[0]}, and other weights are not read: {again}")
    _COMMITS[_spelling(name)] = folder.name
    return folder


def _spelling(name: HubName) -> HubName:
    """Returns a name without `@main`: a name without a revision means the branch `main`, so both mean one commit."""
    return name._replace(revision=None) if name.revision == "main" else name


def _snapshot(name: HubName, commit: str | None, patterns: Sequence[str]) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise FileNotFoundError(
            f"{_absent(name)}; to read it from the hub, run {EXTRA}, or {_by_hand(name)}"
        ) from error
    from huggingface_hub import errors

    fetch = partial(huggingface_hub.snapshot_download, name.repository, repo_type=name.kind, revision=commit)
    try:
        return Path(fetch(allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise PermissionError(_gated(name)) from error
    except errors.RevisionNotFoundError as error:
        lacking = f"{name.repository} has no revision {name.revision!r} on the hub"
        raise FileNotFoundError(f"{lacking}: give a branch, a tag or a commit after the @") from error
    except errors.RepositoryNotFoundError as error:
        private = "if it is private, run hf auth login or set HF_TOKEN"
        raise FileNotFoundError(
            f"{_absent(name)}, and {_endpoint()} knows no such {name.kind}: correct the path or the name; {private}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, error) from error
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"{_absent(name)}, and it is no name on the hub ({_line(error)})") from error
    except Exception as error:  # a connection that breaks raises errors of the library's own HTTP client
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk is full, for example
        raise OSError(f"{name} cannot be fetched from the hub ({_line(error)}); run the same command again") from error


def paths_of(name: HubName) -> list[str]:
    """Returns the paths of a repository's files, for an error message; none if the hub does not list them."""
    import huggingface_hub

    try:
        files = huggingface_hub.HfApi().list_repo_files(name.repository, repo_type=name.kind, revision=name.revision)
    except Exception:  # this list only adds detail to another error, which the caller raises
        return []
    return list(files)


def _absent(name: HubName) -> str:
    return f"{name} does not exist here" if name.kind == "model" else f"the data set {name} is not here"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _by_hand(name: HubName) -> str:
    """Returns the command that fetches a repository into a folder, and what to do with the folder."""
    words, folder = ["hf", "download", name.repository], f"models/{name.repository.split('/')[1]}"
    words += ["--revision", name.revision] if name.revision else []
    return f"run  {' '.join([*words, '--local-dir', folder])}  and give {folder}"


def _gated(name: HubName) -> str:
    page = f"{_endpoint()}/{'datasets/' * (name.kind == 'dataset')}{name.repository}"
    return f"{name} is gated: accept its conditions at {page}, then run hf auth login or set HF_TOKEN"


def _unreachable(name: HubName, error: Exception) -> OSError:
    """Returns the error for a name that is not in the cache while the hub gives no answer, or refuses access."""
    cause = error.__cause__
    if getattr(getattr(cause, "response", None), "status_code", None) in (401, 403):
        return PermissionError(_gated(name))
    words = ["hf", "download", name.repository, *(["--repo-type", name.kind] if name.kind != "model" else [])]
    words += ["--revision", name.revision] if name.revision else []
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{_endpoint()} gives no answer"
    detail = "" if cause is None or constants.HF_HUB_OFFLINE else f" ({_line(cause)})"
    again = f"run  {' '.join(words)}  with a connection, or correct the path"
    return UnreachableError(f"{_absent(name)}, nor in the hub's cache, and {reason}{detail}: {again}")


def _line(error: BaseException) -> str:
    """Returns the first line of an error, with its type."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def hint(path: str | os.PathLike[str]) -> str:
    """Returns a hint for the error message about a missing path; "" if the path can't be meant as a name on the hub."""
    text, place = str(path).rstrip("/"), Path(path)
    if not _NAME.fullmatch(text) or text.endswith(_FILES) or place.exists():
        return ""
    if not place.parent.exists():  # a `Path`, or a text that ends in a slash or begins with a dot
        return f"to read the model from the hub, give the text {PREFIX}{text}; "
    return f"{place.parent}/ is a folder here, so the hub was not asked (to read from the hub, give {PREFIX}{text}); "


def commits(paths: Iterable[str | os.PathLike[str] | None]) -> dict[str, str]:
    """Maps each path that names a model on the hub to the commit that this process has read; omits other paths."""
    names = {str(path): name_of(path) for path in paths if path is not None}
    known = {path: commit_of(name) for path, name in names.items() if name is not None}
    return {path: commit for path, commit in known.items() if commit is not None}


def commit_of(name: HubName) -> str | None:
    """Returns the commit of a repository that this process has read, or `None` if it has not read the repository."""
    return _COMMITS.get(_spelling(name))
