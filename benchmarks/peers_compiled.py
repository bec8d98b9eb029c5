"""Compile one decoding step of Google's own JAX code and of ours for TPUs that this machine does not have.

    pip install -c constraints.txt -e '.[libtpu]'
    pip install --no-deps gemma==4.0.1 kauldron==1.4.4          (Python 3.12)
    pip install einops lark ml-collections immutabledict typeguard clu tensorflow-cpu==2.21.0 tensorboard pandas \\
        mediapy grain tensorflow-datasets chex dialog
    git clone https://github.com/google-research/t5x T5X
    python -m benchmarks.peers_compiled results/peers_compiled.json --t5x=T5X       about 25 minutes on 2 cores
    python -m benchmarks.peers_compiled results/peers_compiled.json --markdown

A step is one iteration of a loop over tokens in greedy decoding. The loops are `SamplerLoop` of the package `gemma`,
T5X's `temperature_sample` around its `Transformer.decode`, and our `run_rounds`. The same code reads the costs of all
compiled loops; `preflight.report` computes those of one of our rounds without the loop. Programs that are in the file
are not compiled again. Nothing runs: all figures come from programs compiled for the devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec

from speccascade_jax import preflight
from speccascade_jax.engine.loop import run_rounds
from speccascade_jax.preflight import bundles, hlo
from speccascade_jax.preflight.chips import chip_of
from speccascade_jax.preflight.compiling import ROUNDS, assumptions
from speccascade_jax.preflight.execution import Assumptions, execute
from speccascade_jax.preflight.programs import Traced
from speccascade_jax.preflight.report import Costs, account, summed
from speccascade_jax.preflight.topologies import mesh_of, sharding_of
from speccascade_jax.runtime import arguments
from speccascade_jax.runtime.mesh import MODEL
from speccascade_jax.storage.files import check_replaceable, expanded, rewrite

BATCHES = (1, 8, 64)
T5X = "T5X_FOLDER"
"""Environment variable with the folder of T5X's sources; it has no release that can be installed."""
_BEGIN = r'\{\n "compiled": '
_FSDP_BYTES = 4 * 2**20
"""Size in bytes of the smallest array that `kauldron`'s FSDPSharding splits."""


class Program(NamedTuple):
    """A model that a peer and we decode with, its devices, and the lengths of prompts and outputs.

    Attributes:
        name: title of the model; preset: the model in this package; peer: the model in the other package (the peer).
        topology: the devices, such as "v5e:2x2"; mesh: their arrangement (data, model).
        read, written: numbers of tokens of a prompt and of an output.
        sharding: the peer's layout on a mesh: "heads" (as ours) or "FSDP" (the rule of the peer's package).
    """

    name: str
    preset: str
    peer: str
    topology: str = "v5e"
    mesh: tuple[int, int] = (1, 1)
    read: int = 1024
    written: int = 128
    sharding: str = "heads"


PROGRAMS = (
    Program("T5 base", "t5_1_1_base", "t5x", read=80, written=80),
    Program("Gemma 2 2B", "gemma2_2b", "Gemma2_2B"),
    Program("Gemma 2 9B", "gemma2_9b", "Gemma2_9B", "v5e:2x2", (1, 4)),
    Program("Gemma 2 9B, FSDP", "gemma2_9b", "Gemma2_9B", "v5e:2x2", (1, 4), sharding="FSDP"),
)


def jobs() -> Iterator[tuple[str, Program, int]]:
    """Yields the key of every program, the program, and its batch size.

    A key ends in "peer" (a step of the other package's loop), "ours" (a step of our loop) or "round" (one of our rounds
    without the loop, by `preflight.report`).
    """
    for program in PROGRAMS:
        for batch in BATCHES:
            for side in ("peer", "ours", "round") if program.sharding == "heads" else ("peer",):
                yield f"{program.name}|{batch}|{side}", program, batch


