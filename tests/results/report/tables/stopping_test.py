"""Tests of cells and notes of the tables of Huang et al., 2024 (SpecDec++), and of block-wise verification."""

import re

import pytest

from speccascade_jax.results.analysis import families
from speccascade_jax.results.report.tables.stopping import GRIDS
from tests.support import measured_records as made


def grids(what, records):
    (panel_families,) = families.of_records(records)
    return GRIDS[what](panel_families)


def rows(grid):
    return {(row[0], row[1]): row for row in grid.rows}


def test_forward_times_cover_all_runs_every_family_and_both_models_alone():
    (grid,) = grids("forward_times", made.sweep())
    cells = {row[0]: row[1:] for row in grid.rows}
    ends = ["Target alone", "Draft alone"]
    assert list(cells) == ["Both models, all", "SpecDecode (fixed γ)", "SpecDec++", *ends]
    assert cells["Both models, all"][:5] == ["288", "2.000 ± 0.000", "11.000 ± 0.000", "4.000 ± 0.000", "1.000"]
    assert cells["Target alone"][:4] == ["384", "–", "10.000 ± 0.000", "3.000 ± 0.000"]
    assert cells["Draft alone"][1:3] == ["2.000 ± 0.000", "–"]
    assert float(cells["SpecDec++"][5].split()[0]) > 2 and "(SpecDec++) has no constant" in grid.notes[0]


def test_a_family_with_collinear_counts_has_dashes_and_a_reason():
    records = [r for r in made.sweep() if r["point"]["block_size"] not in (2, 4, 6)]
    timed = records[2]["latency"]
    timed["per_example_draft_steps"] = [[8 * n for n in trial] for trial in timed["per_example_target_calls"]]
    (grid,) = grids("forward_times", records)
    assert grid.rows[1] == ["SpecDecode (fixed γ)", *["–"] * 8]
    assert grid.notes[0].startswith("SpecDecode (fixed γ): draft_steps and target_calls are nearly collinear")


def test_table_1_names_settings_and_compares_with_the_best_fixed_block():
    grid, _, _ = grids("throughput", made.sweep())
    fixed, adaptive, target = grid.rows
    assert (fixed[0], fixed[1], fixed[4]) == ("SpecDecode (fixed γ)", "γ = 4", "–")
    assert (adaptive[0], adaptive[1], adaptive[5]) == ("SpecDec++", "h = 0.5", "h = 0.5")
    numbers = [float(re.match(r"[\d.]+", row[3])[0]) for row in (fixed, adaptive)]
    gain = float(re.match(r"\+([\d.]+)", adaptive[4])[1])
    assert gain == pytest.approx(100 * (numbers[1] / numbers[0] - 1), abs=1.0)
    assert grid.bold >= {(1, 4)} and target[:2] == ["Target alone", "–"] and target[3] == target[7] == "1.00×"
    assert "t_draft = 2 ms, t_target = 11 ms, 4 ms per generation (R² 1.000)" in grid.notes[0]


def test_a_gain_within_its_interval_is_not_bold():
    same = {block / 10: rates for block, rates in made.FIXED.items()}
    grid, _, _ = grids("throughput", made.sweep(same, seed=3))
    assert not grid.bold and "[-" in grid.rows[1][4]


def test_every_point_is_listed_with_its_prediction():
    _, grid, _ = grids("throughput", made.sweep())
    assert len(grid.rows) == 10 and {row[-1] for row in grid.rows} <= {"+0.0%", "-0.0%"}
    row = rows(grid)["SpecDec++", "h = 0.7"]
    assert float(row[2].split()[0]) == pytest.approx(0.27, abs=0.01)
    assert float(row[3].split()[0]) == pytest.approx(0.8, abs=0.03)
    assert "at most 0.0%" in " ".join(grid.notes)


