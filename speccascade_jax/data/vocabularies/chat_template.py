"""Chat templates: Jinja programs in a tokenizer's folder that write a conversation as the text of a prompt.

A template is a program from a checkpoint. So it runs in Jinja's sandbox, reads plain values only, and takes at most
`MOST_STEPS` steps; its memory is not limited. Files and variables are those of transformers
(https://huggingface.co/docs/transformers/chat_templating).
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from speccascade_jax.core.names import shown
from speccascade_jax.data.vocabularies.tokenizer_files import TokenizerFiles
from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary, TextVocabulary
from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import point_key

JINJA = "chat_template.jinja"
TOOL_JINJA = "additional_chat_templates/tool_use.jinja"
MOST_STEPS = 1_000_000
"""The largest number of lines of a template that one rendering runs; long conversations need some thousands."""
MOST_NESTED = 64
"""The deepest nesting of lists and dictionaries in a value; the limit also refuses a list that contains itself."""
_MOST_REPEATED = 1_000_000
_REASONING = ("reasoning_content", "thinking", "reasoning")
_BRACKETED = re.compile(r"<.+>|\[.+\]")
_NAME = "<template>"  # the name that Jinja gives to the code of a template without a file

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special pieces that it may name.

    Attributes:
        source: the file of the template.
        text: the template.
        pieces: names such as "bos_token", and the text of each piece.
        for_tools: the template to use if the variable `tools` is set; `None`: this template.
    """

    source: Path
    text: str
    pieces: Mapping[str, str] = field(default_factory=dict, hash=False)
    for_tools: "ChatTemplate | None" = None

    @property
    def digest(self) -> str:
        """The hash of the texts and the pieces, for keys of records."""
        others = {"for_tools": self.for_tools.text} if self.for_tools else {}
        return point_key(text=self.text, pieces=dict(self.pieces), **others)

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, now: datetime | None = None
    ) -> str:
        """Returns the text of a conversation, up to the beginning of the assistant's next message.

        Args:
            messages: the messages, of plain values (texts, numbers, lists, dictionaries). Entries that are `None` are
                left out. The template finds a message's reasoning under each of the usual names ("thinking",
                "reasoning_content"), as in transformers.
            variables: further variables of the template, such as `enable_thinking` or `tools`; they replace the usual
                ones (`add_generation_prompt=True`, `tools=None`, `documents=None`, the pieces).
            now: the time that `strftime_now` formats; `None`: the current time.

        Raises:
            ValueError: the template is not valid, refuses the messages, is not allowed to do what it tries, or does not
                end; the message names the file.
        """
        if self.for_tools and variables and variables.get("tools") is not None:
            return self.for_tools.render(messages, variables, now=now)
        usual = {"tools": None, "documents": None, "add_generation_prompt": True, **self.pieces}
        values = usual | dict(variables or {}) | {"messages": [_completed(message) for message in messages]}
        values["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
        return str(self._run(lambda: _program(self.text).render(values)))

    def end_of_turn(self, vocabulary: TextVocabulary) -> tuple[int, ...]:
        """Returns the id of the piece that ends an assistant's message; empty if the template writes no such piece.

        To find it, the template writes a conversation of one question and one answer. The first piece after the answer
        is the result, with whitespace between them ignored. Only a control piece or a piece in brackets counts: a text
        such as "USER:" consists of several pieces, which may also occur within a message.
        """
        question, answer = ({"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes42")))
        try:
            text = self.render([question, answer], {"add_generation_prompt": False})
        except ValueError:  # the template refuses answers, so it has no piece that ends one
            return ()
        _, words, after = text.rpartition("Yes42")
        ids = vocabulary.encode(after.lstrip()) if words and after.strip() else []
        controls: frozenset[int] = getattr(vocabulary, "controls", frozenset())
        ends = ids[:1] if ids and (ids[0] in controls or _BRACKETED.fullmatch(vocabulary.piece(ids[0]))) else []
        return tuple(ends)

    def _run(self, render: Callable[[], str]) -> str:
        """Runs the template, and turns every error into one line that names the file."""
        from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
        from jinja2.exceptions import SecurityError

        try:
            return _with_limit(render)
        except TemplateSyntaxError as error:
            problem = f"line {error.lineno} is not valid Jinja: {error.message}"
        except (SecurityError, _LimitError, OverflowError, MemoryError) as error:
            problem = f"it does what templates are not allowed to do: {error}"
        except UndefinedError as error:
            problem = f"{error}: pass it in template_variables, or correct the messages"
        except TemplateError as error:  # `raise_exception`
            problem = f"it refuses the messages: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"chat template {self.source}: {' '.join(problem.split())}")


class _LimitError(Exception):
    """The error of a template that takes too many steps, or makes too long a text."""