def compile_all(path: Path) -> None:
    """Compiles the programs that are missing in the file `path`, and rewrites the file after each program."""
    entries = read(path)
    for key, program, batch in jobs():
        if key in entries:
            continue
        try:
            entries[key] = one_round(program, batch) if key.endswith("round") else _in_child(key)
        except ValueError as error:
            entries[key] = {"error": str(error)}
        print(f"{key}: {entries[key].get('error', 'compiled')}", flush=True)
        rewrite(path, json.dumps({"compiled": entries}, indent=1), start=_BEGIN)


def read(path: Path) -> dict[str, Any]:
    """Returns the costs of the programs in a file, by key; empty if there is no file."""
    entries: dict[str, Any] = json.loads(path.read_text())["compiled"] if path.exists() else {}
    return entries


def one_round(program: Program, batch: int) -> dict[str, Any]:
    """Returns the costs of one of our rounds without the loop around it."""
    report = preflight.report(**_arguments(program, batch))
    return {"costs": dataclasses.asdict(report.total), "peak": report.memory.peak}


def _arguments(program: Program, batch: int) -> dict[str, Any]:
    return {
        "target": program.preset, "draft": None, "topology": program.topology, "mesh": program.mesh, "batch": batch,
        "prompt_length": program.read, "max_new_tokens": program.written, "method": "autoregressive",
        "temperature": 0.0,
    }  # fmt: skip


def _in_child(key: str) -> dict[str, Any]:
    """Returns the costs of a step, compiled in a process whose compiler writes its final schedules."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        flags = " ".join(bundles.DUMP_FLAGS).format(folder=folder)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
        command = [sys.executable, "-m", "benchmarks.peers_compiled", folder, f"--key={key}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    costs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return costs


def step(key: str, dump: Path) -> dict[str, Any]:
    """Returns the costs of a step of a loop.

    Args:
        key: the program's key.
        dump: the folder in which the compiler writes its final schedules.
    """
    program, batch = next((program, batch) for name, program, batch in jobs() if name == key)
    chosen = Assumptions()
    if key.endswith("ours"):
        traced = Traced.of(preflight.job_of(**_arguments(program, batch)))
        chosen, lowered = assumptions(traced), _ours(traced)
    else:
        lowered = (_t5x if program.peer == "t5x" else _gemma)(program, batch)
    compiled = lowered.compile()
    stats: Any = compiled.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    peak += stats.output_size_in_bytes - stats.alias_size_in_bytes
    costs = step_costs(hlo.parse(compiled.as_text() or ""), bundles.read(dump), chosen)
    return {"costs": dataclasses.asdict(costs), "peak": peak}


def step_costs(module: hlo.Module, cycles: Mapping[str, int], chosen: Assumptions) -> Costs:
    """Returns the costs of one more iteration of a program's loop over tokens.

    Work before the loop, such as XLA's copies of weights into other layouts, does not count: a generation does it once.

    Args:
        module: the program.
        cycles: cycles of every instruction for which the compiler has written a schedule.
        chosen: assumptions about the program's other loops and branches.
    """

    def total(steps: int) -> Costs:
        loops = {**chosen.loops, ROUNDS: steps}
        return summed(account(execute(module, dataclasses.replace(chosen, loops=loops)), cycles).values())

    return total(2).plus(total(1), -1)


def _ours(traced: Traced) -> jax.stages.Lowered:
    """Lowers our loop over rounds."""

    def loop(params: Any, state: Any, controls: Any) -> Any:
        rounds = run_rounds(traced.engine, params, state, controls, lambda state: ~state.done, (), lambda *_: ())
        return rounds[0]

    with traced.on_platform():
        return _lower(loop, traced.program[1], traced.state, traced.controls)


def _lower(loop: Callable[..., Any], params: Any, state: Any, *others: Any) -> jax.stages.Lowered:
    """Lowers a loop with a donated state, whose layout the compiler chooses, as `preflight.report` does."""
    free = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), state)
    layouts = (None, free, *(None for _ in others))
    return jax.jit(loop, in_shardings=layouts, out_shardings=free, donate_argnums=1).lower(params, state, *others)


def _gemma(program: Program, batch: int) -> jax.stages.Lowered:
    """Lowers the sampling loop of the package `gemma`, greedy, with a cache for the prompt and the output."""
    from gemma import gm
    from gemma.gm.text import _sampler_loop, _sampling, _tokenizer

    model, size = getattr(gm.nn, program.peer)(), program.read + program.written
    special = _tokenizer.Gemma2Tokenizer.special_tokens
    loop = _sampler_loop.SamplerLoop(
        model=model,
        end_tokens=(special.EOS, special.END_OF_TURN),
        forbidden_tokens=None,
        sampling=_sampling.Greedy(),
        cache_length=size,
        special_tokens=special,
    )
    leaf, mesh = jax.ShapeDtypeStruct, mesh_of(program.topology, program.mesh)
    rows = leaf((batch,), jnp.int32)
    state = _sampler_loop.SamplingState(
        step=leaf((), jnp.int32),
        done=leaf((batch,), jnp.bool_),
        last_token=rows,
        last_token_pos=rows,
        predicted_tokens=leaf((batch, program.written), jnp.int32),
        cache=jax.eval_shape(lambda: model.init_cache(batch_size=batch, dtype=jnp.bfloat16, cache_length=size)),
        rng=jax.eval_shape(lambda: jax.random.PRNGKey(0)),
        init_cache_length=leaf((), jnp.int32),
        full_attention_mask=leaf((batch, size), jnp.bool_),
    )
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))["params"]

    def laid_out(tree: Any, spec: Callable[[str, Any], PartitionSpec]) -> Any:
        def shape(path: Any, x: Any) -> Any:
            layout = sharding_of(program.topology, mesh, spec(jax.tree_util.keystr(path), x))
            return leaf(x.shape, x.dtype, sharding=layout)

        return jax.tree_util.tree_map_with_path(shape, tree)

    def sample(params: Any, state: Any, steps: Any) -> Any:
        return loop._sample_loop(params=params, state=state, max_new_tokens=steps)

    of_params, of_state = specs(program, batch)
    steps = laid_out(leaf((), jnp.int32), lambda *_: PartitionSpec())
    return _lower(sample, laid_out(params, of_params), laid_out(state, of_state), steps)


_HEADS = {
    "q_einsum": 0, "kv_einsum": 1, "attn_vec_einsum": 0, "linear": 0, "input_embedding": 0, "['k']": 2, "['v']": 2,
}  # fmt: skip
"""Axis along which devices split an array of the package `gemma`, by a part of the array's name."""


