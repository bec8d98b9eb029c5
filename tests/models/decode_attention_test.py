"""The kernels of attention in a decoding step, interpreted on this machine: against NumPy, and in models and engines.

The interpreter of the kernel for TPUs fills memory that nothing has written with NaN, and reports two accesses to the
same place in no order. The kernel for GPUs is interpreted by JAX operations.
"""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.core.types import Prompt
from speccascade_jax.models import decode_attention, decoder_stack
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.layers import MASKED
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.runtime import platforms
from tests.support import interpreted_kernels, random_t5, tiny_decoders


@pytest.fixture
def interpreted():
    with interpreted_kernels.interpreted():
        yield


@pytest.fixture(params=["tpu", "gpu"])
def either(request):
    with interpreted_kernels.interpreted(request.param):
        yield


def by_numpy(columns, keys, values, start, bias, size, cap, ring):
    """Returns what `attend` returns, one token and head at a time, in float64."""
    queries, new_keys, new_values = (np.asarray(x, np.float64) for x in columns)
    keys, values, bias = (np.array(x, np.float64) for x in (keys, values, bias))
    (rows, new, width), heads, slots = queries.shape, len(keys) // len(queries), keys.shape[-1]
    group, mixed = width // size // heads, np.zeros(queries.shape)
    for row, token, head in np.ndindex(rows, new, heads):
        slot, place = start[row] + token, slice(head * size, (head + 1) * size)
        slot = slot % slots if ring else slot
        keys[row * heads + head, :, slot] = new_keys[row, token, place]
        values[row * heads + head, slot] = new_values[row, token, place]
    bias = np.broadcast_to(bias, (rows, heads * group, new, slots))
    for row, token, head in np.ndindex(rows, new, heads * group):
        place, pair = slice(head * size, (head + 1) * size), row * heads + head // group
        logits = queries[row, token, place] @ keys[pair]
        logits = (logits if cap is None else cap * np.tanh(logits / cap)) + bias[row, head, token]
        weights = np.exp(logits - logits.max())
        mixed[row, token, place] = weights / weights.sum() @ values[pair]
    return mixed, keys, values


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int = 2
    new: int = 3
    heads: int = 2
    groups: int = 1
    size: int = 64
    slots: int = 128
    bias_heads: int = 1
    cap: float | None = None
    ring: bool = False
    fused: bool = False
    dtype: str = "float32"

    def arrays(self, start):
        drawn = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(drawn.standard_normal(shape), self.dtype)

        widths = (self.heads * self.groups * self.size, *[self.heads * self.size] * 2)
        columns = tuple(draw(self.rows, self.new, width) for width in widths)
        count = self.rows * self.heads
        caches = draw(count, self.size, self.slots), draw(count, self.slots, self.size)
        biases = drawn.standard_normal((self.rows, self.bias_heads, self.new, self.slots))
        if not self.ring:
            last = np.asarray(start)[:, None] + np.arange(self.new)
            biases = np.where(np.arange(self.slots) <= last[..., None], biases.swapaxes(0, 1), MASKED).swapaxes(0, 1)
        return columns, *caches, biases.astype(np.float32)

    @functools.cached_property
    def kernel(self):
        sizes = {"size": self.size, "cap": self.cap, "ring": self.ring}
        return jax.jit(partial(decode_attention.attend, query_heads=self.heads * self.groups, **sizes))

    def check(self, start, tolerance=2e-5):
        columns, keys, values, bias = self.arrays(start)
        whole = (jnp.concatenate(columns, -1),) if self.fused else columns
        sizes = {"size": self.size, "cap": self.cap, "ring": self.ring}
        results = self.kernel(whole, keys, values, jnp.asarray(start, jnp.int32), jnp.asarray(bias))
        expected = by_numpy(columns, keys, values, start, bias, **sizes)
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            limit = 0 if number else tolerance
            np.testing.assert_allclose(np.asarray(result, np.float64), wanted, atol=limit, rtol=0)


