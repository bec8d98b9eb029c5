"""Bugs planted in selections: the comparison that holds without them finds each.

Every bug has a drafter of its own kind, or a program compiled without it would be run again.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from speccascade_jax.core import rngs
from speccascade_jax.drafters import selected
from speccascade_jax.drafters.chooser import Chooser
from speccascade_jax.drafters.selected import SelectedDrafter
from tests.drafters import selected_test as whole
from tests.support import conformance


@dataclass(frozen=True)
class InEverybodysRows(SelectedDrafter):
    """Blocks are merged whoever's rows they are."""


@dataclass(frozen=True)
class Untold(SelectedDrafter):
    """`sits_out` is not passed."""


@dataclass(frozen=True)
class Unprotected(SelectedDrafter):
    """The same, and nobody is protected from it."""


@dataclass(frozen=True)
class SharedBits(SelectedDrafter):
    """An arm is chosen by the bits that draw the first draft."""

    def init(self, params, start):
        keys, first = rngs.RoundKeys, start.prompt.length
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rngs, "CHOOSE", rngs.DRAFT)
            patch.setattr(rngs, "RoundKeys", lambda rows, round, length: keys(rows, round=round, length=first))
            return super().init(params, start)


def rows_differ(kind):
    """Whether some row of a mixed batch is not what its drafter alone would have made."""
    mixed = whole.run(whole.engine_of(kind(whole.ARMS, Chooser(draws="dynamic"))), whole.selection())
    choice = np.asarray(mixed.inner["choice"])
    for place, (arm, own) in enumerate(zip(whole.ARMS, whole.OWN, strict=True)):
        rows = np.flatnonzero(choice == place)
        alone = whole.run(whole.engine_of(arm), own, rows=rows)
        if not np.array_equal(np.asarray(mixed.tokens)[rows], alone.tokens):
            return True
    return False


@pytest.mark.laws
def test_an_arms_block_in_everybodys_rows_is_found(monkeypatch):
    assert not rows_differ(SelectedDrafter)
    merged = selected._merged
    monkeypatch.setattr(selected, "_merged", lambda rows, *others: merged(rows | True, *others))
    assert rows_differ(InEverybodysRows)


@pytest.mark.laws
def test_laws_that_are_written_over_are_found(monkeypatch):
    monkeypatch.setattr(selected, "_leaving_rows_alone", lambda arm, rows: arm)
    assert not rows_differ(Untold), "who cannot be told is protected from"
    monkeypatch.setattr(selected._Turn, "_protected", False)
    assert rows_differ(Unprotected)


@pytest.mark.laws
def test_an_arm_chosen_by_the_bits_that_draft_is_found():
    """Outputs of one arm's rows are then those of whoever drew such tokens."""
    found = {}
    for kind in (SelectedDrafter, SharedBits):
        engine, params, law = whole._tabular(11, kind=kind)
        tokens, choice = whole.sampled(engine, params, 20_000)
        found[kind] = conformance.holm([conformance.sequence_p_value(tokens[choice == arm], law) for arm in range(3)])
    assert found[SelectedDrafter] > 1e-3 and found[SharedBits] < 1e-6, found
