"""Tests of cells, marks and notes of Table 2, of the list of points, and of the levels of a stack."""

import csv
import io
import re

import pytest

from speccascade_jax.results.analysis import panels
from speccascade_jax.results.report.tables import table2
from speccascade_jax.results.report.tables.levels import level_grids
from tests.support import made_records as hand

RULES = {"chow": {"gain": 1, "ratio": 0.9}, "diff": {"gain": 5, "ratio": 0.8}, "opt": {"gain": 1, "ratio": 0.5}}
WINNER = [hand.TARGET, hand.point(panels.DRAFT, gain=-9, ratio=0.1)]
WINNER += [hand.point(name, **how) for name, how in RULES.items()]


def table(records, **how):
    (grid,) = table2.table2_grids(panels.panels(records), **how)
    return grid


def test_table_2_shows_intervals_and_marks_the_best():
    grid = table(WINNER)
    chow, diff, opt, *_ = grid.rows
    assert [cell.endswith(" *") for cell in chow + diff + opt] == [False] * 9 + [True, False, False, True, False, False]
    assert grid.bold == {(1, 4), (2, 2)}
    assert re.fullmatch(r"[12]\.\d\d× \[1\.\d\d, 2\.\d\d\] \*", opt[2])
    assert re.fullmatch(r"[12]\.\d\d× \[1\.\d\d, 2\.\d\d\]; \+[\d.]+ \[\+?-?[\d.]+, \+[\d.]+\]", opt[3])
    assert re.fullmatch(r"\d\d\.\d\d \[\+4\.\d\d, \+5\.\d\d\] \*", diff[4])
    assert grid.rows[3][0] == "Target alone" and "[" not in "".join(grid.rows[3][3:] + grid.rows[4])


def test_the_targets_row_shows_its_time_relative_to_itself():
    busy = hand.point(panels.TARGET, ratio=1.25, noise=1)
    grid = table([busy, *WINNER[1:]])
    (row,) = (row for row in grid.rows if row[0] == "Target alone")
    assert re.fullmatch(r"0\.(79|80|81)× \[0\.7\d, 0\.8\d\]", row[2])
    assert any("machine was busy, and the latencies are unreliable" in note for note in grid.notes)
    untimed = hand.point(panels.TARGET)
    del untimed["relative_latency"]
    assert [row[2] for row in table([untimed, *WINNER[1:]]).rows if row[0] == "Target alone"] == ["–"]


def test_notes_list_the_points_worse_than_requests_sent_at_random():
    """Checks a draft that takes a tenth of the time and loses 9 points: random requests lose 5 at half the time."""
    good, bad = hand.point("opt", gain=-1, ratio=0.5, noise=0.1), hand.point("chow", gain=-8, ratio=0.5, noise=0.1)
    notes = table([*WINNER[:2], good, bad]).notes
    assert "are better than 1 of 2 points: SpecCascade [Chow]." in " ".join(notes)
    assert any(note.startswith("Significant differences: ") for note in notes)
    assert any("no point is worse than" in note for note in table([*WINNER[:2], good]).notes)
    near = hand.point("chow", gain=-5.2, ratio=0.5, noise=4)
    notes = " ".join(table([*WINNER[:2], near]).notes)  # half a point below, with an interval one point wide
    assert "than 1 of 1 points" in notes and "None of these differences is significant." in notes
    # a point slower than the target is compared with the target alone
    slow = hand.point("chow", gain=-1, ratio=1.5, noise=0.1)
    assert any("than 1 of 1 points" in note for note in table([*WINNER[:2], slow]).notes)


def test_speed_ups_lie_within_their_intervals():
    for row in table(WINNER).rows[:3]:
        value, low, high = map(float, re.findall(r"[\d.]+", row[2].replace("×", "")))
        assert low < value < high


def test_ties_are_marked_and_no_entry_is_bold():
    records = [hand.TARGET, hand.point("diff", gain=1, own=7, ratio=0.7), hand.point("opt", gain=1, own=8, ratio=0.7)]
    grid = table(records)
    assert all(cell.endswith(" ≈") for row in grid.rows[:2] for cell in (row[2], row[4])) and not grid.bold


def test_notes_explain_intervals_marks_and_their_limits():
    notes = "\n".join(table(WINNER).notes)
    assert "1,000 resamples (seeds are averaged, not resampled; latencies resample trials too)" in notes
    assert "*: better than every other entry" in notes and "≈: tied with the best" in notes
    assert "No interval accounts for the choice of α on the same examples" in notes


