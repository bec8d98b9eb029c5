"""Tests of chat templates: renderings of transformers, where a template is read from, and what it may not do."""

import json
import sys

import pytest

from speccascade_jax.data.vocabularies.chat_template import MOST_STEPS, ChatTemplate, plain, require_template
from speccascade_jax.data.vocabularies.load import load_vocabulary
from tests.support import chat_families, tokenizer_files
from tests.support.chat_families import CASES, FAMILIES, FOLDER, GOLDEN, NOW

TEXTS = json.loads(GOLDEN.read_text(encoding="utf-8"))
QUESTION = [{"role": "user", "content": "Hi"}]


def template(name):
    family = FAMILIES[name]
    pieces = {"bos_token": family.bos, "eos_token": family.eos}
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(FOLDER / f"{name}.jinja", text, {role: piece for role, piece in pieces.items() if piece})


def of(text):
    return ChatTemplate(FOLDER / "x.jinja", text)


@pytest.mark.parametrize(("name", "case"), chat_families.cases())
def test_templates_render_as_in_transformers(name, case):
    messages, variables = CASES[case]
    if (text := TEXTS[name][case]) is not None:
        assert template(name).render(messages, variables, now=NOW) == text
    else:
        with pytest.raises(ValueError, match=rf"^chat template .*{name}\.jinja: .+$"):
            template(name).render(messages, variables, now=NOW)


@pytest.mark.parametrize(("text", "rendered"), [
    ("a\n{% if true %}\n  b\n    {% endif %}\nc\n", "a\n  b\nc"),  # trim_blocks, lstrip_blocks, the last line's end
    ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    ("{{ {'b': '<ä>', 'a': none} | tojson(sort_keys=true) }}", '{"a": null, "b": "<ä>"}'),
    ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
    ("{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}{{ n }}"
     "{% endfor %}", "02"),
    ("{{ tools is none }} {{ documents is none }} {{ unk_token is defined }} {{ unk_token }}.", "True True False ."),
    ("{{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }} {{ messages[0].content }}", "2026-11-27 Hi Hi"),
    ("{{ 3 * 'ab' }} {{ 2 ** 10 }} {{ [1] * 2 }} {{ 2 * 1.5 }}", "ababab 1024 [1, 1] 3.0"),
])  # fmt: skip
def test_templates_have_the_functions_and_tags_of_transformers(text, rendered):
    assert of(text).render(QUESTION, now=NOW) == rendered


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WORDS = (
    "{% for a in x %}{% for b in x %}{% for c in x %}{% for d in x %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("text", "message"), [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "not allowed to do: access to attribute '__class__' of 'str'"),
    ("{{ raise_exception.__globals__['sys'] }}", "access to attribute '__globals__' of 'function' object is unsafe"),
    ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    ("{% set _ = messages[0].update({'role': 'x'}) %}", "access to attribute 'update' of 'dict' object is unsafe"),
    ("{% for a in range(10**9) %}{% endfor %}", "not allowed to do: Range too big"),
    (LOOP, "it takes more than 1,000,000 steps"),
    (f"{{% set x = 'a' * 999 %}}{WORDS}", "it takes more than 1,000,000 steps"),
    ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ("{{ 'a' * 10**10 }}", "repeats a text or a list to more than 1,000,000 entries"),
    ("{{ 10**10 * [1] }}", "repeats a text or a list to more than 1,000,000 entries"),
    ("{{ 10 ** (10 ** 10) }}", r"it computes 10 \*\* 10000000000"),
    ("{% include 'x' %}", "no loader"),
    ("{{ x.y }}", "'x' is undefined: pass it in template_variables, or correct the messages"),
    ("{{ messages[0].name.first }}", "'dict object' has no attribute 'name'"),
    ("{% if %}", "line 1 is not valid Jinja: Expected an expression"),
    ("a\n{% for m in messages %}", "line 2 is not valid Jinja"),
    ("{{ raise_exception('no\n  roles') }}", "it refuses the messages: no roles$"),
    ("{{ 'a' + 1 }}", "TypeError"),
])  # fmt: skip
def test_hostile_and_faulty_templates_are_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=rf"^chat template .*x\.jinja: .*{message}") as error:
        of(text).render(QUESTION)
    assert "\n" not in str(error.value)


def test_a_long_conversation_is_far_from_the_limit_of_steps():
    messages = [{"role": ("user", "assistant")[n % 2], "content": "a" * 999} for n in range(2001)]
    assert template("qwen3").render(messages).count("<|im_start|>") == 2002
    assert MOST_STEPS >= 50 * 2001


def test_the_tracing_function_of_a_debugger_is_back_after_a_rendering():
    events, before = [], sys.gettrace()

    def trace(frame, event, argument):
        events.append(event)

    sys.settrace(trace)
    try:
        with pytest.raises(ValueError, match="steps"):
            of(LOOP).render(QUESTION)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_a_template_reads_no_objects():
    assert plain("x", {"a": (1, 2.5, None, True, "b")}) == {"a": [1, 2.5, None, True, "b"]}
    for value, message in (({"a": [len]}, r"x\['a'\]\[0\]=.*len.* cannot be read"), ({1: 2}, "x has the key 1")):
        with pytest.raises(ValueError, match=message):
            plain("x", value)


