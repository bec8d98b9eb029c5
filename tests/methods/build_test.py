"""Tests that a call's decoder is built once, and again if it would be different."""

import contextlib
import dataclasses
import inspect
from pathlib import Path

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods import build as building
from speccascade_jax.methods import method as methods
from speccascade_jax.methods import settings_dict
from speccascade_jax.methods.build import decoder_for
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.methods.table import METHODS
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.rules.deferral import RULES
from tests.support import conformance
from tests.support.settings_dict import source

VOCAB = 9


@pytest.fixture
def pair():
    return conformance.tabular_pair(*conformance.tables(VOCAB, seed=0))


def test_equal_calls_share_a_decoder_and_its_controls(pair):
    settings = {"rule": "token_v3", "alpha": 0.3, "block_size": 3, "temperature": 1.0}
    first = decoder_for(pair, "decode", settings, [4])
    assert decoder_for(pair, "stream", dict(settings), (4,)) is first
    assert first.controls(2) is first.controls(2) and first.controls(2).alpha.tolist() == pytest.approx([0.3] * 2)
    assert first.controls(3).alpha.shape == (3,)
    assert (
        decoder_for(dataclasses.replace(pair), "decode", settings, [4]) is not first
    )  # another pair has other parameters


@pytest.mark.parametrize("other", [
    {"alpha": 0.4}, {"alpha": np.float32(0.3)}, {"block_size": 4}, {"rule": "token_v2"}, {"top_k": 1},
    {"stop": "fixed"},
])  # fmt: skip
def test_different_settings_have_different_decoders(pair, other):
    settings = {"rule": "token_v3", "alpha": 0.3, "block_size": 3}
    assert decoder_for(pair, "decode", settings | other) is not decoder_for(pair, "decode", settings)


def test_different_stop_ids_have_different_decoders(pair):
    decoders = [decoder_for(pair, "decode", {}, stops) for stops in (None, [], [1], [2], [1, 2])]
    assert [decoder.require_engine().stop_ids for decoder in decoders] == [(), (), (1,), (2,), (1, 2)]
    assert decoder_for(pair, "decode", {}, []) is decoders[1]


def test_values_of_another_type_do_not_share_a_decoder(pair):
    """`True == 1`, so a kept decoder might accept what is refused."""
    decoder_for(pair, "decode", {"rule": "token_v3", "alpha": 1, "temperature": 1, "block_size": 1}).controls(1)
    for name in ("alpha", "temperature"):
        settings = {"rule": "token_v3", "alpha": 1, "temperature": 1, "block_size": 1} | {name: True}
        with pytest.raises(ValueError, match=f"{name}=True is not a number"):
            decoder_for(pair, "decode", settings).controls(1)
    with pytest.raises(ValueError, match="block_size=True is not a whole number"):
        decoder_for(pair, "decode", {"rule": "token_v3", "alpha": 1, "temperature": 1, "block_size": True})
    for inside in (lambda level: level, lambda level: Level(model="draft", budget=2, drafters=(level,))):
        settings = [{"drafters": (inside(Level(model="draft", budget=2, temperature=heat)),)} for heat in (1, True)]
        decoder_for(pair, "decode", settings[0]).controls(1)
        with pytest.raises(ValueError, match="temperature=True is not a number"):
            decoder_for(pair, "decode", settings[1]).controls(1)


def test_decoders_of_arrays_and_user_objects_are_not_cached(pair):
    alphas = np.array([0.1, 0.2])
    for settings in ({"rule": "token_v3", "alpha": alphas}, {"stop": "speccascade_jax.stopping.policies.Fixed"}):
        assert decoder_for(pair, "decode", settings) is not decoder_for(pair, "decode", settings)
    assert not pair.decoders
    decoder = decoder_for(pair, "decode", {"rule": "token_v3", "alpha": alphas})
    assert decoder.controls(2).alpha.tolist() == pytest.approx([0.1, 0.2])


