"""The table of tasks, and the readers of their data sets. `data.tasks.task` defines the class of a task.

A new task needs one reader (split -> examples) and one row of `TASKS`. A task for decoder-only models, whose prompt
shows solved examples first, needs a function from a file's entry to a `Record`, and a row of `FEW_SHOT`. Data sets
other than the shipped one are in the data directory (`speccascade_jax.data.directory`) or come through seqio. They are
read when `load` is called, never on import. A task in seqio's registry needs no row, because a `SeqioTask` can be used
in place of a name.

Generated programs (HumanEval, Chen et al. 2021; MBPP, Austin et al. 2021) are scored by a test harness
(`metrics.code.harness`). Scoring runs these programs, so both tasks need `Evaluation.execute_code`. If an answer has
several spellings, the output is compared with each, and the best score counts.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.data import directory
from speccascade_jax.data.sentence_pairs import TextPair, group, join_texts, read_pairs
from speccascade_jax.data.tasks import hub_data
from speccascade_jax.data.tasks.file_task import ENDINGS, FileTask, check_no_path, is_file
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.task import Example, FewShotTask, Record, Task, Template, json_lines, shuffled
from speccascade_jax.metrics.answers import UNANSWERABLE
from speccascade_jax.metrics.code import harness
from speccascade_jax.storage import readers

POOL = 16
"""The number of records that are kept for exemplars, unless a data set sets another number."""
_SQUAD_PARAGRAPHS = 8
_RESULT = "####"  # in GSM8K the final number of a solution follows this mark
_CALCULATOR = re.compile(r"<<.*?>>")
_PUBLISHED_EXEMPLARS = (2, 3, 4)  # task ids of MBPP that Austin et al. use as exemplars

Entry = Mapping[str, Any]


def records_of(folder: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a file in the data directory, each with its number from 0."""
    return enumerate(json_lines(directory.require(folder, file)))


def packaged(file: str) -> list[Example]:
    """Returns the examples in a file that the package ships."""
    with resources.as_file(resources.files("speccascade_jax") / "assets" / file) as path:
        return [Example(**record) for record in json_lines(path)]


def _numbered(pairs: Sequence[TextPair]) -> list[Example]:
    return [Example(number, source, reference) for number, (source, reference) in enumerate(pairs)]


_TATOEBA = ("tatoeba_en_de", {"validation": "valid.en-de.tsv", "train": "train.en-de.tsv.gz"})
_MULTI30K_FILES = {"validation": "val.en-de.tsv", "test": "test_2016_flickr.en-de.tsv", "train": "train.en-de.tsv.gz"}
_MULTI30K = ("multi30k", _MULTI30K_FILES)
_DIALOGSUM = {"validation": "dev.jsonl", "train": "train.jsonl.gz"}


def _pairs(folder: str, files: Mapping[str, str], split: str) -> list[TextPair]:
    return read_pairs(directory.require(folder, files[split]))


def _read_joined(split: str, reverse: bool = False) -> list[Example]:
    """Returns joined sentence pairs, from English to German or, if `reverse`, from German to English.

    Each direction has its own seed, so that no text of one task is the answer to a text of the other.
    """
    pairs = _pairs(*_TATOEBA, split)
    if reverse:
        pairs = [(german, english) for english, german in pairs]
    # The two seeds never change, because the joining of sentences is part of a task's definition.
    groups = group(pairs, max_joined=4, rng=np.random.default_rng(int(reverse)))
    return _numbered([join_texts(pairs, indices) for indices in groups])


def _read_tiny_de_en(split: str) -> list[Example]:
    examples = packaged("tiny_translation.jsonl")
    return [Example(example.id, str(example.reference), example.source) for example in examples]


def _read_dialogsum(split: str) -> list[Example]:
    """Returns dialogues and their summaries without exemplars, for models trained on such pairs."""
    entries = records_of("dialogsum", _DIALOGSUM[split])
    return shuffled([Example(number, entry["dialogue"], entry["summary"]) for number, entry in entries])


def _read_wmt22(split: str) -> list[Example]:
    """Returns half of the general test set of WMT22, with its first human reference.

    The texts are shuffled, because neighbours come from one document: otherwise the first examples would cover
    one or two documents.
    """
    entries = records_of("wmt22_en_de", "dev_half.jsonl")
    return shuffled([Example(entry["id"], entry["en"], entry["de_refA"]) for _, entry in entries])


