"""Spec-Bench with one of our methods: conversations at batch 1, timed turn by turn, beside the target alone.

Answers are written in the schema that Spec-Bench's own `evaluation/speed.py` and `evaluation/equal.py` read
(github.com/hemingkx/Spec-Bench), one file for the method and one for the target; the table printed here follows the
same definitions. One difference: that script counts the target's tokens by cutting its answers up again, we count the
tokens that were generated, a final stop token included, on both sides. Lines have two entries more: `key` makes a run
that was stopped go on where it stood, `checksum` tells damaged lines.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.core.checks import several, whole
from speccascade_jax.core.names import TARGET
from speccascade_jax.evaluation.curves import curve
from speccascade_jax.evaluation.environment import hardware
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.points import ModelPair, Settings, recorded
from speccascade_jax.evaluation.session import load_source
from speccascade_jax.evaluation.studies.spec_bench import questions as spec_bench
from speccascade_jax.evaluation.studies.spec_bench.conversing import ConversationTooLong, Speaker
from speccascade_jax.evaluation.studies.spec_bench.questions import CATEGORIES, Question
from speccascade_jax.methods.settings import sampling_of
from speccascade_jax.results.store import record_key
from speccascade_jax.results.store.result_store import Record, ResultStore, parse_lines
from speccascade_jax.storage.files import expanded, point_key

OVERALL = "overall"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A category of the table: speeds in tokens per second, mean over questions; accepted tokens, mean over rounds.

    `same`: how many questions both sides answered with the same texts.
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


def table(answers: Sequence[Record], of_target: Sequence[Record]) -> list[Row]:
    """A row for each of the six categories that has answers, and one over all; ValueError if the questions differ."""
    if [one["question_id"] for one in answers] != [one["question_id"] for one in of_target]:
        raise ValueError("the two lists answer different questions; compare answers of one run")
    pairs = list(zip(answers, of_target, strict=True))
    own = [Question(one["question_id"], one["category"], ()).group for one in answers]
    groups = {name: [pair for pair, group in zip(pairs, own, strict=True) if group == name] for name in CATEGORIES}
    return [_row(name, group) for name, group in (groups | {OVERALL: pairs}).items() if group]


def _row(category: str, pairs: Sequence[tuple[Record, Record]]) -> Row:
    ours, theirs = ([pair[side]["choices"][0] for pair in pairs] for side in (0, 1))
    return Row(
        category=category,
        questions=len(pairs),
        speed=float(np.mean([_speed(choice) for choice in ours])),
        target_speed=float(np.mean([_speed(choice) for choice in theirs])),
        accepted=float(np.mean([length for choice in ours for length in choice["accept_lengths"]])),
        same=sum(one["turns"] == other["turns"] for one, other in zip(ours, theirs, strict=True)),
    )


def _speed(choice: dict[str, Any]) -> float:
    return float(sum(choice["new_tokens"]) / sum(choice["wall_time"]))


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
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
    """Answer the questions with a method and with the target alone, write both files, print the table.

    Args:
        pair, settings, seed: as of a point; the target alone decodes under the same sampling.
        conversation: a name in `questions.CONVERSATIONS`; instruction: the system's, if any.
        questions: a file in Spec-Bench's format, relative to the data directory.
        categories: of the six; per_category: how many questions of each at most, `None` for all.
        max_new_tokens: of one answer.
        max_prompt_length: of a conversation, in tokens. A first turn that is longer is refused before anything is
            answered; a question whose later turns outgrow it, with the answers before them, is left out of both files
            and named at the end. So it is with the positions that the models were made for.
        output: a folder; the files in it are called after pair and method. What they hold of this very run is not
            answered again.

    Returns:
        The table's rows; none without an answer.

    Raises:
        ValueError: a value without meaning; a first turn that is too long; files with answers of another run.
        FileNotFoundError: no questions.
        StoreLockedError: another process writes these answers.
    """
    settings = recorded(settings)
    if settings.method == TARGET:
        raise ValueError(f"{TARGET} is measured beside every method; choose another method")
    whole("max_prompt_length", max_prompt_length, 1)
    form, asked = spec_bench.get_conversation(conversation), spec_bench.read(questions)
    chosen = choose(asked, categories, per_category)
    loaded = replace(load_source(pair), max_prompt_length=max_prompt_length)
    speakers = [
        Speaker(loaded, each, form, instruction=instruction, max_new_tokens=max_new_tokens, seed=seed)
        for each in (settings, Settings(method=TARGET, **sampling_of(settings)))
    ]
    check_first_turns(speakers[0], chosen)
    identity: Record = {"settings": record_key.canonical(settings), "form": asdict(form)}
    identity |= {"seed": speakers[0].seed, "max_new_tokens": speakers[0].max_new_tokens}  # as whole numbers
    identity |= {"instruction": instruction, "device": hardware()}
    identity |= {"weights": loaded.fingerprint, **Heads(loaded).fingerprint(settings), "code": speakers[0].code()}
    files = [_answer_file(output, pair, speaker.settings) for speaker in speakers]
    for file in files:
        check_file(file, [_key(question, file, identity) for question in asked])
    with ResultStore(files[0]) as ours, ResultStore(files[1]) as theirs:
        sides = [Side(*each, identity) for each in zip(speakers, (ours, theirs), strict=True)]
        left_out = answer_all(sides, chosen)
        answers = [{q.question_id: found for q in chosen if (found := side.answer_to(q))} for side in sides]
    rows = table(*([each[n] for n in answers[0] if n in answers[1]] for each in answers))
    show(rows)
    for reason in left_out:
        print(f"left out: {reason}")
    if left_out:
        print("where the limit is spec_bench.run.max_prompt_length, raise it and run again: what is answered stays")
    print(f"answers: {files[0]} and, of the target alone, {files[1]}")
    return rows


def choose(questions: Sequence[Question], categories: Sequence[str], per_category: int | None = None) -> list[Question]:
    """The first questions of each category; ValueError on an unknown category, or where there are none."""
    several("categories", categories, 1)
    if unknown := [name for name in categories if name not in CATEGORIES]:
        raise ValueError(f"categories: {unknown[0]!r} is not one of {', '.join(CATEGORIES)}")
    if per_category is not None:
        whole("per_category", per_category, 1)
    chosen = [q for name in categories for q in [q for q in questions if q.group == name][:per_category]]
    if not chosen:
        raise ValueError(f"there are no questions of {', '.join(categories)}: give others as categories or questions")
    return chosen


@dataclass(frozen=True)
class Side:
    """One of the two that answer: who speaks, where its answers go, and all that they depend on but the question."""

    speaker: Speaker
    store: ResultStore
    settings: Record

    def key(self, question: Question) -> str:
        return _key(question, self.store.path, self.settings)

    def answer_to(self, question: Question) -> Record | None:
        """The stored answer; `None` without one."""
        key = self.key(question)
        return next((record for record in self.store.records if record["key"] == key), None)

    def answer(self, question: Question) -> Record:
        """A new answer: one line of a file in Spec-Bench's schema, but for the key."""
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
    """The sides answer what they have not answered yet; who begins alternates.

    A question is stored once both have answered it, so that the files hold the same ones in the same order.

    Returns:
        Why questions were left out: a later turn of theirs had no room.
    """
    left_out = []
    for number, question in enumerate(questions):
        lacking = [side for side in sides if side.answer_to(question) is None]
        progress = f"[{number + 1}/{len(questions)}] question {question.question_id} ({question.group})"
        try:
            said = [(side, side.answer(question)) for side in (lacking if number % 2 == 0 else lacking[::-1])]
        except ConversationTooLong as error:
            left_out.append(str(error))
            print(f"{progress}, left out", flush=True)
            continue
        for side, record in said:
            side.store.append(record)
        print(progress if lacking else f"{progress}, answered before", flush=True)
    return left_out


