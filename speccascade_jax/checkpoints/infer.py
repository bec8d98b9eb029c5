"""Checks that compare a checkpoint's arrays with the parameters that its model family (`models.families`) expects."""

from pathlib import Path

from speccascade_jax.models.families import FAMILIES, Config, Shapes, family_of
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, counted, incomplete, listing

MOST_LAYERS = 10_000


def expected_shapes(config: Config) -> Shapes:
    """Returns the shapes by name of the parameters of a model with this configuration."""
    return family_of(config).shapes(config)


def infer_config(path: Path, shapes: Shapes) -> Config:
    """Returns the configuration that the names and shapes of a checkpoint's arrays imply; layers are not stacked.

    Raises:
        CheckpointError: the arrays belong to no known family, or an array that determines a size is missing or has an
            unexpected shape.
    """
    for family in FAMILIES.values():
        if family.infer is not None and (config := family.infer(path, shapes)) is not None:
            return config
    raise CheckpointError(
        f"{path}: unknown architecture: a T5 has token_embedder/embedding, encoder/layers_i and decoder/layers_i, but "
        f"the arrays are {listing(shapes)}; only T5X's T5 encoder-decoders can be loaded"
    )


def check_layers(path: Path, config: Config, arrays: int) -> None:
    """Checks that a configuration does not claim more layers than the checkpoint has arrays.

    The check comes before any work that grows with the number of layers, because a damaged file may claim millions.

    Raises:
        CheckpointError: there are more layers than arrays.
    """
    check_count(path, sum(getattr(config, name) for name in family_of(config).depths), arrays)


def check_count(path: Path, layers: int, most: int) -> None:
    """Raises a `CheckpointError` if the checkpoint at `path` claims more than `most` layers."""
    if layers > most:
        raise CheckpointError(
            f"{path}: its {layers:,} layers exceed the maximum of {most:,}: it is damaged; {COPY_AGAIN}"
        )


def check_shapes(path: Path, shapes: Shapes, config: Config) -> None:
    """Checks that a checkpoint holds exactly the parameters of the configuration, with their shapes.

    Raises:
        CheckpointError: arrays are missing, unknown or of a wrong shape; names them.
    """
    check_layers(path, config, len(shapes))
    expected = expected_shapes(config)
    if missing := expected.keys() - shapes.keys():
        raise incomplete(path, missing, len(expected))
    if unknown := shapes.keys() - expected.keys():
        raise CheckpointError(
            f"{path}: unknown architecture: a {type(config).__name__.removesuffix('Config')} has no place for the "
            f"arrays {listing(unknown)}; correct the configuration or choose another checkpoint"
        )
    if wrong := sorted(name for name in expected if tuple(shapes[name]) != tuple(expected[name])):
        name = wrong[0]
        raise CheckpointError(
            f"{path}: {counted(wrong)} of a wrong shape ({listing(wrong)}): {name} is {list(shapes[name])}, but "
            f"the configuration needs {list(expected[name])}: correct the configuration or {COPY_AGAIN}"
        )
