"""Tests that every method, rule, verifier, drafter and stop policy compiles for a TPU.

Methods that differ in more than arithmetic are compiled with T5, other settings with a Gemma, and the parts of a
model's program with both. `SPECCASCADE_CASES=all` compiles all methods, and nearly everything with both families.
"""

import collections
import contextlib
import os

import jax
import pytest

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.methods.generations import OracleMethod
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.methods.table import METHODS
from speccascade_jax.models import layers
from speccascade_jax.preflight.traffic import COLLECTIVES
from speccascade_jax.runtime import platforms
from speccascade_jax.stopping.policies import STOPS
from tests.support import compiling
from tests.support.compiling import needs_tpu_compiler

pytestmark = [pytest.mark.accelerators, needs_tpu_compiler]
THRESHOLDS = {"stop_threshold": 0.5}


def numbers(method):
    """Returns an α and a stop threshold where a method needs them."""
    settings = Settings(method=method.name)
    alpha, policy = method.alpha(settings), method.threshold(settings)
    chosen = {} if alpha is None else {"alpha": alpha.typical}
    return chosen | (THRESHOLDS if policy and alpha is None or method.name == "bild" else {})


def case(name, **arguments):
    return pytest.param(arguments, id=name)


ONE = [name for name, row in METHODS.items() if isinstance(row, Speculation) and not isinstance(row, OracleMethod)]
ENGINES = [case(name, method=name, **numbers(METHODS[name])) for name in ONE]
CHAINS = [
    case(name, method=name, part="generation", **numbers(row))
    for name, row in METHODS.items()
    if name not in (*ONE, TARGET, DRAFT)
]
OTHERS = [
    case("target_alone", part="target"),
    case("draft_alone", part="draft"),
    case("sampled", temperature=1.0),
    case("truncated", temperature=0.7, top_p=0.9, top_k=20),
    case("block_verification", verify="block", temperature=1.0),
    case("tree", tree=(2, 2), temperature=1.0),
    case("early_exit", draft="exit:1"),
    case("lookup", draft="lookup"),
    case("tail", tail="draft", tail_size=2),
    case(
        "stack",
        others={"small": "DRAFT"},
        drafters=(Level(model="draft", budget=3, drafters=("small",), block_size=2),),
    ),
    case("chosen", others={"small": "DRAFT"}, drafters=("draft", Arm(drafter="small", block_size=2)), choose="random"),
    case("float32", dtype="float32"),
    case("int8", dtype="int8"),
    case("two_rows", batch=2),
    case("prefill", part="prefill"),
    case("generation", part="generation"),
    *[
        case(f"stop_{name}", method="speculative", stop=name, **THRESHOLDS)
        for name in STOPS
        if name not in ("fixed", "oracle") and f"stop_{name}" not in ONE
    ],
]
KINDS = "fuzzy_js", "fuzzy_kl_reversed_top50", "fuzzy_tv_scaled", "fuzzy_after_sd"
ALIKE = {name for name in ONE if name.startswith("fuzzy_") and name not in KINDS} | {
    "token_cascade_log", "chow_log", "diff_log", "opt_log", "lossy_tuned", "lossy_greedy", "token_v1", "token_v2",
}  # fmt: skip
"""Rules that differ from others only in arithmetic on two distributions; compiled weekly, with T5 alone."""
BOTH = {
    "target_alone", "draft_alone", "sampled", "truncated", "block_verification", "tree", "float32", "int8", "two_rows",
    "prefill", "generation", "spec_decode", "token_v3",
}  # fmt: skip
"""Cases that are always compiled with both families, because a family's kernels or caches change with them."""
METHOD_IDS = {case.id for case in (*ENGINES, *CHAINS)}
FAMILIES = {"t5": METHOD_IDS - ALIKE | BOTH, "gemma": {case.id for case in OTHERS} | BOTH}
if os.environ.get("SPECCASCADE_CASES") == "all":
    every = {case.id for case in (*ENGINES, *CHAINS, *OTHERS)}
    FAMILIES = {"t5": every, "gemma": every - ALIKE}
CASES = [
    pytest.param(family, *each.values, id=f"{family}-{each.id}")
    for family, chosen in FAMILIES.items()
    for each in (*ENGINES, *CHAINS, *OTHERS)
    if each.id in chosen
]


WIDTHS = 2
"""Cache copies in a Gemma's round with several widths of target calls, because XLA changes the cache's layout."""


def check(report, text, copies=0):
    """Checks that no number has 64 bits, the host is never called, and loops copy caches `copies` times if given."""
    assert report.f64 == 0 and " f64[" not in text
    assert report.callbacks == 0
    assert copies is None or report.cache_copies == copies


@pytest.mark.parametrize(("family", "arguments"), CASES)
def test_everything_compiles_for_a_tpu(family, arguments):
    arguments = dict(arguments)
    if "others" in arguments:
        arguments["others"] = dict.fromkeys(arguments["others"], compiling.PAIRS[family][1])
    program, report = compiling.compiled(family, **arguments)
    is_round = arguments.get("part", "round") == "round"
    several = family == "gemma" and is_round and any("width_" in line for line in report.assumed)
    # nested engines write a Gemma's short ring buffers as a whole, and trees move all of their entries
    inner = family == "gemma" and bool({"tail", "drafters", "tree"} & arguments.keys())
    check(report, program.as_text(), None if inner else WIDTHS * several)
    assert report.memory.arguments > 0 and report.fits


def test_a_training_step_compiles_for_a_tpu():
    program, report = compiling.compiled("t5", part="train", batch=4)
    check(report, program.as_text())
    assert report.total.hbm_bytes > report.memory.arguments / 2


def collectives(text):
    """Returns how many collectives of each kind a program's text holds."""
    count = collections.Counter()
    for kind in COLLECTIVES:
        count[kind] = text.count(f" {kind}(") + text.count(f" {kind}-start(")
    return +count


def test_planned_block_lengths_are_refused_in_one_line():
    with pytest.raises(ValueError, match="block_size='auto' chooses among programs .* give a number"):
        compiling.compiled("t5", block_size="auto")


ON_MESH = {"topology": "v5e:2x4", "mesh": (2, 4), "batch": 2, "temperature": 1.0}
LAYERS = 2, 1
"""Decoder layers of target and draft."""


@pytest.mark.parametrize("family", ["t5", "gemma"])
def test_a_mesh_exchanges_sums_and_small_arrays_only(family):
    program, report = compiling.compiled(family, **ON_MESH)
    kinds = collectives(program.as_text())
    assert kinds["all-reduce"] and not kinds["all-to-all"] and not kinds["ragged-all-to-all"]
    target, draft = LAYERS
    assert report.total.collectives >= 2 * target + 2 * 5 * draft


def test_attention_that_leaves_its_device_is_found(monkeypatch):
    # without `jax.shard_map`, XLA splits attention by itself; it refuses to split kernels
    monkeypatch.setenv(platforms.SWITCH, "0")
    monkeypatch.setattr(layers, "under", lambda mesh: contextlib.nullcontext())
    jax.clear_caches()
    program, _ = compiling.compiled("t5", **ON_MESH, prompt_length=17)
    jax.clear_caches()
    assert collectives(program.as_text())["all-to-all"]