def test_older_records_have_no_marks_and_a_note_says_so():
    old = [hand.strip(hand.point("diff", gain=5, ratio=0.8)), hand.strip(hand.point("opt", gain=1, ratio=0.5))]
    grid = table([hand.TARGET, *old])
    cells = [cell for row in grid.rows[:2] for cell in row[2:]]
    assert len(cells) == 6 and all(re.fullmatch(r"[\d.]+(×; [\d.]+|×?)", cell) for cell in cells) and not grid.bold
    said = "No interval and no mark for the quality of 2 and the latency of 2 of 3"
    assert any(note.startswith(said) for note in grid.notes)
    (points,) = map(table2.points_grid, panels.panels([hand.TARGET, *old]))
    assert points.rows[1][5] == "–" and points.notes[-1].startswith("No interval and no mark")


def test_the_list_of_points_compares_every_point_with_target_and_best():
    (panel,) = panels.panels(WINNER)
    grid = table2.points_grid(panel)
    rows = {row[0]: row for row in grid.rows}
    assert rows["Target alone"][5] == "–" and rows["Target alone"][6] == "1.00 [1.00, 1.00]"
    assert re.fullmatch(r"-[\d.]+ \[-[\d.]+, -[\d.]+\]", rows["Draft alone"][5])
    best, fastest = rows["SpecCascade [Diff]"], rows["SpecCascade [OPT]"]
    assert best[3].endswith(" *") and best[5].startswith("+4.") and fastest[6].endswith("] *")
    assert grid.bold == {(3, 3), (4, 6)}  # target and draft have no marks: the draft alone is always the fastest


def test_inconclusive_points_are_never_best():
    records = [*WINNER, hand.point("lossy", gain=20, ratio=0.2) | {"inconclusive": True}]
    (panel,) = panels.panels(records)
    marked = [row[0] for row in table2.points_grid(panel).rows if "*" in row[3] + row[6]]
    assert marked == ["SpecCascade [Diff]", "SpecCascade [OPT]"]


def test_csv_holds_the_intervals_and_the_marks():
    chow, diff, opt = csv.DictReader(io.StringIO(table2.table2_csv(panels.panels(WINNER))))
    assert [line["best_quality_mark"] for line in (chow, diff, opt)] == ["", "*", ""]
    assert [line["speed_up_mark"] for line in (chow, diff, opt)] == ["", "", "*"]
    gain = float(diff["best_quality"]) - float(diff["target_quality"])
    assert float(diff["best_quality_gain"]) == pytest.approx(gain)
    assert float(diff["best_quality_gain_low"]) < gain < float(diff["best_quality_gain_high"])
    assert float(opt["speed_up_paired_low"]) < float(opt["speed_up"]) < float(opt["speed_up_paired_high"])


def test_points_are_compared_with_another_methods_point_of_the_nearest_share():
    def at(method, alpha, gain, share):
        record = hand.point(method, gain=gain)
        record["point"]["alpha"], record["measures"]["draft_share"] = alpha, share
        return record

    opt = [at("opt", 0.2, gain=6, share=0.60), at("opt", 0.5, gain=3, share=0.81)]
    random_accept = [at("random_accept", 0.5, gain=5, share=0.50), at("random_accept", 0.7, gain=1, share=0.79)]
    (panel,) = panels.panels([hand.TARGET, *opt, *random_accept])
    grid = table2.beside_grid(panel, "random_accept")
    shares = [("0.2", "60.0%", "0.5", "50.0%"), ("0.5", "81.0%", "0.7", "79.0%")]
    assert [(row[2], row[3], row[5], row[6]) for row in grid.rows] == shares
    differences = [float(row[-1].split()[0]) for row in grid.rows]
    assert differences == pytest.approx([1, 2], abs=1.0) and "of the nearest draft share" in grid.notes[1]
    with pytest.raises(ValueError, match="no points of 'chow' with a draft_share: choose one of opt, random_accept"):
        table2.beside_grid(panel, "chow")


RATES = {"block_efficiency": 2.0, "acceptance_rate": 0.5, "draft_utilisation": 0.4}


def stack(**own):
    """Returns a stack: 100 tokens by 20 target calls and 36 calls of a level, 30 of which were its own rounds."""
    record = hand.point("spec_decode")
    record["counts"] |= {"committed": 100, "target_calls": 20, "draft_steps": 36} | own
    record["measures"] |= RATES
    record["levels"] = [{"model": "middle", "target_calls": 30, "draft_steps": 50, **RATES}]
    return record


def rows_of(record):
    (panel,) = panels.panels([record])
    (grid,) = level_grids(panel)
    return {row[2]: row[3] for row in grid.rows}


def test_a_levels_calls_are_counted_by_the_level_above():
    assert rows_of(stack()) == {"target": "0.200", "middle": "0.360", "lowest draft": "0.500"}


def test_calls_of_tails_have_their_own_row():
    table_rows = rows_of(stack(draft_steps=46, tail_steps=10))
    assert table_rows == {"target": "0.200", "middle": "0.360", "lowest draft": "0.500", "tails": "0.100"}


def test_records_without_levels_are_refused():
    (panel,) = panels.panels([hand.point("spec_decode")])
    with pytest.raises(ValueError, match="only stacks have levels"):
        level_grids(panel)
