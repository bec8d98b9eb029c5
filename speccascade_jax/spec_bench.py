"""Spec-Bench with one of our methods: conversations at batch 1, timed turn by turn, beside the target alone.

Answers are written in the schema that Spec-Bench's own `evaluation/speed.py` and `evaluation/equal.py` read
(github.com/hemingkx/Spec-Bench), one file for the method and one for the target; the table printed here follows the
same definitions. One difference: that script counts the target's tokens by cutting its answers up again, we count the
tokens that were generated, a final stop token included, on both sides.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speccascade_jax.controls import several, whole
from speccascade_jax.conversing import Speaker, Turn
from speccascade_jax.data import spec_bench
from speccascade_jax.data.spec_bench import CATEGORIES, Question
from speccascade_jax.labels import TARGET
from speccascade_jax.points import Method, ModelPair, Sampling, check_name
from speccascade_jax.results import Record

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


def answer_record(question: Question, turns: Sequence[Turn], model_id: str) -> Record:
    """One line of an answer file, in Spec-Bench's schema."""
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [turn.target_calls for turn in turns],
        "new_tokens": [turn.new_tokens for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
    }
    return {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }


def table(answers: Sequence[Record], of_target: Sequence[Record]) -> list[Row]:
    """A row for each of the six categories that has answers, and one over all; both lists have the same questions.

    Raises:
        ValueError: different questions.
    """
    if [one["question_id"] for one in answers] != [one["question_id"] for one in of_target]:
        raise ValueError("the two lists answer different questions; compare answers of one run")
    pairs = list(zip(answers, of_target, strict=True))
    groups = {name: [pair for pair in pairs if _group(pair[0]) == name] for name in CATEGORIES} | {OVERALL: pairs}
    return [_row(name, group) for name, group in groups.items() if group]


def _group(answer: Record) -> str:
    return Question(answer["question_id"], answer["category"], ()).group


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
    method: Method,
    sampling: Sampling,
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
        pair, method, sampling, seed: as of a point; the target alone decodes under the same sampling.
        conversation: a name in `data.spec_bench.CONVERSATIONS`; instruction: the system's, if any.
        questions: a file in Spec-Bench's format, relative to the data directory.
        categories: of the six; per_category: how many questions of each at most, `None` for all.
        max_new_tokens: of one answer; max_prompt_length: of a conversation, in tokens; a longer one is refused.
        output: a folder; the files in it are called after pair and method.

    Raises:
        ValueError: a value without meaning; answers that are there already.
        FileNotFoundError: no questions.
    """
    check_name(method)
    several("categories", categories, 1)
    if unknown := [name for name in categories if name not in CATEGORIES]:
        raise ValueError(f"categories: {unknown[0]!r} is not one of {', '.join(CATEGORIES)}")
    if method.name == TARGET:
        raise ValueError(f"{TARGET} is measured beside every method; choose another method")
    if per_category is not None:
        whole("per_category", per_category, 1)
    form, asked = spec_bench.get_conversation(conversation), spec_bench.read(questions)
    chosen = [q for name in categories for q in [q for q in asked if q.group == name][:per_category]]
    if not chosen:
        raise ValueError(f"{questions} has no questions of {', '.join(categories)}")
    files = [_answer_file(output, pair, each) for each in (method, Method(name=TARGET))]
    from speccascade_jax.evaluation import load_source  # loads JAX's models: not before the values are known to be good

    loaded = replace(load_source(pair), max_prompt_length=whole("max_prompt_length", max_prompt_length, 1))
    speakers = [
        Speaker(loaded, each, sampling, form, instruction=instruction, max_new_tokens=max_new_tokens, seed=seed)
        for each in (method, Method(name=TARGET))
    ]
    rows = table(*answer_all(speakers, chosen, files))
    show(rows)
    print(f"answers: {files[0]} and, of the target alone, {files[1]}")
    return rows


def answer_all(speakers: Sequence[Speaker], questions: Sequence[Question], files: Sequence[Path]) -> list[list[Record]]:
    """Each speaker's answers, written as they come; who answers first alternates."""
    answers: list[list[Record]] = [[] for _ in speakers]
    for number, question in enumerate(questions):
        order = range(len(speakers))
        for n in order if number % 2 == 0 else reversed(order):
            answers[n].append(answer_record(question, speakers[n].converse(question), files[n].stem))
            with files[n].open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(answers[n][-1], ensure_ascii=False) + "\n")
        print(f"[{number + 1}/{len(questions)}] question {question.question_id} ({question.group})", flush=True)
    return answers


def _answer_file(folder: str, pair: ModelPair, method: Method) -> Path:
    alpha = "" if method.alpha is None else f"-{method.alpha:g}"
    path = Path(folder) / f"{Path(pair.name).name}-{method.curve()}{alpha}.jsonl"
    if path.exists():
        raise ValueError(f"{path} holds answers already; remove it, or choose another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
