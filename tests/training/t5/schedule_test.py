"""Learning rates at the points that define a schedule."""

import math

import pytest

from speccascade_jax.training.t5.schedule import Schedule


def test_warm_up_is_linear_in_steps():
    schedule = Schedule(peak=1.0, warmup_steps=10, max_steps=10**9)
    assert schedule.rate(0, 0.0) == pytest.approx(0.1)
    assert schedule.rate(4, 0.0) == pytest.approx(0.5)
    assert schedule.rate(10, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_reaches_the_final_fraction_at_the_planned_end(decay, middle):
    schedule = Schedule(peak=2.0, warmup_steps=1, max_steps=100, decay=decay, final=0.1)
    assert schedule.rate(50, 0.0) == pytest.approx(2.0 * middle)
    assert schedule.rate(100, 0.0) == schedule.rate(150, 0.0) == pytest.approx(0.2)


def test_minutes_and_steps_plan_alike_and_the_first_to_come_ends_the_run():
    by_time = Schedule(peak=1.0, warmup_steps=1, max_minutes=20)
    by_steps = Schedule(peak=1.0, warmup_steps=1, max_steps=200)
    assert by_time.rate(3, 5.0) == pytest.approx(by_steps.rate(50, 99.0))
    both = Schedule(max_steps=200, max_minutes=20)
    assert both.progress(200, 1.0) == both.progress(1, 20.0) == 1.0


def test_rsqrt_keeps_falling_without_a_plan_of_its_own():
    schedule = Schedule(peak=1.0, warmup_steps=100, max_steps=10**6, decay="rsqrt")
    assert schedule.rate(99, 0.0) == pytest.approx(1.0)
    assert schedule.rate(399, 0.0) == pytest.approx(0.5)
    assert schedule.rate(9999, 0.0) == pytest.approx(math.sqrt(0.01))


def test_schedules_without_an_end_or_with_an_unknown_decay_are_refused():
    with pytest.raises(ValueError, match="max_steps or max_minutes"):
        Schedule()
    with pytest.raises(ValueError, match="'exponential' is not one of"):
        Schedule(max_steps=1, decay="exponential")
