"""Public sources of the files that few-shot tasks and Spec-Bench read, and functions that make these files from them.

A file with "half" in its name holds every second row of a public data set. A question that also occurs in Spec-Bench is
an exception: the file holds it exactly if `spec_bench/dev_half.jsonl` holds it too.

The sources on GitHub have fixed commits, and this project's results were measured with their rows. The results for
MBPP, MMLU and CommonsenseQA were measured with copies that have no licence. The publishers' data sets on Hugging Face's
hub replace these copies: the same rows are chosen, but a few texts may differ.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

Row = dict[str, Any]


class File(NamedTuple):
    """A file of the data directory.

    Attributes:
        name: its name in the data set's folder.
        sources: `owner/repository/commit/path` on GitHub, with `#member` for a file in an archive; or
            `hf:owner/name:configuration#split` on the hub.
        derive: function from the rows, lines or JSON value of each source to the file's rows.
    """

    name: str
    sources: tuple[str, ...]
    derive: Callable[..., Iterable[Row]] = list


_even: Callable[[list[Row]], list[Row]] = itemgetter(slice(None, None, 2))


def _numbered(rows: Iterable[Row]) -> list[Row]:
    return [{"id": number, **row} for number, row in enumerate(rows)]


def _bench_half(bench: Iterable[Row]) -> list[Row]:
    """Returns every second row of each category of Spec-Bench."""
    counts, half = Counter[str](), list[Row]()
    for row in bench:
        half += [row] * (counts[row["category"]] % 2 == 0)
        counts[row["category"]] += 1
    return half


def _half(rows: Iterable[Row], bench: list[Row]) -> list[Row]:
    """Returns every second row; a question of Spec-Bench is returned exactly if it is in Spec-Bench's half."""
    half = {_spelling(row["turns"][0]) for row in _bench_half(bench)}
    inside = {spelling: spelling in half for spelling in (_spelling(row["turns"][0]) for row in bench)}
    return [row for number, row in enumerate(rows) if inside.get(_spelling(row["question"]), number % 2 == 0)]


def _spelling(question: str) -> str:
    """Returns a question's words in lower case, for comparison.

    Spec-Bench has capitals and question marks that its sources lack.
    """
    return " ".join(re.findall("[a-z0-9]+", question.lower()))


def _squad(contents: dict[str, Any]) -> list[Row]:
    """Returns the questions of every second article."""
    parts = [(article["title"], part) for article in contents["data"][::2] for part in article["paragraphs"]]
    return [
        {"id": entry["id"], "title": title, "context": part["context"], "question": entry["question"],
         "is_impossible": entry["is_impossible"], "answers": sorted({answer["text"] for answer in entry["answers"]})}
        for title, part in parts for entry in part["qas"]
    ]  # fmt: skip


