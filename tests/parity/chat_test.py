"""Parity of chat templates with transformers: texts and token ids, by tiny tokenizers with the pieces of families."""

import json

import pytest

from speccascade_jax.data.vocabularies.chat_template import require_template
from speccascade_jax.data.vocabularies.load import load_vocabulary
from tests.support import chat_families
from tests.support.chat_families import CASES, FAMILIES, GOLDEN, NOW

pytestmark = pytest.mark.parity
TEXTS = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_ids_equal_those_of_transformers(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
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
