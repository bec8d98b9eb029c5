"""Tiny models by name, and programs compiled for a TPU, for tests of `preflight`."""

import dataclasses
import functools
import importlib.util

import jax
import pytest

from speccascade_jax import preflight
from speccascade_jax.models import families
from speccascade_jax.models.decoder_presets import tiny
from speccascade_jax.models.t5_config import T5Config
from speccascade_jax.preflight import compiling
from speccascade_jax.preflight.programs import Traced

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, TPUs' compiler: make accelerators"
)
_T5 = T5Config(
    vocab_size=250, num_embeddings=256, d_model=128, num_heads=4, head_dim=32, d_ff=256, num_encoder_layers=1,
    num_decoder_layers=2,
)  # fmt: skip
_GEMMA = dataclasses.replace(tiny("gemma2_2b", vocab_size=256), num_heads=8, num_kv_heads=4, d_ff=64)
MODELS = {
    "tiny_t5": _T5,
    "tiny_t5_draft": dataclasses.replace(_T5, d_model=64, num_heads=4, head_dim=16, num_decoder_layers=1),
    "tiny_gemma": _GEMMA,
    "tiny_gemma_draft": dataclasses.replace(_GEMMA, num_layers=1),
}
SMALL = {"topology": "v5e", "prompt_length": 16, "max_new_tokens": 16}
PAIRS = {"t5": ("tiny_t5", "tiny_t5_draft"), "gemma": ("tiny_gemma", "tiny_gemma_draft")}


def known_models():
    """Adds the tiny models to the presets, where `preflight` finds models by name."""
    families.PRESETS.update(MODELS)


@functools.cache
def _compiled(job):
    known_models()
    traced = Traced.of(job)
    # the setting with which other tests compile is restored afterwards
    quickly = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        compiled = compiling.compile_job(traced)
    finally:
        jax.config.update("jax_disable_most_optimizations", quickly)
    _, account = compiling.analyse(traced, compiled, None, compiling.assumptions(traced))
    return compiled, account


def compiled(family, **arguments):
    """Returns a tiny pair's program, compiled for a TPU v5e unless a topology is given, and the report on it."""
    known_models()
    target, draft = PAIRS[family]
    arguments = {"draft": draft} | SMALL | arguments
    return _compiled(preflight.job_of(target, **arguments))
