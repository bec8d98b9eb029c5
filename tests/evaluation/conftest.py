"""The tabular pair over a real vocabulary that most tests of measurement share."""

import pytest

import speccascade_jax as sc
from tests.support import text_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> sc.Pair:
    return text_pair.make(tmp_path_factory.mktemp("pair"))
