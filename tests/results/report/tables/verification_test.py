"""Block-wise beside token-wise: which points stand together, and what the cells say."""

import re

import pytest

from speccascade_jax.results.analysis import families
from speccascade_jax.results.report.tables.verification import verification_grids
from tests.support import measured_records as made

RATES = {3: (0.45, 0.43), 5: (0.36, 0.32), 8: (0.30, 0.24)}
"""γ -> target calls per token, token-wise and block-wise."""


def both(name="spec_decode", rates=RATES, ways=("token", "block"), **point):
    """Records of a rule verified either way."""
    found = []
    for n, way in enumerate(ways):
        own = {"verify": way, "family": name if way == "token" else f"{name}[{way}]", **point}
        own |= {"curve": own["family"], "details": [] if way == "token" else ["block-wise"]}
        found += [made.record(name, each[n], 0.5, block=block, **own) for block, each in rates.items()]
    return found


ENDS = [made.record("autoregressive", 1.0, 0.0), made.record("autoregressive_draft", 0.0, 0.0)]


def grid(records):
    (found,) = families.of_records([*ENDS, *records])
    (one,) = verification_grids(found)
    return one


def test_a_row_per_method_and_a_column_per_block_size():
    found = grid(both() + both("token_v3", alpha=0.9, rates={5: (0.3, 0.25)}))
    assert found.header == ["Method", "γ = 3", "γ = 5", "γ = 8"]
    lossless, cascade = found.rows
    assert "block-wise" not in lossless[0] + cascade[0] and cascade[0].endswith("α 0.9")
    assert cascade[1] == cascade[3] == "–" and "→" in cascade[2]
    for cell, (before, after) in zip(lossless[1:], RATES.values(), strict=True):
        numbers = [float(each) for each in re.findall(r"[\d.]+(?= →)|(?<=→ )[\d.]+", cell)]
        assert numbers == pytest.approx([1 / before, 1 / after], rel=0.05)
    assert "lower, beyond the interval: 0 of 4" in found.notes[1]


def test_the_gain_is_paired_and_a_loss_is_counted():
    (row,) = grid(both(rates={5: (0.30, 0.36), 8: (0.30, 0.30)})).rows
    value, low, high = (float(each) for each in re.findall(r"([+−-][\d.]+)%", row[1]))
    assert value == pytest.approx(-16.7, abs=1.5) and low < value < high < 0 and high - low < 3
    assert "beyond the interval: 1 of 2" in grid(both(rates={5: (0.30, 0.36), 8: (0.30, 0.299)})).notes[1]


def test_one_way_alone_says_what_to_do():
    (found,) = families.of_records([*ENDS, *both(ways=("token",))])
    with pytest.raises(ValueError, match=r"verified both ways: sweep it with verify = \('token', 'block'\)"):
        verification_grids(found)


def test_families_are_rivals_only_where_they_are_verified_alike():
    adaptive = [
        made.record("specdecpp", 0.4, 0.2, stop=h, verify="block", family="specdecpp[block]") for h in (0.3, 0.6)
    ]
    (found,) = families.of_records([*ENDS, *both(), *adaptive])
    (ours,) = found.adaptive
    rival = found.rival(ours)
    assert rival.verify == ours.verify == "block" and {each.verify for each in found.fixed} == {"token", "block"}
