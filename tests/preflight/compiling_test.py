"""Assumptions about a program that its text does not contain; needs no compiler."""

import re

import pytest

from speccascade_jax.models.families import PRESETS
from speccascade_jax.preflight.compiling import expert_loops


def test_loops_over_experts_run_for_the_experts_that_a_calls_tokens_choose():
    sparse, dense = PRESETS["qwen3_30b_a3b"], PRESETS["qwen3_0.6b"]
    loops = expert_loops(sparse, sparse, rows=1, block=5, prompt=4097)

    def iterations(scope: str) -> float:
        scope = f"jit(one)/{scope}/layers/mlp/experts/experts._mix/experts._mix_by_"
        return next(count for pattern, count in loops.items() if re.search(pattern, f"{scope}expert/while"))

    assert iterations("draft/while/body/DecoderModule.extend/decoder") == pytest.approx(8)
    assert iterations("score/DecoderModule.extend/decoder") == pytest.approx(128 * (1 - (15 / 16) ** 6))
    # 256 of 32,768 choices are for the same expert, two blocks of 128
    assert loops[r"\.states/.*_mix_by_block/while$"] == pytest.approx(256)
    assert not expert_loops(dense, dense, rows=1, block=5, prompt=9)