def _with_limit(render: Callable[[], str]) -> str:
    """Calls `render`, and raises `_LimitError` after `MOST_STEPS` lines of templates.

    Lines are counted, not seconds, so that a busy machine refuses no template. Jinja itself bounds each `range`, but
    not loops within loops. The tracing function of a debugger is suspended meanwhile.
    """
    steps, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > MOST_STEPS:
            raise _LimitError(f"it takes more than {MOST_STEPS:,} steps")
        return count

    sys.settrace(lambda frame, event, argument: count if frame.f_code.co_filename == _NAME else None)
    try:
        return render()
    finally:
        sys.settrace(before)


@lru_cache(maxsize=16)
def _program(text: str) -> Any:
    """Compiles a template."""
    return _environment().from_string(text)


def _environment() -> Any:
    """Returns Jinja's sandbox with the functions, filters and tags that transformers gives to templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks the words of the assistant for training and writes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = raise_exception
    # These two operators make values of any size in a single step.
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table |= {"*": _times, "**": _power}
    return environment


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns JSON text; unlike the filter of Jinja, it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _times(left: Any, right: Any) -> Any:
    sizes = (len(value) if isinstance(value, str | list | tuple) else value for value in (left, right))
    if isinstance(left, str | list | tuple) != isinstance(right, str | list | tuple):
        first, second = sizes
        if first * second > _MOST_REPEATED:
            raise _LimitError(f"it repeats a text or a list to more than {_MOST_REPEATED:,} entries")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if abs(left) > 1 << 64 or abs(right) > 64:
        raise _LimitError(f"it computes {shown(left)} ** {shown(right)}")
    return left**right


def _completed(message: Message) -> dict[str, Any]:
    """Returns a message without entries that are `None`, and with its reasoning under every usual name."""
    entries = {name: value for name, value in message.items() if value is not None}
    reasoning = next((entries[name] for name in _REASONING if name in entries), None)
    return entries if reasoning is None else {"thinking": reasoning, **entries, "reasoning_content": reasoning}


def require_template(vocabulary: TextVocabulary | None) -> ChatTemplate:
    """Returns the chat template from a vocabulary's own folder, or else from the folder of the model that uses it.

    A folder's template is `chat_template.jinja`, or else the entry `chat_template` of `tokenizer_config.json`. The
    template for tools is `additional_chat_templates/tool_use.jinja`, or else the entry's template "tool_use".

    Raises:
        ValueError: there is no vocabulary, or no template, or the file is damaged.
    """
    if not isinstance(vocabulary, FileVocabulary):
        raise ValueError("messages need a vocabulary from a file, with a chat template beside it: give texts or ids")
    folders = {files.folder: files for files in map(TokenizerFiles, vocabulary.template_paths)}
    for files in folders.values():
        if template := _in_folder(files, vocabulary):
            return template
    raise ValueError(
        f"no chat template in {' or '.join(map(str, folders))}: put the {JINJA} of the instruction-tuned model there "
        "(or its tokenizer_config.json with a chat_template), or give plain prompts (no messages, "
        "Evaluation.chat = False)"
    )


def _in_folder(files: TokenizerFiles, vocabulary: FileVocabulary) -> ChatTemplate | None:
    jinja, tool_jinja = files.folder / JINJA, files.folder / TOOL_JINJA
    if jinja.is_file():
        source, texts = jinja, {"default": _decoded(jinja)}
    elif entry := files.chat_templates():
        source, texts = entry
    else:
        return None
    tool_source, tool_text = (
        (tool_jinja, _decoded(tool_jinja)) if tool_jinja.is_file() else (source, texts.get("tool_use"))
    )
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    pieces = files.named_pieces({name: vocabulary.piece(token) for name, token in named.items() if token is not None})
    for_tools = None if tool_text is None else ChatTemplate(tool_source, tool_text, pieces)
    return ChatTemplate(source, texts["default"], pieces, for_tools)


def _decoded(path: Path) -> str:
    try:
        return checksums.read(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"chat template {path} is not UTF-8: copy it again") from error


def plain(name: str, value: Any, depth: int = 0) -> Any:
    """Returns a value whose containers are plain lists and dictionaries, which is all that a template may read.

    Args:
        name: the value's name in error messages.
        value: text, number, boolean, `None`, or a list, tuple or mapping of them.
        depth: the number of containers around the value.

    Raises:
        ValueError: a part of the value is of another type, or in more than `MOST_NESTED` containers.
    """
    if depth > MOST_NESTED:
        whole = name.partition("[")[0]
        raise ValueError(f"{whole} has more than {MOST_NESTED} lists and dicts within each other: use fewer")
    if isinstance(value, Mapping):
        return {_key(name, key): plain(f"{name}[{key!r}]", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(f"{name}[{number}]", item, depth + 1) for number, item in enumerate(value)]
    if value is None:
        return None
    for kind in (bool, int, float, str):  # a subclass, such as a NumPy number, may have further methods
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(f"{name}={shown(value)} cannot be read by a chat template: give texts, numbers, lists and dicts")


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{name} has the key {shown(key)}, which is not a text: write it in quotes")
    return key
