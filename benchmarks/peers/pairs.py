"""Pairs of models for all libraries: two trained pairs and two with planted acceptance, with prompts and folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import exporting, planting
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.models.decoder_config import DecoderConfig
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.pairs.pair import DATA_PAIRS, PAIRS_DIRECTORY, load_pair
from speccascade_jax.pairs.prompts import text_ids

ACCEPTANCE = 0.8
STORY_WIDTH = 12
PLANTED_WIDTH = 24
LARGEST = 32

T5_TARGET = T5Config(32_100, 32_128, 512, 6, 64, 1024, 8, 8)
T5_DRAFT = T5Config(32_100, 32_128, 128, 2, 64, 256, 1, 1)
DECODER_TARGET = DecoderConfig(
    vocab_size=32_000, num_embeddings=32_000, d_model=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64,
    d_ff=2048, max_length=1024,
)  # fmt: skip
DECODER_DRAFT = DecoderConfig(
    vocab_size=32_000, num_embeddings=32_000, d_model=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64,
    d_ff=256, max_length=1024,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A pair in a folder, with subfolders `target/` and `draft/` that transformers can read.

    Attributes:
        name, folder: of the pair; family: "t5" or "llama"; ours: the name for `load_pair`, or `None` to load from
            `folder`.
        prompts: 32 prompts of ids; new_tokens: the longest output; stop: ids that end an output.
        alone: number of prompts that are decoded one at a time; turns, batch_turns: the largest number of turns, at
            batch 1 and at larger batches; largest_batch: the largest batch size that is timed.
        task: the task on which quality is measured, or `None`.
        parameters: numbers of parameters of target and draft; uneven: whether encoder and decoder have different
            numbers of layers, for target and draft.
    """

    name: str
    folder: Path
    family: str
    ours: str | None
    prompts: list[list[int]]
    new_tokens: int
    stop: list[int]
    alone: int
    turns: int
    batch_turns: int
    largest_batch: int
    task: str | None
    parameters: tuple[int, int]
    uneven: tuple[bool, bool]

    def told(self) -> dict[str, Any]:
        """Returns the description of the pair that workers receive."""
        keys = ("family", "ours", "new_tokens", "stop")
        width = max(map(len, self.prompts))
        return {key: asdict(self)[key] for key in keys} | {"folder": str(self.folder), "width": width}

    def batches(self, size: int) -> list[list[list[int]]]:
        """Returns prompts in batches of `size`: `alone` batches of one prompt, or one larger batch."""
        return [[prompt] for prompt in self.prompts[: self.alone]] if size == 1 else [self.prompts[:size]]


def tatoeba(folder: Path) -> Prepared:
    """Prepares the smaller shipped T5 pair, with sentences of `tiny_translation` as prompts."""
    name = "tatoeba_en_de"
    pair, task = load_pair(name), get_task("tiny_translation")
    assert pair.vocabulary is not None
    prompts = [text_ids(pair, task.build_prompt(example)) for example in task.load(limit=LARGEST)]
    stop = list(pair.vocabulary.stop_ids)
    paths = [PAIRS_DIRECTORY / name / part for part in ("target", "draft")]
    return _trained(folder, name, "t5", paths, prompts, 64, stop, 4, task.name)


def stories(folder: Path) -> Prepared:
    """Prepares the two small Llamas of the data directory, with beginnings of stories as prompts.

    Raises:
        FileNotFoundError: there is no data directory; the message says how to name one.
    """
    name = "stories"
    paths = [directory.require(*parts) for parts in DATA_PAIRS[name][:2]]
    pair, task = load_pair(name), get_task("stories")
    assert pair.vocabulary is not None
    ids = [text_ids(pair, task.build_prompt(example))[:STORY_WIDTH] for example in task.load(limit=LARGEST)]
    return _trained(folder, name, "llama", paths, ids, 64, list(pair.vocabulary.stop_ids), 4, None)


def planted_t5(folder: Path) -> Prepared:
    """Prepares a target as large as T5 1.1 small and a draft, with random weights and an acceptance of 0.8."""
    return planted(folder, "planted_t5", T5_TARGET, T5_DRAFT, 40)


def planted_decoder(folder: Path) -> Prepared:
    """Prepares a Llama that reads 110 M parameters per step, and a draft: random weights, an acceptance of 0.8."""
    return planted(folder, "planted_decoder", DECODER_TARGET, DECODER_DRAFT, 40)


PAIRS: dict[str, Callable[[Path], Prepared]] = {
    "tatoeba_en_de": tatoeba,
    "stories": stories,
    "planted_t5": planted_t5,
    "planted_decoder": planted_decoder,
}


def planted(folder: Path, name: str, target: Any, draft: Any, new_tokens: int) -> Prepared:
    """Prepares a pair from two configurations of one family, with weights from `planting`."""
    kind = planting.t5 if isinstance(target, T5Config) else planting.decoder
    after = planting.successors(target.vocab_size, seed=0)
    models = {
        "target": (target, kind(target, after, seed=1)),
        "draft": (draft, kind(draft, planting.astray(after, ACCEPTANCE, seed=2), seed=3)),
    }
    for part, (config, flat) in models.items():
        exporting.write(config, flat, folder / part)
    return Prepared(
        name=name,
        folder=folder,
        family="t5" if isinstance(target, T5Config) else "llama",
        ours=None,
        prompts=planting.start_prompts(after, LARGEST, PLANTED_WIDTH, seed=4),
        new_tokens=new_tokens,
        stop=[1],  # planted models never write id 1, so all outputs have full length
        alone=2,
        turns=3,  # planted pairs take ten times as long as the others, and vary less
        batch_turns=2,
        largest_batch=8,  # with 32 rows, a turn of all libraries takes a minute
        task=None,
        parameters=_sizes([flat for _, flat in models.values()]),
        uneven=_uneven([target, draft]),
    )


def _trained(
    folder: Path,
    name: str,
    family: str,
    paths: Sequence[Path],
    prompts: list[list[int]],
    new_tokens: int,
    stop: list[int],
    alone: int,
    task: str | None,
) -> Prepared:
    models = [exporting.read(path) for path in paths]
    for part, (config, flat) in zip(("target", "draft"), models, strict=True):
        exporting.write(config, flat, folder / part)
    return Prepared(
        name=name,
        folder=folder,
        family=family,
        ours=name,
        prompts=prompts,
        new_tokens=new_tokens,
        stop=stop,
        alone=alone,
        turns=5,
        batch_turns=3,
        largest_batch=LARGEST,
        task=task,
        parameters=_sizes([flat for _, flat in models]),
        uneven=_uneven([config for config, _ in models]),
    )


def _sizes(flats: Sequence[planting.Flat]) -> tuple[int, int]:
    target, draft = (sum(values.size for values in flat.values()) for flat in flats)
    return target, draft


def _uneven(configs: Sequence[Any]) -> tuple[bool, bool]:
    target, draft = (isinstance(c, T5Config) and c.num_encoder_layers != c.num_decoder_layers for c in configs)
    return target, draft