def test_an_oracle_that_was_not_timed_is_predicted_only():
    oracle = made.record("stop_oracle", 0.2, 0.0)
    del oracle["latency"], oracle["target_latency"]
    grid, points, _ = grids("throughput", [*made.sweep(), oracle])
    assert grid.rows[-1][0] == "SpecDecode [oracle]" and grid.rows[-1][5:] == ["–"] * 4
    assert float(grid.rows[-1][3].partition("×")[0]) > 2
    row = rows(points)["SpecDecode [oracle]", "–"]
    assert row[3] == "0.000 [0.000, 0.000]" and row[5:] == ["–", "–"]


def test_the_suggested_threshold_names_the_source_of_its_prediction():
    *_, grid = grids("throughput", made.sweep())
    (row,) = grid.rows
    assert row[1] == "0.818" and row[3] == "interpolated between 0.7 and 0.9" and row[4] == "0.5"
    assert re.fullmatch(r"\+[\d.]+ \[\+[\d.]+, \+[\d.]+\] %", row[6])
    *_, grid = grids("throughput", made.sweep({0.3: (0.38, 0.25), 0.5: (0.31, 0.45)}))
    assert grid.rows[0][3] == "measured at 0.5, the nearest"
    *_, grid = grids("throughput", made.sweep({1 - 2 / 11: (0.3, 0.4), 0.9: (0.3, 0.6)}))
    assert grid.rows[0][3] == "measured at 0.818182"


def test_thresholds_on_quantities_other_than_rejection_get_no_suggestion():
    entropy = made.record("stop_entropy", 0.4, 0.3, stop=0.3)
    *_, grid = grids("throughput", [*made.sweep(), entropy])
    assert [row[0] for row in grid.rows] == ["SpecDec++"]
    assert len(grids("throughput", [*made.sweep({}), entropy])) == 2


def test_heads_trained_with_weighted_rejections_get_a_note_and_no_suggestion():
    def head(weight, h):
        named = {"head": f"x/w{weight}.msgpack", "family": f"specdecpp:w{weight}"}
        record = made.record("specdecpp", 0.4, 0.3, stop=h, **named)
        return made.headed(record, f"{weight}") | {"head": {"w_rej": weight}}

    heads = [head(weight, h) for weight in (1.0, 6.0) for h in (0.3, 0.5)]
    *_, grid = grids("throughput", [*made.sweep(), *heads])
    assert [row[0] for row in grid.rows] == ["SpecDec++", "SpecDec++ w1.0"]
    (note,) = [note for note in grid.notes if "w_rej" in note]
    assert note.endswith("that probability: SpecDec++ w6.0 (6).")
    *_, grid = grids("throughput", [*made.sweep({}), *heads[2:]])
    assert "Theorem 3.1" in grid.title and not grid.rows and "w6.0 (6)" in " ".join(grid.notes)
    assert grid.markdown() and grid.latex() and grid.csv() and grid.rich()
    *_, grid = grids("throughput", made.sweep())
    assert not any("w_rej" in note for note in grid.notes)


def test_block_wise_verification_gets_a_note_and_no_suggestion():
    jointly = [made.record("specdecpp", 0.4, 0.3, stop=h, family="specdecpp[block]") for h in (0.3, 0.5)]
    for record in jointly:
        record["point"] |= {"verify": "block", "details": ["block-wise"]}
    *_, grid = grids("throughput", [*made.sweep(), *jointly])
    assert [row[0] for row in grid.rows] == ["SpecDec++"]
    (note,) = [note for note in grid.notes if "block-wise" in note]
    assert note.startswith("Left out, because their blocks do not end at the first rejected token: SpecDec++")
    assert len(grids("throughput", [*made.sweep({}), *jointly])) == 2


def test_dominance_has_a_verdict_per_block_size():
    (grid,) = grids("dominance", made.sweep({0.3: (0.36, 0.5), 0.5: (0.31, 0.75), 0.7: (0.287, 1.2)}))
    assert [row[1] for row in grid.rows] == [f"SpecDecode, γ = {block}" for block in made.FIXED]
    assert [row[-1] for row in grid.rows] == ["not reached", "dominates", "ties", "loses"]
    assert grid.rows[0][4:6] == ["–", "–"] and grid.bold == {(1, 6)}
    assert [row[4].endswith(" (level)") for row in grid.rows] == [False, False, False, True]


