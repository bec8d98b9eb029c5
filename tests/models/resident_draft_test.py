"""The kernel that drafts a block, interpreted on this machine: against single steps by XLA, and in an engine."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.sampling import laws_and_token, sample, softmax
from speccascade_jax.core.types import Prompt, Sampling
from speccascade_jax.models import t5_blocks
from speccascade_jax.models.layers import fuse
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.runtime import platforms
from tests.support import random_t5
from tests.support.interpreted_kernels import EAGER, INTERPRETER, interpreted

SIZES = {"vocab_size": 250, "num_embeddings": 256, "num_heads": 4, "head_dim": 64, "d_model": 128, "d_ff": 128}
CONFIG = T5Config(num_encoder_layers=1, num_decoder_layers=2, **SIZES)
TURNS = 3


def fused(config=CONFIG):
    """Returns a random T5 with fused kernels, whose norms have different scales."""
    bound, drawn = random_t5.bound(config), np.random.default_rng(2)
    moved = jax.tree.map(lambda x: x * drawn.uniform(0.7, 1.4, x.shape) if x.ndim == 1 else x, bound.params)
    return dataclasses.replace(bound, params=fuse(jax.tree.map(lambda x: jnp.asarray(x, config.dtype), moved)))


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of lengths `lengths`, of which some lack a token, at their temperatures."""

    lengths: tuple[int, ...] = (6, 3, 5)
    missed: tuple[bool, ...] = (True, False, False)
    temperature: tuple[float, ...] = (0.8, 1.0, 0.0)
    slots: int = 40
    dtype: str = "float32"
    layers: int = 2

    @property
    def prompt(self):
        drawn, rows = np.random.default_rng(0), len(self.lengths)
        tokens, encoder = (drawn.integers(1, 250, (rows, width)) for width in (max(self.lengths), 10))
        return Prompt(jnp.asarray(tokens), jnp.array(self.lengths), encoder_tokens=jnp.asarray(encoder))

    @property
    def feed(self):
        drawn, rows = np.random.default_rng(1), len(self.lengths)
        known = jnp.asarray(drawn.integers(1, 250, (rows, 2)))
        uniforms = jnp.asarray(drawn.random((rows, TURNS)), jnp.float32)
        return known, jnp.array(self.missed), uniforms, jnp.asarray(self.temperature, jnp.float32)

    @property
    def bound(self):
        return fused(dataclasses.replace(CONFIG, dtype=self.dtype, num_decoder_layers=self.layers))

    def in_steps(self):
        """Returns logits, tokens and the cache of single steps by XLA."""
        model, params = self.bound.model, self.bound.params
        known, missed, uniforms, temperature = self.feed
        ones = jnp.ones_like(temperature)
        cache, extend = model.prefill(params, self.prompt, self.slots), jax.jit(model.extend)
        before, (_, cache) = cache.length, extend(params, cache, known[:, :1])
        cache, current = model.rollback(cache, before + missed), known[:, 1:]
        logits, tokens = [], []
        for turn in range(TURNS):
            out, cache = extend(params, cache, current)
            logits.append(out.logits[:, 0])
            _, token = laws_and_token(logits[-1], Sampling(temperature, ones, 0 * ones), uniforms[:, turn])
            tokens.append(token)
            current = token[:, None]
        return jnp.stack(logits, 1), jnp.stack(tokens, 1), cache

    def in_one_kernel(self, parameters=INTERPRETER):
        model, params = self.bound.model, self.bound.params
        with interpreted(parameters=parameters):
            cache = model.prefill(params, self.prompt, self.slots)
            assert model.can_draft(params, cache, TURNS)
            return model.draft(params, cache, *self.feed, TURNS)


CASES = {
    "three_rows": Case(),
    "a_row_at_the_border_of_tiles": Case((126, 127), (True, False), (0.0, 0.0), slots=140),
    "the_last_slots": Case((1, 126, 3, 125), (False, False, False, True), (1.0, 0.0, 1.0, 0.5), slots=128),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.laws) for n in CASES if n != "three_rows"] + ["three_rows"]
)
def test_a_block_equals_single_steps(name):
    compare(CASES[name].in_one_kernel(), *CASES[name].in_steps())


# With an odd number of groups, an attention ends in one half of the buffers, and the next must begin in the other.
ODD = Case((126, 3, 127), (True, False, True), (0.0,) * 3, slots=140, layers=3)
EVEN = Case((126, 3, 127, 5), (False,) * 4, (0.0,) * 4, slots=140, layers=2)
ANEW = {
    "nothing_stays": (ODD, 1, (0, 0), INTERPRETER),
    "nothing_stays_and_copies_are_early": (ODD, 1, (0, 0), EAGER),
    "slots_stay": (ODD, 1, (3, 0), EAGER),
    "slots_and_some_encoder_layers_stay": (ODD, 1, (3, 2), EAGER),
    "groups_of_two_rows": (EVEN, 2, (0, 0), EAGER),
}


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize("name", ANEW)
def test_caches_that_do_not_fit_are_read_anew(monkeypatch, name):
    """VMEM for the caches of some layers only: of self-attention, and of the encoder's keys and values."""
    case, group, kept, parameters = ANEW[name]
    kernel_of = t5_blocks.kernel_of

    def small_kernel_of(*sizes):
        kernel = dataclasses.replace(kernel_of(*sizes), group=group)
        kernel = dataclasses.replace(kernel, vmem=kernel.needed_bytes(*kept))
        assert (kernel.kept(crossed=False), kernel.kept(crossed=True)) == kept
        return kernel

    expected = case.in_steps()
    monkeypatch.setattr(t5_blocks, "kernel_of", small_kernel_of)
    compare(case.in_one_kernel(parameters), *expected)


