"""Spec-Bench (Xia et al., 2024): timed conversations at batch size 1, with one method and with the target alone.

Spec-Bench is not in `data.tasks.table`, because it compares speed, most of its questions have no reference for a
metric, and its second turns contain the model's own answers.

Answers have the schema that `evaluation/speed.py` and `evaluation/equal.py` of Spec-Bench read
(github.com/hemingkx/Spec-Bench), in one file for the method and one for the target. The table printed here uses the
definitions of `speed.py`, with one difference: `speed.py` counts the target's tokens by tokenizing its answers again;
here, the tokens that the method and the target generated are counted, a final stop token included. The lines of the
files have two more entries: `key` lets a stopped run resume, and `checksum` reveals damaged lines.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.api import collect, make_prompt
from speccascade_jax.core import names
from speccascade_jax.core.checks import check_seed, several, whole
from speccascade_jax.core.names import TARGET
from speccascade_jax.core.types import Array, Round
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.task import json_lines
from speccascade_jax.evaluation import code_digests
from speccascade_jax.evaluation.curves import curve
from speccascade_jax.evaluation.environment import hardware
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import ModelPair, Settings, recorded, warn_of_ranges
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.methods.build import build
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import excess, stop_ids, text_ids
from speccascade_jax.results.store import record_key
from speccascade_jax.results.store.bucket_store import open_store
from speccascade_jax.results.store.lines import parse_lines
from speccascade_jax.results.store.record import Record
from speccascade_jax.results.store.record import Row as JsonRow
from speccascade_jax.results.store.result_store import ResultStore
from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.progress import counted
from speccascade_jax.storage.files import expanded, point_key

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Sub-categories that count as one category, "mt_bench"."""

CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Question:
    """One conversation: the user's text of each turn.

    `category` is the category in the file, which may be a sub-category in `MT_BENCH`.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """The category in `CATEGORIES` that the question is counted in."""
        return "mt_bench" if self.category in MT_BENCH else self.category


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Template that formats a conversation as one text, without the prefix that a tokenizer adds to every text.

    Attributes:
        user: format of a user's turn, `{text}`, up to the start of the model's answer; answer: format of the model's
            answer, `{text}`.
        system: format of an instruction, `{text}`, which is left out if there is no instruction. system_in_turn:
            whether the instruction is part of the first turn; otherwise it comes before this turn.
        stop: texts that end an answer; if a stop text is a single token of the vocabulary, generation also stops at
            this token.
    """

    user: str
    answer: str
    system: str = "{text}\n\n"
    system_in_turn: bool = False
    stop: tuple[str, ...] = ()

    def prompt(self, turns: Sequence[str], answers: Sequence[str], instruction: str = "") -> str:
        """Returns the text before the model's next answer; ValueError unless there is one more turn than answers."""
        if len(turns) != len(answers) + 1:
            raise ValueError(f"got {len(turns)} turns and {len(answers)} answers: give one more turn than answers")
        begin = self.system.format(text=instruction) if instruction else ""
        if self.system_in_turn:
            turns, begin = [begin + turns[0], *turns[1:]], ""
        answered = zip(turns, answers, strict=False)
        said = [self.user.format(text=turn) + self.answer.format(text=answer) for turn, answer in answered]
        return begin + "".join(said) + self.user.format(text=turns[-1])

    def postprocess(self, text: str) -> str:
        """Returns an answer without its first stop text and everything after it."""
        text = text.lstrip()
        ends = [end for stop in self.stop if (end := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))].strip()


