"""The choice of cases of heavy tests that every change runs; a weekly job runs all of them."""

from collections import defaultdict

ALL = "SPECCASCADE_CASES"
"""Environment variable that runs all cases if its value is "all"."""
HEAVY = {"laws", "parity", "tools", "accelerators"}


def weekly_cases(items):
    """Returns the cases that run only weekly: of a test marked `sample(n)`, all but `n` evenly spaced cases."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and HEAVY & {mark.name for mark in item.iter_markers()}:
            groups[item.path, item.originalname].append(item)
    return [case for cases in groups.values() for case in _left_out(cases)]


def _left_out(cases):
    (count,) = cases[0].get_closest_marker("sample").args
    last = len(cases) - 1
    chosen = {round(n * last / max(count - 1, 1)) for n in range(count)}
    return [case for n, case in enumerate(cases) if n not in chosen]