CASES = {
    "one_token": (Case(new=1, bias_heads=2, fused=True), [0, 127]),
    "two_chunks": (Case(rows=3, heads=4, bias_heads=4, slots=768), [0, 382, 765]),
    "tile_border": (Case(new=12, groups=2, slots=256), [120, 0]),
    "ring": (Case(new=6, size=128, slots=256, ring=True, fused=True), [253, 700]),
    "cap": (Case(groups=4, heads=1, size=256, cap=5.0), [17, 90]),
    "bfloat16": (Case(groups=2, heads=4, size=32, dtype="bfloat16"), [60, 125]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_and_caches_equal_those_of_numpy(name, either):
    case, start = CASES[name]
    case.check(start, 2e-2 if case.dtype == "bfloat16" else 2e-5)


def test_rows_have_their_own_places(interpreted):
    cases = [Case(slots=256, ring=ring) for ring in (False, True)]

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, 253), min_size=2, max_size=2), st.sampled_from(cases))
    def check(starts, case):
        case.check(starts)

    check()


def test_fixed_keys_end_inside_a_chunk(either):
    case = Case(slots=600, bias_heads=2, ring=True)
    (queries, *_), keys, values, bias = case.arrays([0, 0])
    start = jnp.zeros((2,), jnp.int32)
    mixed, *cache = decode_attention.attend((queries,), keys, values, start, bias, query_heads=2, size=64)
    logits = np.einsum("rthk,rhks->rhts", queries.reshape(2, 3, 2, 64), keys.reshape(2, 2, 64, 600)) + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("rhts,rhsk->rthk", weights, values.reshape(2, 2, 600, 64)).reshape(2, 3, 128)
    np.testing.assert_allclose(mixed, wanted, atol=2e-5)
    np.testing.assert_array_equal(cache[0], keys)
    np.testing.assert_array_equal(cache[1], values)


def test_a_layer_of_a_stack_is_written_alone(either):
    case = Case()
    columns, keys, values, bias = case.arrays([5, 70])
    stack = tuple(jnp.stack([x, x + 1, x + 2]) for x in (keys, values))
    kernel = partial(decode_attention.attend, query_heads=2, size=64)
    start = jnp.asarray([5, 70], jnp.int32)
    mixed, *caches = kernel(columns, *stack, start, bias, 1)
    alone, *written = kernel(columns, keys + 1, values + 1, start, bias)
    np.testing.assert_array_equal(mixed, alone)
    for cache, layer, before in zip(caches, written, stack, strict=True):
        np.testing.assert_array_equal(cache, jnp.stack([before[0], layer, before[2]]))


def test_only_shapes_that_fill_tiles_use_the_kernel(interpreted):
    fits = partial(decode_attention.fits, dtype="bfloat16")
    assert fits(6, 12, 64, 128) and fits(16, 3, 128, 256) and fits(1, 12, 64, 80, written=False)
    assert not fits(17, 12, 64, 128) and not fits(1, 3, 64, 128) and not fits(1, 12, 64, 80) and not fits(1, 2, 96, 128)


def test_caches_with_too_many_heads_for_vmem_are_left_to_xla(interpreted):
    fits = partial(decode_attention.fits, 6, slots=128)
    assert fits(64, 64, dtype="float32") and fits(32, 128, dtype="bfloat16")
    assert not fits(128, 128, dtype="bfloat16") and not fits(128, 128, dtype="float32", written=False)


def test_groups_of_query_heads_take_vmem_from_chunks_of_slots(interpreted):
    """A block of 16 tokens of Llama 3.1 405B, in float32, did not compile for a v5e: 4 MB of logits a chunk of 512."""
    llama = {"heads": 8, "size": 128, "slots": 1024, "dtype": "float32"}
    assert decode_attention.fits(16, **llama, groups=16) and not decode_attention.fits(16, **llama, groups=32)
    assert decode_attention.fits(8, **llama, groups=32) and decode_attention.fits(16, **llama | {"dtype": "bfloat16"})
    sizes = {"rows": 2, "heads": 8, "size": 128, "slots": 1024, "cap": None, "ring": False, "writes": True, "width": 4}
    chunks = {
        (new, groups): decode_attention._Kernel(new=new, groups=groups, bias_heads=1, chunk=128, **sizes)
        .with_largest_chunk()
        .chunk
        for new, groups in ((6, 8), (16, 8), (16, 16))
    }
    assert chunks == {(6, 8): 512, (16, 8): 256, (16, 16): 128}


