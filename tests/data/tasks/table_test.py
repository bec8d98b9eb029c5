"""Tests of tasks: the shipped data sets, the readers of the data directory, few-shot prompts and exemplars, errors."""

from __future__ import annotations

import collections
import hashlib
import json
import re
from decimal import Decimal

import numpy as np
import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.tasks import table
from speccascade_jax.data.tasks.task import Example, FewShotTask, Record, Task, Template
from speccascade_jax.metrics import answers, code, quality, sandbox
from tests.support.data_sets import load_or_skip


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def test_tiny_translation_is_as_documented():
    examples = table.get_task("tiny_translation").load()
    assert [example.id for example in examples] == list(range(200))
    # a limit beyond the number of examples returns all
    assert table.get_task("tiny_translation").load("test", 1000) == examples
    for example in examples:
        assert 2 <= len(sentences(example.source)) <= 4, example
        assert len(sentences(example.source)) == len(sentences(example.reference)), example
        assert 15 <= len(example.source.split()) <= 40, example
        assert 9 <= len(example.reference.split()) <= 45, example


@pytest.mark.parametrize("side", ["source", "reference"])
def test_tiny_translation_contains_no_sentence_twice(side):
    texts = [getattr(example, side) for example in table.get_task("tiny_translation").load()]
    counts = collections.Counter(sentence for text in texts for sentence in sentences(text))
    assert [sentence for sentence, count in counts.items() if count > 1] == []


def test_tiny_translation_is_not_in_the_training_data():
    known = {example.source.lower() for split in ("train", "validation") for example in load_or_skip("tatoeba", split)}
    ours = [s for example in table.get_task("tiny_translation").load() for s in sentences(example.source)]
    assert [sentence for sentence in ours if sentence.lower() in known] == []


@pytest.mark.parametrize("name", table.TASKS)
def test_every_task_has_its_name_and_known_metrics(name):
    task = table.TASKS[name]
    assert task.name == name and task.main_metric in task.metrics
    assert all(metric in quality.METRICS for metric in task.metrics)


@pytest.mark.parametrize(("name", "split", "count"), [
    ("tatoeba", "validation", 2486), ("multi30k", "validation", 1014), ("multi30k", "test", 1000),
    ("multi30k", "train", 29000), ("wmt22", "test", 1037), ("mmlu", "validation", 1530), ("mbpp", "test", 250),
    ("squad2", "validation", 2783), ("webquestions", "test", 1016), ("nq_open", "validation", 1802),
    ("gsm8k", "test", 660), ("commonsenseqa", "validation", 603), ("humaneval", "test", 82),
    ("xsum_few_shot", "test", 496), ("wmt22_few_shot", "test", 1027), ("cnn_dailymail_few_shot", "test", 96),
    ("dialogsum", "validation", 500),
])  # fmt: skip
def test_tasks_have_known_sizes_and_unique_ids(name, split, count):
    examples = load_or_skip(name, split)
    assert len(examples) == len({example.id for example in examples}) == count
    assert all(example.source and example.reference for example in examples)


@pytest.mark.parametrize("name", ["tatoeba", "tatoeba_joined", "wmt22"])
def test_a_limit_returns_the_beginning_of_one_fixed_order(name):
    split = table.get_task(name).splits[0]
    assert load_or_skip(name, split, 20) == load_or_skip(name, split)[:20]


def test_the_first_examples_of_tatoeba_are_not_its_shortest_sentences():
    first = [len(example.source) for example in load_or_skip("tatoeba", "validation", 200)]
    everything = [len(example.source) for example in load_or_skip("tatoeba", "validation")]
    assert abs(np.mean(first) - np.mean(everything)) < 0.1 * np.mean(everything)


def test_joined_tatoeba_uses_every_pair_once():
    joined = " ".join(example.reference for example in load_or_skip("tatoeba_joined", "validation"))
    pairs = " ".join(example.reference for example in load_or_skip("tatoeba", "validation"))
    assert collections.Counter(joined.split()) == collections.Counter(pairs.split())


def test_the_joined_validation_examples_never_change():
    """Compares their hash: another order of draws would make old results incomparable."""
    examples = load_or_skip("tatoeba_joined", "validation")
    text = "\n".join(f"{example.source}\t{example.reference}" for example in examples)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "17960177ca8dc8c4"


