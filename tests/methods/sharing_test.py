"""Tests of decoders that share a compiled program: each writes what it writes alone, from as few programs as can be."""

from dataclasses import fields, replace

import jax
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import compilations
from speccascade_jax.engine.tracing import facts
from speccascade_jax.methods.build import build
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import Settings
from speccascade_jax.methods.sharing import shared
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.runtime import platforms
from tests.support import conformance

RULES = ("chow", "token_v3", "opt")
ROWS, TOKENS = 8, 12


@pytest.fixture(scope="module")
def pair():
    return conformance.tabular_pair(*conformance.tables(16, 5))


def _decoders(pair, *more, rules=RULES, **settings):
    return [build(pair, Settings(rule=rule, block_size=3, **settings)) for rule in rules] + [
        build(pair, setting) for setting in more
    ]


def _written(decoder, pair, serving=None, **more):
    numbers = replace(decoder.settings, alpha=0.3, temperature=np.repeat([0.0, 1.0], ROWS // 2))
    controls = decoder.method.controls(numbers, ROWS)
    prompt = make_prompt(pair, [[n + 1] for n in range(ROWS)])
    if serving is not None:
        decoder, controls = serving.decoder, serving.controls(controls)
    return decoder.prepared(prompt, controls, np.arange(ROWS), TOKENS)(0, **more)


@pytest.mark.parametrize("settings", [{"verify": "block"}, {"bonus": "target"}, {"accept": "deferral"}])
def test_shared_programs_write_what_each_decoder_writes_alone(pair, settings):
    decoders = _decoders(pair, **settings)
    before, outputs = compilations(), []
    for decoder, serving in zip(decoders, shared(decoders), strict=True):
        outputs.append(_written(decoder, pair, serving))
    assert compilations() == before + 1
    for decoder, output in zip(decoders, outputs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, output, _written(decoder, pair))
    assert len({np.asarray(output.tokens).tobytes() for output in outputs}) > 1


def test_traces_of_a_shared_program_hold_the_rules_distributions(pair):
    decoders = _decoders(pair, rules=("chow", "token_v3"))
    for decoder, serving in zip(decoders, shared(decoders), strict=True):
        traced, alone = (_written(decoder, pair, way, record=facts) for way in (serving, None))
        jax.tree.map(np.testing.assert_array_equal, traced.record, alone.record)


def test_only_decoders_that_differ_in_the_rule_alone_share(pair):
    settings = [
        Settings(rule="spec_decode", block_size=3), Settings(rule="chow_log", block_size=4),
        Settings(rule="chow_log", block_size=3, accept="deferral"), Settings(rule="chow_log", tree=(2, 1)),
        Settings(rule="chow_log", block_size=3, stop="entropy"), Settings(rule="chow_log", block_size="auto"),
        Settings(rule="fuzzy_kl", block_size=3), Settings(method="autoregressive"), Settings(method="token_cascade"),
    ]  # fmt: skip
    decoders = _decoders(pair, *settings)
    served = shared(decoders)
    assert [serving.place for serving in served] == [0, 1, 2] + [None] * len(settings)
    assert len({id(serving.decoder) for serving in served[:3]}) == 1
    assert [serving.decoder for serving in served[3:]] == decoders[3:]


def test_pairs_and_platforms_are_not_mixed(pair):
    other = conformance.tabular_pair(*conformance.tables(16, 6))
    (first,), (second,) = _decoders(pair, rules=("chow",)), _decoders(other, rules=("diff",))
    assert [serving.place for serving in shared([first, second])] == [None, None]
    with platforms.traced_for("tpu"):
        assert {serving.place for serving in shared(_decoders(pair))} == {None}


def test_a_users_rule_shares_the_program_of_the_packages_rules(pair):
    def unsure(laws, alpha):
        return laws.p < alpha

    rule = sc.Rule(name="unsure", deferral=unsure)
    decoders = [*_decoders(pair, rules=("chow",)), build(pair, Settings(rule=rule, block_size=3))]
    served = shared(decoders)
    assert [serving.place for serving in served] == [0, 1]
    output, alone = _written(decoders[1], pair, served[1]), _written(decoders[1], pair)
    jax.tree.map(np.testing.assert_array_equal, output, alone)


def test_equal_rules_take_one_place(pair):
    decoders = _decoders(pair, rules=("chow", "chow", "diff"))
    assert [serving.place for serving in shared(decoders)] == [0, 0, 1]


def test_subclasses_of_engines_and_decoders_are_not_joined_with_others(pair):
    """Both may decode in another way with the same fields."""

    class OtherEngine(Engine):
        pass

    class OtherDecoder(Decoder):
        pass

    plain, first, second = _decoders(pair)
    parts = {field.name: getattr(first.engine, field.name) for field in fields(Engine)}
    decoders = [plain, replace(first, program=OtherEngine(**parts))]
    decoders += [OtherDecoder(second.method, second.settings, second.pair, second.program, second.params)]
    assert [serving.decoder for serving in shared(decoders)] == decoders
