"""Language models behind the one protocol of `base`."""

from speccascade_jax.models import base, fake, t5, table

__all__ = ["base", "fake", "t5", "table"]