OVERALL = "overall"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Row of the table for one category.

    Speeds are tokens per second, as a mean over questions. `accepted` is the number of tokens per round, as a mean over
    rounds. `same` is the number of questions that the method and the target alone answered with the same texts.
    """

    category: str
    questions: int
    speed: float
    target_speed: float
    accepted: float
    same: int

    @property
    def speed_up(self) -> float:
        """The ratio of the two mean speeds."""
        return self.speed / self.target_speed


def table(answers: Sequence[JsonRow], of_target: Sequence[JsonRow]) -> list[Row]:
    """Returns a row for each category with answers, and one row over all; ValueError if the questions differ."""
    if [answer["question_id"] for answer in answers] != [answer["question_id"] for answer in of_target]:
        raise ValueError("the two lists answer different questions; compare answers of one run")
    pairs = list(zip(answers, of_target, strict=True))
    kinds = [Question(answer["question_id"], answer["category"], ()).group for answer in answers]
    groups = {name: [pair for pair, group in zip(pairs, kinds, strict=True) if group == name] for name in CATEGORIES}
    return [_row(name, group) for name, group in (groups | {OVERALL: pairs}).items() if group]


def _row(category: str, pairs: Sequence[tuple[JsonRow, JsonRow]]) -> Row:
    ours, theirs = ([pair[side]["choices"][0] for pair in pairs] for side in (0, 1))
    return Row(
        category=category,
        questions=len(pairs),
        speed=float(np.mean([_speed(choice) for choice in ours])),
        target_speed=float(np.mean([_speed(choice) for choice in theirs])),
        accepted=float(np.mean([length for choice in ours for length in choice["accept_lengths"]])),
        same=sum(answer["turns"] == baseline["turns"] for answer, baseline in zip(ours, theirs, strict=True)),
    )


def _speed(choice: dict[str, Any]) -> float:
    return float(sum(choice["new_tokens"]) / sum(choice["wall_time"]))


def show(rows: Sequence[Row]) -> None:
    """Prints the table of speeds by category."""
    printed = Table("category", "questions", "tokens/s", "target alone", "speed-up", "accepted", "same answers")
    for row in rows:
        speeds = (f"{row.speed:.1f}", f"{row.target_speed:.1f}", f"{row.speed_up:.2f}", f"{row.accepted:.2f}")
        printed.add_row(row.category, str(row.questions), *speeds, f"{row.same}/{row.questions}")
    Console().print(printed)


def run(
    *,
    pair: ModelPair,
    settings: Settings,
    conversation: str = "plain",
    instruction: str = "",
    questions: str = "spec_bench/dev_half.jsonl",
    categories: Sequence[str] = CATEGORIES,
    per_category: int | None = None,
    max_new_tokens: int = 1024,
    max_prompt_length: int = 4096,
    seed: int = 0,
    output: str = "results/spec_bench",
) -> list[Row]:
    """Answers the questions with a method and with the target alone, writes both files, and prints the table.

    Args:
        pair: the models, as in `experiment.run`.
        settings: how the method generates, as in `experiment.run`; the target alone decodes under the same sampling.
        conversation: the template, a name in `CONVERSATIONS`.
        instruction: text of the system instruction; empty: none.
        questions: a file in Spec-Bench's format, relative to the data directory.
        categories: names in `CATEGORIES`.
        per_category: largest number of questions of each category; `None`: all.
        max_new_tokens: largest number of new tokens in one answer.
        max_prompt_length: largest length of a conversation in tokens. A longer first turn is refused before anything is
            answered. If a later turn, together with the conversation before it, is too long, the question is left out
            of both files and named at the end. The number of positions that the models have limits conversations in the
            same way.
        seed: the random seed, as in `experiment.run`.
        output: a folder; the names of its files contain pair and method. Answers that the same run already stored in it
            are not generated again.

    Returns:
        The rows of the table; empty if there is no answer.

    Raises:
        ValueError: a value is invalid; a first turn is too long; the files hold answers of another run.
        FileNotFoundError: the file of questions does not exist.
        StoreLockedError: another process writes these answers.
    """
    settings = recorded(settings)
    if settings.method == TARGET:
        raise ValueError(f"{TARGET} is always measured as the baseline; choose another method")
    whole("max_prompt_length", max_prompt_length, 1)
    form, asked = get_conversation(conversation), read_questions(questions)
    chosen = choose(asked, categories, per_category)
    recipe_header.announce(f"{len(chosen)} questions")
    loaded = replace(load_source(pair), max_prompt_length=max_prompt_length)
    both_settings = settings, Settings(method=TARGET, **sampling_of(settings))
    speakers = [Speaker(loaded, item, form, instruction, max_new_tokens, seed) for item in both_settings]
    check_first_turns(speakers[0], chosen)
    code = code_digests.digest(speakers[0].decoder, lambda: speakers[0].controls)
    identity: JsonRow = {"settings": record_key.canonical(settings), "form": asdict(form)}
    identity |= {"seed": speakers[0].seed, "max_new_tokens": speakers[0].max_new_tokens}  # converted to int
    identity |= {"instruction": instruction, "device": hardware()}
    identity |= {"weights": loaded.fingerprint, **Heads(loaded).fingerprint(settings), "code": code}
    files = [_answer_file(output, pair, speaker.settings) for speaker in speakers]
    for file in files:
        check_file(file, [_key(question, file, identity) for question in asked])
    with open_store(files[0]) as ours, open_store(files[1]) as theirs:
        sides = [Side(*item, identity) for item in zip(speakers, (ours, theirs), strict=True)]
        left_out = answer_all(sides, chosen)
        answers = [{q.question_id: answer for q in chosen if (answer := side.answer_to(q))} for side in sides]
    rows = table(*([item[n] for n in answers[0] if n in answers[1]] for item in answers))
    show(rows)
    for reason in left_out:
        print(f"left out: {reason}")
    if left_out:
        print("if the limit is spec_bench.run.max_prompt_length, raise it and run again: existing answers are kept")
    print(f"answers: {files[0]}; answers of the target alone: {files[1]}")
    return rows


def choose(questions: Sequence[Question], categories: Sequence[str], per_category: int | None = None) -> list[Question]:
    """Returns the first questions of each category; ValueError for an unknown category, or without questions."""
    several("categories", categories, 1)
    if unknown := [name for name in categories if name not in CATEGORIES]:
        raise ValueError(f"categories: {unknown[0]!r} is not one of {', '.join(CATEGORIES)}")
    if per_category is not None:
        whole("per_category", per_category, 1)
    chosen = [q for name in categories for q in [q for q in questions if q.group == name][:per_category]]
    if not chosen:
        raise ValueError(f"there are no questions of {', '.join(categories)}: give other categories or other questions")
    return chosen


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer: text, number of generated tokens, target calls, seconds, and tokens committed in each round."""

    text: str
    new_tokens: int
    target_calls: int
    seconds: float
    accept_lengths: list[int]


