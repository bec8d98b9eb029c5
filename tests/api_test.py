"""Tests of the public functions: outputs, statistics that equal a recount, errors and warnings."""

import dataclasses
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.engine.generate import Failure, compilations, generate
from speccascade_jax.methods.build import assemble, build
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import conformance, reference
from tests.support.acceptance_heads import head_for
from tests.support.front_door import LENGTH, PROMPTS, ROWS, STOP, VOCAB, Words, chain, run, tabular


@pytest.fixture(scope="module")
def pair():
    return tabular()


# --- outputs


def test_decode_works_on_tabular_models():
    q_logits, p_logits = conformance.tables(VOCAB, seed=0)
    pair = sc.Pair(target=sc.TableLM(p_logits), draft=sc.TableLM(q_logits))
    out = sc.decode(
        pair, PROMPTS, rule="token_v3", alpha=0.3, block_size=3, temperature=0.0, top_p=1.0, top_k=0,
        draft_temperature=None, max_new_tokens=LENGTH, seed=0, bonus="rule", example_ids=None,
    )  # fmt: skip
    assert out.tokens.shape == (ROWS, LENGTH) and out.tokens.dtype == np.int32
    assert out.texts is None and (out.lengths == LENGTH).all()  # without a vocabulary, no stop id unless one is passed
    law = reference.transitions("token_v3", q_logits, p_logits, 0.3, 0.0)
    for prompt, row in zip(PROMPTS, out.tokens, strict=True):
        for before, after in zip([prompt[-1], *row], row, strict=False):
            assert law[before].argmax() == after
    pi = sc.target_law("opt", q_logits, p_logits, alpha=0.2, temperature=0.7, top_p=0.9, top_k=0)
    expected = reference.transitions("opt", q_logits, p_logits, 0.2, 0.7, 0.9)
    assert pi.dtype == np.float32
    np.testing.assert_allclose(pi, expected, atol=1e-5)


def test_prompts_can_be_an_array_a_list_or_a_single_prompt(pair):
    array = np.array([[1, 2], [3, 0], [5, 5], [6, 7]] * 4)
    np.testing.assert_array_equal(run(pair, array).tokens, run(pair, array.tolist()).tokens)
    single = run(pair, [3, 0], example_ids=[1])
    np.testing.assert_array_equal(single.tokens, run(pair, array).tokens[1:2])


def test_texts_are_encoded_and_outputs_decoded():
    pair = sc.Pair(*(sc.TableLM(t) for t in conformance.tables(VOCAB, seed=0)), vocabulary=Words())
    out = run(pair, ["cd", "f", "iii", "aa"] * 4, stop_ids=None)
    # the output's text continues the prompt
    assert np.asarray(make_prompt(pair, ["cd"]).tokens)[0, :3].tolist() == [2, 3, 0]
    for text, row, length in zip(out.texts, out.tokens, out.lengths, strict=True):
        assert text == Words().decode(row[:length].tolist())
        assert length == LENGTH or row[length - 1] == Words.eos_id  # by default, the vocabulary's stop id ends a row


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


def test_autoregressive_methods_equal_each_model_alone(pair):
    tables = {"autoregressive": pair.target.params, "autoregressive_draft": pair.draft.params}
    for method, table in tables.items():
        out = run(pair, method=method, temperature=0.0, rule="spec_decode", alpha=None)
        best = np.asarray(table).argmax(-1)
        for prompt, row, length in zip(PROMPTS, out.tokens, out.lengths, strict=True):
            np.testing.assert_array_equal(row[:length], best[[prompt[-1], *row[: length - 1]]])
        assert out.stats["inconclusive"] and out.stats["acceptance_rate"] is None
        calls = {"autoregressive": "target_calls", "autoregressive_draft": "draft_steps"}
        counted = {name: out.stats["committed"] if name == calls[method] else 0 for name in calls.values()}
        assert {name: out.stats[name] for name in counted} == counted
        assert out.stats["draft_share"] == (method == "autoregressive_draft")


def test_max_new_tokens_is_respected_inside_a_block(pair):
    out = run(pair, max_new_tokens=2, stop_ids=[], temperature=0.0, alpha=1.0)
    assert out.tokens.shape == (ROWS, 2) and (out.lengths == 2).all()
    assert out.stats["rows"]["drafted"].tolist() == [2] * ROWS  # no more drafts than fit into max_new_tokens


# --- one value per row


def test_values_per_row_equal_separate_calls(pair):
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


