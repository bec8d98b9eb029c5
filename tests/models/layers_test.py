"""Tests of precision: float32 models multiply in full float32 on every device; 16-bit models use JAX's default."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.core.types import Prompt
from speccascade_jax.models import decoder, t5
from speccascade_jax.models.memory_estimate import abstract
from speccascade_jax.stopping import acceptance_head

T5 = t5.T5Config(20, 24, 16, 2, 8, 32, 1, 2)
CONFIGS = {
    "T5": T5,
    "T5, tied, not gated": dataclasses.replace(T5, tied=True, gated=False),
    "Gemma 2": decoder.tiny("gemma2_2b"),
    "Llama": decoder.tiny("llama2_7b"),
}
IDS, LENGTH = jax.ShapeDtypeStruct((2, 5), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)


def precisions(call, *shapes, platforms=("cuda",)) -> list[str]:
    """Returns the precision that each matrix product of the traced program requests, on each platform."""
    traced = jax.jit(call).trace(*shapes)
    text = "".join(traced.lower(lowering_platforms=(platform,)).as_text() for platform in platforms)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    requested = [re.search(r"precision = \[(\w+), (\w+)\]", line) for line in products]
    return ["DEFAULT" if match is None else "|".join(sorted(set(match.groups()))) for match in requested]


def products(config, platforms=("cuda", "tpu")) -> list[str]:
    """Returns the precisions of the products of prefill, of a block and of the teacher-forced pass."""
    model = t5.T5(config) if isinstance(config, t5.T5Config) else decoder.DecoderLM(config)
    params, inputs = abstract(model), IDS if model.is_encoder_decoder else None

    def cached(params, tokens, length, encoder_tokens):
        cache = model.prefill(params, Prompt(tokens, length, encoder_tokens), 12)
        return model.extend(params, cache, tokens)

    whole = t5.teacher_forced_logits if model.is_encoder_decoder else decoder.teacher_forced_logits
    tokens = (IDS, IDS) if model.is_encoder_decoder else (IDS,)
    return [
        *precisions(cached, params, IDS, LENGTH, inputs, platforms=platforms),
        *precisions(lambda params, *tokens: whole(model, params, *tokens), params, *tokens, platforms=platforms),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_products_have_the_precision_of_their_dtype(name):
    full = products(CONFIGS[name])
    assert len(full) >= 40 and set(full) == {"HIGHEST"}
    halved = products(dataclasses.replace(CONFIGS[name], dtype="bfloat16"))
    assert len(halved) == len(full) and set(halved) == {"DEFAULT"}


def test_a_precision_chosen_by_the_caller_stays():
    for named, asked in (("default", "DEFAULT"), ("high", "HIGH")):
        with jax.default_matmul_precision(named):
            assert set(products(T5, ["tpu"])) == {asked}
    assert set(products(T5, ["tpu"])) == {"HIGHEST"}


def test_an_acceptance_head_multiplies_in_float32_too():
    params = jax.eval_shape(lambda: acceptance_head.initial(jax.random.key(0), 8, 2))
    states = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    assert precisions(acceptance_head.logits, params, states) == ["HIGHEST"] * 3
