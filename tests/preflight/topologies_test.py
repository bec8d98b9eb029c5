"""Test of the names of devices that the compiler receives."""

from types import SimpleNamespace
from typing import Any

import pytest

from speccascade_jax.preflight import topologies
from speccascade_jax.preflight.chips import chip_of


@pytest.mark.parametrize(
    ("asked", "name", "options"),
    [
        ("v4:2x2x2", "v4:2x2x2", {"chip_config_name": "megacore"}),
        ("v5p", "v5p:2x2x1", {}),
        ("v5e:2x4", "v5e:2x4", {}),
        ("h100:8", "h100", {"topology": "1x1x8"}),
        ("a100:1x2x4", "a100", {"topology": "1x2x4"}),
        ("b200", "b200", {"topology": "1x1x1"}),
    ],
)
def test_a_compiler_is_asked_for_whole_chips(
    monkeypatch: pytest.MonkeyPatch, asked: str, name: str, options: dict[str, Any]
) -> None:
    def describe(topology_name: str, platform: str, **given_options: Any) -> SimpleNamespace:
        return SimpleNamespace(devices=[(topology_name, platform, given_options)])

    monkeypatch.setattr(topologies, "_check_installed", lambda kind: None)
    monkeypatch.setattr(topologies.topologies, "get_topology_desc", describe)
    ((topology_name, platform, got),) = topologies.devices.__wrapped__(asked)
    assert topology_name == name
    assert got.pop("target_config", "") == chip_of(asked).target_config
    assert (platform, got) == ("cuda" if "topology" in options else "tpu", options)
