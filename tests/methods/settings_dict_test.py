"""`decode`'s settings as editors and `help()` see them are the fields of `Settings`."""

import inspect
from pathlib import Path

import pytest

import speccascade_jax as sc
from speccascade_jax.methods import settings_dict
from speccascade_jax.methods.settings import Settings
from tests.support.settings_dict import source


def test_the_typed_dict_has_the_fields_of_settings():
    assert Path(settings_dict.__file__).read_text() == source(), "run `make format`"


@pytest.mark.parametrize("function", [sc.decode, sc.stream])
def test_help_lists_the_settings_with_their_defaults(function):
    listed = inspect.signature(function).parameters
    for name, parameter in inspect.signature(Settings).parameters.items():
        assert listed[name].default == parameter.default
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in listed.values())
