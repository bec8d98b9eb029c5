"""Surveys: per position what the laws say, rates that real runs confirm, and α's where the curve moves."""

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.evaluation.studies.survey import estimates
from tests.support import conformance, reference

LENGTH = 8


def take(q_table, p_table, grids, *, rows=64, temperature=1.0, start=0, writer="autoregressive", **more):
    """A survey of what a method writes with tabular models; returns it, the outputs and their lengths."""
    pair = conformance.tabular_pair(q_table, p_table)
    out = sc.decode(
        pair, [[start]] * rows, method=writer, temperature=temperature, max_new_tokens=LENGTH, stop_ids=[2], **more
    )
    prompt = Prompt(jnp.full((rows, 1), start, jnp.int32), jnp.ones((rows,), jnp.int32))
    controls = make_controls(rows, temperature=temperature)
    return estimates.survey(pair, prompt, out.tokens, out.lengths, controls, grids), out


def positions(out, start=0):
    """`(row, previous token, token)` of every surveyed position, in order."""
    found = []
    for number, (row, length) in enumerate(zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)):
        found += [(number, previous, token) for previous, token in zip([start, *row], row[:length], strict=False)]
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_position_is_numpys(temperature):
    q_table, p_table = conformance.tables(5, seed=81)
    names = ("opt", "lossy", "token_v3", "fuzzy_js")
    found, out = take(q_table, p_table, {name: (0.2, 0.5) for name in names}, temperature=temperature)
    assert len({int(n) for n in out.lengths}) > 1 or temperature == 0
    seen = positions(out)
    assert found.rows.tolist() == [row for row, _, _ in seen]
    for at, (_, previous, token) in enumerate(seen):
        q, p = reference.softmax(q_table[previous]), reference.softmax(p_table[previous])
        scaled = [reference.scale(table[previous], temperature) for table in (p_table, q_table)]
        assert found.positions["max_q"][at] == pytest.approx(q.max(), abs=1e-5)
        assert found.positions["entropy_p"][at] == pytest.approx(reference.entropy(p), abs=1e-5)
        assert found.positions["p_of_token"][at] == pytest.approx(p[token], abs=1e-5)
        assert found.positions["kl_reversed"][at] == pytest.approx(reference.divergence("kl_reversed", p, q), abs=1e-4)
        q_tilde = scaled[1]
        for name in ("tv", "js", "kl", "kl_reversed", "js_reference"):
            expected = reference.divergence(name, *scaled)
            assert found.positions[f"{name}_scaled"][at] == pytest.approx(expected, abs=1e-4), name
        for name in names:
            for n, alpha in enumerate((0.2, 0.5)):
                law = reference.target_law(name, q_table[previous], p_table[previous], alpha, temperature)
                rejected = 1 - np.minimum(law, q_tilde).sum()
                assert found.curves[name].rejection[n, at] == pytest.approx(rejected, abs=1e-5), (name, alpha)


def test_padding_is_not_surveyed_and_parts_join():
    q_table, p_table = conformance.tables(5, seed=82)
    grids = {"diff": (0.1,), "spec_decode": (0.0,)}
    one, out = take(q_table, p_table, grids, rows=9)
    assert len(one.rows) == out.lengths.sum() < out.tokens.size
    both = estimates.join([one, one])
    assert len(both.rows) == 2 * len(one.rows) and both.rows.max() == 17
    assert both.estimate("diff", 0.1).rejection == pytest.approx(one.estimate("diff", 0.1).rejection, abs=1e-6)
    assert one.curves["spec_decode"].deferral is None and one.estimate("spec_decode").deferral is None


@pytest.mark.laws
@pytest.mark.parametrize("rule", ["lossy", "opt_log", "token_v3"])
def test_rates_of_a_real_run_along_its_own_outputs(rule):
    """Blocks of one without a bonus examine every position: the estimate is what they should give, to 4 sigma."""
    q_table, p_table = conformance.tables(6, seed=83)
    alpha = conformance.telling_alpha(sc.RULES[rule], q_table, p_table)
    pair, rows = conformance.tabular_pair(q_table, p_table), 4000
    out = sc.decode(
        pair, [[0]] * rows, rule=rule, alpha=alpha, temperature=1.0, block_size=1, bonus="none", max_new_tokens=LENGTH
    )
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32))
    controls = make_controls(rows, temperature=1.0)
    found = estimates.survey(pair, prompt, out.tokens, out.lengths, controls, {rule: (alpha,)}).estimate(rule)
    error = 4 * np.sqrt(0.25 / (rows * LENGTH))
    assert abs(found.rejection - out.stats["rejection_rate"]) < error
    if found.deferral is not None:
        assert found.deferral == pytest.approx(out.stats["deferral_rate"], abs=1e-4)


def test_a_plan_moves_the_rejection_rate_by_equal_steps():
    q_table, p_table = conformance.tables(12, seed=84)
    found, _ = take(q_table, p_table, {"token_v3": tuple(np.linspace(0, 1, 101)), "spec_decode": (0.0,)}, rows=300)
    alphas = found.plan("token_v3", 6)
    rates = [found.estimate("token_v3", alpha).rejection for alpha in alphas]
    assert len(alphas) == 6 and list(alphas) == sorted(alphas) and (alphas[0], alphas[-1]) == (0.0, 1.0)
    steps = np.abs(np.diff(rates))
    even = [found.estimate("token_v3", alpha).rejection for alpha in np.linspace(0, 1, 6)]
    assert steps.max() < 0.7 * np.abs(np.diff(even)).max()
    assert found.plan("spec_decode", 5) == (0.0,)


def test_what_has_no_meaning_is_refused():
    q_table, p_table = conformance.tables(4, seed=85)
    found, _ = take(q_table, p_table, {"chow": (0.0, 1.0)}, rows=2)
    for call, message in (
        (lambda: found.estimate("opt", 0.1), "'opt' was not surveyed; there are chow"),
        (lambda: found.estimate("chow", 1.5), "alpha=1.5 of rule 'chow' is outside the surveyed range 0 … 1"),
        (lambda: found.estimate("chow"), "alpha=None"),
        (lambda: found.plan("chow", 1), "count=1"),
        (lambda: take(q_table, p_table, {"chow": (0.5, 0.5)}, rows=2), "grid of rule 'chow' must rise"),
        (lambda: take(q_table, p_table, {"lossy": (0.5, 1.0)}, rows=2), r"outside the domain \[0, 1\)"),
        (lambda: take(q_table, p_table, {"chw": (0.5,)}, rows=2), "unknown rule 'chw': did you mean chow"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
