"""Small tokenizer files of every kind, written into a folder without downloads."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece as library

from speccascade_jax.data.tasks.table import TASKS

SENTENCES = [
    f"{subject} {verb} {phrase}."
    for subject in ("Tom", "Mary", "She", "Er", "Das Kind", "We")
    for verb in ("sees", "wants", "kauft", "findet", "trägt")
    for phrase in ("the house", "a little dog", "den Schlüssel", "große Äpfel", "nothing")
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def texts() -> list[str]:
    return [text for e in TASKS["tiny_translation"].load(limit=40) for text in (e.source, e.reference)]


def llama2c(path: Path, pieces: dict[str, float] | None = None) -> Path:
    """Writes a tokenizer in llama2.c's format, with `pieces` (scores by text) after special pieces and bytes."""
    if pieces is None:
        words = ("Once", " upon", " a", " time", "up", "on")
        pieces = {letter: -100.0 for letter in " aceimnoptuO"} | {word: float(-n) for n, word in enumerate(words)}
        pieces |= {"On": -7.0, "ce": -8.0, " u": -9.0, " up": -10.0, " t": -11.0, "im": -12.0, " tim": -13.0}
    table = {"<unk>": 0.0, "\n<s>\n": 0.0, "\n</s>\n": 0.0, **dict.fromkeys(BYTES, 0.0), **pieces}
    rows = [(score, text.encode()) for text, score in table.items()]
    body = b"".join(struct.pack("<fi", score, len(text)) + text for score, text in rows)
    path.write_bytes(struct.pack("<i", max(len(text) for _, text in rows)) + body)
    return path


def sentencepiece(folder: Path, **options: Any) -> Path:
    """Writes a sentencepiece file as the library trains it, with byte fallback and texts unchanged."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False} | options
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_prefix=str(folder / "tokenizer"), vocab_size=370, byte_fallback=True,
        model_type="bpe", minloglevel=2, **options,
    )  # fmt: skip
    return folder / "tokenizer.model"


def llama(folder: Path) -> Path:
    """Writes a file with ids and byte fallback as in Llama 2's `tokenizer.model`."""
    return sentencepiece(folder, bos_id=1, eos_id=2, unk_id=0, pad_id=-1)


def gemma(folder: Path) -> Path:
    """Writes a file with ids as in Gemma's `tokenizer.model`, which puts no space before a text."""
    return sentencepiece(folder, add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3)


def byte_level(folder: Path, merges: int = 60, front: str = "<|begin|>", **beside: Any) -> Path:
    """Writes a byte-level BPE, as of GPT-2, Qwen and Llama 3, whose post-processor puts `front` before texts.

    `beside`: contents of further JSON files by name without the ending; by default, files as Qwen 2.5 has them.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{front} $A".strip(), special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    qwen = {"eos_token": "<|endoftext|>", "bos_token": None, "add_bos_token": False}
    return _beside(folder, beside or {"tokenizer_config": qwen})


def metaspace(folder: Path, merges: int = 60, **beside: Any) -> Path:
    """Writes a BPE over `▁` with byte fallback, as in Llama 2's `tokenizer.json`; `beside` as in `byte_level`."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80 + merges, show_progress=False, special_tokens=[])
    learnt.train_from_iterator(texts(), trainer)
    model = json.loads(learnt.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return _beside(folder, beside or {"tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}})


def _beside(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"
