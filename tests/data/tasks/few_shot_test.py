"""Few-shot tasks: prompts, exemplars that are never evaluated, what of an output is scored."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.tasks import few_shot, table
from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.metrics import answers, code, quality, sandbox
from tests.support.data_sets import load_or_skip

ROWS = {name: task for name, task in table.TASKS.items() if isinstance(task, FewShotTask)}
SPLITS = [(name, split) for name, task in ROWS.items() for split in task.splits if name != "triviaqa"]
POOLED = [row for row in SPLITS if ROWS[row[0]].shots]

RECORDS = [Record(id=n, question=f"question {n}", answer=f"answer {n}", reference=f"answer {n}") for n in range(6)]


def toy(**changes) -> FewShotTask:
    given = {"name": "toy", "splits": ("test",), "records": lambda _: RECORDS, "pool": lambda: RECORDS[:3], "shots": 2}
    return FewShotTask(**given | changes)


def spelt(text: str) -> str:
    return " ".join(text.casefold().split())


def test_a_prompt_is_header_exemplars_and_the_question():
    template = Template(question="Q {question}\nA", answer=" {answer}.", separator="\n--\n", header="On {group}:")
    record = Record(id=9, question="why {not}?", group="tea")
    made = template.prompt(RECORDS[:2], record)
    assert made == "On tea:\n--\nQ question 0\nA answer 0.\n--\nQ question 1\nA answer 1.\n--\nQ why {not}?\nA"


@pytest.mark.parametrize("shots", [0, 1, 3])
def test_the_pool_is_kept_out_whatever_the_number_of_exemplars(shots):
    examples = toy(shots=shots).load()
    assert [example.id for example in examples] == [3, 4, 5]
    assert examples[0].source.count("Answer: answer") == shots
    assert examples[0].source.endswith("Question: question 3\nAnswer:")
    assert examples[0].reference == "answer 3"


def test_a_question_that_differs_from_an_exemplar_in_case_and_spaces_is_the_same():
    again = [Record(id=7, question=" QUESTION\n2 "), Record(id=8, question="question 22")]
    assert [example.id for example in toy(records=lambda _: again).load()] == [8]


def test_exemplars_are_of_the_questions_group():
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


def test_another_number_of_exemplars_is_another_task_of_another_name(monkeypatch):
    monkeypatch.setitem(table.TASKS, "toy", toy())
    changed = table.get_task("toy:3")
    assert (changed.name, changed.shots) == ("toy:3", 3)
    assert changed.load()[0].source.count("Answer: answer") == 3
    assert table.get_task("toy").load()[0].source.count("Answer: answer") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tatoeba:3", "task tatoeba has no exemplars; write 'tatoeba' without :3"),
        ("gsm8k:-1", "'-1' is no number of exemplars; write for instance gsm8k:4"),
        ("gsm8k:", "'' is no number of exemplars"),
        ("gms8k:3", "unknown task 'gms8k': did you mean gsm8k"),
    ],
)
def test_wrong_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        table.get_task(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shots": 4}, "task toy has 3 exemplars, not the 4 asked for; ask for fewer"),
        (
            {"shots": 1, "records": lambda _: [Record(id=9, question="new", group="tea")]},
            "has 0 exemplars of tea, not the 1",
        ),
        ({"shots": -1}, "shots=-1"),
        ({"stop_strings": "x"}, r"\('x',\)"),
    ],
)
def test_rows_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes).load()


@pytest.mark.parametrize(("name", "split"), POOLED)
def test_no_exemplar_is_evaluated(name, split):
    task, prompts = ROWS[name], [spelt(example.source) for example in load_or_skip(name, split)]
    pool = list(task.pool())
    assert len(pool) >= task.shots and prompts
    for exemplar in pool:
        asked = spelt(Template(question=task.template.question).prompt([], exemplar))
        assert not any(prompt.endswith(asked) for prompt in prompts), exemplar


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_ids_are_unique_and_every_prompt_shows_its_exemplars_once(name, split):
    task, examples = ROWS[name], load_or_skip(name, split)
    assert len({example.id for example in examples}) == len(examples) >= 80
    begin = task.template.question.partition("{")[0]
    for example in examples[:50]:
        assert example.reference and all(example.reference)
        if begin:
            assert example.source.startswith((begin, task.template.header.partition("{")[0] or begin))
            assert example.source.count(begin) >= task.shots + 1


SIZES = {
    "squad2": 2783, "webquestions": 1016, "nq_open": 1802, "gsm8k": 660, "commonsenseqa": 603, "humaneval": 82,
    "mbpp": 250, "wmt22_few_shot": 1027, "cnn_dailymail_few_shot": 96, "xsum_few_shot": 496, "dialogsum": 500,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    assert len(load_or_skip(name, ROWS[name].splits[0])) == SIZES[name]


def test_another_split_has_its_own_size():
    assert len(load_or_skip("mmlu", "validation")) == 1530


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("humaneval", "mbpp", "triviaqa")])
def test_the_references_themselves_score_100(name):
    task = ROWS[name]
    examples = load_or_skip(name, task.splits[0], 30)
    said = [e.reference if isinstance(e.reference, str) else e.reference[-1] for e in examples]
    scores = quality.score(task.metrics, said, [e.reference for e in examples])
    assert scores == pytest.approx(dict.fromkeys(task.metrics, 100.0))


@pytest.mark.parametrize("name", ["squad2", "mmlu", "wmt22_few_shot"])
def test_the_beginning_comes_from_the_whole_file(name):
    """Neighbours in it share a paragraph, a subject or a document."""
    ids = [example.id for example in load_or_skip(name, table.get_task(name).splits[0])]
    assert min(ids[:40]) < 0.2 * max(ids) and max(ids[:40]) > 0.8 * max(ids)


def test_mmlu_shows_exemplars_of_the_subject_it_asks_about():
    task, examples = ROWS["mmlu"], load_or_skip("mmlu", "test", 20)
    questions = {exemplar.question: exemplar.group for exemplar in task.pool()}
    for example in examples:
        shown = {group for question, group in questions.items() if question in example.source}
        (subject,) = shown
        assert f"questions about {subject}," in example.source


def test_squad_shows_questions_with_and_without_answers_about_paragraphs_of_their_own():
    examples = load_or_skip("squad2", "validation")
    shown = [*ROWS["squad2"].pool()][: ROWS["squad2"].shots]
    assert [exemplar.answer == answers.UNANSWERABLE for exemplar in shown] == [False, True, False, True]
    paragraphs = {exemplar.question.rpartition("\nQuestion:")[0] for exemplar in ROWS["squad2"].pool()}
    asked = {example.source.rpartition("\nQuestion:")[0].rpartition("Paragraph: ")[2] for example in examples}
    assert len(paragraphs) == 8 and not paragraphs & asked
    assert (answers.UNANSWERABLE,) in {example.reference for example in examples}


def test_every_solution_of_gsm8k_ends_with_its_number_and_without_calculator_marks():
    load_or_skip("gsm8k", "test", 1)
    records = [*ROWS["gsm8k"].records("test"), *ROWS["gsm8k"].pool()]
    for record in records:
        assert "<<" not in record.answer and answers.final_number(record.answer, record.reference) == [100.0]
    assert answers.last_number(records[0].reference) == Decimal(18)


def test_mbpp_shows_the_published_three():
    load_or_skip("mbpp", "test", 1)
    pool = [exemplar.id for exemplar in ROWS["mbpp"].pool()]
    assert pool[: ROWS["mbpp"].shots] == [2, 3, 4] and len(pool) == 10
    assert ROWS["mbpp"].postprocess("def f():\n    return 1\n[DONE]\nmore") == "def f():\n    return 1"


def test_what_goes_on_inside_a_function_keeps_its_indent_and_ends_with_it():
    written = "    if x:\n        return 1\n    return 2\n\n\ndef other():\n    pass"
    assert ROWS["humaneval"].postprocess(written) == "    if x:\n        return 1\n    return 2"


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_programs_of_the_data_sets_own_solutions_pass(name):
    if reason := sandbox.available():
        pytest.skip(reason)
    load_or_skip(name, "test", 1)
    task = ROWS[name]
    for record in list(task.records("test"))[:3]:
        right, wrong = (code.program(text, record.reference) for text in (record.answer, "    return None"))
        assert sandbox.run(right).passed and not sandbox.run(wrong).passed


TRIVIA = [
    {
        "Question": f"Which number comes after {n}?",
        "QuestionId": f"q_{n}",
        "Answer": {"Value": str(n + 1), "Aliases": [str(n + 1), f"No. {n + 1}"], "NormalizedAliases": [f"no {n + 1}"]},
    }
    for n in range(20)
]


@pytest.fixture
def trivia(monkeypatch, tmp_path):
    """Writes a split of TriviaQA into a data directory."""
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    (tmp_path / "triviaqa").mkdir()

    def write(entries, name="validation.json"):
        lines = "\n".join(map(json.dumps, entries)) + "\n"
        (tmp_path / "triviaqa" / name).write_text(lines if name.endswith("l") else json.dumps({"Data": entries}))

    return write


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_triviaqa_is_read_in_both_forms(trivia, ending):
    trivia(TRIVIA, f"validation.{ending}")
    examples = table.get_task("triviaqa").load("validation")
    assert [example.id for example in examples] == [16, 17, 18, 19]  # the others are kept for exemplars
    assert examples[0].reference == ("17", "No. 17", "no 17")
    assert examples[0].source.startswith("Q: Which number comes after 0?\nA: 1\nQ:")
    assert examples[0].source.endswith("\nQ: Which number comes after 16?\nA:")


def test_triviaqa_without_data_or_without_answers_is_named(trivia):
    with pytest.raises(FileNotFoundError, match=r"triviaqa/validation\.json does not exist.*SPECCASCADE_DATA"):
        table.get_task("triviaqa").load("validation")
    trivia(TRIVIA)
    trivia([{name: value for name, value in entry.items() if name != "Answer"} for entry in TRIVIA], "test.json")
    with pytest.raises(ValueError, match=r"triviaqa's split 'test' .*test\.json\) has no answer.*split = 'validation'"):
        table.get_task("triviaqa").load("test")


def test_stories_are_64_short_openings_with_a_continuation_of_their_own():
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


def test_a_pool_is_read_when_a_task_is_and_never_before(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    assert isinstance(few_shot.with_shots(ROWS["gsm8k"], "4"), FewShotTask)