def test_thresholds_without_fixed_blocks_of_the_same_distribution_are_refused():
    with pytest.raises(ValueError, match="no stop thresholds and fixed blocks of the same output distribution"):
        grids("dominance", made.sweep(law="opt"))
    (grid,) = grids("dominance", [*made.sweep(), made.record("bild", 0.5, 0.1, stop=0.1, law="bild_star", alpha=0.5)])
    assert "BiLD α 0.5: no fixed blocks of the same output distribution." in grid.notes


def test_every_row_has_a_cell_for_every_column():
    for kind in ("forward_times", "throughput", "dominance"):
        for grid in grids(kind, made.sweep()):
            assert grid.rows and all(len(row) == len(grid.header) for row in grid.rows)


RATES = {3: (0.45, 0.43), 5: (0.36, 0.32), 8: (0.30, 0.24)}
"""γ -> target calls per token, token-wise and block-wise."""


def both(name="spec_decode", rates=RATES, ways=("token", "block"), **point):
    """Returns records of a rule verified both ways."""
    records = []
    for n, way in enumerate(ways):
        settings = {"verify": way, "family": name if way == "token" else f"{name}[{way}]", **point}
        settings |= {"curve": settings["family"], "details": [] if way == "token" else ["block-wise"]}
        records += [
            made.record(name, rates_both[n], 0.5, block=block, **settings) for block, rates_both in rates.items()
        ]
    return records


ENDS = [made.record("autoregressive", 1.0, 0.0), made.record("autoregressive_draft", 0.0, 0.0)]


def verification(records):
    (panel_families,) = families.of_records([*ENDS, *records])
    (grid,) = GRIDS["verification"](panel_families)
    return grid


def test_the_verification_table_has_a_row_per_method_and_a_column_per_block_size():
    grid = verification(both() + both("token_v3", alpha=0.9, rates={5: (0.3, 0.25)}))
    assert grid.header == ["Method", "γ = 3", "γ = 5", "γ = 8"]
    lossless, cascade = grid.rows
    assert "block-wise" not in lossless[0] + cascade[0] and cascade[0].endswith("α 0.9")
    assert cascade[1] == cascade[3] == "–" and "→" in cascade[2]
    for cell, (before, after) in zip(lossless[1:], RATES.values(), strict=True):
        numbers = [float(number) for number in re.findall(r"[\d.]+(?= →)|(?<=→ )[\d.]+", cell)]
        assert numbers == pytest.approx([1 / before, 1 / after], rel=0.05)
    assert "significantly lower: 0 of 4" in grid.notes[1]


def test_verification_gains_are_paired_and_losses_are_counted():
    (row,) = verification(both(rates={5: (0.30, 0.36), 8: (0.30, 0.30)})).rows
    value, low, high = (float(number) for number in re.findall(r"([+−-][\d.]+)%", row[1]))
    assert value == pytest.approx(-16.7, abs=1.5) and low < value < high < 0 and high - low < 3
    assert "significantly lower: 1 of 2" in verification(both(rates={5: (0.30, 0.36), 8: (0.30, 0.299)})).notes[1]


def test_records_of_one_verification_are_refused_with_the_remedy():
    (panel_families,) = families.of_records([*ENDS, *both(ways=("token",))])
    with pytest.raises(ValueError, match=r"verified both ways: sweep it with verify = \('token', 'block'\)"):
        GRIDS["verification"](panel_families)


def test_families_are_rivals_only_if_their_verification_is_the_same():
    named = {"verify": "block", "family": "specdecpp[block]"}
    adaptive = [made.record("specdecpp", 0.4, 0.2, stop=h, **named) for h in (0.3, 0.6)]
    (panel_families,) = families.of_records([*ENDS, *both(), *adaptive])
    (ours,) = panel_families.adaptive
    rival = panel_families.rival(ours)
    assert rival.verify == ours.verify == "block" and {family.verify for family in panel_families.fixed} == {
        "token",
        "block",
    }