def test_values_without_an_end_are_refused_in_one_line():
    deep, cycle = [], {}
    for _ in range(2000):
        deep = [deep]
    cycle["a"] = [cycle]
    for value in (deep, cycle):
        with pytest.raises(ValueError, match="^x has more than 64 lists and dicts within each other: use fewer$"):
            plain("x", {"b": value})
    nested = 7
    for _ in range(64):
        nested = [nested]
    assert plain("x", nested) == nested


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")
    return chat_families.write(tmp_path_factory.mktemp("gemma4"), "gemma4", config=True)


def test_a_file_takes_precedence_over_the_entry_of_the_configuration(folder):
    vocabulary = load_vocabulary(folder)
    entry = require_template(vocabulary)
    assert entry.source == folder / "tokenizer_config.json" and "strip_thinking" in entry.text
    assert entry.pieces == {"bos_token": "<bos>", "eos_token": "<eos>"}
    file = folder / "chat_template.jinja"
    file.write_text("{{ bos_token }}ä")
    try:
        assert require_template(vocabulary).render(QUESTION) == "<bos>ä"
        assert require_template(vocabulary).digest != entry.digest
        file.write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8: copy it again"):
            require_template(vocabulary)
    finally:
        file.unlink()


@pytest.mark.parametrize(("entry", "message"), [
    ([{"name": "rag", "template": "x"}], r'tokenizer_config.json has chat templates called rag: rename .* "default"'),
    ([], "has chat templates called nothing"),
    (7, r"invalid entry \(TypeError\('chat_template 7'"),
    ([{"name": "default", "template": 7}], "invalid entry"),
    ([{"name": "default", "template": "x"}, {"name": "tool_use", "template": 7}], "invalid entry"),
    (None, "no chat template in .*: put the chat_template.jinja of the instruction-tuned model there"),
])  # fmt: skip
def test_a_configuration_without_a_default_template_is_refused(tmp_path, entry, message):
    path = tokenizer_files.gemma(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ValueError, match=message):
        require_template(load_vocabulary(path))


def test_pieces_that_no_file_names_are_those_of_the_vocabulary(tmp_path):
    path = tokenizer_files.gemma(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": {"content": "<unk>"}, "eos_token": null}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ unk_token }}{{ eos_token }}")
    assert require_template(load_vocabulary(path)).render(QUESTION) == "<s><unk>"


def test_every_named_piece_is_a_variable(tmp_path):
    path = tokenizer_files.gemma(tmp_path)
    config = {
        "image_token": {"content": "<i>"},
        "extra_special_tokens": {"start": "<b>", "x": 7},
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"extra_token": None}))
    roles = {"image_token": "<j>", "audio_token": "<a>", "extra_token": "<x>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    (tmp_path / "chat_template.jinja").write_text("{{ image_token }}{{ audio_token }}{{ start }}{{ extra_token }}")
    template = require_template(load_vocabulary(path))
    assert template.render(QUESTION) == "<i><a><b>"
    assert set(template.pieces) == {"eos_token", "image_token", "audio_token", "start"}


def test_tools_have_a_template_of_their_own(tmp_path):
    named = [
        {"name": name, "template": text} for name, text in {"default": "D", "tool_use": "{{ bos_token }}T"}.items()
    ]
    path = tokenizer_files.gemma(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    entry = require_template(load_vocabulary(path))
    texts = [entry.render(QUESTION, variables) for variables in ({"tools": []}, {"tools": None}, {}, None)]
    assert texts == ["<s>T", "D", "D", "D"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ raise_exception('no') }}")
    file = require_template(load_vocabulary(path))
    with pytest.raises(ValueError, match=r"^chat template .*additional_chat_templates/tool_use\.jinja: it refuses"):
        file.render(QUESTION, {"tools": []})
    (tmp_path / "chat_template.jinja").write_text("D")
    digests = {template.digest for template in (entry, file, of("D"), require_template(load_vocabulary(path)))}
    assert len(digests) == 3, "the last template equals that of `file`"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_an_answer_is_the_piece_after_it(name, tmp_path):
    vocabulary = load_vocabulary(chat_families.write(tmp_path, name))
    (end,) = require_template(vocabulary).end_of_turn(vocabulary)
    assert vocabulary.piece(end) == FAMILIES[name].end


@pytest.mark.parametrize("text", [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{{ messages[0].content }}<|im_end|>",
    "{% if messages|length > 1 %}{{ raise_exception('one question') }}{% endif %}",
    "{% for m in messages %}{{ m.content }}\n{% endfor %}",
])  # fmt: skip
def test_a_template_without_such_a_piece_has_no_end(text, folder):
    assert of(text).end_of_turn(load_vocabulary(folder)) == ()
