"""Tests of conversations as prompts of `decode` and `stream`."""

import dataclasses

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.data.tasks.task import Example
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.pairs.chat import conversations, example_ids, read_prompts
from tests.support import chat_families, text_pair, tokenizer_files

pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
HI = [{"role": "user", "content": "Guten Tag."}]
LONGER = [*HI, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Wie geht's?"}]
SETTINGS = {"method": "autoregressive", "max_new_tokens": 6}


def pair_in(folder, name):
    """Returns a tabular pair with the tokenizer of a family of `chat_families`."""
    vocabulary = load_vocabulary(chat_families.write(folder, name))
    table = np.random.default_rng(0).normal(size=(vocabulary.vocab_size,) * 2)
    return sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table + 0.1), vocabulary=vocabulary)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> sc.Pair:
    return pair_in(tmp_path_factory.mktemp("gemma4"), "gemma4")


def ids(pair, messages):
    return pair.vocabulary.encode(pair.chat_template.render(messages))


def test_messages_are_decoded_as_the_ids_of_their_template(pair):
    out = sc.decode(pair, messages=[HI, LONGER], **SETTINGS)
    prompts = [ids(pair, HI), ids(pair, LONGER)]
    bos = pair.vocabulary.encode("<bos>")
    assert [prompt[:2].count(*bos) for prompt in prompts] == [1, 1], "the template writes BOS, and nothing adds another"
    end = pair.chat_template.end_of_turn(pair.vocabulary)
    plain = sc.decode(pair, prompts, **SETTINGS, stop_ids=[*pair.vocabulary.stop_ids, *end])
    assert (out.tokens == plain.tokens).all() and out.texts == plain.texts
    alone = sc.decode(pair, messages=HI, **SETTINGS)
    assert alone.tokens.tolist() == out.tokens[:1].tolist()
    assert [token.id for token in sc.stream(pair, messages=HI, **SETTINGS)] == alone.tokens[
        0, : alone.lengths[0]
    ].tolist()


def test_template_variables_reach_the_template(pair):
    prompt, variables = pair.chat_template.render(HI, {"enable_thinking": True}), {"enable_thinking": True}
    read = read_prompts(pair, None, HI, variables)
    assert read.prompts == [pair.vocabulary.encode(prompt)] and read.shown == [prompt] and "<|think|>" in prompt


def test_an_output_ends_at_the_end_of_the_templates_turns(pair):
    (end,) = pair.chat_template.end_of_turn(pair.vocabulary)
    table = np.array(pair.target.params)
    table[:, end] = np.where(np.arange(len(table)) == pair.vocabulary.encode("was")[-1], 99.0, -99.0)
    table[pair.vocabulary.encode("\n")[-1], pair.vocabulary.encode("was")[-1]] = 50.0
    model = sc.TableLM(table)
    ending = dataclasses.replace(pair, target=model, draft=model)
    out = sc.decode(ending, messages=HI, template_variables={"enable_thinking": True}, **SETTINGS)
    assert end not in pair.vocabulary.stop_ids and out.tokens[0, out.lengths[0] - 1] == end
    assert out.lengths[0] == 2 and "turn" not in out.texts[0]
    assert ending.for_chat is ending.for_chat and ending.for_chat.fingerprint == ending.fingerprint


def test_a_pair_whose_vocabulary_has_the_end_is_its_own_pair_for_chat(tmp_path):
    chat = pair_in(tmp_path, "qwen3")
    assert chat.for_chat is chat


def test_the_template_is_in_the_folder_of_the_vocabulary_or_of_the_target(tmp_path, pair):
    for name in ("vocabulary", "target"):
        (tmp_path / name).mkdir()
    vocabulary = load_vocabulary(tokenizer_files.byte_level(tmp_path / "vocabulary")).of_target(tmp_path / "target")
    texts = {}
    for name in ("target", "vocabulary"):
        (tmp_path / name / "chat_template.jinja").write_text(name)
        texts[name] = dataclasses.replace(pair, vocabulary=vocabulary).chat_template.text
    assert texts == {"target": "target", "vocabulary": "vocabulary"}


