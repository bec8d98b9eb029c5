"""Tests of the choice of heavy cases that every change runs."""

from types import SimpleNamespace

import pytest

from tests.support.sample import weekly_cases


def _item(number, name="test", count=None, heavy=True):
    marks = [SimpleNamespace(name="laws", args=())] * heavy
    marks += [SimpleNamespace(name="sample", args=(count,))] * (count is not None)
    closest = {mark.name: mark for mark in marks}.get
    return SimpleNamespace(
        path="file", originalname=name, number=number, iter_markers=lambda: marks, get_closest_marker=closest
    )


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (1, [0]), (2, [0, 6]), (3, [0, 3, 6]), (9, [*range(7)])])
def test_the_chosen_cases_are_even(count, chosen):
    items = [_item(number, count=count) for number in range(7)]
    weekly = weekly_cases(items)
    assert [item.number for item in items if item not in weekly] == chosen


def test_light_cases_and_unmarked_tests_always_run():
    light = [_item(number, count=0, heavy=False) for number in range(3)]
    unmarked = [_item(number) for number in range(3)]
    assert not weekly_cases([*light, *unmarked])


def test_tests_are_sampled_apart():
    items = [_item(number, name=name, count=1) for name in ("first", "second") for number in range(3)]
    assert [item.number for item in weekly_cases(items)] == [1, 2, 1, 2]
