"""The front door: what it refuses and when, what it warns of, and logits that are no numbers."""

import dataclasses
import warnings

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.engine.generate import compilations
from speccascade_jax.methods.build import build
from speccascade_jax.methods.settings import Level, Settings
from tests.support import conformance
from tests.support.acceptance_heads import head_for
from tests.support.front_door import LENGTH, VOCAB, Words, chain, run, tabular


@pytest.fixture(scope="module")
def pair():
    return tabular()


# --- what is refused, before anything is compiled

BAD = [
    (
        {"rule": "tokn_v3"},
        r"unknown rule 'tokn_v3': did you mean token_v3, token_v2, token_v1\? all \d+ are in speccascade_jax.RULES",
    ),
    ({"rule": "?!"}, r"unknown rule '\?!': all \d+ are in speccascade_jax.RULES"),
    ({"method": "speculativ"}, r"unknown method 'speculativ': did you mean speculative"),
    ({"bonus": "draft"}, r"unknown bonus 'draft': choose one of rule, target, none"),
    ({"accept": "strict"}, r"unknown acceptance 'strict': choose one of speculative, deferral"),
    ({"rule": "lossy", "accept": "deferral"}, r"rule 'lossy' is no deferral rule"),
    ({"alpha": None}, r"rule 'token_v3' needs alpha, say 0\.9; worth sweeping is 0\.0 … 1\.0"),
    ({"alpha": float("nan")}, r"alpha=nan is not finite; give a finite number"),
    ({"alpha": [0.1, np.nan, 0.2, 0.3] * 4}, r"alpha=nan is not finite"),
    ({"alpha": np.inf}, r"alpha=inf is not finite"),
    ({"alpha": "high"}, r"alpha='high' is not a number; give a float, or one per row"),
    ({"alpha": [0.1, 0.2]}, r"alpha has shape \(2,\), but the batch has 16 rows; give one number or \[16\]"),
    ({"rule": "lossy", "alpha": 1.0}, r"alpha=1 is outside the domain \[0, 1\) of rule 'lossy'"),
    (
        {"rule": "lossy_tuned", "alpha": [0.1, 0.2, -0.5, 0.3] * 4},
        r"alpha=-0\.5 is outside the domain \[0, 1\) of rule 'lossy_tuned'",
    ),
    ({"block_size": 0}, r"block_size=0 is not a whole number >= 1"),
    ({"block_size": 1.5}, r"block_size=1\.5 is not a whole number"),
    ({"top_p": 0.0}, r"top_p=0 \(row 0\) is outside \(0, 1\]; 1 switches it off"),
    ({"top_p": [1, 1.2, 1, 1] * 4}, r"top_p=1\.2 \(row 1\) is outside \(0, 1\]"),
    ({"temperature": -0.5}, r"temperature=-0\.5 \(row 0\) is negative; 0 is greedy decoding"),
    ({"draft_temperature": -1}, r"temperature=-1 \(row 0\) is negative"),
    ({"temperature": np.inf}, r"temperature=inf is not finite"),
    ({"top_k": -1}, r"top_k=-1 \(row 0\) is not a whole number >= 0; 0 switches it off"),
    ({"top_k": 1.5}, r"top_k=1\.5 \(row 0\) is not a whole number >= 0"),
    ({"example_ids": [1, 2, 3]}, r"example_ids have shape \(3,\), but the batch has 16 rows; give one id per row"),
    ({"stop_ids": [2, VOCAB]}, r"stop id 9 is outside the vocabulary of 9"),
    ({"stop_ids": [-1]}, r"stop id -1 is outside the vocabulary of 9"),
    ({"max_new_tokens": 10**9}, r"max_new_tokens=1000000000 is too large: give at most 131072"),
    ({"max_new_tokens": 1e308}, r"max_new_tokens=1e\+308 is too large: give at most 131072"),
    ({"block_size": 4096}, r"block_size=4096 is more than an output can hold: max_new_tokens is 14; lower it"),
    (
        {"drafters": (Level(model="draft", budget=10**9),), "block_size": None},
        r"Level\.budget=1000000000 is more than an output can hold",
    ),
    (
        {"tail": "draft", "tail_size": 10**6},
        r"tail_size=1000000 is more than an output can hold: max_new_tokens is 14; lower it",
    ),
    (
        {"drafters": (Level(model="draft", budget=2, tail="draft", tail_size=21),), "block_size": None},
        r"Level\.tail_size=21 is more than an output can hold",
    ),
    ({"block_size": True}, r"block_size=True is not a whole number"),
    ({"rule": 3}, r"rule=3 is no name: give a text, one of speccascade_jax\.RULES"),
    ({"method": ("bild",)}, r"method=\('bild',\) is no name"),
    ({"bonus": ["rule"]}, r"bonus=\['rule'\] is not a text or None"),
    ({"drafters": "draft"}, r"drafters='draft' is one value where a tuple is meant"),
    ({"stop_ids": "."}, r"stop_ids='\.' are no ids"),
    ({"stop_ids": [None]}, r"stop_ids=\[None\] are no ids"),
    ({"temperature": True}, r"temperature=True is not a number"),
    ({"max_new_tokens": 0}, r"max_new_tokens=0 is not a whole number >= 1"),
    ({"seed": -1}, r"seed=-1 is not a whole number >= 0"),
    (
        {"rule": "lossy_greedy"},
        r"rule 'lossy_greedy' is defined at temperature 0 only, got temperature=1\.0; .* use 'token_v3'",
    ),
    (
        {"rule": "lossy_greedy", "temperature": 0.0, "draft_temperature": 0.5},
        r"rule 'lossy_greedy' is defined at temperature 0 only",
    ),
    ({"prompts": []}, r"no prompts: give at least one"),
    ({"prompts": [[1], []]}, r"prompt 1 is empty; give at least one token"),
    ({"prompts": [[1, VOCAB]]}, r"prompt 0 holds id 9, outside the vocabulary of 9"),
    ({"prompts": [[1], [2, -3]]}, r"prompt 1 holds id -3, outside the vocabulary of 9"),
    ({"prompts": ["abc"]}, r"this pair has no vocabulary: give token ids"),
    ({"prompts": [[1], [1] * 33]}, r"prompt 1 has 33 tokens, over the limit of 32; .*max_prompt_length"),
]


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
    with pytest.raises(ValueError, match=r"the draft's vocabulary has 5 entries and the target's 6: .*one vocabulary"):
        sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(q))
    with pytest.raises(ValueError, match=r"the text vocabulary has 9 pieces, the models only 6 entries"):
        sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(p), vocabulary=Words())
    with pytest.raises(ValueError, match=r"TableLM needs logits of shape \[V, V\], got \(5, 6\)"):
        sc.TableLM(np.zeros((5, 6)))


