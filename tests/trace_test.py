"""Tests of traces over hundreds of generations: unchanged tokens, and the engine's counts recomputed from traces."""

import json
from collections import Counter

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.results.store.trace import Trace
from tests.support import conformance
from tests.support.reference import softmax

ROWS, VOCAB = 200, 6
PAIR = conformance.tabular_pair(*conformance.tables(VOCAB, seed=3))
PROMPTS = [[n % VOCAB] for n in range(ROWS)]
COUNTED = ("rounds", "target_calls", "drafted", "kept", "rejected", "examined", "committed")
JOINT = {"verify": "block"}
WAYS = {
    "token_v3": {"rule": "token_v3", "alpha": 0.4},
    "bonus from the target": {"rule": "chow", "alpha": 0.3, "bonus": "target"},
    "no bonus": {"rule": "spec_decode", "bonus": "none"},
    "blocks that end early": {"rule": "diff", "alpha": 0.1, "stop": "confidence", "stop_threshold": 0.6},
    "products": {"rule": "opt", "alpha": 0.1, "stop": "cumulative_confidence", "stop_threshold": 0.7},
    "empty blocks": {"rule": "token_v3", "alpha": 0.4, "stop": "confidence", "stop_threshold": 0.0,
     "bonus": "none"},
    "unverified final blocks": {"method": "token_cascade", "alpha": 0.4},
    "the target alone": {"method": "autoregressive"},
    "greedy": {"rule": "token_v3", "alpha": 0.4, "temperature": 0.0},
    "top-p": {"rule": "lossy", "alpha": 0.5, "top_p": 0.7},
    "block verification": {"rule": "token_v3", "alpha": 0.4, "verify": "block"},
    "block verification, early ends": {"rule": "diff", "alpha": 0.1, "stop": "entropy", "stop_threshold": 1.4} | JOINT,
}  # fmt: skip


def decoded(way, **more):
    return sc.decode(PAIR, PROMPTS, **{"temperature": 1.0, "max_new_tokens": 15, "stop_ids": [5], **WAYS[way], **more})


QUICK = ("token_v3", "blocks that end early")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.laws) for way in WAYS])
def test_counts_recomputed_from_traces_equal_the_engines(way):
    plain, traced = decoded(way), decoded(way, trace=True)
    np.testing.assert_array_equal(plain.tokens, traced.tokens)
    assert plain.trace is None and len(traced.trace) == ROWS
    rows = traced.stats["rows"]
    for name in COUNTED:
        np.testing.assert_array_equal(
            [row_trace.counts()[name] for row_trace in traced.trace], rows[name], err_msg=name
        )
    # METHODS section 6: each sampled token is committed or discarded; a draft in an unverified block is committed
    sampled = np.add(rows["drafted"], rows["target_calls"])
    if way != "no bonus":  # without a bonus, a call after a whole block gives no token
        np.testing.assert_array_equal(sampled, np.add(traced.lengths, rows["discarded"]))
    for name in ("examined_at", "kept_at"):
        for trace, counted in zip(traced.trace, np.asarray(rows[name]).tolist(), strict=True):
            at_position = trace.at_positions()[name]
            assert at_position + [0] * (len(counted) - len(at_position)) == counted, name
    for turn in (turn for trace in traced.trace for turn in trace.rounds):
        fates = [step.fate for step in turn.steps if step.proposed]
        rejected = turn.examined - turn.kept if "verification" in way else turn.rejected
        assert rejected == (turn.drafted - turn.kept if "verification" in way else turn.rejected)
        read = ["unverified" if turn.unverified else "kept"] * turn.kept + ["rejected"] * rejected
        assert fates == read + ["unread"] * (turn.drafted - len(read))
        assert [step.source == "draft" for step in turn.steps if step.committed][: turn.kept] == [True] * turn.kept
    written = [[s.committed.id for r in trace.rounds for s in r.steps if s.committed] for trace in traced.trace]
    assert written == [row[:n].tolist() for row, n in zip(traced.tokens, traced.lengths, strict=True)]
    counts = sum((Counter(trace.counts()) for trace in traced.trace), Counter())
    assert counts["draft"] + counts["replaced"] + counts["bonus"] + counts["target"] == counts["committed"]
    assert counts["drafted"] > 0 or way in ("the target alone", "empty blocks")
    if counts["drafted"] and way not in ("greedy", "unverified final blocks"):
        assert counts["kept"] and counts["rejected"]


def test_sources_equal_those_of_the_stream():
    traced = decoded("token_v3", trace=True)
    settings = {"temperature": 1.0, "max_new_tokens": 15, "stop_ids": [5], **WAYS["token_v3"]}
    for row in (0, 7, 150):
        streamed = sc.stream(PAIR, PROMPTS[row], example_id=row, **settings)
        steps = [(n, step) for n, turn in enumerate(traced.trace[row].rounds) for step in turn.steps if step.committed]
        traced_tokens = [(n, step.slot, step.committed.id, step.source) for n, step in steps]
        assert traced_tokens == [(token.round, token.slot, token.id, token.source) for token in streamed]