def test_prompts_are_built_and_outputs_are_postprocessed():
    example = table.Example(0, "Hello.", "Hallo.")
    for prefix in ("", "translate: "):
        task = table.Task(name="x", splits=("test",), read=lambda _: [example], prefix=prefix)
        assert task.build_prompt(example) == f"{prefix}Hello." and task.postprocess(" Hallo. \n") == "Hallo."


@pytest.mark.parametrize(("name", "asked", "said"), [
    ("tiny_translation", ("test", 0), "limit=0: give at least 1"),
    ("tiny_translation", ("test", -3), "limit=-3: give at least 1"),
    ("tatoeba", ("dev",), "task tatoeba has no split 'dev'; its splits: validation, train"),
    ("multi30", (), "unknown task 'multi30': did you mean multi30k.*speccascade_jax.data.tasks.table.TASKS"),
    ("tatoeba:3", (), "task tatoeba shows no exemplars; write 'tatoeba' without :3"),
    ("gsm8k:-1", (), "'-1' is not a number of exemplars; write for example gsm8k:4"),
    ("gsm8k:", (), "'' is not a number of exemplars"),
    ("gms8k:3", (), "unknown task 'gms8k': did you mean gsm8k"),
])  # fmt: skip
def test_unknown_tasks_splits_and_limits_are_rejected(name, asked, said):
    with pytest.raises(ValueError, match=said):
        table.get_task(name).load(*asked)


ROWS = {name: task for name, task in table.TASKS.items() if isinstance(task, FewShotTask)}
SPLITS = [(name, split) for name, task in ROWS.items() for split in task.splits if name != "triviaqa"]

RECORDS = [Record(id=n, question=f"question {n}", answer=f"answer {n}", reference=f"answer {n}") for n in range(6)]


def toy(**changes) -> FewShotTask:
    defaults = {
        "name": "toy",
        "splits": ("test",),
        "records": lambda _: RECORDS,
        "pool": lambda: RECORDS[:3],
        "shots": 2,
    }
    return FewShotTask(**defaults | changes)


@pytest.mark.parametrize(("task", "message"), [
    (Task(name="t", splits=("a",), read=lambda _: [("a", "b")]), "^task 't': read must yield Examples; item 0 is a tu"),
    (Task(name="t", splits=("a",), read=lambda _: [Example(0, "a", "b")] * 2), "^task 't': Example.id 0 occurs twice;"),
    (toy(records=lambda _: [*RECORDS, "x"]), "^task 'toy': records must yield Records; item 6 is a str"),
    (toy(pool=lambda: [{}]), "^task 'toy': pool must yield Records; item 0 is a dict"),
])  # fmt: skip
def test_readers_of_other_things_are_refused(task, message):
    with pytest.raises(ValueError, match=message):
        task.load()


def spelt(text: str) -> str:
    return " ".join(text.casefold().split())


def test_a_prompt_consists_of_header_exemplars_and_question():
    template = Template(question="Q {question}\nA", answer=" {answer}.", separator="\n--\n", header="On {group}:")
    record = Record(id=9, question="why {not}?", group="tea")
    prompt = template.prompt(RECORDS[:2], record)
    assert prompt == "On tea:\n--\nQ question 0\nA answer 0.\n--\nQ question 1\nA answer 1.\n--\nQ why {not}?\nA"


@pytest.mark.parametrize("shots", [0, 1, 3])
def test_the_pool_is_never_evaluated_for_any_number_of_exemplars(shots):
    examples = toy(shots=shots).load()
    assert [example.id for example in examples] == [3, 4, 5]
    assert examples[0].source.count("Answer: answer") == shots
    assert examples[0].source.endswith("Question: question 3\nAnswer:")
    assert examples[0].reference == "answer 3"


def test_a_question_that_equals_an_exemplar_up_to_case_and_spaces_is_excluded():
    again = [Record(id=7, question=" QUESTION\n2 "), Record(id=8, question="question 22")]
    assert [example.id for example in toy(records=lambda _: again).load()] == [8]


def test_exemplars_belong_to_the_questions_group():
    pool = [Record(id=n, question=f"{group} {n}", answer="x", group=group) for n in range(3) for group in ("a", "b")]
    asked = [Record(id=10, question="new", group="b")]
    (example,) = toy(pool=lambda: pool, records=lambda _: asked).load()
    assert "b 0" in example.source and "b 1" in example.source
    assert "a 0" not in example.source and "b 2" not in example.source


