"""Drafts that consist of the target's first layers: early exits with the target's head or a separate one.

An exit is the target cut off above a layer. Its parameters are the target's arrays themselves, so memory holds each
weight once. An exit is a full language model with a cache for its own layers. If it drafts for the target that it was
cut from, `view` and `put` let it read and extend the target's cache (`ExitDrafter`). Sources: METHODS.md section 7;
LayerSkip (Elhoushi et al., 2024) for the shared head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import Array, BoundModel, Cache, LMOutput, Params, Prompt
from speccascade_jax.models.decoder import DecoderCache
from speccascade_jax.models.families import FAMILIES, Model
from speccascade_jax.models.t5 import T5

HEAD = "head"
"""Name of an exit's separate head, a kernel `[E, num_embeddings]`, among the exit's parameters."""


@dataclass(frozen=True)
class EarlyExit:
    """A language model of the first `layer` decoder layers of the model `of`, its last norm and a head.

    `exit_params` returns its parameters.

    Attributes:
        of: the model that the layers belong to.
        layer: number of layers; 0 exits right after the embedding.
        own_head: whether the exit has a separate head; otherwise it uses the model's.

    Raises:
        ValueError: the model has fewer layers, or its family cannot be cut.
    """

    of: Any
    layer: int
    own_head: bool = False

    def __post_init__(self) -> None:
        depth = depth_of(self.of)
        if not 0 <= self.layer <= depth:
            raise ValueError(f"there is no exit at layer {self.layer}: the model's decoder has layers 0 to {depth}")

    @property
    def model(self) -> Model:
        """The model cut off above `layer`."""
        # A separate head is an untied output layer, whatever the whole model has.
        config = replace(self.of.config, **{_layers(self.of): self.layer})
        cut: Model = replace(self.of, config=replace(config, tied=False) if self.own_head else config)
        return cut

    @property
    def config(self) -> Any:
        """The configuration of the cut model, with `layer` decoder layers."""
        return self.model.config

    @property
    def mesh(self) -> Any:
        """The devices that hold the model and therefore the exit (`models.layers.CachedModel`)."""
        return getattr(self.of, "mesh", None)

    @property
    def vocab_size(self) -> int:
        """The number of real vocabulary entries, as in the whole model."""
        return int(self.of.vocab_size)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the whole model has an encoder."""
        return bool(self.of.is_encoder_decoder)

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        """Returns the cut model's cache of the prompt; layers above the exit do not run."""
        return self.model.prefill(params, prompt, max_len, max_rollback)

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feeds `tokens` `[B, T]` to the lower layers, the last norm and the head."""
        return self.model.extend(params, cache, tokens)

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """Sets the length of the exit's cache to `length`, `[B]`."""
        return self.model.rollback(cache, length)

    def consumed(self, cache: Cache) -> Array:
        """Returns how many tokens each row of the exit's cache has consumed, `[B]`."""
        return self.model.consumed(cache)

    def prompt_features(self, cache: Cache) -> Array:
        """Returns the cut model's summary of the prompt, `[B, D]`."""
        return self.model.prompt_features(cache)

    def view(self, cache: Cache) -> Cache:
        """Returns the part of the whole model's cache that the exit's layers use."""
        # Slices of tuples: the arrays are the target's, and nothing is copied.
        keys, values = cache.keys[: self.layer], cache.values[: self.layer]
        if isinstance(cache, DecoderCache):
            return replace(cache, keys=keys, values=values, rings=cache.rings[: self.layer])
        # T5 also caches each layer's cross-attention; the relative bias is one for all layers and stays.
        static = replace(cache.static, cross=cache.static.cross[: self.layer])
        return replace(cache, keys=keys, values=values, static=static)

    def put(self, cache: Cache, exit_cache: Cache) -> Cache:
        """Returns the whole model's cache with the exit's writes in its first layers, and its length unchanged."""
        # The upper layers have not seen the drafted tokens. The target feeds them again and overwrites these slots.
        return replace(
            cache,
            keys=exit_cache.keys + cache.keys[self.layer :],
            values=exit_cache.values + cache.values[self.layer :],
        )


