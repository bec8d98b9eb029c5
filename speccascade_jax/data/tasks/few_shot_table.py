"""The few-shot tasks that have a name: one row each."""

from itertools import islice
from typing import Any

from speccascade_jax.data.tasks import few_shot_records as records
from speccascade_jax.data.tasks.few_shot import FewShotTask, Template
from speccascade_jax.data.tasks.few_shot_records import POOL, DataSet
from speccascade_jax.metrics.answers import UNANSWERABLE


def _task(name: str, data: DataSet, shots: int, lengths: tuple[int, int], **row: Any) -> FewShotTask:
    """Returns a task over the files of a data set; `lengths`: of input and output at most."""
    fields: dict[str, Any] = {"splits": tuple(data.files), "records": data.records, "pool": data.pool}
    fields |= {"max_input_length": lengths[0], "max_output_length": lengths[1]}
    return FewShotTask(name=name, shots=shots, **fields | row)


# outputs have the 5 tokens of METHODS section 9
_QA: dict[str, Any] = {"metrics": ("answer_exact_match", "answer_f1"), "stop_strings": ("\n",)}
_OPEN = _QA | {"template": Template(question="Q: {question}\nA:", separator="\n")}
_CHOICE: dict[str, Any] = {"metrics": ("choice",), "stop_strings": ("\n",)}
_SUMMARY: dict[str, Any] = {"metrics": ("rouge2", "rouge1", "rougeL")}  # paper 1 shows ROUGE-2
_ARTICLE = _SUMMARY | {"template": Template(question="Article: {question}\nSummary:")}
_MBPP = DataSet(
    "mbpp",
    {"test": "test_dev_half.jsonl", "validation": "valid_511-600.jsonl", "train": "train_601-974.jsonl"},
    records.mbpp,
    "prompt_1-10.jsonl",
)
_MMLU = {"test": "test_dev_half.jsonl.gz", "validation": "val.jsonl"}
_WEB = {"test": "test_dev_half.jsonl", "validation": "val.jsonl", "devtest": "devtest.jsonl"}
_HALF_TEST, _HALF_VALIDATION = {"test": "dev_half.jsonl"}, {"validation": "dev_half.jsonl"}

FEW_SHOT = (
    FewShotTask(
        name="squad2", splits=("validation",), records=lambda split: records.squad_records(),
        pool=lambda: records.squad_exemplars().values(), shots=4, max_input_length=2048, max_output_length=5, **_QA,
        template=Template(
            header=f'Answer with words of the paragraph, or with "{UNANSWERABLE}" if it does not say.',
            question="Paragraph: {question}\nAnswer:",
        ),
    ),
    FewShotTask(
        name="triviaqa", splits=("validation", "test"), records=records.trivia_records,
        pool=lambda: islice(records.trivia_records("validation"), POOL),
        shots=5, max_input_length=512, max_output_length=5, **_OPEN,
    ),
    _task(
        "webquestions", DataSet("webquestions", _WEB, records.web_question, "trainmodel.jsonl"),
        shots=5, lengths=(256, 5), **_OPEN,
    ),
    _task(
        "nq_open", DataSet("nq_open", _HALF_VALIDATION, records.nq_question, "efficientqa_dev_1.1.jsonl"),
        shots=5, lengths=(256, 5), **_OPEN,
    ),
    _task(
        "gsm8k", DataSet("gsm8k", {"test": "test_dev_half.jsonl"}, records.gsm8k, "train.jsonl.gz"),
        shots=8, lengths=(2048, 320), metrics=("final_number",), stop_strings=("\nQuestion:",),
    ),
    _task(
        # one subject after the other in the files: a limit would sample two or three of 57
        "mmlu", DataSet("mmlu", _MMLU, records.mmlu, "dev.jsonl", most=None, mixed=True),
        shots=5, lengths=(3072, 5), **_CHOICE,
        template=Template(header="Multiple-choice questions about {group}, each with the letter of its answer."),
    ),
    _task(
        "commonsenseqa", DataSet("commonsenseqa", _HALF_VALIDATION, records.commonsense, most=8),
        shots=7, lengths=(768, 5), **_CHOICE,
    ),
    _task(
        "humaneval", DataSet("humaneval", _HALF_TEST, records.humaneval, most=0),
        shots=0, lengths=(768, 320), metrics=("pass_at_1",), template=Template(question="{question}"),
        stop_strings=("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@"),
        clean=str.rstrip,  # it goes on inside a function: the first line's indent counts
    ),
    _task(
        "mbpp", _MBPP, pool=lambda: records.published_first(_MBPP.pool()),
        shots=3, lengths=(1024, 320), metrics=("pass_at_1",), stop_strings=("[DONE]",),
        template=Template(
            question="Write a Python function for this description; it has to pass the tests below it.\n"
            "{question}\n[BEGIN]\n",
            answer="{answer}\n[DONE]",
        ),
    ),
    _task(
        "wmt22_few_shot", DataSet("wmt22_en_de", _HALF_TEST, records.wmt22, most=8, mixed=True),
        shots=5, lengths=(768, 80), template=Template(question="English: {question}\nGerman:"), stop_strings=("\n",),
    ),
    _task(
        "cnn_dailymail_few_shot",
        DataSet("cnn_dailymail_100", {"test": "train_sample.jsonl"}, records.article(512), most=4),
        shots=1, lengths=(2048, 128), stop_strings=("\n\n", "\nArticle:"), **_ARTICLE,
    ),
    _task(
        "xsum_few_shot", DataSet("xsum_1000", _HALF_TEST, records.article(384), most=4),
        shots=1, lengths=(1536, 64), stop_strings=("\n",), **_ARTICLE,
    ),
    _task(
        "dialogsum", DataSet("dialogsum", {"validation": "dev.jsonl"}, records.dialogue, "train.jsonl.gz"),
        shots=2, lengths=(2048, 128), stop_strings=("\n",), **_SUMMARY,
        template=Template(question="Dialogue:\n{question}\nSummary:"),
    ),
)  # fmt: skip
