"""Conversations as prompts: checks of messages, and their token ids by the chat template of a pair's tokenizer."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from speccascade_jax.core.checks import check_text
from speccascade_jax.core.names import shown
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.chat_template import Message, plain
from speccascade_jax.pairs.pair import Pair

TASK_DATE = datetime(2024, 7, 26)
"""The date that chat templates write in the prompts of tasks, so that prompts do not depend on the day of a run."""
_RESERVED = ("messages", "strftime_now")


class Prompts(NamedTuple):
    """The prompts of a call.

    Attributes:
        pair: the pair. If the prompts are conversations, its outputs also end where the chat template ends a turn.
        prompts: texts or token ids, as `make_prompt` takes them.
        shown: the prompts for printed traces: as the caller wrote them or, for conversations, the template's texts.
    """

    pair: Pair
    prompts: Any
    shown: Any


def read_prompts(pair: Pair, prompts: Any, messages: Any, template_variables: Mapping[str, Any] | None) -> Prompts:
    """Returns the prompts of a call that takes either prompts or messages.

    Raises:
        ValueError: neither or both are given, template variables are given without messages, or an error of
            `conversations`, `checked_variables` or `ChatTemplate.render`.
    """
    if (prompts is None) == (messages is None):
        problem = "no prompts" if prompts is None else "both prompts and messages"
        raise ValueError(f"{problem}: give prompts (texts or ids), or messages=[{{'role': 'user', 'content': …}}]")
    if messages is None:
        if template_variables is not None:
            raise ValueError("template_variables belong to a chat template: give messages instead of prompts")
        return Prompts(pair, prompts, prompts)
    variables = checked_variables(template_variables)
    texts = [chat_text(pair, conversation, variables) for conversation in conversations(messages)]
    return Prompts(pair.for_chat, [chat_ids(pair, text) for text in texts], texts)


def chat_text(
    pair: Pair, conversation: Sequence[Message], variables: Mapping[str, Any], now: datetime | None = None
) -> str:
    """Returns the text that a pair's chat template makes of a conversation (`ChatTemplate.render`)."""
    text = pair.chat_template.render(conversation, variables, now=now)
    check_text("the text of the chat template", text)
    return text


def chat_ids(pair: Pair, text: str) -> list[int]:
    """Returns the token ids of a text that a chat template wrote.

    The template itself writes the names of the beginning-of-sequence token and of all other control tokens, and the
    vocabulary encodes these names as the tokens. So nothing is added here. As in transformers, such a name in a user's
    message is encoded as the token, too.
    """
    assert pair.vocabulary is not None  # `Pair.chat_template` refuses a pair without a vocabulary
    return pair.vocabulary.encode(text)


def example_ids(pair: Pair, task: Task, example: Example, variables: Mapping[str, Any]) -> tuple[list[int], bool]:
    """Returns the token ids of an example's prompt, written as one message of a user, and whether the message was cut.

    `Task.cut` shortens the message until the prompt, template included, has at most `Task.max_input_length` tokens.

    Raises:
        ValueError: the template alone is longer than that.
    """

    def ids_of(content: str) -> list[int]:
        return chat_ids(pair, chat_text(pair, [{"role": "user", "content": content}], variables, TASK_DATE))

    prompt, longest = task.build_prompt(example), task.max_input_length
    check_text(f"{task.name}: the prompt of example {example.id}", prompt)
    ids = ids_of(prompt)
    if len(ids) <= longest:
        return ids, False
    assert pair.vocabulary is not None  # `Pair.chat_template` refuses a pair without a vocabulary
    words = pair.vocabulary.encode(prompt)
    room = len(words)
    while len(ids) > longest:
        room -= len(ids) - longest
        if room < 1:
            limit = f"no room for a message in max_input_length={longest}: raise it"
            raise ValueError(f"{task.name}: the chat template {pair.chat_template.source} leaves {limit}")
        ids = ids_of(pair.vocabulary.decode(task.cut(words, room)))
    return ids, True


def checked_variables(variables: Any) -> dict[str, Any]:
    """Returns a chat template's variables as plain values; raises a `ValueError` for an unsuitable value or name."""
    if not isinstance(variables, Mapping | None):
        raise ValueError(
            f"template_variables={shown(variables)} is not a dictionary: write {{'enable_thinking': False}}"
        )
    checked: dict[str, Any] = plain("template_variables", variables or {})
    if taken := [name for name in _RESERVED if name in checked]:
        raise ValueError(f"template_variables sets {taken[0]!r}, which is set for every template: leave it out")
    return checked


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Checks a conversation or a batch of conversations; returns a list of conversations with plain values.

    Args:
        messages: a list of messages, dictionaries with a "role" and a "content", or a list of such lists. A content is
            a text, or a list of parts `{"type": "text", "text": …}`.

    Raises:
        ValueError: a conversation is empty or ends with an answer, or a message lacks its role or its text.
    """
    form = "give a list of {'role': 'user', 'content': 'text'}, or a list of such lists"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages={shown(messages)} is not a conversation: {form}")
    if not messages:
        raise ValueError(f"messages is empty: {form}")
    batch = [messages] if isinstance(messages[0], Mapping) else messages
    return [_conversation(number, conversation) for number, conversation in enumerate(batch)]


def _conversation(number: int, messages: Any) -> list[dict[str, Any]]:
    name = f"conversation {number}"
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"{name} is {shown(messages)}: give a list of messages, and do not mix lists and messages")
    if not messages:
        raise ValueError(f"{name} is empty: give at least one message")
    checked = [_message(f"{name}, message {place}", message) for place, message in enumerate(messages)]
    if checked[-1]["role"] == "assistant":
        raise ValueError(f"{name} ends with a message of the assistant: end it with the message to answer")
    return checked


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is {shown(message)}: give a dictionary such as {{'role': 'user', 'content': 'text'}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name} has the role {shown(role)}: give 'system', 'user', 'assistant' or another text")
    content = message.get("content")
    if isinstance(content, list | tuple):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{name} has the part {shown(part)}: only {{'type': 'text', 'text': …}} can be read")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{name} has the content {shown(content)}: give a text")
    checked: dict[str, Any] = plain(name, message)
    return checked
