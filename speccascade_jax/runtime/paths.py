"""Where the repository and what is shipped lie."""

from pathlib import Path


def shipped(*parts: str) -> Path:
    """The path of `parts` among the package's assets: weights, vocabularies, `tiny_translation`."""
    return Path(__file__).resolve().parents[1].joinpath("assets", *parts)


def repository_root() -> Path:
    """The folder that holds the package: the clone's root when installed with `pip install -e`."""
    return Path(__file__).resolve().parents[2]
