"""Early exits: draft models that consist of the target's first layers and the target's or a separate output head.

An exit's parameters are the target's arrays themselves, so memory holds each weight once. An exit is a full language
model with a cache for its layers. If it drafts for the target that it is a part of, `view` and `put` let it read and
extend the target's cache (`ExitDrafter`). Sources: docs/methods.md, section 7; LayerSkip (Elhoushi et al., 2024) for
the shared head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.protocols import AttachedModel
from speccascade_jax.core.types import Array, BoundModel, Cache, LMOutput, Params, Prompt
from speccascade_jax.models.decoder import DecoderCache
from speccascade_jax.models.families import FAMILIES, Model
from speccascade_jax.models.t5 import T5

HEAD = "head"
"""Name of the parameter that holds an exit's separate output head, a kernel `[E, num_embeddings]`."""


@dataclass(frozen=True)
class EarlyExit:
    """A language model made of the first `layer` decoder layers of the model `of`, its last norm and an output head.

    `exit_params` returns the parameters of an exit.

    Attributes:
        of: the whole model, whose first layers the exit uses.
        layer: number of decoder layers; 0 exits right after the embedding.
        own_head: whether the exit has a separate output head; otherwise it uses the whole model's.

    Raises:
        ValueError: the whole model has fewer layers, or its family does not support early exits.
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
        """The model with the first `layer` decoder layers only."""
        # A separate head is an untied output layer, even if the whole model's output layer is tied.
        # The layers run in a scan exactly if the whole model's do, however few they are: they share its parameters.
        layout = {"scan_layers": True} if self.of.config.scanned else {}
        config = replace(self.of.config, **{_layers(self.of): self.layer}, **layout)
        cut: Model = replace(self.of, config=replace(config, tied=False) if self.own_head else config)
        return cut

    @property
    def config(self) -> Any:
        """The whole model's configuration with `layer` decoder layers."""
        return self.model.config

    @property
    def mesh(self) -> Any:
        """The mesh of devices that hold the whole model, and therefore the exit; `None`: one device."""
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
        """Feeds the prompt except its last token to the exit's layers, and returns their cache."""
        return self.model.prefill(params, prompt, max_len, max_rollback)

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feeds `tokens` `[B, T]` to the exit's layers, the last norm and the head; returns output and new cache."""
        return self.model.extend(params, cache, tokens)

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """Returns the exit's cache with its length set to `length`, `[B]`."""
        return self.model.rollback(cache, length)

    def consumed(self, cache: Cache) -> Array:
        """Returns how many tokens each row of the exit's cache has consumed, `[B]`."""
        return self.model.consumed(cache)

    def prompt_features(self, cache: Cache) -> Array:
        """Returns the summary vector of the prompt that the exit's layers computed, `[B, D]`."""
        return self.model.prompt_features(cache)

    def view(self, cache: Cache) -> Cache:
        """Returns the part of the model's cache that the exit's layers use; if they run in a scan, the whole cache."""
        if self.of.config.scanned:
            return cache  # The exit's loop over layers ends early, and leaves the other layers' slots as they are.
        # Only tuples are sliced, so the result holds the target's own arrays without a copy.
        keys, values = cache.keys[: self.layer], cache.values[: self.layer]
        if isinstance(cache, DecoderCache):
            encoded = cache.encoded and cache.encoded._replace(source=cache.encoded.source[: self.layer])
            return replace(cache, keys=keys, values=values, rings=cache.rings[: self.layer], encoded=encoded)
        # A T5's cache also holds each layer's cross-attention, which is cut too. All layers share the relative bias.
        static = replace(cache.static, cross=cache.static.cross[: self.layer])
        return replace(cache, keys=keys, values=values, static=static)

    def put(self, cache: Cache, exit_cache: Cache) -> Cache:
        """Returns the whole model's `cache` with its first layers taken from `exit_cache`; its length is unchanged."""
        if self.of.config.scanned:
            return replace(cache, keys=exit_cache.keys, values=exit_cache.values)
        # The length must not grow, because the upper layers have not seen the drafted tokens. The target is fed these
        # tokens again and overwrites their slots.
        return replace(
            cache,
            keys=exit_cache.keys + cache.keys[self.layer :],
            values=exit_cache.values + cache.values[self.layer :],
        )