def test_prompts_of_tasks_have_the_same_date_on_every_day(pair, tmp_path):
    vocabulary = load_vocabulary(tokenizer_files.byte_level(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    dated = dataclasses.replace(pair, vocabulary=vocabulary)
    task = TASKS["tiny_translation"]
    ids, cut = example_ids(dated, task, Example(id=0, source="Hi", reference=""), {})
    assert vocabulary.decode(ids) == f"26 Jul 2024 {task.prefix}Hi" and not cut
    assert "2024" not in dated.chat_template.render(HI)


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(("messages", "message"), [
    ("Hi", "messages='Hi' is not a conversation: give a list of {'role': 'user', 'content': 'text'}, or a list of"),
    (user("Hi"), "is not a conversation"),
    (7, "messages=7 is not a conversation"),
    ([], "messages is empty"),
    ([[]], "conversation 0 is empty: give at least one message"),
    ([[user("Hi")], user("Hi")], "conversation 1 is {.*}: give a list of messages"),
    ([user("Hi"), [user("Hi")]], "conversation 0, message 1 is .*: give a dictionary"),
    (["Hi"], "conversation 0 is 'Hi': give a list of messages"),
    ([{"content": "Hi"}], "conversation 0, message 0 has the role None: give 'system', 'user', 'assistant'"),
    ([{"role": 1, "content": "Hi"}], "has the role 1"),
    ([[user("Hi")], [user("Hi"), user(None)]], "conversation 1, message 1 has the content None: give a text"),
    ([{"role": "user"}], "has the content None: give a text"),
    ([user(["Hi"])], "has the part 'Hi': only {'type': 'text', 'text': …} can be read"),
    ([user([{"type": "image", "url": "x"}])], "has the part .*image.*: only"),
    ([user([{"type": "image", "text": "x"}])], "has the part .*image.*: only"),
    ([user([{"type": "text", "text": "x"}, {"text": "x"}])], "has the part {'text': 'x'}: only"),
    ([user("Hi") | {"x": len}], r"message 0\['x'\]=.* cannot be read by a chat template"),
    ([user("Hi"), {"role": "assistant", "content": "a"}], "ends with a message of the assistant"),
])  # fmt: skip
def test_messages_that_are_no_conversations_are_refused_in_one_line(messages, message):
    with pytest.raises(ValueError, match=message) as error:
        conversations(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, r"no prompts: give prompts \(texts or ids\), or messages="),
    ({"prompts": ["a"], "messages": HI}, "both prompts and messages"),
    ({"prompts": ["a"], "template_variables": {}}, "template_variables belong to a chat template: give messages"),
    ({"messages": HI, "template_variables": True}, "template_variables=True is not a dictionary"),
    ({"messages": HI, "template_variables": {"messages": []}}, "template_variables sets 'messages'"),
    ({"messages": HI, "template_variables": {"x": {1}}}, r"template_variables\['x'\]=.* cannot be read"),
    ({"messages": [user("\ud800")]}, "half of a surrogate pair"),
    ({"prompts": [user("Hi")]}, r"is not a prompt: give conversations as messages=\[…\], or texts or ids"),
])  # fmt: skip
def test_other_arguments_are_refused_before_anything_is_compiled(pair, arguments, message, monkeypatch):
    monkeypatch.setattr("speccascade_jax.methods.method.Decoder.fetch", None)
    with pytest.raises(ValueError, match=message):
        sc.decode(pair, **arguments, **SETTINGS)


def test_pairs_without_a_template_say_what_to_do(tmp_path, pair):
    tabular = text_pair.make(tmp_path)
    with pytest.raises(ValueError, match=f"no chat template in {tmp_path}: put the chat_template.jinja of the instruc"):
        sc.decode(tabular, messages=HI)
    with pytest.raises(ValueError, match="messages need a vocabulary from a file, with a chat template beside it"):
        sc.stream(dataclasses.replace(tabular, vocabulary=None), messages=HI)
    with pytest.raises(ValueError, match="stream takes one prompt, not 2"):
        sc.stream(pair_in(tmp_path / "pair", "qwen3"), messages=[HI, HI]) if (
            tmp_path / "pair"
        ).mkdir() is None else ...