def test_seed_and_example_ids_determine_the_random_bits(pair):
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
    """Returns everything about a round that a recount needs."""
    names = ("active", "num_kept", "rejected", "tokens", "num_new", "source", "start")
    draft = {"drafts": turn.draft.tokens, "drafted": turn.draft.length, "steps": turn.draft.steps}
    return draft | {name: getattr(turn, name) for name in names}


def recount(record, rounds, row, bonus):
    """Counts the counters of one row, one token at a time."""
    counts = dict.fromkeys(("rounds", "drafted", "examined", "kept", "rejected", "committed", "discarded", "bonus"), 0)
    counts["steps"], output = 0, []
    for r in range(rounds):
        turn = {name: values[r, row] for name, values in record.items()}
        if not turn["active"]:
            assert turn["num_new"] == 0
            continue
        drafts, new = turn["drafts"][: turn["drafted"]].tolist(), turn["tokens"][: turn["num_new"]].tolist()
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
        # rejected drafts, and the target's own token if it drew one that was not committed
        target_drew = bonus != "none" or bool(turn["rejected"])
        counts["discarded"] += len(drafts) - len(from_draft) + (target_drew and len(new) == len(from_draft))
        counts["steps"] += int(turn["steps"])
        assert turn["start"] - len(output) == record["start"][0, row]
        output += new
    return counts, output


@pytest.mark.parametrize(("rule", "bonus"), [("token_v3", "rule"), ("spec_decode", "target"), ("token_v2", "none")])
def test_statistics_equal_a_recount_of_the_rounds(pair, rule, bonus):
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
    """A lossless rule needs no distribution at the bonus position, which saves a draft pass.

    After a fully kept block, the next round makes up for this pass.
    """
    same = sc.TableLM(chain(None))
    pair = sc.Pair(target=same, draft=same)
    lossless = run(pair, [[5]] * ROWS, rule="spec_decode", alpha=None, temperature=0.0)
    # three blocks of 3 are kept with their bonus, then 2 of 14 tokens remain; later rounds feed a missed token
    assert lossless.stats["rows"]["rounds"].tolist() == [4] * ROWS
    assert lossless.stats["rows"]["draft_steps"].tolist() == [3 + 4 + 4 + 3] * ROWS
    reads_q = run(pair, [[5]] * ROWS, temperature=0.0)
    # the last block ends at the limit: no bonus, and no pass for its distribution
    assert reads_q.stats["rows"]["draft_steps"].tolist() == [4 + 4 + 4 + 2] * ROWS


def test_deferral_rate_is_the_mean_over_committed_positions(pair):
    """Compares with `η` computed in NumPy from the output alone."""
    q, p = (np.asarray(x.params) for x in (pair.draft, pair.target))
    out = run(pair, stop_ids=[], seed=8)
    eta = []
    for prompt, row in zip(PROMPTS, out.tokens, strict=True):
        for before in [prompt[-1], *row[:-1]]:
            r = reference.decision("token_v3", q[before], p[before], 0.3, 1.0)
            eta.append((r * reference.scale(q[before], 1.0)).sum())
    assert out.stats["deferral_rate"] == pytest.approx(np.mean(eta), abs=1e-5)
    assert jnp.asarray(out.stats["rows"]["decided"]).sum() == ROWS * LENGTH


# --- refusals, before anything is compiled