@pytest.mark.parametrize("call", [sc.decode, sc.stream])
def test_the_name_of_a_pair_is_no_pair(call):
    with pytest.raises(
        ValueError, match=r"pair='tatoeba_en_de' is no loaded pair: give sc.load_pair\('tatoeba_en_de'\)"
    ):
        call("tatoeba_en_de", ["Hello."])


def test_what_holds_parameters_is_shown_in_a_line(pair):
    head = head_for(pair)
    whole = dataclasses.replace(pair, head=head, name="two", others={"small": pair.draft})
    built = build(pair, Settings())
    texts = [repr(each) for each in (pair, whole, pair.draft, head, built)]
    assert all(len(text) < 700 and "\n" not in text and "Array" not in text for text in texts), texts
    assert texts[2] == "BoundModel(Table, 81 parameters)"
    assert texts[1] == f"Pair('two': target={texts[2]}, draft={texts[2]}, small={texts[2]}, acceptance head)"


@pytest.mark.parametrize(("broken", "value"), [("draft", np.nan), ("target", np.nan), ("target", np.inf)])
def test_a_law_of_nan_logits_names_the_model(broken, value):
    logits = dict(zip(("draft", "target"), conformance.tables(5, seed=0), strict=True))
    logits[broken] = np.array(logits[broken])
    logits[broken][3, 1] = value
    with pytest.raises(FloatingPointError, match=rf"the {broken} model's logits hold NaN or infinity, .* at \[3\]"):
        sc.target_law("chow", logits["draft"], logits["target"], alpha=0.1)