@dataclasses.dataclass(frozen=True)
class DataSet:
    """The files of a data set in a folder of the data directory, with one record per line.

    Attributes:
        folder: the folder.
        files: a file for each split, the default split first.
        record: function `(number of the line, entry) -> record`.
        exemplars: the file from which exemplars are taken; empty: the beginning of the default split.
        most: how many records at the beginning of that file are kept for exemplars; `None`: all of them.
        mixed: whether records are shuffled, because neighbours are related and the first ones would cover few groups.
    """

    folder: str
    files: Mapping[str, str]
    record: Callable[[int, Entry], Record]
    exemplars: str = ""
    most: int | None = POOL
    mixed: bool = False

    def records(self, split: str) -> Iterable[Record]:
        """Returns all records of a split."""
        records = self._read(self.files[split])
        return shuffled(list(records)) if self.mixed else records

    def pool(self) -> Iterable[Record]:
        """Returns the records from which exemplars are taken, in order."""
        records = self._read(self.exemplars) if self.exemplars else self.records(next(iter(self.files)))
        return islice(records, self.most)

    def _read(self, file: str) -> Iterator[Record]:
        return (self.record(number, entry) for number, entry in records_of(self.folder, file))


def _answered(number: int, question: str, answer: str, group: str = "") -> Record:
    """Returns a record whose answer is its reference."""
    return Record(id=number, question=question, answer=answer, reference=answer, group=group)


def humaneval(number: int, entry: Entry) -> Record:
    """Returns a record of HumanEval: the question is the head of a function, and the reference holds its tests."""
    after = f"\n{entry['test']}\ncheck({entry['entry_point']})\n"
    number, prompt = int(entry["task_id"].rpartition("/")[2]), entry["prompt"]
    reference = harness(before=prompt, after=after)
    return Record(id=number, question=prompt, answer=entry["canonical_solution"], reference=reference)


def mbpp(number: int, entry: Entry) -> Record:
    """Returns a record of MBPP: the question is a description of a function with its tests."""
    tests = "\n".join(entry["test_list"])
    question = f"{entry['text'].strip()}\n{_unix(tests)}"
    reference = harness(before="", after=_unix(f"\n{entry['test_setup_code']}\n{tests}\n"))
    return Record(id=entry["task_id"], question=question, answer=_unix(entry["code"]), reference=reference)


def published_first(records: Iterable[Record]) -> list[Record]:
    """Returns the exemplars of MBPP, beginning with the three that Austin et al. published."""
    return sorted(records, key=lambda record: (record.id not in _PUBLISHED_EXEMPLARS, record.id))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def gsm8k(number: int, entry: Entry) -> Record:
    """Returns a problem of GSM8K and its solution, without the `<<…>>` marks for a calculator."""
    solution = _CALCULATOR.sub("", entry["answer"])
    result = solution.rpartition(_RESULT)[2].strip()
    return Record(id=number, question=entry["question"].strip(), answer=solution, reference=result)


def mmlu(number: int, entry: Entry) -> Record:
    """Returns a multiple-choice question of MMLU; the group is the subject, so exemplars have the same subject."""
    question = _choices(entry["question"], entry["choices"])
    return _answered(number, question, entry["answer"], entry["subject"].replace("_", " "))


def commonsense(number: int, entry: Entry) -> Record:
    """Returns a multiple-choice question of CommonsenseQA."""
    return _answered(number, _choices(entry["question"], entry["choices"]["text"]), entry["answerKey"])


def _choices(question: str, choices: Iterable[str]) -> str:
    """Returns the question, followed by one line for each choice with a letter from A."""
    lettered = zip(string.ascii_uppercase, choices, strict=False)
    return "\n".join([question.strip(), *(f"{letter}. {choice.strip()}" for letter, choice in lettered)])


def wmt22(number: int, entry: Entry) -> Record:
    """Returns an English text of WMT22, with the first human translation as its answer."""
    return _answered(entry["id"], entry["en"].strip(), entry["de_refA"])


def article(words: int) -> Callable[[int, Entry], Record]:
    """Returns a function that reads articles and cuts them to `words` words, so that a prompt keeps all exemplars."""

    def record(number: int, entry: Entry) -> Record:
        question, summary = " ".join(entry["document"].split()[:words]), entry["summary"]
        return Record(id=number, question=question, answer=" ".join(summary.split()), reference=summary)

    return record


def dialogue(number: int, entry: Entry) -> Record:
    """Returns a dialogue of DialogSum and its summary."""
    summary = entry["summary"]
    return Record(id=number, question=entry["dialogue"].strip(), answer=summary.strip(), reference=summary)