def check_first_turns(speaker: Speaker, questions: Sequence[Question]) -> None:
    """Refuses questions that cannot even be asked; ValueError naming the first of them."""
    for question in questions:
        try:
            speaker.prompt(question)
        except ConversationTooLong as error:
            raise ValueError(
                f"{error}; raise spec_bench.run.max_prompt_length if that is the limit, lower "
                "spec_bench.run.max_new_tokens, or leave the question out (spec_bench.run.categories, .questions)"
            ) from error


def check_file(path: Path, keys: Sequence[str]) -> None:
    """Refuses a file that holds other answers than those of the `keys`; half a line at its end is no answer."""
    content = path.read_bytes() if path.exists() else b""
    records, others = parse_lines(content[: content.rfind(b"\n") + 1])
    if others or not {record["key"] for record in records} <= set(keys):
        raise ValueError(
            f"{path} holds answers of another run already (other settings, weights, questions or another device); "
            "remove it, or choose another output"
        )


def _key(question: Question, file: Path, settings: Record) -> str:
    return point_key(question=asdict(question), model_id=file.stem, **settings)


def _answer_file(folder: str, pair: ModelPair, settings: Settings) -> Path:
    alpha = "" if settings.alpha is None else f"-{settings.alpha:g}"
    return expanded(folder) / f"{Path(pair.name).name}-{curve(settings)}{alpha}.jsonl"
