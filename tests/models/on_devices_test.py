"""Eight simulated devices write what one writes, and no step gathers a cache or a law (`tests.support.on_devices`)."""

import pytest

from tests.support.on_devices import ROWS, found

GREEDY = (
    "t5 1x8", "t5 2x4", "t5 2x4 unfused", "t5 2x4 whole draft", "t5 2x4 in chunks", "decoder 2x4", "stack 2x4",
    "selection 8x1", "tree 2x4", "decoder tree 2x4",
)  # fmt: skip
SAMPLED = ("t5 2x4 sampled", "decoder 2x4 sampled", "stack 2x4 sampled", "blocks 2x4", "tree 2x4 sampled")


def same(told):
    """Every row's tokens, every counter, and rows that did not end at once."""
    assert told["rows"] == ROWS and told["counters"] and told["longest"] > 4


@pytest.mark.parity
def test_a_pair_is_read_into_its_parts():
    """Its fingerprint, outputs and streams are one device's; rows that do not divide are refused."""
    told = found("rows", "loaded")
    assert told["rows"].startswith("a batch of 7 does not divide by the 2 parts that mesh=(2, 4) spreads rows over: ")
    assert set(told["loaded"]) == {"fingerprint", "split", "tokens", "stream"} and all(told["loaded"].values())


@pytest.mark.parity
@pytest.mark.parametrize("cases", [GREEDY[:4], GREEDY[4:], SAMPLED])
def test_meshes_models_and_methods_write_what_one_device_writes(cases):
    """Sampled runs draw the same numbers by row, round and slot: their tokens are one device's but at near-ties."""
    for told in found(*cases).values():
        same(told)


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "shapes"), [("t5", ("1x8", "2x4")), ("decoder", ("2x4",))])
def test_no_step_gathers_a_cache_or_the_laws(kind, shapes):
    """Read from the compiled program, vocabularies of 32k and 256k; the merged layout left to XLA is found out."""
    cases = [f"gathers {kind} {shape} {entries}" for shape in shapes for entries in (32_768, 262_144)]
    told = found(*cases, "gathers merged")
    for name in cases:
        largest = told[name]["largest"]
        assert largest["all-gather"] <= told[name]["block_sums"], (name, told[name])
        assert largest.get("collective-permute", 0) <= ROWS and "all-to-all" not in largest, (name, told[name])
    for small, large in zip(cases[::2], cases[1::2], strict=True):  # there block sums are larger than caches: as many
        assert told[small]["block_sums"] < told[small]["cache"] and told[small]["counts"] == told[large]["counts"]
    merged = told["gathers merged"]
    assert merged["largest"]["all-gather"] >= merged["cache"] > merged["block_sums"]
