"""Tests that the costs of compiled programs agree: by the package, by a second reader, and by hand."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from speccascade_jax.preflight import bundles, hlo
from speccascade_jax.preflight.chips import CHIPS
from speccascade_jax.preflight.execution import Assumptions, execute
from speccascade_jax.preflight.report import Costs, account
from tests.preflight import compile_programs, second_reader
from tests.preflight.by_hand import MODELS, PROGRAMS

pytestmark = [
    pytest.mark.accelerators,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the compiler of TPUs: pip install libtpu"
    ),
    pytest.mark.xdist_group("agreement"),
]
ON_V5P = ("product", "turns", "update", "padded", "kernel_64")
COMPILATIONS = {"v5e": [*PROGRAMS], "v5p": list(ON_V5P), "v5e models": [*MODELS]}
CASES = [(place, name) for place, names in COMPILATIONS.items() for name in names]


@dataclass(frozen=True)
class Reading:
    """One compiled program by both readers."""

    costs: Costs
    second: second_reader.Costs


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """Returns a program's costs by both readers; compiles all programs for a chip at once."""
    folders: dict[str, Path] = {}

    def read(place: str, name: str) -> Reading:
        if place not in folders:
            folder = tmp_path_factory.mktemp(place.replace(" ", "_"))
            compile_programs.start(folder, place.split()[0], COMPILATIONS[place])
            folders[place] = folder
        return read_both(folders[place] / name, name)

    return read


def read_both(folder: Path, name: str) -> Reading:
    numbers = json.loads((folder / "assumptions.json").read_text())
    if name in PROGRAMS:
        numbers = {"loops": PROGRAMS[name].loops, "branches": PROGRAMS[name].branches}
    text = (folder / "hlo.txt").read_text()
    costs = account_of(text, folder / "dump", Assumptions(**numbers))
    return Reading(costs, second_reader.Reader(text, folder / "dump", **numbers).total())


def account_of(text: str, dump: Path, assumed: Assumptions) -> Costs:
    total = Costs()
    for costs in account(execute(hlo.parse(text), assumed), bundles.read(dump)).values():
        total = total.plus(costs)
    return total


@pytest.mark.parametrize(("place", "name"), CASES)
def test_two_readers_agree(reading, place, name):
    readers = reading(place, name)
    assert readers.costs.hbm_bytes == pytest.approx(readers.second.hbm, rel=0.03)
    assert readers.costs.cycles == pytest.approx(readers.second.cycles, rel=0.05)
    assert readers.costs.ops == pytest.approx(readers.second.ops, rel=0.05)
    assert readers.costs.transfers == readers.second.transfers
    assert readers.costs.collectives == readers.second.messages


@pytest.mark.parametrize(("place", "name"), [case for case in CASES if case[1] in PROGRAMS])
def test_bytes_equal_those_counted_by_hand(reading, place, name):
    costs = reading(place, name).costs
    assert costs.hbm_bytes == pytest.approx(PROGRAMS[name].hbm, rel=0.03)
    if PROGRAMS[name].ops and place == "v5e":
        assert costs.ops == PROGRAMS[name].ops


def test_cycles_of_a_kernel_grow_with_its_blocks(reading):
    small, large = (reading("v5e", f"kernel_{blocks}").costs.cycles for blocks in (16, 64))
    assert large / small == pytest.approx(64 / 16, rel=0.05)


def test_cycles_of_a_product_are_those_of_its_multiplications(reading):
    """Checks a product against the chip's peak; the core issues faster than its matrix units multiply."""
    (rows, depth), (_, columns) = (shape for shape, _ in PROGRAMS["product"].shapes)
    least = 2 * rows * depth * columns / (CHIPS["v5e"].flops / CHIPS["v5e"].clock)
    assert 0.9 * least < reading("v5e", "product").costs.cycles < 1.05 * least


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_its_decoder_at_least_once(reading, name):
    floor = {"t5_small": 2 * 41e6, "t5_large": 2 * 400e6, "t5_small_base": 2 * 130e6, "gemma_4_layers": 2 * 900e6}
    assert reading("v5e models", name).costs.hbm_bytes > floor[name]
