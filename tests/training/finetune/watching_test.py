"""Tests of operations per training step against XLA's count and PaLM's formula, and of speeds derived from them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.models.decoder import DecoderModule, parameter_shapes, tiny
from speccascade_jax.models.t5 import T5Config, T5Module
from speccascade_jax.preflight.chips import CHIPS
from speccascade_jax.runtime.peaks import PEAK_FLOPS, peak_flops
from speccascade_jax.training.finetune import watching
from speccascade_jax.training.finetune.schedule import Schedule
from tests.support import tiny_decoders

ROWS, SOURCE, TARGET = 2, 48, 80
T5S = {
    "gated": T5Config(1000, 1024, 192, 3, 64, 320, 2, 3),
    "tied_relu": T5Config(1000, 1024, 192, 5, 64, 320, 3, 1, gated=False, tied=True),
}
SIZES = {"d_model": 192, "head_dim": 64, "d_ff": 320, "num_layers": 2, "num_heads": 6}
DECODERS = {
    "llama2": replace(tiny("llama2_7b", vocab_size=1000), **SIZES | {"num_kv_heads": 6}),
    "gemma2": replace(tiny("gemma2_2b", vocab_size=1000, window=TARGET), **SIZES),
    # its second layer has no kernel of values, and its third has no keys and values
    "gemma4": replace(
        tiny_decoders.SHARED,
        window=TARGET,
        vocab_size=1000,
        num_embeddings=1000,
        **SIZES | {"num_layers": 3, "global_head_dim": 128, "shared_d_ff": 512, "layer_input": 64},
    ),
}


def _counted(module, *widths) -> float:
    """Returns XLA's count of operations of the compiled forward pass."""
    tokens = [jax.ShapeDtypeStruct((ROWS, width), jnp.int32) for width in widths]
    params = jax.eval_shape(module.init, jax.random.key(0), *tokens)
    return jax.jit(module.apply).lower(params, *tokens).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", T5S)
def test_a_t5s_operations_are_those_that_xla_counts(name):
    ours = watching.training_flops(T5S[name], np.full(ROWS, TARGET), np.full(ROWS, SOURCE)) / 3
    assert ours == pytest.approx(_counted(T5Module(T5S[name]), SOURCE, TARGET), rel=0.03)


def test_a_t5gemmas_operations_are_those_that_xla_counts():
    config = replace(DECODERS["gemma2"], encoder=replace(DECODERS["gemma2"], d_model=128, num_layers=3))
    _check_encoder_decoder(config)
    encoder = replace(DECODERS["gemma2"], window=SOURCE, centered_window=True)
    _check_encoder_decoder(replace(DECODERS["gemma2"], encoder=encoder, merged_attention=True, shared_embedding=True))


def _check_encoder_decoder(config):
    ours = watching.training_flops(config, np.full(ROWS, TARGET), np.full(ROWS, SOURCE)) / 3
    assert ours == pytest.approx(_counted(DecoderModule(config), SOURCE, TARGET), rel=0.03)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoders_operations_are_those_that_xla_counts(name):
    ours = watching.training_flops(DECODERS[name], np.full(ROWS, TARGET)) / 3
    assert ours == pytest.approx(_counted(DecoderModule(DECODERS[name]), TARGET), rel=0.03)


def test_a_decoders_operations_follow_palms_formula():
    """`6 N + 12 L H Q T` per token, with N the entries of all matrices that multiply."""
    c = DECODERS["llama2"]
    matrices = sum(np.prod(shape) for name, shape in parameter_shapes(c).items() if name.endswith("kernel"))
    per_token = 6 * matrices + 12 * c.num_layers * c.num_heads * c.head_dim * TARGET
    assert watching.training_flops(c, np.array([TARGET])) == per_token * TARGET


def test_padding_is_no_work_and_windows_bound_attention():
    def work(config, *lengths):
        return watching.training_flops(config, np.array(lengths))

    plain, windowed = DECODERS["llama2"], replace(DECODERS["gemma2"], window=10)
    assert work(plain, 7, 0, 5) == work(plain, 7) + work(plain, 5)
    whole = work(replace(windowed, window=TARGET), TARGET)
    # one of the two layers has an attention window
    assert whole - work(windowed, TARGET) == 3 * 4 * 6 * 64 * TARGET * (TARGET - 10)


def test_operations_inside_a_step_do_not_overflow():
    lengths = np.full(64, 2**14)
    inside = jax.jit(lambda x: watching.training_flops(DECODERS["llama2"], x))(jnp.asarray(lengths, jnp.int32))
    assert float(inside) == pytest.approx(watching.training_flops(DECODERS["llama2"], lengths), rel=1e-5)


def test_speeds_are_shares_of_the_peak_of_all_devices():
    tpu = SimpleNamespace(device_kind="TPU v5 lite")
    speeds = watching.speeds(tokens=600, flops=197e12 * 3, seconds=2.0, devices=[tpu] * 4)
    assert speeds == {"tokens_per_second": 300.0, "mfu": pytest.approx(3 / 8)}
    assert watching.speeds(1, 1.0, 1.0, jax.devices("cpu"))["mfu"] is None


def test_every_chip_has_its_peak():
    assert {name: chip.flops for name, chip in CHIPS.items()} == PEAK_FLOPS
    for kind in ("TPU v5", "TPU7x", "NVIDIA H100 80GB HBM3"):
        assert peak_flops(SimpleNamespace(device_kind=kind)) in PEAK_FLOPS.values()


def test_the_norm_is_that_of_all_gradients_together():
    # 301 + 18^2 = 25^2; bfloat16 has no 301
    gradients = {"a": jnp.ones(301, jnp.bfloat16), "b": jnp.array([18.0])}
    assert float(watching.gradient_norm(gradients)) == 25.0


def test_progress_is_printed_after_the_first_step_and_twice_a_minute(monkeypatch):
    clock, said = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watching.logging, "info", lambda text, *values: said.append(text % values))
    progress = watching.Progress(Schedule(peak=1e-3, max_steps=101, warmup_steps=0), 0.0)
    for step in range(1, 42):
        clock.now = 50.0 + 2.0 * step
        if step == 20:
            progress.told_at = clock.now  # the run has just reported this step
        progress.tell(step)
    assert said == [
        "the training step was compiled; 52 s since the start", "step 17  16.8%, 2.8 min left",
        "step 36  35.6%, 2.2 min left",
    ]  # fmt: skip
