"""Chat templates in the form of real families, with their pieces, conversations, and transformers' renderings.

The templates in `chat_templates/` were written for these tests. `golden.json` in the same folder holds transformers'
renderings of them at the time `NOW`; the parity suite compares them with transformers again. This command writes the
file:

    python -m tests.support.chat_families
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from speccascade_jax.data.vocabularies.chat_template import JINJA
from tests.support import tokenizer_files

FOLDER = Path(__file__).parent / "chat_templates"
GOLDEN = FOLDER / "golden.json"
NOW = datetime(2026, 11, 27, 12)
LAST = 319
"""The first id after the pieces that `tokenizer_files.byte_level` writes."""


@dataclass(frozen=True)
class Family:
    """The pieces that a family's template writes: BOS, EOS, the end of an answer, and others."""

    bos: str | None
    eos: str
    end: str
    others: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[str]:
        return list(dict.fromkeys(piece for piece in (self.bos, self.eos, self.end, *self.others) if piece))


QWEN = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
FAMILIES = {
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "gemma3": Family("<bos>", "<eos>", "<end_of_turn>", ("<start_of_turn>",)),
    "gemma4": Family("<bos>", "<eos>", "<turn|>", ("<|turn>", "<|channel>", "<channel|>", "<|think|>")),
    "qwen25": Family(None, "<|endoftext|>", "<|im_end|>", QWEN),
    "qwen3": Family(None, "<|im_end|>", "<|im_end|>", QWEN),
    "mistral": Family("<s>", "</s>", "</s>", ("[INST]", "[/INST]")),
    "smollm3": Family(None, "<|endoftext|>", "<|im_end|>", QWEN),
    "chatml": Family(None, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",)),
    "phi": Family(None, "<|endoftext|>", "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>")),
    "deepseek": Family(
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")
    ),
    "gpt_oss": Family(
        "<|startoftext|>", "<|return|>", "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    ),
}


def _said(*texts: str, **more: Any) -> list[dict[str, Any]]:
    """Returns a conversation that alternates between user and assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text, **(more if n % 2 else {})} for n, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": " Be brief. "}
TOOLS = [{"type": "function", "function": {"name": "tür", "parameters": {"a": ["<b>", 1.5, None, True]}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "tür", "arguments": {"a": "ö"}}}]}
ANSWERED = {"role": "tool", "content": "7"}
PARTS = [{"type": "text", "text": " Guten Tag. "}, {"type": "text", "text": "Wie geht's?"}]
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "question": (_said("Guten Tag. \n"), {}),
    "system": ([SYSTEM, *_said("What is 2 + 2?", " 4 ", "And <b>3</b> & 'ä'?\n")], {}),
    "thinking": (_said("Hi", "<think>\nHm.\n</think>\n\nHello!", "And now?"), {}),
    "reasoning": (_said("Hi", "Hello!", "And now?", reasoning="Hm."), {"reasoning_effort": "low"}),
    "channel": (_said("Hi", "<|channel>thought\nHm.<channel|>Hello! ", "So?"), {"enable_thinking": True}),
    "without thinking": ([SYSTEM, *_said("Hi")], {"enable_thinking": False, "date_string": "1 Jan 2025"}),
    "answer": (_said("Hi", "Hello!", reasoning_content="Hm."), {"add_generation_prompt": False}),
    "tools": ([*_said("Open it."), CALL, ANSWERED, ANSWERED], {"tools": TOOLS}),
    "parts": ([{"role": "user", "content": PARTS}], {}),
    "two questions": (_said("Hi") * 2, {}),
}


def cases() -> Iterator[tuple[str, str]]:
    """Yields each family and case of the golden file."""
    for family, texts in json.loads(GOLDEN.read_text(encoding="utf-8")).items():
        for case in texts:
            yield family, case


def write(folder: Path, name: str, *, config: bool = False, **more: Any) -> Path:
    """Writes a tiny tokenizer with a family's pieces and template into a folder; returns the folder.

    Args:
        folder: an empty folder; name: the family.
        config: whether the template is one of several in `tokenizer_config.json`, instead of a separate file.
        more: further entries of `tokenizer_config.json`.
    """
    family, template = FAMILIES[name], (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    pieces = [piece for piece in family.pieces if piece not in ("<|endoftext|>", "<|im_end|>")]
    added = {str(LAST + n): {"content": piece, "special": "think" not in piece} for n, piece in enumerate(pieces)}
    named = {"bos_token": family.bos, "eos_token": family.eos, "added_tokens_decoder": added}
    listed = [{"name": "rag", "template": "{{ other }}"}, {"name": "default", "template": template}]
    named |= {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"chat_template": listed} if config else {}) | more
    tokenizer_files.byte_level(folder, tokenizer_config=named)
    if not config:
        (folder / JINJA).write_text(template, encoding="utf-8")
    return folder


def transformers_rendering(tokenizer: Any, case: str, **more: Any) -> Any:
    """Returns transformers' rendering of a case, or `None` if the template refuses it."""
    from jinja2 import TemplateError

    messages, variables = CASES[case]
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True} | variables | more)
    except (TemplateError, TypeError):
        return None


class FixedDate:
    """A class in place of `datetime`, whose time is `NOW`."""

    @staticmethod
    def now() -> datetime:
        return NOW


def main() -> None:
    """Writes `golden.json` with transformers."""
    import tempfile

    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = FixedDate
    golden = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = AutoTokenizer.from_pretrained(write(Path(folder), name))
            golden[name] = {case: transformers_rendering(tokenizer, case, tokenize=False) for case in CASES}
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
