"""Tests that eight simulated devices write the tokens of one device, and that no step gathers a cache or distribution.

The runs themselves are in `tests.support.on_devices`.
"""

import pytest

from tests.support.on_devices import ROWS, found

GREEDY = (
    "t5 1x8", "t5 2x4", "t5 2x4 unfused", "t5 2x4 whole draft", "t5 2x4 in chunks", "t5gemma 2x4", "stack 2x4",
    "selection 8x1", "tree 2x4", "decoder tree 2x4",
)  # fmt: skip
SCANS = ("t5 scan 2x4 sampled", "umt5 scan 2x4 whole draft", "decoder scan 2x4", "decoder scan tree 2x4")
NORMED = ("normed 2x4 unfused", "normed scan 2x4", "shared 2x4", "assistant 2x4", "head 2x4")
SAMPLED = ("t5 2x4 sampled", "decoder 2x4 sampled", "stack 2x4 sampled", "blocks 2x4", "tree 2x4 sampled")


def same(told):
    """Checks that all rows' tokens and all counters are equal, and that the rows did not end at once."""
    assert told["rows"] == ROWS and told["counters"] and told["longest"] > 4


@pytest.mark.parity
def test_a_pair_is_loaded_directly_into_shards():
    """Checks that its fingerprint, outputs and streams equal one device's, and that 7 rows are refused."""
    results = found("rows", "loaded")
    assert results["rows"].startswith(
        "a batch of 7 is not divisible by the 2 parts that mesh=(2, 4) spreads rows over: "
    )
    assert set(results["loaded"]) == {"fingerprint", "split", "tokens", "stream"} and all(results["loaded"].values())


@pytest.mark.parity
@pytest.mark.parametrize("cases", [GREEDY[:4], GREEDY[4:], SAMPLED, SCANS, NORMED])
def test_every_mesh_model_and_method_gives_the_outputs_of_one_device(cases):
    """Checks tokens and counters; sampled runs draw equal random numbers by row, round and slot.

    Their tokens therefore equal one device's except at near-ties.
    """
    for results in found(*cases).values():
        same(results)


@pytest.mark.parity
def test_split_experts_and_an_attention_to_two_sources_give_the_logits_of_one_device():
    """Decoding uses nothing else of these models, so their logits suffice."""
    errors = found("experts scan 2x4", "parallel 2x4", "t5gemma2 scan 2x4")
    assert len(errors) == 3 and max(errors.values()) < 2e-5


@pytest.mark.parity
def test_kernels_on_meshes_of_two_and_four_devices_give_the_logits_of_xla():
    runs = found("kernels t5 1x2", "kernels decoder 2x2")
    assert all(run["error"] < 2e-5 and run["kernels"] and not run["chains"] for run in runs.values()), runs


@pytest.mark.parity
def test_chains_on_meshes_of_two_and_four_devices_give_the_logits_of_xla():
    runs = found("chains t5 1x2", "chains decoder scan 2x2")
    assert all(run["error"] < 2e-5 and run["chains"] for run in runs.values()), runs


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "shapes"), [("t5", ("1x8", "2x4")), ("decoder", ("2x4",)), ("decoder scan", ("2x4",))]
)
def test_no_step_gathers_a_cache_or_the_distributions(kind, shapes):
    """Reads the compiled programs for vocabularies of 32k and 256k entries.

    The same measure must detect that XLA gathers the cache if it partitions the merged axis itself.
    """
    cases = [f"gathers {kind} {shape} {entries}" for shape in shapes for entries in (32_768, 262_144)]
    runs = found(*cases, "gathers merged")
    for name in cases:
        largest = runs[name]["largest"]
        assert largest["all-gather"] <= runs[name]["block_sums"], (name, runs[name])
        assert largest.get("collective-permute", 0) <= ROWS and "all-to-all" not in largest, (name, runs[name])
    # With the large vocabulary, block sums exceed caches in size, so the counts of operations are compared instead.
    for small, large in zip(cases[::2], cases[1::2], strict=True):
        assert runs[small]["block_sums"] < runs[small]["cache"] and runs[small]["counts"] == runs[large]["counts"]
    merged = runs["gathers merged"]
    assert merged["largest"]["all-gather"] >= merged["cache"] > merged["block_sums"]
