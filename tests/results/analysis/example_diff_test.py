"""Tests of two points side by side: the selected records, the order of the examples, the marked differences."""

import pytest

from speccascade_jax.results.analysis import example_diff
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from tests.support import fake_records

RECORDS = [fake_records.run(point) for point in fake_records.coordinates()]
TEXTS = {"first": ["the cat sat on the mat", "a b c d", "same"], "second": ["the cat sat", "a b c d e f", "same"]}
REFERENCES = ["the cat sat on the mat", "a b c d e f", "same"]


def kept(texts):
    return [
        Output(id=n, prompt=f"p{n}", reference=reference, output=text, tokens=(), pieces=())
        for n, (text, reference) in enumerate(zip(texts, REFERENCES, strict=True))
    ]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "a.jsonl"
    for record, texts in zip(RECORDS, TEXTS.values(), strict=False):
        outputs.write(path, record, kept(texts))
    return path


def test_points_are_found_by_key_method_and_alpha():
    assert example_diff.find(RECORDS, RECORDS[5]["key"][:8]) is RECORDS[5]
    assert example_diff.find(RECORDS, "spec_decode")["point"]["method"] == "spec_decode"
    assert example_diff.find(RECORDS, "token_v3@0.97")["point"]["alpha"] == 0.97
    with pytest.raises(ValueError, match=r"5 records are called 'chow'.*chow@0.1"):
        example_diff.find(RECORDS, "chow")
    twice = [*RECORDS, *(fake_records.run(point) for point in fake_records.coordinates(temperature=0.0))]
    with pytest.raises(ValueError, match=r"2 records are called 'token_v3@0.97'"):
        example_diff.find(twice, "token_v3@0.97")
    with pytest.raises(ValueError, match=r"no record is called 'chau@0.1': did you mean chow@0.1"):
        example_diff.find(RECORDS, "chau@0.1")


def test_examples_are_sorted_from_the_seconds_worst_to_its_best(store):
    pairs = example_diff.pairs(store, *RECORDS[:2])
    assert [pair.first.id for pair in pairs] == [0, 2, 1]
    assert pairs[0].gain < 0 == pairs[1].gain < pairs[2].gain
    assert pairs[0].scores[0] == pytest.approx(100) == pairs[2].scores[1]


def test_scores_of_metrics_that_run_code_come_from_the_records(tmp_path):
    """Checks a metric whose scores cannot be computed from the text again, because it runs code."""
    records = []
    for record, correct in zip(RECORDS, ([1.0, 0.0, 1.0], [0.0, 1.0, 1.0]), strict=False):
        judged = {"ids": [0, 1, 2], "statistics": {"pass_at_1": correct}}
        records.append(record | {"quality": {"metric": "pass_at_1", "per_example": judged}})
        outputs.write(tmp_path / "a.jsonl", records[-1], kept(TEXTS["first"]))
    pairs = example_diff.pairs(tmp_path / "a.jsonl", *records)
    assert [(pair.first.id, pair.gain) for pair in pairs] == [(0, -100.0), (2, 0.0), (1, 100.0)]


def test_differing_words_are_marked():
    text = example_diff.marked("the big cat sat", "the cat sat down", "red")
    assert text.plain == "the big cat sat"
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == "red"] == [" big"]


def test_lines_show_both_outputs(store):
    pairs = example_diff.pairs(store, *RECORDS[:2])
    shown = "\n".join(line.plain for line in example_diff.shown(*RECORDS[:2], pairs[:1]))
    assert "example 0, 100.0 → " in shown and TEXTS["second"][0] in shown and REFERENCES[0] in shown


def test_points_that_cannot_be_compared_are_refused(store):
    with pytest.raises(ValueError, match=rf"outputs of {RECORDS[4]['key']} were not kept"):
        example_diff.pairs(store, RECORDS[0], RECORDS[4])
    elsewhere = RECORDS[1] | {"fingerprints": {"examples": "others"}}
    outputs.write(store, elsewhere, kept(TEXTS["second"]))
    with pytest.raises(ValueError, match="measured on different examples"):
        example_diff.pairs(store, RECORDS[0], elsewhere)