def test_a_name_with_a_new_meaning_is_looked_up_again(pair, monkeypatch):
    asked = {"rule": "chow", "alpha": 0.1}, {"method": "bild", "alpha": 0.1}
    by_rule, by_method = (decoder_for(pair, "decode", settings) for settings in asked)
    monkeypatch.setitem(RULES, "chow", dataclasses.replace(RULES["chow"], variant="another"))
    monkeypatch.setitem(METHODS, "bild", dataclasses.replace(METHODS["bild"], block_size=3))
    again = [decoder_for(pair, "decode", settings) for settings in asked]
    assert again[0].rule.variant == "another" != by_rule.rule.variant
    assert (again[1].require_engine().block, by_method.require_engine().block) == (3, 10)


def test_a_pair_keeps_a_limited_number_of_decoders(pair):
    for number in range(building._KEPT + 10):
        decoder_for(pair, "decode", {"rule": "token_v3", "alpha": number / 1000})
    assert len(pair.decoders) == building._KEPT


# --- notices about a new program


@pytest.fixture
def said(monkeypatch):
    """Returns the list of notices that a waiting user would read."""
    words = []

    @contextlib.contextmanager
    def said_if_long(describe):
        words.append(describe())
        yield

    monkeypatch.setattr(methods, "said_if_long", said_if_long)
    return words


@pytest.mark.tools
def test_a_compile_notice_says_what_the_program_is_for_and_what_is_new(pair, said):
    settings = {"rule": "spec_decode", "block_size": 2}
    sc.decode(pair, [[1]], max_new_tokens=3, **settings)
    first = (
        "compiling 'speculative' for a batch of 1, prompts padded to 8 tokens, 3 new tokens (these settings are new)"
    )
    assert said == [first]
    sc.decode(pair, [[5]], max_new_tokens=3, seed=4, **settings)
    assert len(said) == 1
    sc.decode(pair, [[5] * 9, [2]], max_new_tokens=3, **settings)
    assert said[1].endswith("(a batch of 2 and prompts padded to 12 tokens for the first time)")
    list(sc.stream(pair, [1], max_new_tokens=3, **settings))  # streaming needs other programs
    assert len(said) == 3 and said[2].endswith("(these settings are new)")


def test_dropped_programs_count_as_new(pair, said, monkeypatch):
    sc.decode(pair, [[1]], max_new_tokens=3, block_size=2)
    monkeypatch.setattr(methods, "release_when_crowded", lambda: True)
    sc.decode(pair, [[1]], max_new_tokens=3, block_size=2)
    assert len(said) == 2


# --- the programs and transfers of a call


def compiled_by(call):
    """Returns the names of the programs that a call compiles after the caches are cleared."""
    names = []

    def on_event(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    return names


@pytest.mark.parametrize(("method", "programs"), [("speculative", 1), ("autoregressive", 1), ("seq_cascade", 2)])
def test_a_call_runs_its_program_and_no_other(pair, method, programs):
    """Every operation outside the program would be another program.

    A chain need not be traceable; a second program joins its results.
    """
    settings = {"method": method, "alpha": -1.0, "max_new_tokens": 3, "temperature": 0.5}
    assert len(compiled_by(lambda: sc.decode(pair, [[1], [2, 3]], **settings))) == programs


def test_a_warm_call_makes_no_separate_transfers(pair, monkeypatch):
    """Arguments travel with the call of the program, and results come back as one array."""
    settings = {"rule": "token_v3", "alpha": 0.3, "block_size": 2, "temperature": 1.0, "max_new_tokens": 3}
    first = sc.decode(pair, [[1], [2, 3]], **settings)
    for name in ("device_put", "device_get"):
        monkeypatch.setattr(jax, name, pytest.fail)
    out = sc.decode(pair, [[1], [2, 3]], **settings)
    np.testing.assert_array_equal(out.tokens, first.tokens)
    assert isinstance(out.tokens, np.ndarray)
    assert np.shares_memory(_memory(out.tokens), _memory(out.generation.num_rounds))


def _memory(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_prompts_are_made_on_the_host(pair):
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(make_prompt(pair, [[1], [2, 3]])))


# --- editors and `help()` see the fields of `Settings`


def test_the_typed_dict_has_the_fields_of_settings():
    assert Path(settings_dict.__file__).read_text() == source(), "run `make format`"


@pytest.mark.parametrize("function", [sc.decode, sc.stream])
def test_help_lists_the_settings_with_their_defaults(function):
    listed = inspect.signature(function).parameters
    for name, parameter in inspect.signature(Settings).parameters.items():
        assert listed[name].default == parameter.default
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in listed.values())
