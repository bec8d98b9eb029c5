"""From a pair and settings to what generates: what `decode`, `stream` and the experiments share."""

from collections.abc import Sequence
from typing import Any

from speccascade_jax.core.flat_params import Flat
from speccascade_jax.core.names import shown
from speccascade_jax.core.types import Params
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import Generator
from speccascade_jax.methods import table
from speccascade_jax.methods.method import Built, Recipe
from speccascade_jax.methods.settings import Settings
from speccascade_jax.models.sharding import rest
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import checked_stop_ids
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.runtime.program_memory import release_when_crowded


def build(pair: Pair, settings: Settings, *, stop_ids: Sequence[int] | None = None, head: Head | None = None) -> Built:
    """A program for a pair and the parameters to pass to it.

    Whoever decodes comes through here first, so it is here that the compilation cache is switched on
    (`compilation_cache.switch_on`), and not by an import, and that programs are given back when there are too many.

    Args:
        stop_ids: end a row; `None`: the vocabulary's, or none without a vocabulary.
        head: instead of the pair's own acceptance head, where the method asks one.

    Raises:
        ValueError: unknown method, rule, acceptance, stop policy, drafter or bonus, a block size below 1, or one that
            the method does not have; a stop id outside the vocabulary; an acceptance head that is missing, or of
            another draft.
    """
    check_pair(pair)
    recipe, stops = table.get(settings.method), checked_stop_ids(pair, stop_ids)
    program, params = recipe.build(pair, settings, stops, head)
    compilation_cache.switch_on()
    release_when_crowded()
    return Built(program, Flat(rest(params, pair.mesh)))


def check_pair(pair: Any) -> None:
    """Refuse what is no pair, such as the name of one, with a ValueError."""
    if not isinstance(pair, Pair):
        raise ValueError(f"pair={shown(pair)} is no loaded pair: give sc.load_pair({shown(pair)}), or a Pair")


def assemble(
    pair: Pair, *, stop_ids: Sequence[int] | None = None, head: Head | None = None, **settings: Any
) -> tuple[Engine, Params]:
    """An engine for a pair and the parameters to pass beside it, where the method is one.

    Arguments as of `build`, and `Settings` by name.

    Raises:
        ValueError: as `build`; a method that is more than one generation.
    """
    chosen = Settings.of("assemble", settings)
    return engine_of(table.get(chosen.method), build(pair, chosen, stop_ids=stop_ids, head=head))


def engine_of(recipe: Recipe, built: Built) -> tuple[Engine, Params]:
    """The engine that a method built, and its parameters.

    Raises:
        ValueError: a method that is more than one generation.
    """
    if not isinstance(built.program, Generator):
        raise ValueError(f"method {recipe.name!r} is more than one generation, and so is no engine: call decode")
    return built.program.engine, built.params