@pytest.mark.laws
def test_a_row_that_is_not_finite_leaves_the_others():
    case = Case()
    model, params = case.bound.model, case.bound.params
    with interpreted():
        cache = model.prefill(params, case.prompt, case.slots)
        second = slice(4, 8)  # heads of the second row
        cross = tuple((keys, values.at[second].set(jnp.nan)) for keys, values in cache.static.cross)
        cache = dataclasses.replace(cache, static=dataclasses.replace(cache.static, cross=cross))
        block = model.draft(params, cache, *case.feed, TURNS)
    assert np.isfinite(np.asarray(block.logits)[..., :250]).all((1, 2)).tolist() == [True, False, True]


def compare(block, logits, tokens, cache):
    """Compares a block with the logits, tokens and caches of single steps."""
    np.testing.assert_array_equal(block.tokens, tokens)
    np.testing.assert_allclose(block.logits[..., :250], logits[..., :250], atol=5e-5)
    assert np.all(np.asarray(block.logits)[..., 250:] == -np.inf)
    fed = np.asarray(cache.length)  # in the caches, slots from here on are meaningless
    for ours, theirs in zip((*block.cache.keys, *map(turned, block.cache.values)), slots_last(cache), strict=True):
        for row, length in enumerate(fed):
            heads = slice(4 * row, 4 * row + 4)
            np.testing.assert_allclose(ours[heads, :, :length], theirs[heads, :, :length], atol=5e-5)


def turned(values):
    return values.swapaxes(1, 2)


def slots_last(cache):
    return (*cache.keys, *map(turned, cache.values))


def test_draws_invert_the_distribution():
    """Rows that differ only in their random numbers, the smallest and the largest among them; a tile has no mass."""
    rows = 8
    case = Case((3,) * rows, (False,) * rows, (0.7,) * rows)
    uniforms = np.array([0.0, 2.0**-24, 0.2, 0.4, 0.5, 0.7, 0.9, 1 - 2.0**-24], np.float32)
    known, missed, _, temperature = case.feed
    model, params, prompt = case.bound.model, case.bound.params, case.prompt
    same = Prompt(*(jnp.repeat(x[:1], rows, 0) for x in (prompt.tokens, prompt.length, prompt.encoder_tokens)))
    known = jnp.repeat(known[:1], rows, 0)
    hidden = jax.jit(model.extend)(params, model.prefill(params, same, 40), known[:, 1:])[0].hidden[0, 0]
    head = params["decoder"]["logits_dense"]
    head["kernel"] = head["kernel"].at[:, :128].set(-200 * hidden[:, None] / (hidden @ hidden))
    with interpreted():
        cache = model.prefill(params, same, 40)
        block = model.draft(params, cache, known, missed, jnp.asarray(uniforms)[:, None], temperature, 1)
    law = softmax(block.logits[:, 0] / 0.7)
    assert not np.any(law[:, :128])
    np.testing.assert_array_equal(block.tokens[:, 0], sample(law, jnp.asarray(uniforms)))
    assert len(set(np.asarray(block.tokens[:, 0]).tolist())) > 5


REFUSED = {
    "ungated": {"gated": False},
    "tied": {"tied": True},
    "scanned": {"scan_layers": True},
    "a_width_of_half_a_tile": {"d_ff": 192},
    "too_large_for_vmem": {"d_ff": 32 * 1024},
    "a_single_layer": {"num_decoder_layers": 1},
    "columns_of_one_tile": {"num_heads": 2},
    "fewer_rows_than_the_vocabulary": {"vocab_size": 260, "missing_rows": 4},
    "none": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_decoders_draft_in_steps(name):
    config = dataclasses.replace(CONFIG, **REFUSED[name])
    bound = fused(dataclasses.replace(config, vocab_size=250, missing_rows=0))
    bound = dataclasses.replace(bound, model=dataclasses.replace(bound.model, config=config))
    with platforms.traced_for("tpu"):
        cache = jax.eval_shape(partial(bound.model.prefill, max_len=40), bound.params, Case().prompt)
        assert bound.model.can_draft(bound.params, cache, TURNS) == (name == "none")
    assert not bound.model.can_draft(bound.params, cache, TURNS)  # on a CPU


@pytest.mark.sample(1)
@pytest.mark.laws
@pytest.mark.parametrize(("method", "temperature"), [("token_v3", 0.9), ("spec_decode", 0.0)])
def test_generations_equal_those_of_single_steps(method, temperature):
    pair = sc.Pair(target=fused(), draft=fused())
    settings = {"method": method, "temperature": temperature, "block_size": 3, "max_new_tokens": 8, "alpha": 0.3}

    def rows(**changes):
        return sc.decode(pair, [[5, 9, 17], [200, 3]], **settings | changes).stats["rows"]

    # the kernel does not know top-k, so the program contains the loop of single steps too
    calls = [{}, {"top_k": 5}] if temperature else [{}]
    expected = [rows(**changes) for changes in calls]
    with interpreted():
        drafted = [rows(**changes) for changes in calls]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), drafted, expected)
