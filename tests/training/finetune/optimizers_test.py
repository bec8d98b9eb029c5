"""Tests of optimisers: Adafactor against the published update in NumPy, stacked layers against unrolled ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.training.finetune.optimizers import Adafactor, AdamW, ScaledAdam, state_specs

STEPS, LAYERS, RATE = 4, 3, 1e-3
SHAPES = {
    "factored": (130, 200), "square": (128, 128), "turned": (140, 129), "narrow": (127, 200), "vector": (300,),
    "zero": (130, 130),
}  # fmt: skip


def _tree(seed: int, size: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (size * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def _parameters() -> dict[str, np.ndarray]:
    return {name: array * (name != "zero") for name, array in _tree(0, 0.05).items()}


def _gradients(step: int) -> dict[str, np.ndarray]:
    """Returns gradients that grow from step to step, so that clipping acts, and differ from row to row."""
    spread = np.random.default_rng(99)
    grown = {name: array * 10.0**step for name, array in _tree(1 + step, 1e-3).items()}
    return {
        name: (array * spread.uniform(0, 2, (len(array), *[1] * (array.ndim - 1)))) for name, array in grown.items()
    }


class _PublishedAdafactor:
    """Adafactor of one array in float64: Shazeer and Stern (2018), algorithms 4 and 5, with T5's settings.

    The order of the parts and the constants are those of T5X (`t5x/adafactor.py`, `apply_param_gradient`).
    """

    def __init__(self, shape):
        self.factored = len(shape) == 2 and min(shape) >= 128
        self.rows, self.columns, self.whole, self.step = 0.0, 0.0, 0.0, 0

    def direction(self, gradient, parameter):
        gradient, parameter = gradient.astype(np.float64), parameter.astype(np.float64)
        self.step += 1
        decay = 1.0 - self.step**-0.8
        squares = gradient**2 + 1e-30
        if self.factored:
            self.rows = decay * self.rows + (1 - decay) * squares.sum(1)
            self.columns = decay * self.columns + (1 - decay) * squares.sum(0)
            second = np.outer(self.rows, self.columns) / self.rows.sum()
        else:
            self.whole = second = decay * self.whole + (1 - decay) * squares
        update = gradient / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)) / 1.0)
        return update * max(1e-3, np.sqrt(np.mean(parameter**2)))


def _unroll(tree):
    """Returns the tree of unrolled layers of a tree with stacked ones."""
    layers = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for i in range(LAYERS)}
    return {name: part for name, part in tree.items() if name != "layers"} | layers


def _stacked(make) -> dict:
    """Returns a tree with stacked layers and other arrays from `make(number)`, which returns a tree."""
    trees = [make(number) for number in range(LAYERS)]
    # `layers_norm` is no stack, whatever its name begins with
    return {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *trees), "layers_norm": make(LAYERS)}


def _run(transformation, parameters, gradients):
    """Yields the direction of every step and the parameters after it."""
    update = jax.jit(transformation.update)
    state = transformation.init(parameters)
    for step in range(STEPS):
        direction, state = update(gradients(step), state, parameters)
        parameters = jax.tree.map(lambda p, d: p - RATE * d, parameters, direction)
        yield direction, parameters


def test_adafactor_equals_the_published_update_over_several_steps():
    wanted, published = _parameters(), {name: _PublishedAdafactor(shape) for name, shape in SHAPES.items()}
    for step, (direction, parameters) in enumerate(_run(Adafactor().transformation(), _parameters(), _gradients)):
        for name, gradient in _gradients(step).items():
            by_hand = published[name].direction(gradient, wanted[name])
            wanted[name] = wanted[name] - RATE * by_hand
            np.testing.assert_allclose(direction[name], by_hand, rtol=1e-5, atol=1e-6 * np.abs(by_hand).max())
            np.testing.assert_allclose(parameters[name], wanted[name], atol=1e-8, rtol=1e-6)


def test_adafactor_equals_optax():
    reference = optax.adafactor(learning_rate=RATE)
    state, wanted = reference.init(_parameters()), _parameters()
    for step, (_, parameters) in enumerate(_run(Adafactor().transformation(), _parameters(), _gradients)):
        updates, state = jax.jit(reference.update)(_gradients(step), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        for name in SHAPES:
            np.testing.assert_allclose(parameters[name], wanted[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "optimizer", [Adafactor(weight_decay=0.1), ScaledAdam(), AdamW()], ids=lambda o: type(o).__name__
)
def test_stacked_layers_are_updated_as_unrolled_ones(optimizer):
    def gradients(step):
        # layers of very different size: a moment or scale over all of them would be wrong for each
        return _stacked(lambda number: jax.tree.map(lambda g: g * 100.0**-number, _gradients(step)))

    parameters = _stacked(lambda number: jax.tree.map(lambda p: p * 10.0**-number, _parameters()))
    transformation = optimizer.transformation()
    scanned = _run(transformation, parameters, gradients)
    unrolled = _run(transformation, _unroll(parameters), lambda step: _unroll(gradients(step)))
    for (stacked_direction, _), (direction, _) in zip(scanned, unrolled, strict=True):
        for ours, wanted in zip(*map(jax.tree.leaves, (_unroll(stacked_direction), direction)), strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_the_first_update_of_scaled_adam_is_relative_to_each_array():
    parameters = {"small": jnp.full((3,), 0.02), "large": jnp.full((3,), -5.0), "zero": jnp.zeros((3,))}
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), parameters)
    direction, _ = next(_run(ScaledAdam(min_scale=1e-3).transformation(), parameters, lambda _: gradients))
    for name, scale in (("small", 0.02), ("large", 5.0), ("zero", 1e-3)):
        np.testing.assert_allclose(direction[name], scale, rtol=1e-3)


def test_weight_decay_is_multiplied_by_the_rate_and_spares_vectors_in_adamw():
    def difference(decayed, plain):
        first, second = (next(_run(o.transformation(), _parameters(), _gradients))[0] for o in (decayed, plain))
        return {name: np.asarray(first[name] - second[name]) for name in SHAPES}

    parameters = _parameters()
    for name, added in difference(Adafactor(weight_decay=0.5), Adafactor()).items():
        np.testing.assert_allclose(added, 0.5 * parameters[name], atol=1e-6)
    for name, added in difference(AdamW(weight_decay=0.5), AdamW(weight_decay=0.0)).items():
        np.testing.assert_allclose(added, 0.5 * parameters[name] * (name != "vector"), atol=1e-6)


def test_output_scales_do_not_decay():
    """Compares with a norm's scale; weight decay is the only part of a step that could change an output scale."""
    optimizer = Adafactor(weight_decay=0.1).transformation()
    scale = {"scale": jnp.full((1,), 0.7)}
    params = {"layers_0": {"output": scale, "norm": scale}, "layers": {"output": {"scale": jnp.ones((2, 1))}}}
    directions, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert directions["layers_0"]["norm"]["scale"] == pytest.approx(0.07)
    assert not directions["layers_0"]["output"]["scale"].any() and not directions["layers"]["output"]["scale"].any()