def web_question(number: int, entry: Entry) -> Record:
    """Returns a question of WebQuestions."""
    return _open_question(number, entry["qText"], entry["answers"])


def nq_question(number: int, entry: Entry) -> Record:
    """Returns a question of NQ-open."""
    return _open_question(number, entry["question"], entry["answer"])


def _open_question(number: int, question: str, answers: list[str]) -> Record:
    """Returns a record whose question ends in exactly one question mark, which is missing in some data sets."""
    spellings = tuple(dict.fromkeys(answers))
    return Record(id=number, question=question.strip().rstrip("?") + "?", answer=spellings[0], reference=spellings)


def _squad_paragraphs() -> Iterator[tuple[Entry, Record]]:
    """Yields every entry of SQuAD 2 together with its record."""
    for number, entry in records_of("squad2", "dev_articles_even.jsonl.gz"):
        answers = tuple(dict.fromkeys(entry["answers"])) or (UNANSWERABLE,)
        question = f"{entry['context'].strip()}\nQuestion: {entry['question'].strip()}"
        yield entry, Record(id=number, question=question, answer=answers[0], reference=answers)


def squad_exemplars() -> dict[str, Record]:
    """Returns one exemplar for each of the first paragraphs; questions with and without an answer alternate.

    The key of an exemplar is the text of its paragraph.
    """
    exemplars: dict[str, Record] = {}
    for entry, record in _squad_paragraphs():
        is_wanted = entry["is_impossible"] == bool(len(exemplars) % 2)
        if is_wanted and entry["context"] not in exemplars:
            exemplars[entry["context"]] = record
        if len(exemplars) == _SQUAD_PARAGRAPHS:
            break
    return exemplars


def squad_records() -> list[Record]:
    """Returns the records of all paragraphs except the exemplars', shuffled because neighbours share an article."""
    shown = squad_exemplars()
    return shuffled([record for entry, record in _squad_paragraphs() if entry["context"] not in shown])


def trivia_records(split: str) -> Iterator[Record]:
    """Yields the records of TriviaQA from `triviaqa/<split>.json` as published, or from `triviaqa/<split>.jsonl`.

    The `.jsonl` file holds one entry of the published list `Data` per line.
    """
    lines = f"{split}.jsonl"
    fetched = (directory.data_directory() / "triviaqa" / lines).exists()
    path = directory.require("triviaqa", lines if fetched else f"{split}.json")
    for number, entry in enumerate(_trivia_data(path) if path.suffix == ".json" else json_lines(path)):
        if "Answer" not in entry:
            raise ValueError(
                f"question {number} of triviaqa's split {split!r} ({path}) has no answer, and the published test split "
                "has no answers at all: set Evaluation.split = 'validation', or replace the file by one with answers"
            )
        answer = entry["Answer"]
        spellings = [answer["Value"], *answer.get("Aliases", ()), *answer.get("NormalizedAliases", ())]
        yield _open_question(number, entry["Question"], spellings)


def _trivia_data(path: Path) -> list[dict[str, Any]]:
    data = readers.json_object(path, "copy it again").get("Data")
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise ValueError(f"{path} is damaged (Data is {data!r:.80}): copy it again")
    return data


def _few_shot(data: DataSet, shots: int, lengths: tuple[int, int], **row: Any) -> FewShotTask:
    """Returns a task over the files of a data set; `lengths` are the largest numbers of input and output tokens.

    The task's name is the name of the folder, unless `row` has another name.
    """
    fields: dict[str, Any] = {"name": data.folder, "records": data.records, "pool": data.pool}
    fields |= {"splits": tuple(data.files), "max_input_length": lengths[0], "max_output_length": lengths[1]}
    return FewShotTask(shots=shots, **fields | row)


def _of_paper_1(name: str, prefix: str, metrics: tuple[str, ...], lengths: tuple[int, int]) -> SeqioTask:
    """Returns a data set of the T5 experiments of Narasimhan et al. (2024, §F.1; docs/methods.md, section 9).

    The default split is the validation split, as in the paper.
    """
    return SeqioTask(
        name=name, registered=f"speccascade_{name}", module="speccascade_jax.data.tasks.seqio_registry", prefix=prefix,
        metrics=metrics, max_input_length=lengths[0], max_output_length=lengths[1],
    )  # fmt: skip