def test_probabilities_and_ranks_equal_those_of_the_tables():
    """Checks raw probabilities given the previous token, at any temperature, the sampled token, and the rule's `π`."""
    traced = decoded("token_v3", temperature=0.5, trace=True)
    (q_table, p_table), law = conformance.tables(VOCAB, seed=3), conformance.law_by_rule
    pi = law(sc.RULES["token_v3"], q_table, p_table, 0.4, 0.5, 1.0)
    looked = 0
    for row, trace in enumerate(traced.trace[:40]):
        last = PROMPTS[row][0]
        for step in (step for turn in trace.rounds for step in turn.steps):
            if not step.committed:
                continue
            q, p, token = softmax(q_table[last]), softmax(p_table[last]), step.committed
            assert token.p == pytest.approx(p[token.id], abs=1e-5)
            assert token.rank_p == 1 + (p > p[token.id] + 1e-7).sum()
            assert token.pi == pytest.approx(pi[last, token.id], abs=1e-5)
            if step.proposed:
                assert step.proposed.q == pytest.approx(q[step.proposed.id], abs=1e-5)
                assert step.proposed.rank_q == 1 + (q > q[step.proposed.id] + 1e-7).sum()
                assert step.entropy_q == pytest.approx(-(q * np.log(q)).sum(), abs=1e-4)
                assert step.divergence == pytest.approx(0.5 * np.abs(q - p).sum(), abs=1e-5)
                looked += 1
            last = token.id
    assert looked > 100


def test_confidence_is_a_product_and_names_its_threshold():
    traced = decoded("products", trace=True)
    for turn in (turn for trace in traced.trace[:20] for turn in trace.rounds):
        sure = [step.max_q for step in turn.steps if step.proposed]
        confidences = [step.confidence for step in turn.steps if step.proposed]
        np.testing.assert_allclose(confidences, np.cumprod(sure), rtol=1e-5)
    assert "product of max q" in traced.trace[0].threshold and "0.7" in traced.trace[0].threshold


COMPARED = {
    "confidence": (0.6, lambda q: 1.0 - q.max(-1)),
    "entropy": (1.3, lambda q: -(q * np.log(q)).sum(-1)),
    "cumulative_confidence": (0.9, lambda q: 1.0 - np.cumprod(q.max(-1))),
}


@pytest.mark.parametrize(
    "stop", [pytest.param(stop, marks=pytest.mark.laws) if stop == "entropy" else stop for stop in COMPARED]
)
def test_a_trace_holds_the_value_that_the_stop_policy_compared_at_each_slot(stop):
    threshold, compared = COMPARED[stop]
    way = "products" if stop == "cumulative_confidence" else "blocks that end early"
    traced = decoded(way, stop=stop, stop_threshold=threshold, trace=True)
    table = np.stack([softmax(row) for row in conformance.tables(VOCAB, seed=3)[0]])
    asked = ended = 0
    for row, trace in enumerate(traced.trace[:40]):
        last = PROMPTS[row][0]
        for turn in trace.rounds:
            before = [last, *(step.proposed.id for step in turn.steps if step.proposed)]
            wanted = compared(table[before])
            values = [step.stop for step in turn.steps]
            known = [value for value in values if value is not None]
            np.testing.assert_allclose(known, wanted[: len(known)], atol=1e-5)
            # asked at every slot that was drafted; and at the one that ended the block, if something was written there
            assert len(known) >= turn.drafted and values[len(known) :] == [None] * (len(values) - len(known))
            asked, ended = asked + len(known), ended + (len(known) > turn.drafted)
            assert all(value <= threshold + 1e-6 for value in known[: turn.drafted])
            last = [step.committed.id for step in turn.steps if step.committed][-1]
    assert asked > 100 and ended


@pytest.mark.laws
def test_a_trace_holds_the_acceptance_heads_prediction():
    """`1 − Π P_i` over the tokens so far, by the pair's own head; the block went on while it was small enough."""
    pair = sc.load_pair("tatoeba_en_de")
    settings = {"method": "specdecpp", "stop_threshold": 0.3, "temperature": 1.0, "max_new_tokens": 20}
    trace = sc.decode(pair, ["A dog is running on the beach."], trace=True, **settings).trace[0]
    for turn in trace.rounds:
        values = [step.stop for step in turn.steps if step.proposed]
        assert values[0] == 0.0 and values == sorted(values) and all(0.0 <= value <= 1.0 for value in values)
        assert all(value <= 0.3 for value in values[2:-1])  # at least two are drafted; the last ends the block
    assert any(step.stop for turn in trace.rounds for step in turn.steps)


def test_a_trace_round_trips_through_json_and_fixed_blocks_compare_nothing():
    for trace in decoded("token_v3", trace=True).trace[:5]:
        assert all(step.stop is None for turn in trace.rounds for step in turn.steps)
    for trace in decoded("blocks that end early", trace=True).trace[:5]:
        again = Trace.from_json(json.loads(json.dumps(trace.to_json())))
        assert again.counts() == trace.counts() and again.text == trace.text
        assert again.rounds[0].steps[0].committed.id == trace.rounds[0].steps[0].committed.id


def test_a_trace_of_the_draft_alone_has_one_source():
    out = sc.decode(PAIR, [[0]], method="autoregressive_draft", max_new_tokens=5, trace=True)
    assert {step.source for turn in out.trace[0].rounds for step in turn.steps} == {"draft"}
    with pytest.raises(ValueError, match="seq_cascade"):  # this method runs several generations
        sc.decode(PAIR, [[0]], method="seq_cascade", alpha=0.5, trace=True)


def test_notebooks_show_escaped_tokens():
    pair = sc.load_pair("tatoeba_en_de")
    out = sc.decode(pair, ["<script>alert(1)</script> Hello."], rule="token_v3", alpha=0.3, temperature=1.0, trace=True)
    shown = out.trace._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;alert(1)" in shown
    assert out.trace[0].text == out.texts[0] and shown.count('tabindex="0"') == out.trace[0].counts()["committed"]
    assert out.trace[0]._repr_html_() == shown
