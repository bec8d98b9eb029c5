"""Progress with the time left."""

import pytest

from speccascade_jax.results.report import printing
from tests.support import fake_records as fake


def test_progress_estimates_from_what_this_process_measured(capsys):
    now = iter([0.0, 10.0, 20.0, 20.0])
    with printing.Progress(10, present=4, where="store.jsonl", clock=lambda: next(now)) as progress:
        for point in fake.coordinates()[2:4]:
            progress.advance(fake.run(point))
    said = capsys.readouterr().out
    assert "10 points, 4 of them already in store.jsonl" in said
    assert "[ 5/10] spec_decode" in said and "(0:10 elapsed, 0:50 left)" in said
    assert "[ 6/10] lossy α=0" in said and "(0:20 elapsed, 0:40 left)" in said
    assert "2 points measured in 0:20" in said


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_clock_times(seconds, shown):
    assert printing.clock_time(seconds) == shown