# settings of question answering, whose outputs have at most 5 tokens (docs/methods.md, section 9)
_QA: dict[str, Any] = {"metrics": ("answer_exact_match", "answer_f1"), "stop_strings": ("\n",)}
_OPEN = _QA | {"template": Template(question="Q: {question}\nA:", separator="\n")}
_CHOICE: dict[str, Any] = {"metrics": ("choice",), "stop_strings": ("\n",)}
_ROUGE = ("rouge2", "rouge1", "rougeL")  # ROUGE-2 is first, because Narasimhan et al. (2024) report it
_ARTICLE: dict[str, Any] = {"metrics": _ROUGE, "template": Template(question="Article: {question}\nSummary:")}
_MBPP_FILES = {"test": "test_dev_half.jsonl", "validation": "valid_511-600.jsonl", "train": "train_601-974.jsonl"}
_MBPP = DataSet("mbpp", _MBPP_FILES, mbpp, "prompt_1-10.jsonl")
_MMLU = {"test": "test_dev_half.jsonl.gz", "validation": "val.jsonl"}
_WEB = {"test": "test_dev_half.jsonl", "validation": "val.jsonl", "devtest": "devtest.jsonl"}
_WEB |= {"train": "trainmodel.jsonl"}
_HALF_TEST, _HALF_VALIDATION = {"test": "dev_half.jsonl"}, {"validation": "dev_half.jsonl"}

