"""Drafts that are the target's own first layers: an early exit with the shared head, or with one of its own.

An exit is the target cut off above a layer, with the target's very arrays for parameters: weights are never there
twice. By itself it is a language model like any other, with a cache of its own for the layers that it has; where it
drafts for the target itself, `view` and `put` let it read and extend the target's (`ExitDrafter`). Sources:
METHODS.md section 7; LayerSkip (Elhoushi et al., 2024) for the shared head.
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
"""Of an exit's own parameters: the kernel `[E, num_embeddings]` of its head."""


@dataclass(frozen=True)
class EarlyExit:
    """The first `layer` layers of the decoder of `of`, its last norm and a head; parameters as `exit_params` gives.

    Attributes:
        of: the model whose layers they are.
        layer: how many; 0 is right after the embedding.
        own_head: whether the head is its own; otherwise the logits are the model's of what the layers give.

    Raises:
        ValueError: the model has fewer layers, or is of no kind that can be cut.
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
        """The model cut off."""
        config = replace(self.of.config, **{_layers(self.of): self.layer})
        cut: Model = replace(self.of, config=replace(config, tied=False) if self.own_head else config)
        return cut

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def mesh(self) -> Any:
        """The devices that the model is spread over, and so the exit (`models.layers.CachedModel`)."""
        return getattr(self.of, "mesh", None)

    @property
    def vocab_size(self) -> int:
        return int(self.of.vocab_size)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.of.is_encoder_decoder)

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        return self.model.prefill(params, prompt, max_len, max_rollback)

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        return self.model.extend(params, cache, tokens)

    def rollback(self, cache: Cache, length: Array) -> Cache:
        return self.model.rollback(cache, length)

    def consumed(self, cache: Cache) -> Array:
        return self.model.consumed(cache)

    def prompt_features(self, cache: Cache) -> Array:
        return self.model.prompt_features(cache)

    def view(self, cache: Cache) -> Cache:
        """What the exit sees of the whole model's cache."""
        keys, values = cache.keys[: self.layer], cache.values[: self.layer]
        if isinstance(cache, DecoderCache):
            return replace(cache, keys=keys, values=values, rings=cache.rings[: self.layer])
        static = replace(cache.static, cross=cache.static.cross[: self.layer])
        return replace(cache, keys=keys, values=values, static=static)

    def put(self, cache: Cache, own: Cache) -> Cache:
        """The whole model's cache with what the exit wrote into its layers, at the length that it had."""
        return replace(cache, keys=own.keys + cache.keys[self.layer :], values=own.values + cache.values[self.layer :])


def depth_of(model: Any) -> int:
    """How many layers a model's decoder has.

    Raises:
        ValueError: it is of no kind that can be cut.
    """
    name = _layers(model)
    return int(getattr(model.config, name))


def _layers(model: Any) -> str:
    for family in FAMILIES.values():
        if isinstance(model, family.model):
            return family.depths[-1]
    raise ValueError(f"{type(model).__name__} has no early exits: only T5 and decoder-only models of ours do")


def exit_params(params: Params, layer: int, head: Array | None = None) -> Params:
    """The parameters of an exit of a model with `params`: the same arrays, without the layers above.

    Args:
        head: `[E, num_embeddings]`, the exit's own; `None`: the model's.
    """
    dropped = [name for name in params["decoder"] if name.startswith("layers_") and int(name[7:]) >= layer]
    decoder = {name: tree for name, tree in params["decoder"].items() if name not in dropped}
    if head is not None:
        decoder["logits_dense"] = {"kernel": head}
    return {**params, "decoder": decoder}


def shared_head(bound: BoundModel) -> np.ndarray:
    """The model's own head as a kernel `[E, num_embeddings]` for `early_exit`, float32; what is padding is zero."""
    config, decoder = bound.model.config, bound.params["decoder"]
    if "logits_dense" in decoder:
        head = np.array(decoder["logits_dense"]["kernel"], np.float32)
    else:
        head = np.array(bound.params["token_embedder"]["embedding"], np.float32).T
        if isinstance(bound.model, T5):
            head *= config.d_model**-0.5
    head[:, config.vocab_size :] = 0.0
    return head


def early_exit(bound: BoundModel, layer: int, head: Array | None = None) -> BoundModel:
    """A draft that is the first `layer` layers of `bound`, with its head or one of its own (`exit_params`).

    Raises:
        ValueError: as `EarlyExit`; a head of another width or vocabulary.
    """
    model = EarlyExit(bound.model, layer, own_head=head is not None)
    wanted = (bound.model.config.d_model, bound.model.config.num_embeddings)
    if head is not None and head.shape != wanted:
        raise ValueError(f"the head of the exit at layer {layer} has the shape {head.shape}; the model's are {wanted}")
    return BoundModel(params=exit_params(bound.params, layer, head), model=model)


Places = tuple[tuple[jax.tree_util.PyTreeDef, tuple[int, ...]], ...]
"""For each model the shape of its tree, and where among the arrays its leaves are. Hashable: static under jit."""


def distinct(params: Sequence[Params]) -> tuple[list[Array], Places]:
    """The arrays of all trees, one that is held twice once, and what `restored` needs to give the trees back.

    A compiler merges what is computed twice from one array, and cannot from two arguments, be they one in the caller's
    hands.
    """
    arrays: list[Array] = []
    known: dict[int, int] = {}
    places = []
    for tree in params:
        leaves, shape = jax.tree.flatten(tree)
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = len(arrays)
                arrays.append(leaf)
        places.append((shape, tuple(known[id(leaf)] for leaf in leaves)))
    return arrays, tuple(places)


def restored(arrays: Sequence[Array], places: Places) -> list[Params]:
    """The trees that `distinct` took apart."""
    return [jax.tree.unflatten(shape, [arrays[n] for n in own]) for shape, own in places]
