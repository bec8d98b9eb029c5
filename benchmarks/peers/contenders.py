"""The compared libraries, the folders of their environments, and the settings that are timed for each library."""

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
"""Block sizes γ of this package's lossless settings; transformers is timed with γ = 3 and 5 too."""
HELD = {"float16": (2, 3, 5), "int8": (2, 3, 5)}
"""Block sizes γ of the lossless settings, by further dtypes of this package's weights; blocks are shorter, because a
step is cheaper in these dtypes."""
LOSSY_BLOCKS = (3, 5, 7)
LARGE_BLOCK = 3
"""The largest block that is timed at batch sizes above 1, where arithmetic limits speed and favours short blocks."""
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
LOSSY_POINTS = tuple((rule, alpha) for rule in ("token_v3", "opt") for alpha in ALPHAS)
"""Lossy rules and their α's. For each rule, only the α with the most tokens per target call among those that keep the
quality is timed."""
KEPT_QUALITY = 0.5
"""The largest loss of quality, in points of the metric, at which a lossy setting counts as keeping the quality."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library: its worker's module, the folder of its environment (`None`: the current one), and model families."""

    module: str
    folder: str | None = None
    families: tuple[str, ...] = ("t5", "llama")

    @property
    def python(self) -> Path:
        """The Python interpreter that runs the library's worker."""
        return Path(sys.executable) if self.folder is None else repository_root() / self.folder / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """The reason why the worker cannot be started, or `None`."""
        if self.python.exists():
            return None
        return f"{self.folder} does not exist: create it with make bench-peers, if the library can be installed here"


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
        library: a name of `LIBRARIES`; weights: their dtype; kind: `PLAIN`, `LOSSLESS`, `LOSSY` or `LOOKUP`; label: the
            setting in words.
        options: options that the worker receives; largest_batch: the largest batch size at which it is timed.
    """

    library: str
    weights: str
    kind: str
    label: str
    options: dict[str, Any] = field(hash=False)
    largest_batch: int = 32

    @property
    def group(self) -> tuple[str, str, str]:
        """The group of settings of which the summary shows only the fastest one."""
        return self.library, self.weights, self.kind


def contenders(libraries: Sequence[str], family: str, uneven: tuple[bool, bool]) -> list[Contender]:
    """Returns the settings of those `libraries` that support a model family, except this package's lossy settings.

    Args:
        uneven: whether encoder and decoder have different numbers of layers, for target and draft. transformers needs a
            fix for such models (`workers/huggingface.py`).
    """
    chosen: list[Contender] = []
    for name in libraries:
        if family not in LIBRARIES[name].families:
            continue
        if name == "ours":
            chosen += _ours()
        elif name == "CTranslate2":
            chosen += _threads(name, ("float32", "int8"))
        elif name == "llama.cpp":
            chosen += _threads(name, ("float32", "float16", "q8"))
        else:
            chosen += _transformers(name, uneven)
    return chosen


def lossy(rule: str, alpha: float) -> list[Contender]:
    """Returns this package's settings for a lossy rule and an α, one per block size."""
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
    settings = []
    for weights, blocks in ({"float32": BLOCKS} | HELD).items():
        options = {"dtype": weights, "method": "autoregressive"}
        base = Contender(library="ours", weights=weights, kind=PLAIN, label=PLAIN, options=options)
        # Other dtypes are not timed in batches, where arithmetic limits the speed: it is in float32 for every dtype.
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
        settings += [base, *lossless]
    return settings


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
    settings = []
    modes = [(PLAIN, PLAIN, None), (LOSSLESS, "assisted", 3), (LOSSLESS, "assisted", 5), (LOSSLESS, "assisted", None)]
    for weights in ("float32", "bfloat16"):
        for kind, mode, tokens in (*modes, (LOOKUP, "lookup", None)):
            label = f"assisted, {tokens or 'default schedule'}" if mode == "assisted" else kind
            # transformers 4 needs no fix for the target: it verifies drafts with a cache that grows on demand
            grows = name == "transformers 4" and mode != PLAIN
            for words, mended in _mends(mode, (uneven[0] and not grows, uneven[1])).items():
                settings.append(
                    Contender(
                        library=name,
                        weights=weights,
                        kind=kind,
                        label=label + words,
                        options={"dtype": weights, "mode": mode, "tokens": tokens, "mended": mended},
                        largest_batch=32 if mode == PLAIN else 1,
                    )
                )
    return settings


def _mends(mode: str, uneven: tuple[bool, bool]) -> dict[str, list[str]]:
    """Returns the variants of a setting by suffix of the label; the values name the models whose cache is patched.

    One variant patches no model, one patches every model that needs it, and one, if both need it, only the target.
    """
    target, draft = uneven[0], uneven[1] and mode == "assisted"
    ways = {"": list[str]()}
    if target and draft:
        ways[", target patched"] = ["target"]
    if target or draft:
        ways[", patched"] = [name for name, is_uneven in (("target", target), ("draft", draft)) if is_uneven]
    return ways
