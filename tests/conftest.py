"""Fixtures and settings of every test: processes share compiled programs, and drop them before memory maps run out."""

import gc
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path

# XLA:CPU's newer code generator only makes compiling take twice as long here; users keep it (docs/performance.md).
# Later releases have no other generator, and end a process that names a flag they do not know.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # Scheduling for concurrency does not help programs this small, and costs 8% of compiling. Compiling parts in
    # parallel costs a fifth, because another process of the suite has the other core.
    chosen = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_enable_concurrency_optimized_scheduler=false "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_llvm_force_inline_before_split=false"
    )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {chosen}".strip()

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables would be as narrow as the terminal of the tests
os.environ["HF_HUB_OFFLINE"] = "1"  # a path of a test that looks like a name on the hub is never looked up

import jax
import pytest

from speccascade_jax.core import names
from speccascade_jax.runtime import compilation_cache, program_memory, recipe_header
from tests.support.hub_server import on_the_hub, serving
from tests.support.sample import ALL, weekly_cases

# A separate cache for this process and those that tests start; the suite's processes and its next run share it.
os.environ[compilation_cache.VARIABLE] = str(Path(__file__).parents[1] / ".pytest_cache" / "xla")
# LLVM takes longer to optimise a program than the few rounds of a test gain; XLA's own passes are unchanged
QUICKLY = "jax_disable_most_optimizations"
os.environ[QUICKLY.upper()] = "1"
jax.config.update(QUICKLY, True)
compilation_cache.switch_on()

gc.set_threshold(100_000, 50, 50)  # tracing makes many live objects: garbage collection took 5% of the time

LONGEST_FIRST = (
    "laws_test", "configs_selection_test", "configs_test", "benchmarks/command_test", "tests/trees_test",
    "methods/stacks_test", "drafters/planned_test", "hierarchy/optimizing_test", "tests/afternoon_test",
    "engine/t5_test", "stopping/policies_test", "methods/table_test", "engine/edges_test", "stories_test",
    "docs_test", "finetune/trainer_test", "experiments/hosts_test", "drafters/nested_test",
)  # fmt: skip
"""Files that should start first, so that no process is still busy with one when the other has finished.

Recipes of selection go before the others: gin keeps what it has registered, and several functions are called `make`.
"""


CEILING = 160
CEILINGS = {
    "acceptance_head_test": 400, "heads/train_test": 400, "t5_golden_test": 400, "divergences_test": 400,
    "models/decoder_test": 320, "models/t5_test": 320, "drafters/protocol_test": 300, "rules/verification_test": 400,
    "checkpoints/t5x_test": 260, "models/teacher_forcing_test": 240, "heads/report_test": 240,
    "rules/deferral_test": 380, "evaluation/code_digests_test": 200, "finetune/steps_test": 200,
    "drafters/planned_test": 200, "rules/block_wise_test": 290, "models/branching_test": 300, "tests/api_test": 320,
    "parity/transformers_test": 950, "parity/families_test": 220, "models/decode_attention_test": 900,
    "models/resident_draft_test": 3400, "parity/peers_test": 240, "benchmarks/command_test": 240,
    "models/product_chains_test": 400,
}  # fmt: skip
"""The most programs that a file may compile, single operations outside jit included: they take most of the time."""


def pytest_collection_modifyitems(config, items):
    """Leaves weekly cases out, moves long files to the front and keeps the order of all others."""
    weekly = [] if os.environ.get(ALL) == "all" else weekly_cases(items)
    config.hook.pytest_deselected(items=weekly)
    items[:] = [item for item in items if item not in weekly]

    def place(item):
        name = item.path.with_suffix("").as_posix()
        return next((n for n, end in enumerate(LONGEST_FIRST) if name.endswith(end)), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_configure(config):
    """Refuses to group tests with a pytest whose groups xdist ignores: each process would compile the same programs."""
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError("this pytest ignores groups (pytest-xdist#1386): install that of constraints.txt")


_COMPILED = Counter[str]()
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _COMPILED.update([event]))


def programs() -> int:
    """Returns how many programs this process has compiled, or read from the cache, small ones included."""
    return _COMPILED["/jax/core/compile/backend_compile_duration"]


@pytest.fixture(scope="module", autouse=True)
def few_programs(request):
    """Limits the programs that a file compiles, which take most of the suite's time and grow unseen."""
    before = programs()
    yield
    ceiling = next((most for name, most in CEILINGS.items() if f"{name}.py" in str(request.path)), CEILING)
    compiled = programs() - before
    assert compiled <= ceiling, (
        f"{request.path.name} compiled {compiled} programs, its ceiling is {ceiling}: share them"
    )


CROWDED, program_memory.SHARE = program_memory.SHARE, 0.7
"""The share of memory maps at which programs are dropped between tests; a call in a test may be counting them."""


@pytest.fixture(autouse=True)
def programs_are_given_back():
    """Drops compiled programs between tests before the process runs out of memory maps."""
    yield
    program_memory.release_when_crowded(CROWDED)


@pytest.fixture(autouse=True)
def no_recipe_is_remembered():
    """Forgets the recipe of a test that read gin files, which the next test's command would announce."""
    yield
    recipe_header.forget()


@pytest.fixture(autouse=True)
def no_users_module_is_remembered(monkeypatch):
    """Forgets the modules of earlier tests that names led to, which this test's records and workers would import."""
    monkeypatch.setattr(names, "MODULES", {})


@pytest.fixture(scope="session")
def _bucket_server():
    from tests.support import bucket_server

    with bucket_server.serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(bucket_server.URL, server.url)
        patch.setenv(bucket_server.TOKEN, "a-token")
        yield server


@pytest.fixture
def bucket(_bucket_server):
    """Returns the server of an empty bucket, which answers for every `gs://` address of this process."""
    yield _bucket_server
    _bucket_server.objects.clear()
    _bucket_server.asked.clear()
    _bucket_server.sent.clear()
    _bucket_server.fault = lambda method, name: None


def _as_users_compile():
    before = jax.config.read(QUICKLY)
    jax.config.update(QUICKLY, False)
    yield
    jax.config.update(QUICKLY, before)


optimised = pytest.fixture(_as_users_compile, name="optimised")
"""Compiles a test's programs as users do, for tests that run longer than they compile."""
all_optimised = pytest.fixture(_as_users_compile, name="all_optimised", scope="module")
"""Compiles the programs of a whole file as users do."""


@pytest.fixture(scope="session")
def hub_server():
    """Yields a server on this machine that speaks the hub's API."""
    with serving() as server:
        yield server


@pytest.fixture
def empty_hub(hub_server, tmp_path, monkeypatch):
    """Runs a test in an empty folder, with an empty cache, and yields the server of an empty hub."""
    monkeypatch.chdir(tmp_path)
    for table in (hub_server.commits, hub_server.branches, hub_server.gated, hub_server.asked):
        table.clear()
    with on_the_hub(hub_server, tmp_path / "cache"):
        yield hub_server