def specs(program: Program, batch: int) -> tuple[Callable[[str, Any], PartitionSpec], ...]:
    """Returns the layout of the peer's parameters and of its state, each a function of an array's name and shape.

    "heads" splits heads, hidden units, vocabulary and caches over the axis "model", as our layout does. "FSDP" follows
    kauldron's `FSDPSharding`, which the package's documentation uses: it splits the largest axis of an array that is
    divisible by the number of devices, and also the rows if they are divisible.
    """
    model = program.mesh[1]

    def heads(name: str, x: Any) -> PartitionSpec:
        axis = next((axis for part, axis in _HEADS.items() if part in name), None)
        if "gating_einsum" in name:
            # (2, features, hidden), transposed in larger models
            axis = max(range(1, 3), key=lambda number: x.shape[number])
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, MODEL)

    def largest(name: str, x: Any) -> PartitionSpec:
        if x.size * x.dtype.itemsize <= _FSDP_BYTES:
            return PartitionSpec()
        axes = [axis for axis in range(x.ndim) if x.shape[axis] % model == 0]
        axis = max(axes, key=lambda number: (x.shape[number], number))
        return PartitionSpec(*(None,) * axis, MODEL)

    def rows(name: str, x: Any) -> PartitionSpec:
        split = batch % model == 0 and x.shape[:1] == (batch,)
        return PartitionSpec(MODEL) if split else PartitionSpec()

    return (heads, heads) if program.sharding == "heads" else (largest, rows)