def test_gpus_leave_long_caches_and_blocks_and_odd_heads_to_xla():
    with platforms.traced_for("cuda"):
        fits = partial(decode_attention.fits, heads=3, dtype="bfloat16")
        assert fits(16, size=64, slots=2048) and fits(1, size=64, slots=80, written=False)
        assert not fits(17, size=64, slots=80) and not fits(1, size=64, slots=2049) and not fits(1, size=96, slots=80)
        assert decode_attention.tiled(82) == 82


def test_programs_for_a_cpu_have_no_kernels():
    assert not decode_attention.fits(1, 12, 64, 128, "float32") and decode_attention.tiled(82) == 82
    with platforms.traced_for("tpu"):
        assert [decode_attention.tiled(slots) for slots in (82, 600, 1089, 1153)] == [128, 640, 1152, 1280]
        assert decode_attention.fits(1, 12, 64, 128, "float32")


def test_heads_side_by_side_are_rotated_as_heads_apart():
    values = jax.random.normal(jax.random.key(0), (2, 3, 5, GEMMA.head_dim))
    by = decoder_stack.turns(GEMMA, jnp.array([[0, 1, 2], [7, 8, 9]]))
    expected = [*decoder_stack.rotate(values[:, :, :4], by, "halves").swapaxes(0, 2), values[:, :, 4].swapaxes(0, 1)]
    wide = decoder_stack.with_columns(by, 4, 1).columns
    rotated = decoder_stack.rotate_columns(values.reshape(2, 3, -1), *wide, GEMMA.head_dim)
    by_head = rotated.reshape(values.shape).swapaxes(0, 2)
    for head, values_of_head in zip(by_head, expected, strict=True):
        np.testing.assert_array_equal(head, values_of_head)


T5_SIZES = {"vocab_size": 31, "num_embeddings": 31, "num_heads": 2, "head_dim": 64, "d_model": 32, "d_ff": 48}
GEMMA = dataclasses.replace(tiny("gemma2_2b", vocab_size=31, window=5), num_kv_heads=2, head_dim=64)
MODELS = {
    "t5": random_t5.bound(T5Config(num_encoder_layers=1, num_decoder_layers=2, **T5_SIZES)),
    "t5_scanned": random_t5.bound(T5Config(num_encoder_layers=1, num_decoder_layers=2, scan_layers=True, **T5_SIZES)),
    "gemma2": tiny_decoders.bound(GEMMA),
}


def test_a_cache_that_is_too_short_is_refused_before_it_is_tiled(interpreted):
    params, model = MODELS["t5"].params, MODELS["t5"].model
    prompt = Prompt(
        tokens=jnp.ones((1, 9), jnp.int32), length=jnp.array([9]), encoder_tokens=jnp.ones((1, 4), jnp.int32)
    )
    with pytest.raises(ValueError, match="max_len is 8, but"):
        model.prefill(params, prompt, 8)


def steps(bound):
    """Returns the logits of two blocks, fed after a rollback that differs by row, and of one more token."""
    params, model = bound.params, bound.model
    tokens = jax.random.randint(jax.random.key(0), (2, 22), 1, 31)
    encoder = tokens[:, 9:20] if model.is_encoder_decoder else None
    prompt = Prompt(tokens=tokens[:, :9], length=jnp.array([9, 4]), encoder_tokens=encoder)
    cache = jax.jit(lambda: model.prefill(params, prompt, 40, max_rollback=6))()
    extend = jax.jit(model.extend)
    first, cache = extend(params, cache, tokens[:, 9:14])
    cache = model.rollback(cache, cache.length - jnp.array([3, 0]))
    second, cache = extend(params, cache, tokens[:, 14:19])
    last, cache = extend(params, cache, tokens[:, 19:20])
    return [np.asarray(out.logits) for out in (first, second, last)]


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize(("name", "platform"), [*((name, "tpu") for name in MODELS), ("gemma2", "gpu")])
def test_models_have_the_logits_of_the_path_by_xla(name, platform):
    expected = steps(MODELS[name])
    with interpreted_kernels.interpreted(platform):
        logits = steps(MODELS[name])
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-5)