def test_an_output_ends_before_the_first_stop_string():
    task = toy(stop_strings=("\nQuestion:", "\n\n"))
    assert task.postprocess("  Paris \n\nmore\nQuestion: next") == "Paris"
    assert task.postprocess("Paris\nQuestion: next\n\n") == "Paris"
    assert task.postprocess("\n\n Paris") == "Paris"
    assert task.postprocess("") == ""


def test_a_prompt_that_is_too_long_loses_its_beginning():
    assert toy().cut([1, 2, 3, 4], 3) == [2, 3, 4]
    assert toy().cut([1, 2], 3) == [1, 2] and toy().cut([1, 2], 0) == []
    assert table.get_task("tatoeba").cut([1, 2, 3, 4], 3) == [1, 2, 3]


def test_another_number_of_exemplars_gives_a_task_with_another_name(monkeypatch):
    monkeypatch.setitem(table.TASKS, "toy", toy())
    changed = table.get_task("toy:3")
    assert (changed.name, changed.shots) == ("toy:3", 3)
    assert changed.load()[0].source.count("Answer: answer") == 3
    assert table.get_task("toy").load()[0].source.count("Answer: answer") == 2


@pytest.mark.parametrize(("changes", "message"), [
    ({"shots": 4}, "task toy has 3 exemplars, but shots=4; lower shots"),
    ({"shots": 1, "records": lambda _: [Record(id=9, question="new", group="tea")]},
     "has 0 exemplars of tea, but shots=1"),
    ({"shots": -1}, "shots=-1"), ({"stop_strings": "x"}, r"\('x',\)"),
])  # fmt: skip
def test_invalid_few_shot_tasks_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes).load()


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_every_prompt_shows_its_exemplars_once_and_none_is_evaluated(name, split):
    task, examples = ROWS[name], load_or_skip(name, split)
    assert len({example.id for example in examples}) == len(examples) >= 80
    begin = task.template.question.partition("{")[0]
    for example in examples[:50]:
        assert example.reference and all(example.reference)
        if begin:
            assert example.source.startswith((begin, task.template.header.partition("{")[0] or begin))
            assert example.source.count(begin) >= task.shots + 1
    pool = [spelt(Template(question=task.template.question).prompt([], exemplar)) for exemplar in task.pool()]
    assert len(pool) >= task.shots
    assert not any(spelt(example.source).endswith(tuple(pool)) for example in examples)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("humaneval", "mbpp", "triviaqa")])
def test_the_references_themselves_score_100(name):
    task = ROWS[name]
    examples = load_or_skip(name, task.splits[0], 30)
    said = [e.reference if isinstance(e.reference, str) else e.reference[-1] for e in examples]
    scores = quality.score(task.metrics, said, [e.reference for e in examples])
    assert scores == pytest.approx(dict.fromkeys(task.metrics, 100.0))


@pytest.mark.parametrize("name", ["squad2", "mmlu", "wmt22_few_shot"])
def test_the_first_examples_come_from_the_whole_file(name):
    """Checks that ids are spread, because neighbours in a file share a paragraph, a subject or a document."""
    ids = [example.id for example in load_or_skip(name, table.get_task(name).splits[0])]
    assert min(ids[:40]) < 0.2 * max(ids) and max(ids[:40]) > 0.8 * max(ids)


def test_mmlu_shows_exemplars_of_the_questions_subject():
    task, examples = ROWS["mmlu"], load_or_skip("mmlu", "test", 20)
    questions = {exemplar.question: exemplar.group for exemplar in task.pool()}
    for example in examples:
        shown = {group for question, group in questions.items() if question in example.source}
        (subject,) = shown
        assert f"questions about {subject}," in example.source


def test_squad_exemplars_have_paragraphs_that_are_not_evaluated():
    examples = load_or_skip("squad2", "validation")
    shown = [*ROWS["squad2"].pool()][: ROWS["squad2"].shots]
    assert [exemplar.answer == answers.UNANSWERABLE for exemplar in shown] == [False, True, False, True]
    paragraphs = {exemplar.question.rpartition("\nQuestion:")[0] for exemplar in ROWS["squad2"].pool()}
    asked = {example.source.rpartition("\nQuestion:")[0].rpartition("Paragraph: ")[2] for example in examples}
    assert len(paragraphs) == 8 and not paragraphs & asked
    assert (answers.UNANSWERABLE,) in {example.reference for example in examples}


