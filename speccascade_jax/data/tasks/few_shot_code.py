"""Programs from descriptions: HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021).

What an output is judged against is a test harness (`metrics.code.harness`). Scoring runs what the models wrote, so
both tasks need `Evaluation.execute_code`.
"""

from collections.abc import Iterator

from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.data.tasks.task import records_of
from speccascade_jax.metrics.code import harness

_MBPP_FILES = {"test": "test_dev_half.jsonl", "validation": "valid_511-600.jsonl", "train": "train_601-974.jsonl"}
_PUBLISHED_EXEMPLARS = (2, 3, 4)  # task ids; Austin et al. show these three


def _humaneval(split: str) -> Iterator[Record]:
    for _, record in records_of("humaneval", "dev_half.jsonl"):
        after = f"\n{record['test']}\ncheck({record['entry_point']})\n"
        yield Record(
            id=int(record["task_id"].rpartition("/")[2]),
            question=record["prompt"],
            answer=record["canonical_solution"],
            reference=harness(before=record["prompt"], after=after),
        )


def _mbpp(file: str) -> Iterator[Record]:
    for _, record in records_of("mbpp", file):
        tests = "\n".join(record["test_list"])
        yield Record(
            id=record["task_id"],
            question=f"{record['text'].strip()}\n{_unix(tests)}",
            answer=_unix(record["code"]),
            reference=harness(before="", after=_unix(f"\n{record['test_setup_code']}\n{tests}\n")),
        )


def _mbpp_exemplars() -> list[Record]:
    """The published three first."""
    return sorted(_mbpp("prompt_1-10.jsonl"), key=lambda one: (one.id not in _PUBLISHED_EXEMPLARS, one.id))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


CODE = (
    FewShotTask(
        name="humaneval",
        splits=("test",),
        records=_humaneval,
        template=Template(question="{question}"),
        metrics=("pass_at_1",),
        stop_strings=("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@"),
        clean=str.rstrip,  # it goes on inside a function: the first line's indent counts
        max_input_length=768,
        max_output_length=320,
    ),
    FewShotTask(
        name="mbpp",
        splits=tuple(_MBPP_FILES),
        records=lambda split: _mbpp(_MBPP_FILES[split]),
        pool=_mbpp_exemplars,
        shots=3,
        template=Template(
            question="Write a Python function for this description; it has to pass the tests below it.\n"
            "{question}\n[BEGIN]\n",
            answer="{answer}\n[DONE]",
        ),
        metrics=("pass_at_1",),
        stop_strings=("[DONE]",),
        max_input_length=1024,
        max_output_length=320,
    ),
)