def _shapes(**shapes) -> dict:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


SHARDED = {
    "layers": _shapes(kernel=(6, 256, 512), square=(6, 256, 256), cube=(256,) * 3, small=(6, 256, 16), scale=(6, 256)),
    "embedding": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
    "norm": jax.ShapeDtypeStruct((256,), jnp.float32),
}
SPECS = {
    "layers": {
        "kernel": P(None, "data", "model"), "square": P(None, "model", "data"), "cube": P(None, "data", "model"),
        "small": P(None, "data"), "scale": P(),
    },
    "embedding": P("model", "data"), "norm": P("data"),
}  # fmt: skip
WHOLE = {name: P() for name in SPECS["layers"]}


def test_the_state_of_adafactor_is_laid_out_as_its_parameters():
    moments, *_ = state_specs(Adafactor().transformation(), SHARDED, SPECS)
    by_data, by_model = P(None, "data"), P(None, "model")
    assert moments.count == P()
    assert moments.v_row["layers"] == WHOLE | {"kernel": by_data, "square": by_model, "cube": by_data}
    assert moments.v_col["layers"] == WHOLE | {"kernel": by_model, "square": by_data, "cube": by_model}
    assert moments.v["layers"] == WHOLE | {"small": by_data}
    # the larger side is the column, whichever side comes first
    assert (moments.v_row["embedding"], moments.v_col["embedding"]) == (P("data"), P("model"))
    assert (moments.v["norm"], moments.v_row["norm"]) == (P("data"), P())


@pytest.mark.parametrize("optimizer", [Adafactor(), ScaledAdam(), AdamW()], ids=lambda o: type(o).__name__)
def test_every_array_of_a_state_fits_its_layout(optimizer):
    transformation, mesh = optimizer.transformation(), AbstractMesh((4, 2), ("data", "model"))
    state = jax.eval_shape(transformation.init, SHARDED)
    specs = state_specs(transformation, SHARDED, SPECS)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    sizes = jax.tree.map(lambda leaf, spec: np.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)), state, specs)
    # the moments of the layers' scales stay whole, because the scales do
    assert sum(jax.tree.leaves(sizes)) < 0.5 * sum(leaf.size for leaf in jax.tree.leaves(state))
