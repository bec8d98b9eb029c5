"""Parity of chat templates with transformers: texts and token ids, by tiny tokenizers with the pieces of families."""

import json

import pytest

from speccascade_jax.data.vocabularies.chat_template import require_template
from speccascade_jax.data.vocabularies.load import load_vocabulary
from tests.support import chat_families
from tests.support.chat_families import CASES, FAMILIES, GOLDEN, NOW

pytestmark = pytest.mark.parity
TOOLS = "additional_chat_templates/tool_use"
TEXTS = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_ids_equal_those_of_transformers(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", chat_families.FixedDate)
    chat_families.write(tmp_path, name, config=name in ("gemma3", "qwen3"))
    tokenizer, vocabulary = transformers.AutoTokenizer.from_pretrained(tmp_path), load_vocabulary(tmp_path)
    assert len(TEXTS[name]) == len(CASES)
    for case, (messages, variables) in CASES.items():
        rendered = chat_families.transformers_rendering(tokenizer, case, tokenize=False)
        assert rendered == TEXTS[name][case], "tests/support/chat_families.py writes golden.json again"
        if rendered is None:
            continue
        text = require_template(vocabulary).render(messages, variables, now=NOW)
        ids = chat_families.transformers_rendering(tokenizer, case, return_dict=False)
        assert text == rendered and vocabulary.encode(text) == ids


PIECES = "{{ image_token }}|{{ start }}|{{ pad_token }}|{{ other }}|{{ messages[0].content }}"
NAMED = [{"name": name, "template": f"{name} {PIECES}"} for name in ("default", "tool_use")]


@pytest.mark.parametrize("files", [{}, {"chat_template": PIECES}, {"chat_template": PIECES, TOOLS: "T" + PIECES}])
def test_templates_for_tools_and_named_pieces_equal_those_of_transformers(files, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra: make parity")
    more = {
        "image_token": "<|im_start|>",
        "extra_special_tokens": {"start": "<|im_end|>"},
        "pad_token": "<|endoftext|>",
    }
    chat_families.write(tmp_path, "chatml", config=True, **more | {"chat_template": NAMED})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).with_suffix(".jinja").write_text(text)
    tokenizer, template = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        require_template(load_vocabulary(tmp_path)),
    )
    for variables in ({}, {"tools": []}, {"tools": chat_families.TOOLS}):
        messages = [{"role": "user", "content": "Hi"}]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        assert template.render(messages, variables) == expected
