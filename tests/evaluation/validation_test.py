"""Numbers that mean something but change hardly anything: a warning that names them, and no error."""

import math
import warnings
from dataclasses import replace

import pytest

from speccascade_jax.evaluation.points import Evaluation, Level, ModelPair, Point, Settings
from speccascade_jax.evaluation.validation import validate, warn_of_ranges
from speccascade_jax.rules.deferral import RULES

SIZE = 10_000
LN = math.log(SIZE)


def _said(*methods: Settings) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ranges(methods, SIZE)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Settings(method="chow", alpha=1.5), "alpha=1.5 of 'chow' lies outside 0 … 1"),
        (Settings(method="token_v3", alpha=-0.1), "alpha=-0.1 of 'token_v3' lies outside 0 … 1"),
        (Settings(method="opt", alpha=100), "alpha=100 of 'opt' lies outside -1 … 1"),
        (Settings(method="chow_log", alpha=LN + 0.1), "alpha=9.31034 of 'chow_log' lies outside 0 … 9.21034"),
        (Settings(method="diff_log", alpha=-10), "alpha=-10 of 'diff_log' lies outside -9.21034 … 9.21034"),
        (Settings(method="fuzzy", alpha=1.01), "alpha=1.01 of 'fuzzy' lies outside 0 … 1"),
        (Settings(method="bild", alpha=-1, stop_threshold=0.5), "alpha=-1 of 'bild' lies outside 0 … inf"),
        (Settings(method="seq_cascade", alpha=1), "alpha=1 of 'seq_cascade' lies outside -inf … 0"),
        (
            Settings(method="stop_entropy", stop_threshold=10),
            "stop_threshold=10 of 'stop_entropy' lies outside 0 … 9.21034",
        ),
        (
            Settings(
                method="speculative",
                drafters=(Level(model="draft", budget=3, rule="chow", alpha=2, stop="entropy", stop_threshold=11),),
            ),
            "alpha=2 of level 'draft' lies outside 0 … 1; stop_threshold=11 of level 'draft' lies outside 0 … 9.21034",
        ),
    ],
)
def test_numbers_beyond_which_nothing_changes_are_named(method, message):
    (said,) = _said(method)
    assert said.startswith(message) and said.endswith(": beyond it hardly anything changes, is it meant?")


def test_one_warning_names_all_of_a_sweep_and_the_first_few_of_many():
    sweep = [Settings(method="chow", alpha=alpha, block_size=block) for alpha in (0.5, 1.5, 2.5) for block in (2, 3)]
    (said,) = _said(*sweep)
    assert said.count("alpha=") == 2
    (said,) = _said(*(Settings(method="chow", alpha=2 + n) for n in range(50)))
    assert said.count("alpha=") == 5 and "and 45 more" in said


def test_what_sweeps_use_is_no_cause_for_a_word():
    rules = [
        Settings(method=name, alpha=a) for name, rule in RULES.items() if rule.alpha for a in rule.alpha.usual(7, SIZE)
    ]
    shipped = [
        Settings(method="lossy", alpha=0.95), Settings(method="seq_cascade", alpha=-40.0),
        Settings(method="fuzzy_kl", alpha=30.0), Settings(method="bild_star", alpha=12.0),
        Settings(method="opt_log", alpha=-3.0),
        Settings(method="stop_entropy", stop_threshold=5.7), Settings(method="token_cascade_log", alpha=5.7),
        Settings(method="autoregressive"), Settings(method="spec_decode"),
    ]  # fmt: skip
    assert _said(*rules, *shipped) == []
    usual = [Settings(method="chow_log", alpha=alpha) for alpha in RULES["chow_log"].alpha.usual()]
    warn_of_ranges(usual, 320)  # of a small vocabulary: the usual range is another's


def test_single_examples_are_not_timed_where_rows_are_spread():
    timed = Evaluation(task="tiny_translation", latency_examples=3)
    point = Point(pair=ModelPair(name="p", mesh=(2, 4)), evaluation=timed, settings=Settings(method="spec_decode"))
    with pytest.raises(ValueError, match=r"latency_examples=3 .* mesh=\(2, 4\) .* or time on a mesh of \(1, 4\)"):
        validate(point)
    validate(replace(point, pair=ModelPair(name="p", mesh=(1, 8))))
    validate(replace(point, evaluation=replace(timed, latency_examples=0)))