class ConversationTooLong(ValueError):  # noqa: N818 (not the caller's error: answers have any length)
    """Error for a turn that is too long for the models, with its answer; the message names turn and limit."""


def committed(turn: Round) -> Array:
    """Returns the number of tokens that a round committed in each row, int32 `[B]`."""
    return turn.num_new


@dataclass(eq=False)
class Speaker:
    """Model pair with one method that answers questions; generation stops at stop texts that are a single token.

    Args:
        pair: a pair with a vocabulary; settings: as in `experiment.run`.
        conversation: the template of the texts; instruction: the text of the system instruction.
        max_new_tokens: largest number of new tokens in one answer; seed: the random seed.

    Raises:
        ValueError: the errors of `build` and `Method.controls`; the method consists of several generations; the pair
            has no vocabulary.
    """

    pair: Pair
    settings: Settings
    conversation: Conversation
    instruction: str = ""
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        pair, settings = self.pair, self.settings
        self.max_new_tokens, self.seed = whole("max_new_tokens", self.max_new_tokens, 1), check_seed(self.seed)
        if pair.vocabulary is None:
            raise ValueError(f"pair {pair.name!r} has no vocabulary, but Spec-Bench is text; give one to Pair.load")
        ends = stop_ids(pair.vocabulary, self.conversation.stop)
        heads = Heads(pair)
        heads.check([settings])
        warn_of_ranges([settings], pair.target.model.vocab_size)
        self.decoder = build(pair, settings, stop_ids=ends, head=heads.of(settings))
        if self.decoder.engine is None:
            name = self.decoder.method.name
            raise ValueError(
                f"method {name!r} decides about whole outputs, which Spec-Bench does not support: choose another method"
            )
        self.controls = self.decoder.controls(1)
        self._compiled: set[tuple[int, ...]] = set()

    def converse(self, question: Question) -> list[Turn]:
        """Answers all turns of a question; a prompt contains all earlier answers. Raises the errors of `prompt`."""
        said: list[Turn] = []
        for _ in question.turns:
            said.append(self.answer(self.prompt(question, [turn.text for turn in said]), question.question_id))
        return said

    def prompt(self, question: Question, answers: Sequence[str] = ()) -> str:
        """Returns the text before a question's next answer.

        Raises:
            ConversationTooLong: the text has more tokens than the pair accepts, or than the models have positions for.
        """
        turn = len(answers) + 1
        text = self.conversation.prompt(question.turns[:turn], answers, self.instruction)
        if too_long := excess(self.pair, len(text_ids(self.pair, text)), self.max_new_tokens):
            place = f"question {question.question_id} ({question.group}), turn {turn}"
            raise ConversationTooLong(f"{place}, has {too_long}")
        return text

    def answer(self, text: str, example_id: int = 0) -> Turn:
        """Generates and times an answer to the prompt `text`; compilation is not timed."""
        prompt = jax.device_put(make_prompt(self.pair, [text], max_new_tokens=self.max_new_tokens))
        inputs = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens

        extra: dict[str, Any] = {"controls": self.controls, "max_new_tokens": self.max_new_tokens, "record": committed}
        extra |= {"example_ids": np.asarray([example_id])}
        run = partial(self.decoder.generate, prompt, self.seed, **extra)
        if inputs.shape not in self._compiled:
            jax.block_until_ready(run())
            self._compiled.add(inputs.shape)
        begin = time.perf_counter()
        generation = jax.block_until_ready(run())
        seconds = time.perf_counter() - begin
        out = collect(self.pair, generation, prompt, draft_alone=self.decoder.method.draft_alone)
        assert out.texts is not None  # `__post_init__` refuses a pair without a vocabulary
        return Turn(
            text=self.conversation.postprocess(out.texts[0]),
            new_tokens=int(out.lengths[0]),
            target_calls=int(out.stats["rows"]["target_calls"][0]),
            seconds=seconds,
            accept_lengths=np.asarray(generation.record)[: int(generation.num_rounds), 0].tolist(),
        )


