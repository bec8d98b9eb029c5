"""Spec-Bench (Xia et al. 2024): its questions, its six categories, and how conversations are written for a model.

No row of `data.tasks.table`: it compares speed, most of its questions have no reference that a metric could use, and
its second turns contain the model's own answers. `answering` runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from speccascade_jax.core import names
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.task import json_lines

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""The sub-categories that count as one category, "mt_bench"."""

CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Question:
    """One conversation: what is said in each turn. `category` is as in the file, sub-categories apart."""

    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """The one of the six categories that it counts for."""
        return "mt_bench" if self.category in MT_BENCH else self.category


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """How a conversation is written as one text, without what a tokenizer puts in front of every text.

    Attributes:
        user: a turn of the user, `{text}`, up to where the model answers; answer: an answer of the model, `{text}`.
        system: an instruction, `{text}`; left out where there is none. system_in_turn: it is part of the first turn,
            where otherwise it stands before it.
        stop: what ends an answer; where the vocabulary has it as one token, generation stops there too.
    """

    user: str
    answer: str
    system: str = "{text}\n\n"
    system_in_turn: bool = False
    stop: tuple[str, ...] = ()

    def prompt(self, turns: Sequence[str], answers: Sequence[str], instruction: str = "") -> str:
        """The text before the next answer; ValueError if there is not one more turn than answers."""
        if len(turns) != len(answers) + 1:
            raise ValueError(f"{len(turns)} turns and {len(answers)} answers; the model answers the last turn only")
        begin = self.system.format(text=instruction) if instruction else ""
        if self.system_in_turn:
            turns, begin = [begin + turns[0], *turns[1:]], ""
        answered = zip(turns, answers, strict=False)
        said = [self.user.format(text=turn) + self.answer.format(text=answer) for turn, answer in answered]
        return begin + "".join(said) + self.user.format(text=turns[-1])

    def postprocess(self, text: str) -> str:
        """An answer without what follows its end."""
        text = text.lstrip()
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))].strip()


def read(file: str = "spec_bench/dev_half.jsonl") -> list[Question]:
    """The questions of a file in Spec-Bench's format, relative to the data directory.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a question of no known category, or without a turn.
    """
    found = []
    for record in json_lines(directory.require(file)):
        question = Question(record["question_id"], record["category"], tuple(record["turns"]))
        if question.group not in CATEGORIES or not question.turns:
            raise ValueError(
                f"question {question.question_id} has category {question.category!r} and {len(question.turns)} turns; "
                f"Spec-Bench's categories are {', '.join((*CATEGORIES, *MT_BENCH))}"
            )
        found.append(question)
    return found


def get_conversation(name: str) -> Conversation:
    """The row of `CONVERSATIONS` called `name`; ValueError if there is none."""
    if name in CONVERSATIONS:
        return CONVERSATIONS[name]
    raise ValueError(
        f"unknown conversation {name!r}; {names.hint(name, CONVERSATIONS)}there are {', '.join(CONVERSATIONS)}"
    )


# Marks and spaces are those that the models were trained with; the beginning-of-sequence token is the tokenizer's.
CONVERSATIONS = {
    "plain": Conversation(user="User: {text}\nAssistant:", answer=" {text}\n", stop=("\nUser:",)),
    "vicuna": Conversation(
        user="USER: {text} ASSISTANT:", answer=" {text}</s>", system="{text} ", stop=("</s>", "USER:"),
    ),
    "llama2": Conversation(
        user="[INST] {text} [/INST]", answer=" {text} </s><s>",
        system="<<SYS>>\n{text}\n<</SYS>>\n\n", system_in_turn=True, stop=("</s>",),
    ),
    "gemma": Conversation(
        user="<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n", answer="{text}<end_of_turn>\n",
        system_in_turn=True, stop=("<end_of_turn>",),
    ),
    "chatml": Conversation(
        user="<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", answer="{text}<|im_end|>\n",
        system="<|im_start|>system\n{text}<|im_end|>\n", stop=("<|im_end|>",),
    ),
}  # fmt: skip
