"""Tests of quality metrics, on known corpora and against the libraries that they use, and of their errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from speccascade_jax.data import directory
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.metrics import quality

ROUGE = ("rouge1", "rouge2", "rougeL")


def require_or_skip(*parts: str) -> Path:
    try:
        return directory.require(*parts)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def records(*parts: str) -> list[dict]:
    with require_or_skip(*parts).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("system", "expected"), [("Online-B", 38.63), ("OpenNMT", 35.54), ("PROMT", 36.13)])
def test_bleu_of_real_systems_has_known_values(system, expected):
    segments = records("wmt22_en_de", "dev_half.jsonl")
    predictions = [segment["hyp"][system] for segment in segments]
    scores = quality.score(["bleu"], predictions, [segment["de_refA"] for segment in segments])
    assert scores["bleu"] == pytest.approx(expected, abs=0.005)


def test_bleu_of_copied_sources_has_a_known_value():
    require_or_skip("multi30k", "test_2016_flickr.en-de.tsv")
    examples = get_task("multi30k").load("test")
    scores = quality.score(["bleu"], [e.source for e in examples], [e.reference for e in examples])
    assert scores["bleu"] == pytest.approx(0.48, abs=0.005)


def lead(text: str, count: int) -> str:
    return " ".join(re.split(r"(?<=[.!?])\s+", text)[:count])


@pytest.mark.parametrize(("file", "predict", "expected"), [
    ("xsum_1000/dev_half.jsonl", lambda article: lead(article["document"], 1), [16.63, 1.58, 12.27]),
    ("cnn_dailymail_100/train_sample.jsonl", lambda article: lead(article["document"], 3), [28.72, 11.78, 19.02]),
    ("dialogsum/dev.jsonl", lambda entry: entry["dialogue"].split("\n")[0], [22.39, 6.06, 19.72]),
])  # fmt: skip
def test_rouge_of_the_first_sentences_has_known_values(file, predict, expected):
    entries = records(file)
    scores = quality.score(ROUGE, list(map(predict, entries)), [entry["summary"] for entry in entries])
    assert list(scores.values()) == pytest.approx(expected, abs=0.005)


def noisy_corpus() -> tuple[list[str], list[str]]:
    """Returns references of the shipped task, and copies with words dropped; one empty, one without any match."""
    rng = np.random.default_rng(0)
    references = [example.reference for example in get_task("tiny_translation").load(limit=40)]
    predictions = [" ".join(word for word in text.split() if rng.random() < 0.8) for text in references]
    predictions[:2] = ["", "xyz"]
    return predictions, references


def one_by_one(name: str, predictions: list[str], references: list[str]) -> list[float]:
    return [quality.score([name], [p], [r])[name] for p, r in zip(predictions, references, strict=True)]


@pytest.mark.parametrize(("name", "theirs"), [("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)])
def test_corpus_scores_equal_those_of_sacrebleu(name, theirs):
    predictions, references = noisy_corpus()
    expected = theirs(predictions, [references]).score
    assert quality.score([name], predictions, references)[name] == pytest.approx(expected, abs=1e-9)


CHINESE = (["今天天气很好我们去公园散步吧"], ["今天天气很好我们去公园散步呀"])


@pytest.mark.parametrize("tokeniser", ["zh", "char"])
def test_bleu_has_the_tokenisers_of_sacrebleu(tokeniser):
    expected = sacrebleu.corpus_bleu(CHINESE[0], [CHINESE[1]], tokenize=tokeniser).score
    measured = quality.measure([f"bleu:{tokeniser}"], [0], *CHINESE)
    assert measured["value"] == pytest.approx(expected) and f"tok:{tokeniser}|" in measured["signature"]
    assert quality.sentence_bleu(CHINESE[0][0], CHINESE[1][0], "bleu:zh") == pytest.approx(91.93, abs=0.01)


@pytest.mark.parametrize(("metric", "texts", "said"), [
    ("bleu", CHINESE, "a script without them: choose one of bleu:zh, bleu:ja-mecab"),
    ("rouge1", (["पूर्व प्रधान"], ["पूर्व प्रधान"]), "and a text has none, so its score is 0: choose chrf"),
    ("rougeLsum", (["你好"], ["hello"]), "so its score is 0"),
])  # fmt: skip
def test_a_score_of_zero_for_its_script_is_not_silent(metric, texts, said):
    with pytest.warns(UserWarning, match=said):
        assert quality.score([metric], *texts)[metric] == 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", ["bleu", "rouge2", "bleu:zh"])
def test_texts_with_ascii_letters_and_empty_ones_are_scored_without_a_warning(metric):
    long = "der Zug fährt heute nach München"
    texts = CHINESE if metric == "bleu:zh" else ([long, "", "…"], [long, "a", "b"])
    assert quality.score([metric], *texts)[metric] > 0.0


def test_rouge_lsum_is_over_the_lines_of_a_summary():
    texts = "the cat sat\nthe dog ran home", "the dog ran home\nthe cat sat"
    scores = quality.score(["rougeL", "rougeLsum"], [texts[0]], [texts[1]])
    assert scores["rougeL"] < scores["rougeLsum"] == pytest.approx(100.0)


@pytest.mark.parametrize("name", [*ROUGE, "exact_match"])
def test_other_metrics_are_means_over_examples(name):
    predictions, references = noisy_corpus()
    corpus_score = quality.score([name], predictions, references)[name]
    assert corpus_score == pytest.approx(np.mean(one_by_one(name, predictions, references)))


@pytest.mark.parametrize("name", ["bleu", *ROUGE, "exact_match", "answer_exact_match", "answer_f1"])
def test_references_score_100_and_empty_texts_0(name):
    _, references = noisy_corpus()
    assert quality.score([name], references, references)[name] == pytest.approx(100.0)
    assert quality.score([name], [""] * len(references), references)[name] == 0.0


def test_exact_match_ignores_surrounding_spaces_only_and_rouge_stems():
    assert quality.score(["rouge1"], ["he walks"], ["he walked"])["rouge1"] == pytest.approx(100.0)
    assert quality.score(["exact_match"], [" a", "B", "c"], ["a", "b", "c "])["exact_match"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("name", ["bleu", "rougeL"])
def test_the_interval_surrounds_the_score_and_repeats(name):
    measured = quality.measure([name], range(40), *noisy_corpus())
    assert measured["low"] < measured["value"] < measured["high"]
    assert measured == quality.measure([name], range(40), *noisy_corpus())
    more = quality.measure([name], range(40), *noisy_corpus(), samples=300)
    assert (measured["low"], measured["high"]) != (more["low"], more["high"])


def test_a_record_keeps_the_statistics_of_every_example():
    predictions, references = noisy_corpus()
    ids = list(range(100, 140))
    measured = json.loads(json.dumps(quality.measure(["bleu", *ROUGE], ids, predictions, references, samples=50)))
    scores = quality.score(["bleu", *ROUGE], predictions, references)
    assert measured["metric"] == "bleu" and measured["value"] == scores["bleu"] and measured["all"] == scores
    assert measured["interval"] == "95% bootstrap over examples, 50 resamples"
    assert measured["examples"] == 40 and measured["signature"] == quality.METRICS["bleu"].signature()
    per_example = measured["per_example"]
    assert per_example["ids"] == ids and set(per_example["statistics"]) == {"bleu", *ROUGE}
    assert all(type(number) is int for row in per_example["statistics"]["bleu"] for number in row)
    for name in ROUGE:
        assert per_example["statistics"][name] == one_by_one(name, predictions, references)


@pytest.mark.parametrize("ids", [[1], [1, 1], [1, 2, 3]])
def test_ids_that_are_not_one_per_example_are_rejected(ids):
    with pytest.raises(ValueError, match="different ids for 2 predictions; give one id per prediction"):
        quality.measure(["bleu"], ids, ["a", "b"], ["a", "b"])


def test_signatures_name_the_metrics_settings():
    for name in ("final_number", "answer_exact_match", "answer_f1", "choice"):
        assert quality.METRICS[name].signature().startswith(name)
    assert quality.METRICS["bleu"].signature().startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert quality.METRICS["rougeL"].signature().startswith("rougeL|f1|stemmer:porter|version:")


@pytest.mark.parametrize(("names", "predictions", "references", "message"), [
    (["bleau"], ["a"], ["a"], "unknown metric 'bleau': did you mean bleu.*chrf.* your own as module.NAME"),
    ([quality.METRICS["bleu"]], ["a"], ["a"], r"is not a name: give .* one of bleu.*, or module\.NAME of your own"),
    (["no_such_file.NOUN"], ["a"], ["a"], "there is no module 'no_such_file'; its file must be in the folder that you"),
    (["bleu"], [], [], "no predictions to score with bleu"),
    (["bleu"], ["a"], ["a", "b"], "1 predictions for 2 references"),
    (["bleu"], "a", ["a"], "predictions is one string"),
    ("bleu", ["a"], ["a"], "metric_names='bleu' is one string"),
])  # fmt: skip
def test_invalid_inputs_are_rejected(names, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        quality.score(names, predictions, references)