@dataclass(frozen=True)
class Side:
    """One side of the comparison, the method or the target alone: its speaker, its store, and its settings.

    `settings` holds everything that answers depend on except the question.
    """

    speaker: Speaker
    store: ResultStore
    settings: JsonRow

    def key(self, question: Question) -> str:
        """Returns the key of a question's answer: a hash of the question, the store's file name and the settings."""
        return _key(question, self.store.path, self.settings)

    def answer_to(self, question: Question) -> JsonRow | None:
        """Returns the stored answer to a question; `None` if there is none."""
        key = self.key(question)
        answers = cast(list[JsonRow], self.store.records)
        return next((answer for answer in answers if answer["key"] == key), None)

    def answer(self, question: Question) -> JsonRow:
        """Returns a new answer: one line of a file in Spec-Bench's schema, with the key."""
        turns = self.speaker.converse(question)
        choice = {
            "index": 0,
            "turns": [turn.text for turn in turns],
            "decoding_steps": [turn.target_calls for turn in turns],
            "new_tokens": [turn.new_tokens for turn in turns],
            "wall_time": [turn.seconds for turn in turns],
            "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
        }
        return {
            "key": self.key(question),
            "question_id": question.question_id,
            "category": question.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": self.store.path.stem,
            "choices": [choice],
            "tstamp": time.time(),
        }


