"""The libraries, where each one's environment is, and the settings that are timed of each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccascade_jax.runtime.paths import repository_root

PLAIN, LOSSLESS, LOSSY, LOOKUP = "plain", "lossless", "lossy", "prompt lookup"
BLOCKS = (2, 3, 5, 7)
"""γ of our lossless settings; 3 and 5 are the others' too."""
HELD = {"float16": (2, 3, 5), "int8": (2, 3, 5)}
"""What our weights are held in beside float32, and γ of the lossless settings: a cheaper step wants shorter blocks."""
LOSSY_BLOCKS = (3, 5, 7)
LARGE_BLOCK = 3
"""Beyond it one row alone is timed: in batches, which are bound by arithmetic, blocks want to be short."""
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
LOSSY_POINTS = tuple((rule, alpha) for rule in ("token_v3", "opt") for alpha in ALPHAS)
"""Of which the one of each rule with the most tokens per call of the target is timed, if it keeps the quality."""
KEPT_QUALITY = 0.5
"""What a lossy setting may lose of the target's quality."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A worker: its module, the environment's folder in the repository (`None`: this one), the families it can do."""

    module: str
    folder: str | None = None
    families: tuple[str, ...] = ("t5", "llama")

    @property
    def python(self) -> Path:
        """The interpreter to start it with."""
        return Path(sys.executable) if self.folder is None else repository_root() / self.folder / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """Why it cannot be started, if it can't."""
        if self.python.exists():
            return None
        return f"{self.folder} is not there: make bench-peers makes it, where the package can be installed"


LIBRARIES = {
    "ours": Library(module="ours"),
    "transformers 4": Library(module="huggingface", folder=".venv-peers-4"),
    "transformers 5": Library(module="huggingface", folder=".venv-peers-5"),
    "CTranslate2": Library(module="ctranslate", folder=".venv-peers-4"),
    "llama.cpp": Library(module="llamacpp", folder=".venv-peers-llama", families=("llama",)),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One setting of one library.

    Attributes:
        library: a name of `LIBRARIES`; weights: the type they are held in; kind: `PLAIN`, `LOSSLESS`, `LOSSY` or
            `LOOKUP`; label: the setting in words.
        options: what the worker is told; largest_batch: rows it can decode together.
    """

    library: str
    weights: str
    kind: str
    label: str
    options: dict[str, Any] = field(hash=False)
    largest_batch: int = 32

    @property
    def group(self) -> tuple[str, str, str]:
        """What it is the best of in the summary."""
        return self.library, self.weights, self.kind


def contenders(libraries: Sequence[str], family: str, uneven: tuple[bool, bool]) -> list[Contender]:
    """All settings of the libraries that can do a family, without lossy ones.

    Args:
        uneven: of target and draft, whether the encoder has another number of layers than the decoder: what
            transformers must be mended for (`workers/huggingface.py`).
    """
    made: list[Contender] = []
    for name in libraries:
        if family not in LIBRARIES[name].families:
            continue
        if name == "ours":
            made += _ours()
        elif name == "CTranslate2":
            made += _threads(name, ("float32", "int8"))
        elif name == "llama.cpp":
            made += _threads(name, ("float32", "float16", "q8"))
        else:
            made += _transformers(name, uneven)
    return made


def lossy(rule: str, alpha: float) -> list[Contender]:
    """Our settings with a rule and an α that keep the target's quality."""
    return [
        Contender(
            library="ours",
            weights="float32",
            kind=LOSSY,
            label=f"{rule}, α {alpha:g}, γ {block}",
            options={"dtype": "float32", "rule": rule, "alpha": alpha, "block_size": block},
            largest_batch=32 if block <= LARGE_BLOCK else 1,
        )
        for block in LOSSY_BLOCKS
    ]


def _ours() -> list[Contender]:
    made = []
    for weights, blocks in ({"float32": BLOCKS} | HELD).items():
        options = {"dtype": weights, "method": "autoregressive"}
        base = Contender(library="ours", weights=weights, kind=PLAIN, label=PLAIN, options=options)
        # products are in float32 whatever weights are held in: where arithmetic counts, nothing else is to be seen
        largest = LARGE_BLOCK if weights == "float32" else 0
        lossless = [
            dataclasses.replace(
                base,
                kind=LOSSLESS,
                label=f"spec_decode, γ {block}",
                options={"dtype": weights, "rule": "spec_decode", "block_size": block},
                largest_batch=32 if block <= largest else 1,
            )
            for block in blocks
        ]
        made += [base, *lossless]
    return made


def _threads(name: str, weights: Sequence[str]) -> list[Contender]:
    return [
        Contender(
            library=name,
            weights=kind,
            kind=PLAIN,
            label=f"{PLAIN}, {threads} thread{'s' * (threads > 1)}",
            options={"dtype": kind, "threads": threads},
            largest_batch=32 if threads > 1 or name == "CTranslate2" else 1,
        )
        for kind in weights
        for threads in (1, 2)
    ]


def _transformers(name: str, uneven: tuple[bool, bool]) -> list[Contender]:
    made = []
    modes = [(PLAIN, PLAIN, None), (LOSSLESS, "assisted", 3), (LOSSLESS, "assisted", 5), (LOSSLESS, "assisted", None)]
    for weights in ("float32", "bfloat16"):
        for kind, mode, tokens in (*modes, (LOOKUP, "lookup", None)):
            label = f"assisted, {tokens or 'its own schedule'}" if mode == "assisted" else kind
            # release 4 verifies drafts with a cache that grows as it is needed
            grows = name == "transformers 4" and mode != PLAIN
            for words, mended in _mends(mode, (uneven[0] and not grows, uneven[1])).items():
                made.append(
                    Contender(
                        library=name,
                        weights=weights,
                        kind=kind,
                        label=label + words,
                        options={"dtype": weights, "mode": mode, "tokens": tokens, "mended": mended},
                        largest_batch=32 if mode == PLAIN else 1,
                    )
                )
    return made


def _mends(mode: str, uneven: tuple[bool, bool]) -> dict[str, list[str]]:
    """In words, and the models concerned: as released first; a target that fails is mended alone, then both are."""
    target, draft = uneven[0], uneven[1] and mode == "assisted"
    ways = {"": list[str]()}
    if target and draft:
        ways[", target mended"] = ["target"]
    if target or draft:
        ways[", mended"] = [name for name, one in (("target", target), ("draft", draft)) if one]
    return ways