def test_unknown_pair_names_the_remedy():
    with pytest.raises(ValueError, match=r"no pair 'tatoeba': .*or give a directory with vocabulary.model"):
        sc.load_pair("tatoeba")


def test_a_damaged_pair_names_what_it_lacks(tmp_path):
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
    with pytest.raises(ValueError, match=r"q_logits have shape \(4, 5\) and p_logits \(5, 5\); they must agree"):
        sc.target_law("chow", q[:4], p, alpha=0.1)


def test_an_alpha_beyond_the_useful_range_is_warned_of(pair):
    """`token_v3` at 2 defers every token that the target does not name: a slip, and no error."""
    with pytest.warns(UserWarning, match=r"alpha=2 of 'token_v3' lies outside 0 … 1: beyond it hardly anything"):
        sc.decode(pair, [[1], [2]], rule="token_v3", alpha=[0.5, 2.0], max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.decode(pair, [[1]], rule="token_v3", alpha=1.0, max_new_tokens=2)


# --- logits that are no numbers


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_nan_logits_name_model_row_and_position(broken, value):
    healthy, damaged = sc.TableLM(chain(None)), sc.TableLM(chain(8, value))
    models = {"target": healthy, "draft": healthy} | {broken: damaged}
    # row 1: 2, 5 | 6, 7, 8, then the damaged row: positions 0 and 1 are the prompt's, 5 is the first without a law
    said = f"the {broken} model gave NaN or infinite logits in row 1 at position 5 of its decoder sequence"
    prompts, pair = [[0], [2, 5], [0, 0], [0]] * 4, sc.Pair(**models)
    with pytest.warns(UserWarning, match=rf"4 of 16 rows failed and end early \(DecodeOutput.failed\): {said}"):
        out = run(pair, prompts, temperature=0.0)
    assert [(each.row, each.model, each.position) for each in out.failed] == [(r, broken, 5) for r in (1, 5, 9, 13)]
    well = np.delete(np.arange(16), [1, 5, 9, 13])
    fine = run(sc.Pair(target=healthy, draft=healthy), prompts, temperature=0.0)
    assert not fine.failed
    np.testing.assert_array_equal(out.tokens[well], fine.tokens[well])
    np.testing.assert_array_equal(out.lengths[well], fine.lengths[well])
    assert out.tokens[1, : out.lengths[1]].tolist() == [6, 7, 8][: out.lengths[1]]  # whole rounds before it
    # failed rows are in no measure, whatever they wrote before
    with pytest.warns(UserWarning, match="4 of 16 rows"):
        out = run(pair, prompts, temperature=0.0, block_size=1)
    assert out.tokens[1, : out.lengths[1]].tolist() == [6, 7]
    assert out.stats["committed"] == out.lengths[well].sum() == out.lengths.sum() - 4 * 2
    message = f"the {broken} model .* in row 0 at position 5 of its decoder sequence; check its weights"
    for alone in ([[2, 5]], [[2, 5]] * 16):
        with pytest.raises(FloatingPointError, match=message):
            run(pair, alone, temperature=0.0)


def test_nan_logits_that_no_row_meets_are_harmless():
    damaged = sc.TableLM(chain(6))
    out = run(sc.Pair(target=damaged, draft=damaged), [[0], [7, 0], [0], [0]] * 4, temperature=0.0)
    assert (out.tokens == 0).all() and (out.lengths == LENGTH).all()


def test_masked_entries_are_no_failure():
    table = chain(None)
    table[:, 8] = -np.inf
    out = run(sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table)), temperature=1.0)
    assert (out.tokens != 8).all()
