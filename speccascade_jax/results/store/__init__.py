"""Store of measurement records, and of the files beside it."""

from speccascade_jax.runtime import moved

__getattr__ = moved.attributes_of("speccascade_jax.results.store.result_store")
