"""Section `vocabulary`: temporary memory of a generation with a large vocabulary, by rule, block size and batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.setting import Bench, Rows
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import compiled_for
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.memory_estimate import abstract
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed


def run(bench: Bench) -> Rows:
    """Compiles programs without running them: every rule and batch size at one γ, and every γ for the lossless rule."""
    settings = bench.settings
    chosen = [(rule, settings.block_size, batch) for rule in settings.large_rules for batch in settings.large_batches]
    chosen += [("spec_decode", block, settings.large_batches[0]) for block in settings.large_blocks]
    return {"vocabulary": [_row(settings.large_vocab, *point) for point in bench.track(chosen)]}


def _row(vocab: int, rule: str, block: int, batch: int) -> dict[str, Any]:
    """Returns the temporary memory that the compiler reports, and its ratio to the bytes of a block's q̃ and p̃.

    The two models are as small as possible, so that all memory but that of the distributions is negligible.
    """
    small = replace(tiny("gemma2_2b"), vocab_size=vocab, num_embeddings=vocab, d_model=8, num_layers=1)
    model = DecoderLM(small)
    engine = Engine(target=model, drafter=ModelDrafter(model, Fixed(block)), verifier=Speculative(RULES[rule]))
    weights = abstract(model)
    shapes = jax.eval_shape(lambda: Prompt(jnp.ones((batch, 4), jnp.int32), jnp.ones((batch,), jnp.int32)))
    controls = jax.eval_shape(lambda: make_controls(batch, alpha=0.1, temperature=1.0))
    params = {"target": weights, "drafter": {"model": weights}}
    compiled = compiled_for(engine, params, shapes, controls, max_new_tokens=32)
    temporary, floor = measure.memory(compiled).temp_size_in_bytes, 2 * batch * (block + 1) * vocab * 4
    row: dict[str, Any] = {"rule": rule, "block_size": block, "batch": batch, "floor_megabytes": floor / 1e6}
    return row | {"temporary_megabytes": temporary / 1e6, "temporary_ratio": temporary / floor}