BAD = [
    ({"rule": "tokn_v3"},
     r"unknown rule 'tokn_v3': did you mean token_v3, token_v2, token_v1\? all \d+ are in speccascade_jax.RULES"),
    ({"rule": "?!"}, r"unknown rule '\?!': all \d+ are in speccascade_jax.RULES"),
    ({"method": "speculativ"}, r"unknown method 'speculativ': did you mean speculative"),
    ({"bonus": "draft"}, r"unknown bonus 'draft': choose one of rule, target, none"),
    ({"accept": "strict"}, r"unknown acceptance 'strict': choose one of speculative, deferral"),
    ({"rule": "lossy", "accept": "deferral"}, r"rule 'lossy' is not a deferral rule"),
    ({"alpha": None}, r"rule 'token_v3' needs alpha, for example 0\.9; the useful range is 0\.0 … 1\.0"),
    ({"alpha": float("nan")}, r"alpha=nan is not finite; give a finite number"),
    ({"alpha": [0.1, np.nan, 0.2, 0.3] * 4}, r"alpha=nan is not finite"),
    ({"alpha": np.inf}, r"alpha=inf is not finite"),
    ({"alpha": "high"}, r"alpha='high' is not a number; give a float, or one per row"),
    ({"alpha": [0.1, 0.2]}, r"alpha has shape \(2,\), but the batch has 16 rows; give one number or \[16\]"),
    ({"rule": "lossy", "alpha": 1.0}, r"alpha=1 is outside the domain \[0, 1\) of rule 'lossy'"),
    ({"rule": "lossy_tuned", "alpha": [0.1, 0.2, -0.5, 0.3] * 4},
     r"alpha=-0\.5 is outside the domain \[0, 1\) of rule 'lossy_tuned'"),
    ({"block_size": 0}, r"block_size=0 is not a whole number >= 1"),
    ({"block_size": 1.5}, r"block_size=1\.5 is not a whole number"),
    ({"top_p": 0.0}, r"top_p=0 \(row 0\) is outside \(0, 1\]; 1 switches it off"),
    ({"top_p": [1, 1.2, 1, 1] * 4}, r"top_p=1\.2 \(row 1\) is outside \(0, 1\]"),
    ({"temperature": -0.5}, r"temperature=-0\.5 \(row 0\) is negative; give 0 for greedy decoding"),
    ({"draft_temperature": -1}, r"temperature=-1 \(row 0\) is negative"),
    ({"temperature": np.inf}, r"temperature=inf is not finite"),
    ({"top_k": -1}, r"top_k=-1 \(row 0\) is not a whole number >= 0; 0 switches it off"),
    ({"top_k": 1.5}, r"top_k=1\.5 \(row 0\) is not a whole number >= 0"),
    ({"example_ids": [1, 2, 3]}, r"example_ids have shape \(3,\), but the batch has 16 rows; give one id per row"),
    ({"stop_ids": [2, VOCAB]}, r"stop id 9 is outside the vocabulary of 9"),
    ({"stop_ids": [-1]}, r"stop id -1 is outside the vocabulary of 9"),
    ({"max_new_tokens": 10**9}, r"max_new_tokens=1000000000 is too large: give at most 131072"),
    ({"max_new_tokens": 1e308}, r"max_new_tokens=1e\+308 is too large: give at most 131072"),
    ({"block_size": 4096}, r"block_size=4096 is longer than an output: max_new_tokens is 14; lower "),
    ({"drafters": (Level(model="draft", budget=10**9),), "block_size": None},
     r"Level\.budget=1000000000 is longer than an output"),
    ({"tail": "draft", "tail_size": 10**6},
     r"tail_size=1000000 is longer than an output: max_new_tokens is 14; lower "),
    ({"drafters": (Level(model="draft", budget=2, tail="draft", tail_size=21),), "block_size": None},
     r"Level\.tail_size=21 is longer than an output"),
    ({"block_size": True}, r"block_size=True is not a whole number"),
    ({"rule": 3}, r"rule=3 is not a name: give a string, one of speccascade_jax\.RULES"),
    ({"method": ("bild",)}, r"method=\('bild',\) is not a name"),
    ({"bonus": ["rule"]}, r"bonus=\['rule'\] is not a text or None"),
    ({"drafters": "draft"}, r"drafters='draft' is one value where a tuple is meant"),
    ({"stop_ids": "."}, r"stop_ids='\.' are not ids"),
    ({"stop_ids": [None]}, r"stop_ids=\[None\] are not ids"),
    ({"temperature": True}, r"temperature=True is not a number"),
    ({"max_new_tokens": 0}, r"max_new_tokens=0 is not a whole number >= 1"),
    ({"seed": -1}, r"seed=-1 is not a whole number >= 0"),
    ({"rule": "lossy_greedy"},
     r"rule 'lossy_greedy' is defined at temperature 0 only, got temperature=1\.0; .* use 'token_v3'"),
    ({"rule": "lossy_greedy", "temperature": 0.0, "draft_temperature": 0.5},
     r"rule 'lossy_greedy' is defined at temperature 0 only"),
    ({"prompts": []}, r"no prompts: give at least one"),
    ({"prompts": [[1], []]}, r"prompt 1 is empty; give at least one token"),
    ({"prompts": [[1, VOCAB]]}, r"prompt 0 holds id 9, outside the vocabulary of 9"),
    ({"prompts": [[1], [2, -3]]}, r"prompt 1 holds id -3, outside the vocabulary of 9"),
    ({"prompts": ["abc"]}, r"this pair has no vocabulary: give token ids"),
    ({"prompts": [[1], [1] * 33]}, r"prompt 1 has 33 tokens, over the limit of 32; .*max_prompt_length"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_refused_before_anything_is_compiled(changes, message):
    q, p = conformance.tables(VOCAB, seed=0)
    pair = sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(q), max_prompt_length=32)
    compiled = compilations()
    with pytest.raises(ValueError, match=message):
        run(pair, **changes)
    assert compilations() == compiled


def test_vocabularies_must_match():
    (q, _), (_, p) = conformance.tables(5, seed=0), conformance.tables(6, seed=0)
    with pytest.raises(ValueError, match=r"the draft's vocabulary has 5 entries and the target's 6: .*same vocabulary"):
        sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(q))
    with pytest.raises(ValueError, match=r"the text vocabulary has 9 pieces, more than the 6 rows of the models"):
        sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(p), vocabulary=Words())
    with pytest.raises(ValueError, match=r"TableLM needs logits of shape \[V, V\], got \(5, 6\)"):
        sc.TableLM(np.zeros((5, 6)))