def _wmt22(source: list[str], reference: list[str]) -> list[Row]:
    """Returns every second block of 50 lines."""
    pairs = ({"en": text, "de_refA": answer} for text, answer in zip(source, reference, strict=True))
    return [row for row in _numbered(pairs) if row["id"] // 50 % 2 == 0]


def _xsum(rows: list[Row]) -> list[Row]:
    """Returns every second article, without the prompt's words around it."""
    begin, end = "###\nArticle: ", "\n\nSummarize the above article in 1 sentence.\n"
    articles = (row["article"].removeprefix(begin).removesuffix(end) for row in rows)
    pairs = zip(articles, (row["summary_gt"] for row in rows), strict=True)
    return _even(_numbered({"document": document, "summary": summary} for document, summary in pairs))


def _cnn(rows: list[Row]) -> list[Row]:
    return [{"id": row["id"], "document": row["article"], "summary": row["highlights"]} for row in rows]


def _mmlu(rows: list[Row]) -> list[Row]:
    """Returns the questions sorted by subject, with each answer's index replaced by its letter."""
    return [row | {"answer": "ABCD"[row["answer"]]} for row in sorted(rows, key=itemgetter("subject"))]


def _trivia(rows: list[Row]) -> list[Row]:
    """Returns rows in the form in which TriviaQA's authors publish them."""
    names = {"Value": "value", "Aliases": "aliases", "NormalizedAliases": "normalized_aliases"}
    return [
        {"Question": row["question"], "Answer": {name: row["answer"][part] for name, part in names.items()}}
        for row in rows
    ]


_BENCH = "hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
_GSM8K = "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
_HUMANEVAL = "openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz"
_NQ = "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open/NQ-open"
_WEB = "brmson/dataset-factoid-webquestions/668890853388010fe6ae9a5eb035a7917b88933b/main"
_SQUAD = "chrischute/squad/85623adeb9e6639f145081fea9cae2d8f3a26379/data/dev-v2.0.json"
_WMT = "wmt-conference/wmt22-news-systems/20240a2e96a50e823ea8cdf37fd8af52547146e3/txt/{}/generaltest2022.en-de.{}"
_XSUM = "FMInference/H2O/ac75c2a8a9e76832b2a4139b9363373b56336bfb/h2o_hf/data/summarization_data/xsum_0shot.jsonl"
_CNN = "EileenFeng/Text-Summarization-NLP/5bfee8b9ad6228e1c4d02f7be1042a4276632417/data/train_sample.zip"
_DIALOGSUM = "cylnlp/dialogsum/848cc8c05e0a04def79326539de827f1b28786a0/DialogSum_Data/dialogsum.dev.jsonl"
_DIALOGSUM_TRAIN = "cylnlp/dialogsum/9a79c6b7a768020c97b44e955312dd68172c34f4/DialogSum_Data.zip"
_MBPP, _MMLU, _TRIVIA = "hf:google-research-datasets/mbpp:full", "hf:cais/mmlu:all", "hf:mandarjoshi/trivia_qa"

DATA_SETS: dict[str, tuple[str, tuple[File, ...]]] = {
    "spec_bench": ("Apache-2.0", (File("dev_half.jsonl", (_BENCH,), _bench_half),)),
    "gsm8k": ("MIT", (
        File("test_dev_half.jsonl", (f"{_GSM8K}/test.jsonl", _BENCH), lambda rows, b: _half(_numbered(rows), b)),
        File("train.jsonl.gz", (f"{_GSM8K}/train.jsonl",)))),
    "nq_open": ("CC BY-SA 3.0", (
        File("dev_half.jsonl", (f"{_NQ}.dev.jsonl", _BENCH), _half),
        File("efficientqa_dev_1.1.jsonl", (f"{_NQ}.efficientqa.dev.1.1.jsonl",)))),
    "webquestions": ("CC BY 4.0", (
        File("test_dev_half.jsonl", (f"{_WEB}/test.json",), _even),
        *(File(f"{part}.jsonl", (f"{_WEB}/{part}.json",)) for part in ("val", "devtest", "trainmodel")))),
    "squad2": ("CC BY-SA 4.0", (File("dev_articles_even.jsonl.gz", (_SQUAD,), _squad),)),
    "humaneval": ("MIT", (File("dev_half.jsonl", (_HUMANEVAL,), _even),)),
    "wmt22_en_de": ("research only", (File("dev_half.jsonl",
        (_WMT.format("sources", "src.en"), _WMT.format("references", "ref.A.de")), _wmt22),)),
    "xsum_1000": ("research only, texts © BBC", (File("dev_half.jsonl", (_XSUM,), _xsum),)),
    "cnn_dailymail_100": ("research only, texts © CNN and Daily Mail", (
        File("train_sample.jsonl", (f"{_CNN}#train_sample.csv",), _cnn),)),
    "dialogsum": ("CC BY-NC-SA 4.0", (
        File("dev.jsonl", (_DIALOGSUM,)),
        File("train.jsonl.gz", (f"{_DIALOGSUM_TRAIN}#DialogSum_Data/dialogsum.train.jsonl",)))),
    "mbpp": ("CC BY 4.0", (
        File("test_dev_half.jsonl", (f"{_MBPP}#test",), _even), File("valid_511-600.jsonl", (f"{_MBPP}#validation",)),
        File("train_601-974.jsonl", (f"{_MBPP}#train",)), File("prompt_1-10.jsonl", (f"{_MBPP}#prompt",)))),
    "mmlu": ("MIT", (
        File("test_dev_half.jsonl.gz", (f"{_MMLU}#test",), lambda rows: _even(_mmlu(rows))),
        File("val.jsonl", (f"{_MMLU}#validation",), _mmlu), File("dev.jsonl", (f"{_MMLU}#dev",), _mmlu))),
    "commonsenseqa": ("MIT", (File("dev_half.jsonl", ("hf:tau/commonsense_qa:default#validation",), _even),)),
    "triviaqa": ("not stated", tuple(
        File(f"{split}.jsonl", (f"{_TRIVIA}:unfiltered.nocontext#{split}",), _trivia)
        for split in ("validation", "train"))),
}  # fmt: skip
"""The licence and the files of each data set, by its folder in the data directory.

Data sets on the hub come last, because fetching them needs the extra `hub`.
"""