FEW_SHOT = (
    FewShotTask(name="squad2", splits=("validation",), records=lambda split: squad_records(),
        pool=lambda: squad_exemplars().values(), shots=4, max_input_length=2048, max_output_length=5, **_QA,
        template=Template(
            header=f'Answer with words of the paragraph, or with "{UNANSWERABLE}" if it does not say.',
            question="Paragraph: {question}\nAnswer:")),
    FewShotTask(name="triviaqa", splits=("validation", "test", "train"), records=trivia_records,
        pool=lambda: islice(trivia_records("validation"), POOL),
        shots=5, max_input_length=512, max_output_length=5, **_OPEN),
    _few_shot(DataSet("webquestions", _WEB, web_question, "trainmodel.jsonl"), shots=5, lengths=(256, 5), **_OPEN),
    _few_shot(DataSet("nq_open", _HALF_VALIDATION, nq_question, "efficientqa_dev_1.1.jsonl"),
        shots=5, lengths=(256, 5), **_OPEN),
    _few_shot(DataSet("gsm8k", {"test": "test_dev_half.jsonl", "train": "train.jsonl.gz"}, gsm8k, "train.jsonl.gz"),
        shots=8, lengths=(2048, 320), metrics=("final_number",), stop_strings=("\nQuestion:",)),
    # `mixed`, because the files are sorted by subject: the first examples would cover two or three of 57 subjects
    _few_shot(DataSet("mmlu", _MMLU, mmlu, "dev.jsonl", most=None, mixed=True), shots=5, lengths=(3072, 5), **_CHOICE,
        template=Template(header="Multiple-choice questions about {group}, each with the letter of its answer.")),
    _few_shot(DataSet("commonsenseqa", _HALF_VALIDATION, commonsense, most=8), shots=7, lengths=(768, 5), **_CHOICE),
    # `clean` keeps leading spaces: an output continues inside a function, so the indent of its first line matters
    _few_shot(DataSet("humaneval", _HALF_TEST, humaneval, most=0),
        shots=0, lengths=(768, 320), metrics=("pass_at_1",), template=Template(question="{question}"),
        stop_strings=("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@"), clean=str.rstrip),
    _few_shot(_MBPP, pool=lambda: published_first(_MBPP.pool()),
        shots=3, lengths=(1024, 320), metrics=("pass_at_1",), stop_strings=("[DONE]",),
        template=Template(
            question="Write a Python function for this description; it has to pass the tests below it.\n"
            "{question}\n[BEGIN]\n",
            answer="{answer}\n[DONE]")),
    _few_shot(DataSet("wmt22_en_de", _HALF_TEST, wmt22, most=8, mixed=True), name="wmt22_few_shot",
        shots=5, lengths=(768, 80), template=Template(question="English: {question}\nGerman:"), stop_strings=("\n",)),
    _few_shot(DataSet("cnn_dailymail_100", {"test": "train_sample.jsonl"}, article(512), most=4),
        name="cnn_dailymail_few_shot", shots=1, lengths=(2048, 128), stop_strings=("\n\n", "\nArticle:"), **_ARTICLE),
    _few_shot(DataSet("xsum_1000", _HALF_TEST, article(384), most=4),
        name="xsum_few_shot", shots=1, lengths=(1536, 64), stop_strings=("\n",), **_ARTICLE),
    _few_shot(DataSet("dialogsum", _DIALOGSUM, dialogue, "train.jsonl.gz"), metrics=_ROUGE,
        shots=2, lengths=(2048, 128), stop_strings=("\n",),
        template=Template(question="Dialogue:\n{question}\nSummary:")),
)  # fmt: skip
_LONG: dict[str, Any] = {"max_input_length": 128, "max_output_length": 128}
_ROWS: tuple[Task, ...] = (
    Task(name="tiny_translation", splits=("test",), read=lambda split: packaged("tiny_translation.jsonl")),
    Task(name="tiny_translation_de_en", splits=("test",), read=_read_tiny_de_en),
    Task(name="tatoeba", splits=tuple(_TATOEBA[1]),
        read=lambda split: shuffled(_numbered(_pairs(*_TATOEBA, split)))),
    Task(name="tatoeba_joined", splits=tuple(_TATOEBA[1]), read=_read_joined, **_LONG),
    Task(name="tatoeba_joined_de_en", splits=tuple(_TATOEBA[1]), read=partial(_read_joined, reverse=True), **_LONG),
    Task(name="dialogsum_plain", splits=tuple(_DIALOGSUM), read=_read_dialogsum, metrics=_ROUGE,
        max_input_length=128, max_output_length=64),
    Task(name="multi30k", splits=tuple(_MULTI30K[1]), read=lambda split: _numbered(_pairs(*_MULTI30K, split))),
    Task(name="wmt22", splits=("test",), read=_read_wmt22, max_input_length=256, max_output_length=256),
    # beginnings of stories, written for this project, each with one continuation
    Task(name="stories", splits=("test",), read=lambda split: packaged("stories.jsonl"), metrics=("rougeL",), **_LONG),
    _of_paper_1("wmt14_en_de", "translate English to German: ", ("bleu",), lengths=(80, 80)),
    _of_paper_1("xsum", "summarize: ", _ROUGE, lengths=(1024, 64)),
    _of_paper_1("cnn_dailymail", "summarize: ", _ROUGE, lengths=(2048, 128)),
    *FEW_SHOT,
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def get_task(name: str | Task) -> Task:
    """Returns the task with a name; returns a `Task` unchanged.

    Args:
        name: a name in `TASKS`, or `module.NAME` for a user's task. "gsm8k:4" is the task "gsm8k" with 4 exemplars.
            "news.csv" is a `FileTask` over the columns source and reference of that file. "hf:EdinburghNLP/xsum" is a
            `FileTask` over a data set on the hub; its columns are those in `data.tasks.hub_data.KNOWN`, or else source
            and reference.

    Returns:
        A `Task`. Its data are read when `load` is called.

    Raises:
        ValueError: the task is unknown (the message names the nearest names), or a number of exemplars is given for a
            task without exemplars.
        FileNotFoundError: the name is the path of a file that does not exist.

    Examples:
        >>> from speccascade_jax.extend import get_task
        >>> task = get_task("tiny_translation")
        >>> task.splits, task.metrics, task.load(limit=1)[0].id
        (('test',), ('bleu',), 0)
        >>> get_task("gsm8k:4").shots
        4
    """
    if isinstance(name, Task):
        return name
    if is_file(name):
        return FileTask(path=name, **hub_data.task_fields(name) if hub_data.is_name(name) else {})
    plain, colon, shots = name.partition(":") if isinstance(name, str) else (name, "", "")
    if isinstance(name, str) and name not in TASKS:
        check_no_path(plain)
    also = f"; for your own file give a path that ends in {', '.join(ENDINGS)} (gin/tasks/file.gin), for a data set"
    also += " saved by datasets its folder './folder', for one on the hub hf:owner/name, for a task registered with "
    also += "seqio a SeqioTask (gin/tasks/seqio.gin)"
    task: Task = names.look_up("task", plain, TASKS, Task, "speccascade_jax.data.tasks.table.TASKS", also)
    return with_shots(task, shots) if colon else task


def with_shots(task: Task, shots: str) -> FewShotTask:
    """Returns a few-shot task with another number of exemplars; its new name contains this number.

    Raises:
        ValueError: the task shows no exemplars, or `shots` is not a number.
    """
    if not isinstance(task, FewShotTask):
        raise ValueError(f"task {task.name} shows no exemplars; write {task.name!r} without :{shots}")
    if not shots.isdecimal():
        raise ValueError(
            f"{task.name}:{shots}: {shots!r} is not a number of exemplars; write for example {task.name}:4"
        )
    return dataclasses.replace(task, name=f"{task.name}:{int(shots)}", shots=int(shots))