def depth_of(model: Any) -> int:
    """Returns the number of layers of a model's decoder.

    Raises:
        ValueError: the model's family cannot be cut.
    """
    name = _layers(model)
    return int(getattr(model.config, name))


def _layers(model: Any) -> str:
    for family in FAMILIES.values():
        if isinstance(model, family.model):
            return family.depths[-1]
    raise ValueError(f"{type(model).__name__} has no early exits: only this package's T5 and decoder-only models do")


def exit_params(params: Params, layer: int, head: Array | None = None) -> Params:
    """Returns the parameters of an exit of a model with `params`: the same arrays, without the layers above the exit.

    Args:
        params: the whole model's parameters.
        layer: number of decoder layers that the exit keeps.
        head: `[E, num_embeddings]`, the exit's own; `None`: the model's.
    """
    # Names of layers count from 0, so the exit at layer n keeps `layers_0` to `layers_{n - 1}`.
    dropped = [name for name in params["decoder"] if name.startswith("layers_") and int(name[7:]) >= layer]
    decoder = {name: tree for name, tree in params["decoder"].items() if name not in dropped}
    if head is not None:
        decoder["logits_dense"] = {"kernel": head}
    return {**params, "decoder": decoder}


def shared_head(bound: BoundModel) -> np.ndarray:
    """Returns the model's head as a float32 kernel `[E, num_embeddings]` for `early_exit`; padding columns are zero."""
    config, decoder = bound.model.config, bound.params["decoder"]
    if "logits_dense" in decoder:
        head = np.array(decoder["logits_dense"]["kernel"], np.float32)
    else:
        head = np.array(bound.params["token_embedder"]["embedding"], np.float32).T
        # A tied T5 scales the hidden state; a separate head has no such scale, so the kernel takes it.
        if isinstance(bound.model, T5):
            head *= config.d_model**-0.5
    # The model's columns of padding are untrained; zeros are a neutral start, and logits of padding are masked.
    head[:, config.vocab_size :] = 0.0
    return head


def early_exit(bound: BoundModel, layer: int, head: Array | None = None) -> BoundModel:
    """Returns the first `layer` layers of `bound` as a draft, with the model's head or `head` (`exit_params`).

    Raises:
        ValueError: as `EarlyExit`, or the head has a different width or vocabulary.
    """
    model = EarlyExit(bound.model, layer, own_head=head is not None)
    wanted = (bound.model.config.d_model, bound.model.config.num_embeddings)
    if head is not None and head.shape != wanted:
        raise ValueError(f"the head of the exit at layer {layer} has shape {head.shape}, but the model needs {wanted}")
    return BoundModel(params=exit_params(bound.params, layer, head), model=model)


Places = tuple[tuple[jax.tree_util.PyTreeDef, tuple[int, ...]], ...]
"""Each model's tree structure and the indices of its leaves among the arrays. Hashable, hence static under jit."""


def distinct(params: Sequence[Params]) -> tuple[list[Array], Places]:
    """Returns the arrays of all trees without duplicates, and the `Places` from which `restored` rebuilds the trees.

    XLA merges two computations on the same argument. It cannot merge them if the same array arrives as two arguments.
    """
    arrays: list[Array] = []
    known: dict[int, int] = {}
    places = []
    for tree in params:
        leaves, shape = jax.tree.flatten(tree)
        for leaf in leaves:
            # By identity: a comparison of values would read every weight.
            if id(leaf) not in known:
                known[id(leaf)] = len(arrays)
                arrays.append(leaf)
        places.append((shape, tuple(known[id(leaf)] for leaf in leaves)))
    return arrays, tuple(places)


def restored(arrays: Sequence[Array], places: Places) -> list[Params]:
    """Rebuilds the parameter trees from the output of `distinct`."""
    return [jax.tree.unflatten(shape, [arrays[n] for n in indices]) for shape, indices in places]
