"""Tests of the work before a process's first token: heavy imports, and programs other than those that decode."""

import json
import os
import subprocess
import sys

from speccascade_jax.runtime.paths import repository_root
from tests.support import tiny_pair

HEAVY = {"orbax", "matplotlib", "nltk", "rouge_score", "scipy", "optax", "sacrebleu", "seqio", "torch", "tensorflow"}

DECODE = """
import json, sys
from pathlib import Path
import jax
import speccascade_jax as sc
imported = {name.partition(".")[0] for name in sys.modules}
compiled, seen = [], []
def note(event, duration, fun_name="?", **_):
    if event.endswith("backend_compile_duration"):
        compiled.append(fun_name)
def since():
    new = compiled[sum(map(len, seen)):]
    seen.append(new)
jax.monitoring.register_event_duration_secs_listener(note)
pair = sc.load_pair(Path(sys.argv[1]))
since()
sc.decode(pair, ["A cold day."], max_new_tokens=8, block_size=2, rule="chow", alpha=0.5, temperature=1.0)
since()
list(sc.stream(pair, "A cold day.", max_new_tokens=8, block_size=2, rule="chow", alpha=0.5, temperature=1.0))
since()
from speccascade_jax.evaluation import experiment, session
later = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([seen, sorted(imported), sorted(later)]))
"""


def test_the_first_call_imports_little_and_compiles_only_the_decoder(tmp_path):
    """Runs in a separate process, because other tests have imported and compiled everything in this one."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository_root())}
    run = subprocess.run(
        [sys.executable, "-c", DECODE, str(tiny_pair.write(tmp_path))],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (loading, decoding, streaming), imported, later = json.loads(run.stdout.splitlines()[-1])
    assert not set(loading) - {"jit(stage)"}, "loading may compile only the move of weights to the device"
    assert decoding == ["jit(_joined)"]
    assert streaming == ["jit(_init)", "jit(_one_round)"]
    assert not HEAVY & {*imported}
    assert HEAVY & {*later} == {"sacrebleu"}  # only sacrebleu is imported, because the task is scored with BLEU