def _t5x(program: Program, batch: int) -> jax.stages.Lowered:
    """Lowers T5X's sampling loop, greedy, around a step of its T5 1.1 base."""
    # the package's own __init__ imports data pipelines that decoding does not need
    package = types.ModuleType("t5x")
    package.__path__ = [str(Path(os.environ[T5X]) / "t5x")]
    sys.modules["t5x"] = package
    from t5x import decoding
    from t5x.examples.t5 import network

    config = network.T5Config(
        vocab_size=32128, dtype=jnp.bfloat16, emb_dim=768, num_heads=12, num_encoder_layers=12, num_decoder_layers=12,
        head_dim=64, mlp_dim=2048, mlp_activations=("gelu", "linear"),
    )  # fmt: skip
    model, layout = network.Transformer(config), sharding_of(program.topology, None)
    inputs, outputs = (jnp.ones((batch, size), jnp.int32) for size in (program.read, program.written))
    key = jax.random.key(0)
    made = jax.eval_shape(lambda: model.init(key, inputs, outputs, outputs, enable_dropout=False, decode=True))
    encoded = jax.ShapeDtypeStruct((*inputs.shape, config.emb_dim), config.dtype)

    def loop(params: Any, cache: Any, encoded: Any, inputs: Any) -> Any:
        def logits(state: Any) -> tuple[Any, Any]:
            token = state.cur_token
            values, changed = model.apply(
                {"params": params, "cache": state.cache}, encoded, inputs, token, token, enable_dropout=False,
                decode=True, max_decode_length=program.written, mutable=["cache"], method=model.decode,
            )  # fmt: skip
            return values[:, 0], changed["cache"]

        prompt = jnp.zeros((batch, program.written), jnp.int32)
        return decoding.temperature_sample(prompt, cache, logits, eos_id=1, temperature=0.0, topk=0)

    def laid_out(tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=layout), tree)

    params, cache = laid_out(made["params"], jnp.bfloat16), laid_out(made["cache"])
    return jax.jit(loop).lower(params, cache, laid_out(encoded), laid_out(inputs))


def markdown(entries: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the compiled programs, each cell: the peer's step, ours, one of our rounds alone."""
    lines = [
        "| model | rows | HBM MB | compute ms | ops | collectives | GB a device |",
        "|---|---|---|---|---|---|---|",
    ]
    for program in PROGRAMS:
        for batch in BATCHES:
            name = program.name.split(",")[0]
            keys = (f"{program.name}|{batch}|peer", f"{name}|{batch}|ours", f"{name}|{batch}|round")
            if all(key in entries for key in keys):
                lines.append(_row(program, batch, [entries[key] for key in keys]))
    return "\n".join(lines)


def _row(program: Program, batch: int, columns: list[Any]) -> str:
    clock = chip_of(program.topology).clock

    def cell(format_value: Callable[[dict[str, Any]], str]) -> str:
        return ", ".join("–" if "error" in entry else format_value(entry) for entry in columns)

    cells = (
        cell(lambda entry: f"{entry['costs']['hbm_bytes'] / 1e6:,.0f}".replace(",", " ")),
        cell(lambda entry: f"{entry['costs']['cycles'] / clock * 1e3:.2f}"),
        cell(lambda entry: f"{entry['costs']['ops']:.0f}"),
        cell(lambda entry: f"{entry['costs']['collectives']:.0f}"),
        cell(lambda entry: f"{entry['peak'] / 1e9:.2f}"),
    )
    return f"| {program.name} | {batch} | " + " | ".join(cells) + " |"


def main() -> None:
    """Compiles the missing programs, unless `--markdown` is given, and prints the table."""
    parser = arguments.parser(__doc__)
    parser.add_argument("output", help="JSON file of the programs")
    parser.add_argument("--markdown", action="store_true", help="print the table, compile nothing")
    parser.add_argument("--t5x", help="folder of T5X's sources")
    parser.add_argument("--key", help="compile this program, print its costs; `output` is the dump's folder")
    args = parser.parse_args()
    if args.key:
        print(json.dumps(step(args.key, Path(args.output))))
        return
    if args.t5x:
        os.environ[T5X] = args.t5x
    path = expanded(args.output)
    check_replaceable(path, start=_BEGIN)
    if not args.markdown:
        compile_all(path)
    print(markdown(read(path)))


if __name__ == "__main__":
    main()
