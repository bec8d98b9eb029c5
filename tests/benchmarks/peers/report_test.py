"""Tests of the tables of a comparison with other libraries."""

from benchmarks.peers import report
from benchmarks.peers.contenders import LOSSLESS, LOSSY, PLAIN


def _row(library, kind, label, batch, ms, **more):
    spread = {"value": ms, "low": ms / 2, "high": 2 * ms}
    row = {"library": library, "weights": "float32", "kind": kind, "label": label, "options": {}, "batch": batch}
    return row | {"outputs": 4, "tokens": 40, "turns": 3, "ms_per_token": spread} | more


ROWS = [
    _row("ours", PLAIN, "plain", 1, 2.0, ratio={"value": 1.0}, equal_tokens=1.0, equal_outputs=1.0, gap=None),
    _row("ours", LOSSLESS, "spec_decode, γ 3", 1, 1.5, ratio={"value": 0.75}, equal_tokens=1.0),
    _row("ours", LOSSLESS, "spec_decode, γ 5", 1, 0.5, ratio={"value": 0.25}, equal_tokens=1.0),
    _row("ours", LOSSY, "opt, α 0.2, γ 5", 1, 0.4, ratio={"value": 0.2}) | {"options": {"rule": "opt", "alpha": 0.2}},
    _row("transformers 5", PLAIN, "plain", 1, 12.34, equal_tokens=0.9, equal_outputs=0.75, gap=0.0625),
    _row("transformers 5", PLAIN, "plain", 8, 3.0, equal_tokens=1.0, equal_outputs=1.0, gap=None),
]
QUALITY = [
    {"rule": None, "alpha": None, "quality": 40.0, "metric": "bleu", "tokens_per_call": 1.0},
    {"rule": "opt", "alpha": 0.2, "quality": 39.9, "metric": "bleu", "tokens_per_call": 4.0},
    {"rule": "opt", "alpha": 0.3, "quality": 38.9, "metric": "bleu", "tokens_per_call": 5.0},
]
FAILED = [{"library": "transformers 5", "label": label, "reason": "IndexError: no"} for label in ("a", "b", "a")]
PAIR = {"parameters": [77_000_000, 9_000_000], "rows": ROWS, "left_out": FAILED, "quality": QUALITY}
RECORD = {
    "format": 1, "date": "2026-01-02", "load_at_start": 0.5, "settings": {}, "left_out": {"llama.cpp": "not there"},
    "device": {"processor": "a processor", "cpus": 2, "system": "Linux"}, "pairs": {"made": PAIR},
    "versions": {"transformers 4": {"transformers": "4.1", "torch": "2"}, "transformers 5": {"transformers": "5.2"}},
}  # fmt: skip


def test_the_summary_shows_the_fastest_setting_of_each_kind():
    grid = report.summary({"made": PAIR})
    assert grid.header == ["library, weights, kind", "made (77 M, draft 9 M)"]
    assert grid.rows == [
        ["ours, float32, the target alone", "2.00"],
        ["ours, float32, lossless speculation", "0.500 (spec_decode, γ 5)"],
        ["ours, float32, lossy", "0.400 (opt, α 0.2, γ 5)"],
        ["transformers 5, float32, the target alone", "12.3"],
    ]
    assert grid.bold == {(3 - 1, 1)}


def test_a_pairs_table_has_a_row_per_setting_and_columns_per_batch_size():
    grid = report.settings("made", PAIR)
    columns = ["/ ours, plain", "tokens equal to ours"]
    assert grid.header[3:] == ["batch 1: ms / token", *columns, "batch 8: ms / token", *columns]
    lines = {tuple(line[:3]): line[3:] for line in grid.rows}
    assert lines["ours", "float32", "plain"] == ["2.00 (1.00 to 4.00)", "1.00", "100.0%", *["–"] * 3]
    theirs = ["12.3 (6.2 to 24.7)", "–", "90.0%", "3.00 (1.50 to 6.00)"]
    assert lines["transformers 5", "float32", "plain"][:4] == theirs
    assert grid.bold == {(3, 3), (4, 6)}
    assert grid.notes == [
        "transformers 5 fails (IndexError: no): a; b",
        "transformers 5, float32: at least 75% of outputs equal ours; at the first difference our logits of the two "
        "tokens differ by at most 0.062",
    ]


def test_the_timed_lossy_point_is_bold():
    grid = report.quality("made", PAIR)
    assert grid.rows == [["the target alone", "–", "40.00", "1.00"], ["opt", "0.2", "39.90", "4.00"],
                         ["opt", "0.3", "38.90", "5.00"]]  # fmt: skip
    assert grid.bold == {(1, 0)}


def test_a_page_names_machine_versions_and_turns():
    page = report.markdown(RECORD)
    assert "a processor, 2 CPUs, Linux; transformers 4.1 and 5.2, torch 2" in page
    assert "the median of 3 turns" in page
    assert "Left out: llama.cpp (not there)." in page
    assert page.count("| --- |") == 3
