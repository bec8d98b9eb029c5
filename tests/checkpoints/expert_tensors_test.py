"""Tests of experts in transformers' two forms, of the parts that devices read of them, and of experts in 8 bits."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="writing test files needs safetensors")

from speccascade_jax.checkpoints import CheckpointError, load, model_of, save, write_checksums
from speccascade_jax.checkpoints.array_plan import fused
from speccascade_jax.checkpoints.reading import find
from speccascade_jax.checkpoints.slices import stream_parts
from speccascade_jax.core.types import BoundModel
from speccascade_jax.models import fingerprints, sharding
from speccascade_jax.models.decoder import DecoderLM
from tests.support import huggingface_files as hf
from tests.support.checkpoint_arrays import flat, same

KIND = "qwen3_moe"
FORMS = {"of each expert": lambda tensors: tensors, "of a layer": lambda tensors: fused_form(tensors)}
DOWN = "model.layers.2.mlp.experts.{}.down_proj.weight"


def fused_form(tensors):
    """Returns the tensors that release 5 writes with `save_original_format=False`."""
    out = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] + ".experts" for name in tensors.keys() - out.keys()}:
        gate, up, down = (
            np.stack([tensors[f"{layer}.{i}.{part}_proj.weight"] for i in range(8)]) for part in ("gate", "up", "down")
        )
        out |= {f"{layer}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{layer}.down_proj": down}
    return out


@pytest.fixture(params=FORMS)
def written(request, tmp_path):
    tensors = FORMS[request.param](hf.tensors(KIND, hf.random_parameters(KIND)))
    return hf.write(tmp_path / "theirs", hf.entries(KIND), tensors, shards=3)


def test_both_forms_are_read_whole_checked_and_in_parts(written):
    model, params = load(written)
    assert model.config == hf.KINDS[KIND] and same(params, hf.random_parameters(KIND))
    stored = find(written)
    plan = fused(stored.plan)
    shards = 2
    layouts = {name: sharding.spec_of(name) for name in plan}

    def layout(name, shape):
        axis = layouts[name].index("model") if "model" in layouts[name] else None
        halves = [
            tuple(
                slice(n * size // 2, (n + 1) * size // 2) if i == axis else slice(0, size)
                for i, size in enumerate(shape)
            )
            for n in range(shards)
        ]
        return (halves if axis is not None else [tuple(slice(0, size) for size in shape)]), shards

    arrays = hf.random_parameters(KIND)
    for name, blocks in stream_parts(stored, plan, "float32", layout):
        parts = [arrays[part] for part in ([name] if name in arrays else _parts(name))]
        array = sharding.interleave_fused(parts, shards) if len(parts) > 1 else parts[0]
        for key, block in blocks.items():
            np.testing.assert_array_equal(block, array[tuple(slice(*axis) for axis in key)])
    write_checksums(written)
    file = next(file for file in sorted(written.glob("*.safetensors")) if b"layers.2.mlp.experts" in file.read_bytes())
    assert same(load(written)[1], arrays)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not match"):
        load(written)


def _parts(name):
    whole, names = next((w, p) for w, p in {"/qkv/": "query key value", "/wi_01/": "wi_0 wi_1"}.items() if w in name)
    return [name.replace(whole, f"/{part}/") for part in names.split()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda stored: stored.pop(DOWN.format(3)),
            r"experts.7.down_proj.weight is stored, but the tensor of expert 3 is",
        ),
        (lambda stored: stored.pop(DOWN.format(7)), r"\[7, 32, 16\], but .* \[8, 32, 16\]"),
        (
            lambda stored: stored.update({DOWN.format(3): np.zeros((32, 9), np.float32)}),
            r"experts.3.down_proj.weight is float32 \[32, 9\], but that of expert 0 is float32 \[32, 16\]: copy",
        ),
        (
            lambda stored: stored.update({DOWN.format(8): stored[DOWN.format(0)]}),
            r"\[9, 32, 16\], but .* \[8, 32, 16\]",
        ),
    ],
)
def test_another_number_or_shape_of_experts_is_refused(tmp_path, change, message):
    stored = hf.tensors(KIND, hf.random_parameters(KIND))
    change(stored)
    with pytest.raises(CheckpointError, match=message):
        model_of(hf.write(tmp_path / "theirs", hf.entries(KIND), stored))


def test_the_same_weights_in_8_bits_have_one_fingerprint(written, tmp_path):
    model, params = load(written)
    save(tmp_path / "narrow", model, params, "int8")
    bound = [
        BoundModel(*reversed(load(tmp_path / "narrow", dtype=dtype, prepared=True))) for dtype in ("int8", "float32")
    ]
    assert fingerprints.of_model(bound[0]) == fingerprints.of_model(bound[1])
    assert fingerprints.in_eight_bits(bound[0]) and isinstance(bound[0].model, DecoderLM)
    tokens = np.array([[3, 9, 4, 1]])
    run = jax.jit(partial(DecoderLM._apply, method="__call__"), static_argnums=0)
    logits = [run(model.model, model.params, tokens) for model in bound]
    # sums of two kernels differ in their order, which depends on the processor: by 4e-4 of logits up to 8 on one
    np.testing.assert_allclose(*logits, atol=2e-3)
    first = flat(params)["decoder/layers_0/mlp/experts/wo/kernel"]
    kept = flat(load(tmp_path / "narrow")[1])["decoder/layers_0/mlp/experts/wo/kernel"]
    assert (np.abs(first - kept) <= np.abs(first).max(1, keepdims=True) / 254 * 1.00001).all()