def answer_all(sides: Sequence[Side], questions: Sequence[Question]) -> list[str]:
    """Generates the missing answers of both sides (the method and the target alone).

    The side that answers first alternates between questions. The answers to a question are stored after both sides have
    answered it, so that both files hold the same questions in the same order.

    Returns:
        For each question that was left out, a text that names the turn that was too long.
    """
    left_out = []
    for number, question in enumerate(counted(questions, "answering", "questions")):
        lacking = [side for side in sides if side.answer_to(question) is None]
        progress = f"[{number + 1}/{len(questions)}] question {question.question_id} ({question.group})"
        try:
            said = [(side, side.answer(question)) for side in (lacking if number % 2 == 0 else lacking[::-1])]
        except ConversationTooLong as error:
            left_out.append(str(error))
            print(f"{progress}, left out", flush=True)
            continue
        for side, answer in said:
            side.store.append(cast(Record, answer))
        print(progress if lacking else f"{progress}, answered before", flush=True)
    return left_out


def check_first_turns(speaker: Speaker, questions: Sequence[Question]) -> None:
    """Raises ValueError for the first question whose first turn is too long."""
    for question in questions:
        try:
            speaker.prompt(question)
        except ConversationTooLong as error:
            raise ValueError(
                f"{error}; raise spec_bench.run.max_prompt_length if that is the limit, lower "
                "spec_bench.run.max_new_tokens, or leave the question out (spec_bench.run.categories, .questions)"
            ) from error


def check_file(path: Path, keys: Sequence[str]) -> None:
    """Refuses a file with answers whose keys are not in `keys`; an incomplete last line is ignored."""
    content = path.read_bytes() if path.exists() else b""
    records, damaged = parse_lines(content[: content.rfind(b"\n") + 1])
    if damaged or not {record["key"] for record in records} <= set(keys):
        raise ValueError(
            f"{path} already holds answers of another run (other settings, weights, questions or another device); "
            "remove it, or choose another output"
        )


def _key(question: Question, file: Path, settings: JsonRow) -> str:
    return point_key(question=asdict(question), model_id=file.stem, **settings)


def _answer_file(folder: str, pair: ModelPair, settings: Settings) -> Path:
    alpha = "" if settings.alpha is None else f"-{settings.alpha:g}"
    return expanded(folder) / f"{Path(pair.name).name}-{curve(settings)}{alpha}.jsonl"


def read_questions(file: str = "spec_bench/dev_half.jsonl") -> list[Question]:
    """Reads the questions of a file in Spec-Bench's format, relative to the data directory.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a question has an unknown category or no turn.
    """
    all_questions = []
    for record in json_lines(directory.require(file)):
        question = Question(record["question_id"], record["category"], tuple(record["turns"]))
        if question.group not in CATEGORIES or not question.turns:
            raise ValueError(
                f"question {question.question_id} has category {question.category!r} and {len(question.turns)} turns; "
                f"Spec-Bench's categories are {', '.join((*CATEGORIES, *MT_BENCH))}"
            )
        all_questions.append(question)
    return all_questions


def get_conversation(name: str) -> Conversation:
    """Returns the template `name` of `CONVERSATIONS`; ValueError if there is none."""
    if name in CONVERSATIONS:
        return CONVERSATIONS[name]
    raise ValueError(
        f"unknown conversation {name!r}; {names.hint(name, CONVERSATIONS)}there are {', '.join(CONVERSATIONS)}"
    )


# The special marks and spaces are those that the models were trained with. The tokenizer adds the beginning-of-sequence
# token.
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
