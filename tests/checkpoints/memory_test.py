"""Tests that loading needs memory for at most the model and two of its largest arrays, above an empty start-up.

The tests allow half an array more, because freed pages go back to the system at varying times: the peaks of several
runs were 120 to 132 MB, with a limit of 132 MB for two arrays. A third array would still be detected.

To load a gigabyte and print the numbers: SPECCASCADE_LARGE=1 python -m pytest -s tests/checkpoints/memory_test.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from speccascade_jax.runtime.paths import repository_root

library = pytest.importorskip("safetensors.numpy", reason="writing test files needs safetensors")

WIDTH, VOCABULARY, LAYERS = (2048, 16_000, 3) if os.environ.get("SPECCASCADE_LARGE") else (512, 16_000, 4)

# The first peak includes an empty start-up: modules, JAX's device, the threads that put arrays on it.
PROGRAM = """
import json, sys
import jax, numpy as np
from speccascade_jax import checkpoints

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

checkpoints.load(sys.argv[1])
jax.device_put(np.zeros(4, np.float32)).block_until_ready()
before = peak()
_, params = checkpoints.load(sys.argv[2], **json.loads(sys.argv[3]))
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def write(path: Path, width: int, vocabulary: int, layers: int) -> Path:
    """Writes a Llama whose weights are all 1, in shards of one layer each."""
    path.mkdir()
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 4 * width} | sizes))
    outer = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width), "model.norm": (width,)}
    layer = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (4 * width, width), "mlp.up_proj": (4 * width, width)}
    layer |= {"mlp.down_proj": (width, 4 * width), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    parts = [outer, *({f"model.layers.{i}.{name}": shape for name, shape in layer.items()} for i in range(layers))]
    index = {}
    for number, part in enumerate(parts):
        arrays = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in part.items()}
        library.save_file(arrays, path / f"{number}.safetensors")
        index |= dict.fromkeys(arrays, f"{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return write(folder / "empty", 16, 16, 1), write(folder / "large", WIDTH, VOCABULARY, LAYERS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "prepared": True}])
def test_peak_memory_is_the_model_and_two_arrays(paths, options):
    environment = os.environ | {"PYTHONPATH": str(repository_root()), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, *map(str, paths), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    largest = 4 * VOCABULARY * WIDTH  # In float32, the stored dtype, in which arrays are read.
    print(f"{options}: {size / 1e6:.0f} MB, largest array {largest / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert size > 5e7
    assert peak <= size + 2.5 * largest, f"{peak / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"