def depth_of(model: Any) -> int:
    """Returns the number of layers of a model's decoder.

    Raises:
        ValueError: the model's family does not support early exits.
    """
    name = _layers(model)
    return int(getattr(model.config, name))


def _layers(model: Any) -> str:
    if isinstance(model, AttachedModel):
        raise ValueError(f"{type(model).__name__} has no early exits: it drafts for its target only")
    for family in FAMILIES.values():
        if isinstance(model, family.model):
            return family.depths[-1]
    raise ValueError(f"{type(model).__name__} has no early exits: only this package's T5 and decoder-only models do")


def exit_params(params: Params, layer: int, head: Array | None = None) -> Params:
    """Returns the parameters of an early exit: the whole model's arrays, without the layers above the exit.

    Args:
        params: the whole model's parameters.
        layer: number of decoder layers that the exit keeps.
        head: the exit's separate output head, `[E, num_embeddings]`; `None` keeps the whole model's head.
    """
    # Names of layers count from 0, so an exit with n layers keeps `layers_0` to `layers_{n - 1}`. It keeps stacked
    # parameters as they are, because a part of them would be a copy; its loop over layers ends early instead.
    dropped = [name for name in params["decoder"] if name.startswith("layers_") and int(name[7:]) >= layer]
    decoder = {name: tree for name, tree in params["decoder"].items() if name not in dropped}
    if head is not None:
        decoder["logits_dense"] = {"kernel": head}
    return {**params, "decoder": decoder}


def shared_head(bound: BoundModel) -> np.ndarray:
    """Returns the model's output head as a float32 kernel `[E, num_embeddings]`, from which a separate head can start.

    Columns of vocabulary padding are zero.
    """
    config, decoder = bound.model.config, bound.params["decoder"]
    if "logits_dense" in decoder:
        head = np.array(decoder["logits_dense"]["kernel"], np.float32)
    else:
        head = np.array(bound.params["token_embedder"]["embedding"], np.float32).T
        # A T5 with a tied head scales the hidden states before it. A separate head does not, so the kernel is scaled.
        if isinstance(bound.model, T5):
            head *= config.d_model**-0.5
    # The columns of padding are untrained, so they start from zero. Logits of padding are masked in any case.
    head[:, config.vocab_size :] = 0.0
    return head


def early_exit(bound: BoundModel, layer: int, head: Array | None = None) -> BoundModel:
    """Returns a draft model of the first `layer` layers of `bound`, with the output head `head` (`exit_params`).

    Raises:
        ValueError: the model has fewer layers, its family has no early exits, or `head` has a wrong shape.
    """
    model = EarlyExit(bound.model, layer, own_head=head is not None)
    wanted = (bound.model.config.d_model, bound.model.config.num_embeddings)
    if head is not None and head.shape != wanted:
        raise ValueError(
            f"the head of the exit at layer {layer} has shape {head.shape}, but the model needs {wanted}: choose a "
            "head that was trained for this model"
        )
    return BoundModel(params=exit_params(bound.params, layer, head), model=model)


Places = tuple[tuple[jax.tree_util.PyTreeDef, tuple[int, ...]], ...]
"""For each parameter tree: its structure, and its leaves' indices in a list of arrays; a static argument of jit."""


def distinct(params: Sequence[Params]) -> tuple[list[Array], Places]:
    """Returns the arrays of all parameter trees without duplicates, and the `Places` that `restored` needs.

    Models that share arrays, such as a target and its early exit, then pass each array to a jitted function once. XLA
    merges equal computations on one argument, but not if the same array arrives as two arguments.
    """
    arrays: list[Array] = []
    known: dict[int, int] = {}
    places = []
    for tree in params:
        leaves, shape = jax.tree.flatten(tree)
        for leaf in leaves:
            # Arrays are compared by identity, because a comparison of values would read every weight.
            if id(leaf) not in known:
                known[id(leaf)] = len(arrays)
                arrays.append(leaf)
        places.append((shape, tuple(known[id(leaf)] for leaf in leaves)))
    return arrays, tuple(places)


def restored(arrays: Sequence[Array], places: Places) -> list[Params]:
    """Rebuilds the parameter trees from the output of `distinct`."""
    return [jax.tree.unflatten(shape, [arrays[n] for n in indices]) for shape, indices in places]
