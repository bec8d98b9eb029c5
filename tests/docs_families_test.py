"""The table of families in docs/models.md: each of its marks names a case of a test."""

import re
from pathlib import Path

from speccascade_jax.checkpoints.huggingface_config import MODELS

ROOT = Path(__file__).parents[1]
PARITY, DEVICES = "tests/parity/transformers_test.py", "tests/support/on_devices.py"
FAMILIES, ENCODERS = "tests/parity/families_test.py", "tests/parity/encoder_decoder_test.py"
NAMES = {
    "gemma": "gemma1", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "gemma4_text, experts": "gemma4, experts",
    "llama": "llama3.1", "qwen2": "qwen2.5",
}  # fmt: skip
"""`model_type` -> the name of its cases, where they differ."""
OLDER = ("gemma2", "llama", "qwen2", "t5")
"""Families whose greedy text `test_a_decoders_greedy_generation_equals_transformers` and that of T5 compare."""
DEVICES_OF = {
    "gemma2": "decoder", "gemma3_text": "normed", "smollm3": "normed", "gemma4_text": "shared", "qwen3_moe": "experts",
    "gemma4_text, experts": "parallel",
}  # fmt: skip
"""`model_type` -> the kind of its case on devices, where their names differ."""
DRAFTS = {
    ("llama", "EAGLE-3"): ("tests/support/eagle3_files.py", 'KIND = "llama2"'),
    ("gemma4_text", "assistant"): ("tests/support/gemma4_assistant_files.py", 'KIND = "gemma4"'),
}
ABSENT = ("gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "mt5")
"""Other names of a row's family."""


def rows():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    table = text[text.index("| `model_type` | logits |") :].split("\n\n")[0].splitlines()
    head, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:]))
    return {row[0].replace("`", ""): dict(zip(head[1:], row[1:], strict=True)) for row in body}


def has(path, needle):
    return re.search(needle, (ROOT / path).read_text(encoding="utf-8")) is not None


def case_of(model_type, column):
    """Returns the file and the pattern of a case that belongs to a mark of the table."""
    name = NAMES.get(model_type, model_type)
    encoder = model_type in ("umt5", "t5gemma", "t5gemma2")
    quoted = rf'"{re.escape(name)}(, small)?"'
    if column == "logits":
        return (ENCODERS, quoted) if encoder else (PARITY, rf'"{re.escape(name)}(_1.0_tied_relu)?": ')
    if column == "greedy text":
        place = PARITY if model_type in OLDER else ENCODERS if encoder else FAMILIES
        return place, r"def test_a_(decoder|t5)s_greedy" if model_type in OLDER else rf"\({quoted}, \""
    if column == "windows":
        block = {"gemma3_text": r"\nGEMMA3 = [^}]*?", "gemma4_text": r"\nGEMMA4 = [^}]*?"}
        kind = block.get(model_type.partition(",")[0], rf"\n    {quoted}: [^\n]*")
        return (ENCODERS, "sliding_window") if encoder else (PARITY, rf"{kind}sliding_window")
    if column == "2 × 4 devices":
        return DEVICES, rf'"{DEVICES_OF.get(model_type, model_type)}( scan)? 2x4[^"]*"'
    if column == "early exit":
        return ("tests/drafters/exits_test.py", "T5") if model_type == "t5" else (FAMILIES, rf'{quoted}, "exit"')
    raise KeyError(column)


def test_every_family_has_a_row_and_every_mark_a_case():
    table = rows()
    assert {name.partition(",")[0] for name in table} | set(ABSENT) == set(MODELS)
    for model_type, marks in table.items():
        for column, mark in marks.items():
            if mark == "✓":
                assert has(*case_of(model_type, column)), (model_type, column)
            elif mark not in ("", "–"):
                assert has(*DRAFTS[model_type, mark]), (model_type, mark)
