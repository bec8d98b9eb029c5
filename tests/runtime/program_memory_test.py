"""Tests that compiled programs are dropped when the process runs out of memory maps, and not before."""

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.runtime import program_memory
from tests.support import new_process


def test_programs_are_dropped_only_if_maps_run_short():
    double = jax.jit(lambda x: 2 * x)
    assert double(jnp.float32(1)) == 2 and double._cache_size() == 1
    assert not program_memory.release_when_crowded(share=1.0)
    assert double._cache_size() == 1
    assert program_memory.release_when_crowded(share=0.0) == program_memory._MAPS.exists()
    assert double._cache_size() == (0 if program_memory._MAPS.exists() else 1)
    assert double(jnp.float32(2)) == 4


def test_maps_are_counted_again_only_after_a_compilation(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    monkeypatch.setattr(program_memory, "_MAPS", maps)
    assert not program_memory.release_when_crowded(share=0.0)  # simulates a system without /proc
    maps.write_text("\n" * 3)
    jax.jit(lambda x: 3 * x)(jnp.float32(1))
    limit = int(program_memory._LIMIT.read_text())
    assert not program_memory.release_when_crowded(share=10 / limit)
    maps.write_text("\n" * 30)
    assert not program_memory.release_when_crowded(share=10 / limit)
    jax.jit(lambda x: 4 * x)(jnp.float32(1))
    assert program_memory.release_when_crowded(share=10 / limit)


MANY = """
import json, sys
from pathlib import Path
import numpy as np
import speccascade_jax as sc
from speccascade_jax.runtime import program_memory

def maps():
    return len(Path("/proc/self/maps").read_text().splitlines())

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

programs, decodes = map(int, sys.argv[1:3])
program_memory._LIMIT = Path(sys.argv[3])
table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
pair = sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table + 1))
rules = ["token_v1", "token_v2", "token_v3", "chow", "diff", "opt", "lossy", "chow_log", "diff_log", "opt_log"]
most = 0
for number in range(programs):
    given = {"rule": rules[number % 10], "alpha": 0.3, "block_size": 1 + number // 10}
    if number % 10 == 9:  # the other door
        list(sc.stream(pair, [0], max_new_tokens=2, **given))
    else:
        sc.decode(pair, [[0]], max_new_tokens=2, **given)
    most = max(most, maps())
given = {"rule": "chow", "block_size": 2, "max_new_tokens": 2}
for number in range(decodes):
    sc.decode(pair, [[number % 4]], alpha=number / max(decodes, 1), seed=number, **given)
    if number == decodes // 10:
        before = resident()
print(json.dumps({"maps": most, "grown": resident() - before if decodes else 0}))
"""


@pytest.mark.parity
@pytest.mark.skipif(not program_memory._MAPS.exists(), reason="Linux counts memory maps")
def test_many_programs_in_one_process_stay_within_the_limit_of_maps(tmp_path):
    """Calls `decode` and `stream`; 24 programs would need 4,300 maps with the tests' flags, 11,800 with users'."""
    (tmp_path / "limit").write_text("4000")
    assert new_process.answer(MANY, 24, 0, tmp_path / "limit")["maps"] < 2500


@pytest.mark.laws
@pytest.mark.skipif(not program_memory._MAPS.exists(), reason="reads /proc")
def test_a_thousand_decodes_of_one_program_need_no_more_memory_than_a_hundred():
    assert new_process.answer(MANY, 0, 1000, program_memory._LIMIT)["grown"] < 8  # megabytes
