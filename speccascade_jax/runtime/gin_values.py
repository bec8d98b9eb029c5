"""Values that gin files bind, held against the annotations of what they are bound to, before any of it is called."""

from types import FunctionType
from typing import Any

import gin

from speccascade_jax.core import validate_types
from speccascade_jax.runtime import gin_errors


def check() -> None:
    """Refuse values of the wrong kind.

    Raises:
        ValueError: names the binding, the value and what is meant.
    """
    for (scope, selector), bound in gin.config._CONFIG.items():
        if selector != "gin.macro":
            name = ".".join(selector.split(".")[-2:])
            prefix = f"{scope}/{name}." if scope else f"{name}."
            values = {argument: _value(value, prefix + argument) for argument, value in bound.items()}
            validate_types.check(gin.config._REGISTRY[selector].wrapped, values, prefix)


def _value(value: Any, name: str) -> Any:
    """The value with macros in place; what a call will give is `validate_types.Later`."""
    if isinstance(value, dict):
        return {key: _value(one, name) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_value(one, name) for one in value)
    if not isinstance(value, gin.config.ConfigurableReference):
        return value
    called = value.configurable
    if called.selector == "gin.macro" and value.evaluate:
        return _value(gin.config._CONFIG[value.config_key]["value"], name)
    if called.selector == "gin.constant" and value.evaluate:
        if (constant := value.scoped_configurable_fn()) is gin.REQUIRED:
            raise ValueError(gin_errors.unfilled(name))
        return constant
    if not value.evaluate:
        return validate_types.Later(f"{value!r} (to call it: {value!r}())", FunctionType)
    return validate_types.Later(repr(value), called.wrapped if isinstance(called.wrapped, type) else None)


def operative() -> str:
    """The settings that were used, as a gin file; empty where none were read."""
    return str(gin.operative_config_str()).strip()
