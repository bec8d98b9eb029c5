"""The front door: what it gives back, and that its statistics are what happened."""

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import conformance, reference
from tests.support.front_door import LENGTH, PROMPTS, ROWS, STOP, VOCAB, Words, chain, run, tabular


@pytest.fixture(scope="module")
def pair():
    return tabular()


# --- what comes back


def test_front_door_on_tabular_models():
    q_logits, p_logits = conformance.tables(VOCAB, seed=0)
    pair = sc.Pair(target=sc.TableLM(p_logits), draft=sc.TableLM(q_logits))
    out = sc.decode(
        pair, PROMPTS, rule="token_v3", alpha=0.3, block_size=3, temperature=0.0, top_p=1.0, top_k=0,
        draft_temperature=None, max_new_tokens=LENGTH, seed=0, bonus="rule", example_ids=None,
    )  # fmt: skip
    assert out.tokens.shape == (ROWS, LENGTH) and out.tokens.dtype == np.int32
    assert out.texts is None and (out.lengths == LENGTH).all()  # no stop id unless one is named
    law = reference.transitions("token_v3", q_logits, p_logits, 0.3, 0.0)
    for prompt, row in zip(PROMPTS, out.tokens, strict=True):
        for before, after in zip([prompt[-1], *row], row, strict=False):
            assert law[before].argmax() == after
    found = sc.target_law("opt", q_logits, p_logits, alpha=0.2, temperature=0.7, top_p=0.9, top_k=0)
    expected = reference.transitions("opt", q_logits, p_logits, 0.2, 0.7, 0.9)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_as_array_list_and_single_prompt(pair):
    array = np.array([[1, 2], [3, 0], [5, 5], [6, 7]] * 4)
    np.testing.assert_array_equal(run(pair, array).tokens, run(pair, array.tolist()).tokens)
    single = run(pair, [3, 0], example_ids=[1])
    np.testing.assert_array_equal(single.tokens, run(pair, array).tokens[1:2])


def test_texts_go_in_and_come_out():
    pair = sc.Pair(*(sc.TableLM(t) for t in conformance.tables(VOCAB, seed=0)), vocabulary=Words())
    out = run(pair, ["cd", "f", "iii", "aa"] * 4, stop_ids=None)
    assert np.asarray(make_prompt(pair, ["cd"]).tokens)[0, :3].tolist() == [2, 3, 0]  # what is written goes on
    for text, row, length in zip(out.texts, out.tokens, out.lengths, strict=True):
        assert text == Words().decode(row[:length].tolist())
        assert length == LENGTH or row[length - 1] == Words.eos_id  # the vocabulary's stop id is the default


@pytest.mark.parametrize("method", ["speculative", "autoregressive", "autoregressive_draft"])
def test_stop_ids_end_rows_and_are_committed(pair, method):
    out = run(pair, method=method, seed=3)
    stopped = 0
    for row, length in zip(out.tokens, out.lengths, strict=True):
        assert 1 <= length <= LENGTH and (row[length:] == 0).all()
        assert STOP not in row[: length - 1]
        assert length == LENGTH or row[length - 1] == STOP
        stopped += length < LENGTH
    assert stopped > 0
    assert out.stats["committed"] == out.lengths.sum()


def test_both_ends_are_the_models_alone(pair):
    tables = {"autoregressive": pair.target.params, "autoregressive_draft": pair.draft.params}
    for method, table in tables.items():
        out = run(pair, method=method, temperature=0.0, rule="spec_decode", alpha=None)
        best = np.asarray(table).argmax(-1)
        for prompt, row, length in zip(PROMPTS, out.tokens, out.lengths, strict=True):
            np.testing.assert_array_equal(row[:length], best[[prompt[-1], *row[: length - 1]]])
        assert out.stats["inconclusive"] and out.stats["acceptance_rate"] is None
        calls = {"autoregressive": "target_calls", "autoregressive_draft": "draft_steps"}
        assert {name: out.stats[name] for name in calls.values()} == {
            name: out.stats["committed"] if name == calls[method] else 0 for name in calls.values()
        }
        assert out.stats["draft_share"] == (method == "autoregressive_draft")


def test_max_new_tokens_is_respected_inside_a_block(pair):
    out = run(pair, max_new_tokens=2, stop_ids=[], temperature=0.0, alpha=1.0)
    assert out.tokens.shape == (ROWS, 2) and (out.lengths == 2).all()
    assert out.stats["rows"]["drafted"].tolist() == [2] * ROWS  # no draft beyond what fits


# --- one value per row


def test_a_value_per_row_is_the_separate_call(pair):
    alpha, temperature, top_p = np.linspace(0, 1, ROWS), [0.0, 0.5, 1.0, 1.5] * 4, [1.0, 0.9, 0.8, 1.0] * 4
    ids = np.random.default_rng(0).permutation(100)[:ROWS]
    together = run(pair, alpha=alpha, temperature=temperature, top_p=top_p, example_ids=ids)
    compiled = compilations()
    for row in range(ROWS):
        alone = run(pair, alpha=alpha[row], temperature=temperature[row], top_p=top_p[row], example_ids=ids)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[row])
        for name, counts in together.stats["rows"].items():
            np.testing.assert_array_equal(counts[row], alone.stats["rows"][name][row], err_msg=name)
    assert compilations() == compiled
    assert len({tuple(row) for row in together.tokens}) > ROWS // 2


def test_seed_and_example_ids_decide_the_bits(pair):
    same = [PROMPTS[0]] * ROWS
    first = run(pair, same)
    assert len({tuple(row) for row in first.tokens}) > 1
    np.testing.assert_array_equal(first.tokens, run(pair, same).tokens)
    assert (first.tokens != run(pair, same, seed=1).tokens).any()
    twins = run(pair, same, example_ids=[7, 7, 8, 8] * 4).tokens
    np.testing.assert_array_equal(twins[0], twins[1])
    np.testing.assert_array_equal(twins[2], twins[3])