def test_gsm8k_solutions_end_with_the_number_and_have_no_calculator_marks():
    load_or_skip("gsm8k", "test", 1)
    records = [*ROWS["gsm8k"].records("test"), *ROWS["gsm8k"].pool()]
    for record in records:
        assert "<<" not in record.answer and answers.final_number(record.answer, record.reference) == [100.0]
    assert answers.last_number(records[0].reference) == Decimal(18)


def test_mbpp_shows_the_three_published_exemplars():
    load_or_skip("mbpp", "test", 1)
    pool = [exemplar.id for exemplar in ROWS["mbpp"].pool()]
    assert pool[: ROWS["mbpp"].shots] == [2, 3, 4] and len(pool) == 10
    assert ROWS["mbpp"].postprocess("def f():\n    return 1\n[DONE]\nmore") == "def f():\n    return 1"


def test_a_function_body_keeps_its_indent_and_ends_before_the_next_function():
    written = "    if x:\n        return 1\n    return 2\n\n\ndef other():\n    pass"
    assert ROWS["humaneval"].postprocess(written) == "    if x:\n        return 1\n    return 2"


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_pass_their_tests(name):
    if reason := sandbox.available():
        pytest.skip(reason)
    load_or_skip(name, "test", 1)
    task = ROWS[name]
    for record in list(task.records("test"))[:3]:
        right, wrong = (code.program(text, record.reference) for text in (record.answer, "    return None"))
        assert sandbox.run(right).passed and not sandbox.run(wrong).passed


def trivia_entry(n: int) -> dict:
    answer = {"Value": str(n + 1), "Aliases": [str(n + 1), f"No. {n + 1}"], "NormalizedAliases": [f"no {n + 1}"]}
    return {"Question": f"Which number comes after {n}?", "QuestionId": f"q_{n}", "Answer": answer}


TRIVIA = list(map(trivia_entry, range(20)))


@pytest.fixture
def trivia(monkeypatch, tmp_path):
    """Returns a function that writes a split of TriviaQA into a data directory."""
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    (tmp_path / "triviaqa").mkdir()

    def write(entries, name="validation.json"):
        lines = "\n".join(map(json.dumps, entries)) + "\n"
        (tmp_path / "triviaqa" / name).write_text(lines if name.endswith("l") else json.dumps({"Data": entries}))

    return write


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_triviaqa_is_read_as_json_and_as_json_lines(trivia, ending):
    trivia(TRIVIA, f"validation.{ending}")
    examples = table.get_task("triviaqa").load("validation")
    assert [example.id for example in examples] == [16, 17, 18, 19]  # the first 16 are kept for exemplars
    assert examples[0].reference == ("17", "No. 17", "no 17")
    assert examples[0].source.startswith("Q: Which number comes after 0?\nA: 1\nQ:")
    assert examples[0].source.endswith("\nQ: Which number comes after 16?\nA:")


def test_triviaqa_without_data_or_answers_is_rejected(trivia):
    with pytest.raises(FileNotFoundError, match=r"triviaqa/validation\.json does not exist.*SPECCASCADE_DATA"):
        table.get_task("triviaqa").load("validation")
    trivia(TRIVIA)
    trivia([{name: value for name, value in entry.items() if name != "Answer"} for entry in TRIVIA], "test.json")
    with pytest.raises(ValueError, match=r"triviaqa's split 'test' .*test\.json\) has no answer.*split = 'validation'"):
        table.get_task("triviaqa").load("test")


def test_stories_has_64_short_openings_each_with_one_continuation():
    examples = table.get_task("stories").load()
    assert [example.id for example in examples] == list(range(64))
    for side in ("source", "reference"):
        assert len({getattr(example, side) for example in examples}) == 64
    for example in examples:
        assert example.source.isascii() and example.reference.isascii()
        assert 12 <= len(example.source.split()) <= 40 and 25 <= len(example.reference.split()) <= 50
    assert quality.score(["rougeL"], [e.reference for e in examples], [e.reference for e in examples]) == {
        "rougeL": pytest.approx(100.0)
    }


def test_a_pool_is_read_only_when_its_task_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    assert isinstance(table.with_shots(ROWS["gsm8k"], "4"), FewShotTask)
