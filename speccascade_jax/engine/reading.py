"""What a drafter reads of the target: its summary of the prompt, and its hidden states."""

from speccascade_jax.core.protocols import LanguageModel, LayeredModel, PromptSummary
from speccascade_jax.core.types import Array, Cache, Params, Prompt


def check_layers(target: LanguageModel, layers: tuple[int, ...]) -> None:
    """Refuses a drafter that reads layers of a target that cannot give them, with a ValueError."""
    if layers and not isinstance(target, LayeredModel):
        kind = type(target).__name__
        raise ValueError(f"the drafter reads layers {layers} of the target, but {kind} has no extend_layers")


def prefilled(
    target: LanguageModel,
    params: Params,
    prompt: Prompt,
    slots: int,
    max_rollback: int | None,
    layers: tuple[int, ...],
) -> tuple[Cache, Array | None]:
    """Returns the target's cache, and its states `[B, P, L, D]` along the prompt if there are `layers` to read."""
    if not layers:
        return target.prefill(params, prompt, slots, max_rollback), None
    assert isinstance(target, LayeredModel)
    return target.prefill_layers(params, prompt, slots, layers, max_rollback)


def prompt_features(target: LanguageModel, cache: Cache) -> Array:
    """Returns float `[B, D]`, what the target's prefill made of the prompt.

    Raises:
        ValueError: a model that says nothing of it.
    """
    if not isinstance(target, PromptSummary):
        raise ValueError(f"the drafter reads the target's features, but {type(target).__name__} has no prompt_features")
    return target.prompt_features(cache)
