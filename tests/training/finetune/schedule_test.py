"""Tests of the learning rate by step and by elapsed time."""

import math

import pytest

from speccascade_jax.training.finetune.schedule import Schedule


def test_warm_up_is_linear_in_steps():
    schedule = Schedule(peak=1.0, warmup_steps=10, max_steps=10**9)
    assert schedule.rate(0, 0.0) == pytest.approx(0.1)
    assert schedule.rate(4, 0.0) == pytest.approx(0.5)
    assert schedule.rate(10, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 0.775), ("cosine", 0.1 + 0.45 * (1 + math.sqrt(0.5)))])
def test_decay_reaches_the_final_fraction_at_the_planned_end(decay, quarter):
    schedule = Schedule(peak=2.0, warmup_steps=1, max_steps=100, decay=decay, final=0.1)
    assert schedule.rate(25, 0.0) == pytest.approx(2.0 * quarter)
    assert schedule.rate(50, 0.0) == pytest.approx(2.0 * 0.55)
    assert schedule.rate(100, 0.0) == schedule.rate(150, 0.0) == pytest.approx(0.2)


def test_a_constant_rate_is_constant_from_the_end_of_the_warm_up():
    constant = Schedule(peak=1e-3, warmup_steps=0, max_steps=100, decay="constant")
    assert {constant.rate(step, 0.0) for step in range(101)} == {1e-3}
    warmed = Schedule(peak=1.0, warmup_steps=4, max_minutes=1.0, decay="constant")
    assert [warmed.rate(step, 0.5) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_run_ends_at_its_limit_of_minutes_or_steps_whichever_comes_first():
    by_time = Schedule(peak=1.0, warmup_steps=1, max_minutes=20)
    by_steps = Schedule(peak=1.0, warmup_steps=1, max_steps=200)
    assert by_time.rate(3, 5.0) == pytest.approx(by_steps.rate(50, 99.0))
    by_first = Schedule(max_steps=200, max_minutes=20)
    assert by_first.progress(200, 1.0) == by_first.progress(1, 20.0) == 1.0


def test_rsqrt_keeps_falling_without_a_planned_end():
    schedule = Schedule(peak=1.0, warmup_steps=100, max_steps=10**6, decay="rsqrt")
    assert schedule.rate(99, 0.0) == pytest.approx(1.0)
    assert schedule.rate(399, 0.0) == pytest.approx(0.5)
    assert schedule.rate(9999, 0.0) == pytest.approx(math.sqrt(0.01))


def test_schedules_without_an_end_or_with_an_unknown_decay_are_refused():
    with pytest.raises(ValueError, match="max_steps or max_minutes"):
        Schedule()
    with pytest.raises(ValueError, match="'exponential' is not one of constant, linear, cosine, rsqrt"):
        Schedule(max_steps=1, decay="exponential")


def test_pre_training_continues_with_its_own_rate():
    whole = Schedule(peak=1e-2, warmup_steps=100, max_steps=2000, decay="rsqrt")
    rest = Schedule(peak=1e-2, warmup_steps=100, max_steps=1000, decay="rsqrt", first_step=1000)
    assert [rest.rate(step, 0.0) for step in (0, 1, 999)] == [whole.rate(step, 0.0) for step in (1000, 1001, 1999)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"peak": -1.0}, "peak=-1.0: give a finite number of at least 0"), ({"peak": math.nan}, "peak=nan: give a finite"),
    ({"max_steps": math.nan}, "max_steps=nan is not a whole number"), ({"max_steps": -3}, "max_steps=-3 is not"),
    ({"first_step": -5}, "first_step=-5 is not a whole number"), ({"max_minutes": math.inf}, "max_minutes=inf: give a"),
])  # fmt: skip
def test_numbers_that_no_plan_can_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"max_steps": 10} | changes)