@pytest.mark.parametrize("call", [sc.decode, sc.stream])
def test_the_name_of_a_pair_is_refused_in_place_of_a_pair(call):
    with pytest.raises(
        ValueError, match=r"pair='tatoeba_en_de' is not a loaded pair: give sc.load_pair\('tatoeba_en_de'\)"
    ):
        call("tatoeba_en_de", ["Hello."])


def test_objects_with_parameters_print_in_one_line(pair):
    head = head_for(pair)
    whole = dataclasses.replace(pair, head=head, name="two", others={"small": pair.draft})
    built = build(pair, Settings())
    texts = [repr(holder) for holder in (pair, whole, pair.draft, head, built)]
    assert all(len(text) < 700 and "\n" not in text and "Array" not in text for text in texts), texts
    assert texts[2] == "BoundModel(Table, 81 parameters)"
    assert texts[1] == f"Pair('two': target={texts[2]}, draft={texts[2]}, small={texts[2]}, acceptance head)"


def test_an_output_prints_its_numbers_and_the_first_texts():
    pair = sc.Pair(*(sc.TableLM(t) for t in conformance.tables(VOCAB, seed=0)), vocabulary=Words())
    out = run(pair, ["cd", "f", "iii", "aa"] * 4, stop_ids=None)
    assert len(out.texts) == 16
    first, *rows, last = repr(dataclasses.replace(out, texts=["x" * 1000, *out.texts[1:]])).splitlines()
    numbers = re.fullmatch(
        r"DecodeOutput of 16 rows: (\d+) tokens, (\d\.\d\d) per target call, (\d+)% of drafts accepted, "
        r"(\d+) target calls, (\d+) draft steps", first,
    ).groups()  # fmt: skip
    counted = [out.stats[name] for name in ("committed", "target_calls", "draft_steps")]
    assert [int(numbers[n]) for n in (0, 3, 4)] == counted and counted[0] == out.lengths.sum()
    assert float(numbers[1]) == pytest.approx(counted[0] / counted[1], abs=0.006)
    assert int(numbers[2]) == round(100 * out.stats["kept"] / out.stats["examined"])
    assert len(rows) == 5 and last == "  … and 11 more"
    assert rows[0].startswith("  'xxx") and len(rows[0]) == 80 and rows[0].endswith("…")
    assert rows[1] == f"  {out.texts[1]!r}"


def test_an_output_without_texts_prints_its_tokens_and_names_failed_rows(pair):
    out = run(pair, [3, 0])
    assert repr(out).splitlines()[1] == f"  {out.tokens[0, : out.lengths[0]].tolist()}"
    broken = dataclasses.replace(out, failed=(Failure(row=0, position=3, model="draft"),))
    assert repr(broken).startswith("DecodeOutput of 1 row: 1 failed, ")
    alone = repr(sc.decode(pair, [[3, 0]], method="autoregressive", max_new_tokens=LENGTH))
    assert "None" not in alone and "accepted" not in alone and "tokens, 1.00 per target call" in alone


@pytest.mark.parametrize(("broken", "value"), [("draft", np.nan), ("target", np.nan), ("target", np.inf)])
def test_target_law_names_the_model_of_nan_logits(broken, value):
    logits = dict(zip(("draft", "target"), conformance.tables(5, seed=0), strict=True))
    logits[broken] = np.array(logits[broken])
    logits[broken][3, 1] = value
    with pytest.raises(FloatingPointError, match=rf"the {broken} model's logits have NaN or infinity, .* at \[3\]"):
        sc.target_law("chow", logits["draft"], logits["target"], alpha=0.1)