# --- statistics


def trace(turn):
    """Everything about a round that a recount needs."""
    return {
        "active": turn.active,
        "drafts": turn.draft.tokens,
        "drafted": turn.draft.length,
        "steps": turn.draft.steps,
        "kept": turn.num_kept,
        "rejected": turn.rejected,
        "tokens": turn.tokens,
        "new": turn.num_new,
        "source": turn.source,
        "start": turn.start,
    }


def recount(record, rounds, row, bonus):
    """The counters of one row, one token at a time."""
    counts = dict.fromkeys(("rounds", "drafted", "examined", "kept", "rejected", "committed", "discarded", "bonus"), 0)
    counts["steps"], output = 0, []
    for r in range(rounds):
        turn = {name: values[r, row] for name, values in record.items()}
        if not turn["active"]:
            assert turn["new"] == 0
            continue
        drafts, new = turn["drafts"][: turn["drafted"]].tolist(), turn["tokens"][: turn["new"]].tolist()
        from_draft = [t for t, s in zip(new, turn["source"], strict=False) if s == 0]
        assert from_draft == drafts[: len(from_draft)] == new[: len(from_draft)]
        assert len(new) - len(from_draft) <= 1
        counts["rounds"] += 1
        counts["drafted"] += len(drafts)
        counts["kept"] += len(from_draft)
        counts["rejected"] += bool(turn["rejected"])
        counts["examined"] += len(from_draft) + bool(turn["rejected"])
        counts["bonus"] += len(new) - len(from_draft) - bool(turn["rejected"])
        counts["committed"] += len(new)
        # drafts that did not make it, and the target's own token where it drew one that did not
        own = bonus != "none" or bool(turn["rejected"])
        counts["discarded"] += len(drafts) - len(from_draft) + (own and len(new) == len(from_draft))
        counts["steps"] += int(turn["steps"])
        assert turn["start"] - len(output) == record["start"][0, row]
        output += new
    return counts, output


@pytest.mark.parametrize(("rule", "bonus"), [("token_v3", "rule"), ("spec_decode", "target"), ("token_v2", "none")])
def test_statistics_are_a_recount_of_the_rounds(pair, rule, bonus):
    engine, params = assemble(pair, rule=rule, block_size=3, bonus=bonus, stop_ids=[STOP])
    controls = make_controls(ROWS, alpha=np.linspace(0, 1, ROWS), temperature=[0.0, 0.7, 1.0, 1.3] * 4)
    out = generate(
        engine, params, make_prompt(pair, PROMPTS), 5, controls=controls, max_new_tokens=LENGTH, record=trace
    )
    record, stats = {k: np.asarray(v) for k, v in out.record.items()}, out.stats
    for row in range(ROWS):
        counts, output = recount(record, int(out.num_rounds), row, bonus)
        assert output == np.asarray(out.tokens)[row, : int(out.lengths[row])].tolist()
        for name in ("rounds", "drafted", "examined", "kept", "rejected", "committed"):
            assert counts[name] == int(getattr(stats, name)[row]), name
        assert counts["rounds"] == int(stats.target_calls[row])
        assert counts["steps"] == int(stats.draft_steps[row])
        assert counts["examined"] == counts["kept"] + counts["rejected"]
        assert int(stats.examined_at[row].sum()) == counts["examined"]
        assert int(stats.kept_at[row].sum()) == counts["kept"]
        if bonus != "none":
            assert counts["drafted"] + counts["rounds"] == counts["committed"] + counts["discarded"]
        else:
            assert counts["bonus"] == 0 and counts["discarded"] == counts["drafted"] - counts["kept"]
        assert counts["discarded"] == int(stats.discarded[row])
    measured = sc.api.collect(pair, out).stats
    assert measured["acceptance_rate"] + measured["rejection_rate"] == pytest.approx(1.0)
    assert 0 < measured["rejected"] < measured["examined"]


def test_draft_steps_count_every_forward_pass():
    """A lossless rule needs no law at the bonus position, but the pass it saves is made up for after a full block."""
    same = sc.TableLM(chain(None))
    pair = sc.Pair(target=same, draft=same)
    lossless = run(pair, [[5]] * ROWS, rule="spec_decode", alpha=None, temperature=0.0)
    # three blocks of 3 are kept with their bonus, then 2 of the 14 tokens are left; later rounds feed a missed token
    assert lossless.stats["rows"]["rounds"].tolist() == [4] * ROWS
    assert lossless.stats["rows"]["draft_steps"].tolist() == [3 + 4 + 4 + 3] * ROWS
    reads_q = run(pair, [[5]] * ROWS, temperature=0.0)
    # the last block ends at the limit: no bonus, and no pass for its law
    assert reads_q.stats["rows"]["draft_steps"].tolist() == [4 + 4 + 4 + 2] * ROWS


def test_deferral_rate_is_the_mean_over_committed_positions(pair):
    """Against `η` computed in NumPy from the output alone."""
    q, p = (np.asarray(x.params) for x in (pair.draft, pair.target))
    out = run(pair, stop_ids=[], seed=8)
    eta = []
    for prompt, row in zip(PROMPTS, out.tokens, strict=True):
        for before in [prompt[-1], *row[:-1]]:
            r = reference.decision("token_v3", q[before], p[before], 0.3, 1.0)
            eta.append((r * reference.scale(q[before], 1.0)).sum())
    assert out.stats["deferral_rate"] == pytest.approx(np.mean(eta), abs=1e-5)
    assert jnp.asarray(out.stats["rows"]["decided"]).sum() == ROWS * LENGTH