def test_an_error_about_an_unknown_pair_names_the_remedy():
    with pytest.raises(ValueError, match=r"no pair 'tatoeba': .*give one of them, a directory with vocabulary.model"):
        sc.load_pair("tatoeba")


def test_an_error_about_a_damaged_pair_names_the_missing_part(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(ValueError, match=r"lacks 'vocabulary.model'; it needs vocabulary.model, target/ and draft/"):
        sc.load_pair(tmp_path)


def test_target_law_refuses_what_decode_refuses():
    q, p = conformance.tables(5, seed=0)
    for arguments, message in (
        ({"rule": "chow"}, "rule 'chow' needs alpha"),
        ({"rule": "lossy", "alpha": 1.0}, "outside the domain"),
        ({"rule": "chow", "alpha": np.nan}, "alpha=nan is not finite"),
        ({"rule": "chow", "alpha": 0.1, "top_p": 0}, "top_p=0 "),
        ({"rule": "lossy_greedy", "alpha": 0.1}, "temperature 0 only"),
        ({"rule": "chaw", "alpha": 0.1}, "did you mean chow"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.target_law(q_logits=q, p_logits=p, **arguments)
    with pytest.raises(ValueError, match=r"q_logits have shape \(4, 5\) and p_logits \(5, 5\): pass equal shapes"):
        sc.target_law("chow", q[:4], p, alpha=0.1)


def test_an_alpha_beyond_the_useful_range_gives_a_warning(pair):
    """`token_v3` at α = 2 defers every token but the target's best, which is allowed but probably a mistake."""
    with pytest.warns(UserWarning, match=r"alpha=2 of 'token_v3' lies outside 0 … 1: beyond it hardly anything"):
        sc.decode(pair, [[1], [2]], rule="token_v3", alpha=[0.5, 2.0], max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.decode(pair, [[1]], rule="token_v3", alpha=1.0, max_new_tokens=2)


# --- NaN logits


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_an_error_about_nan_logits_names_model_row_and_position(broken, value):
    healthy, damaged = sc.TableLM(chain(None)), sc.TableLM(chain(8, value))
    models = {"target": healthy, "draft": healthy} | {broken: damaged}
    # row 1: 2, 5 | 6, 7, 8, then the damaged row: positions 0 and 1 are the prompt's, 5 is the first failure
    said = f"the {broken} model gave NaN or infinite logits in row 1 at position 5 of its decoder sequence"
    prompts, pair = [[0], [2, 5], [0, 0], [0]] * 4, sc.Pair(**models)
    with pytest.warns(UserWarning, match=rf"4 of 16 rows failed and end early \(DecodeOutput.failed\): {said}"):
        out = run(pair, prompts, temperature=0.0)
    assert [(failure.row, failure.model, failure.position) for failure in out.failed] == [
        (r, broken, 5) for r in (1, 5, 9, 13)
    ]
    well = np.delete(np.arange(16), [1, 5, 9, 13])
    fine = run(sc.Pair(target=healthy, draft=healthy), prompts, temperature=0.0)
    assert not fine.failed
    np.testing.assert_array_equal(out.tokens[well], fine.tokens[well])
    np.testing.assert_array_equal(out.lengths[well], fine.lengths[well])
    # a failed row keeps only whole rounds before the failure
    assert out.tokens[1, : out.lengths[1]].tolist() == [6, 7, 8][: out.lengths[1]]
    # no measure counts failed rows, not even their earlier tokens
    with pytest.warns(UserWarning, match="4 of 16 rows"):
        out = run(pair, prompts, temperature=0.0, block_size=1)
    assert out.tokens[1, : out.lengths[1]].tolist() == [6, 7]
    assert out.stats["committed"] == out.lengths[well].sum() == out.lengths.sum() - 4 * 2
    message = f"the {broken} model .* in row 0 at position 5 of its decoder sequence; check its weights"
    for alone in ([[2, 5]], [[2, 5]] * 16):
        with pytest.raises(FloatingPointError, match=message):
            run(pair, alone, temperature=0.0)


def test_nan_logits_that_no_row_reads_are_harmless():
    damaged = sc.TableLM(chain(6))
    out = run(sc.Pair(target=damaged, draft=damaged), [[0], [7, 0], [0], [0]] * 4, temperature=0.0)
    assert (out.tokens == 0).all() and (out.lengths == LENGTH).all()


def test_masked_entries_are_not_a_failure():
    table = chain(None)
    table[:, 8] = -np.inf
    out = run(sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table)), temperature=1.0)
    assert (out.tokens != 8).all()
