"""Tests of kernels, traffic, waits and command buffers of a program compiled for an H100, against counts by hand.

`gpu_dump/` holds the compiler's text of the program below and its list of the host's work; metadata and the bodies of
reductions were cut from the text. The program, with w [512, 512], table [4096, 512], cache [1, 64, 512], x [1, 512],
n:

    with named_scope("draft"):      # while i < n
        x = tanh(x @ w.T @ w) * table[i]
        cache = dynamic_update_slice(cache, x[None], (0, i, 0))
    with named_scope("score"):
        x = x + dynamic_slice(table, (n, 0), (1, 512))
        x = cond(n > 3, lambda z: fori_loop(0, 5, lambda i, z: tanh(z @ w.T), z), lambda z: z, x)
"""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from speccascade_jax import preflight
from speccascade_jax.preflight import chips, compiling, execution, gpu, hlo, topologies
from speccascade_jax.preflight.execution import Assumptions, Execution
from speccascade_jax.preflight.report import Costs, Launches, Memory, Report, account, band

DUMP = Path(__file__).with_name("gpu_dump")
GPUS = ("a100", "h100", "h200", "b200")
WEIGHTS, ROW, NUMBER, FLAG = 512 * 512 * 2, 512 * 2, 4, 1
DRAFTED, SCORED = 4, 5
ONE_STEP = 6 + 1
"""Kernels of a step of the draft: those of its body, and its condition."""
NO_WORK = ("kWhile", "kConditional", "kCommandBuffer", "kSequential", "kAsyncStart", "kAsyncDone", "kPartitionId")


def run(branch: int = 1, drafted: float = DRAFTED) -> Execution:
    module = hlo.parse((DUMP / "program.txt").read_text())
    assumed = Assumptions(loops={"/draft/while": drafted}, branches={"/score/cond:2": branch})
    return execution.execute(module, assumed, host_counts=True)


def test_kernels_by_stage_are_those_counted_by_hand() -> None:
    stages = account(run(), None)
    # the loop reads two copies that are made before it
    assert stages["draft"].ops == 2 + DRAFTED * ONE_STEP + 1
    # comparison, slice and sum; two copies; three kernels a turn, and no condition, because XLA knows the five turns
    assert stages["score"].ops == 2 + 2 + SCORED * 3
    assert sum(costs.ops for costs in stages.values()) == 2 + DRAFTED * ONE_STEP + 1 + 4 + SCORED * 3
    assert all(costs.cycles == 0 for costs in stages.values())


def test_the_branch_that_runs_decides_on_the_kernels() -> None:
    taken, skipped = (sum(c.ops for c in account(run(branch), None).values()) for branch in (1, 0))
    assert taken - skipped == 2 + SCORED * 3 - 1


def test_branches_that_are_only_compared_add_no_decisions() -> None:
    module = run().module
    # without a pattern, the branch with most work counts, so both have to be evaluated
    tried = execution.execute(module, Assumptions(loops={"/draft/while": DRAFTED}), host_counts=True)
    assert tried.decisions == run(branch=1).decisions
    assert (len(tried.assumed), tried.steps) == (2, run(branch=1).steps)


def test_conditions_run_if_the_host_does_not_count_the_iterations() -> None:
    module = run().module
    assumed = Assumptions(loops={"/draft/while": DRAFTED}, branches={"/score/cond:2": 1})
    by_device = execution.execute(module, assumed)
    assert len(by_device.steps) == len(run().steps) + 1
    assert sum(step.times for step in by_device.steps) == sum(step.times for step in run().steps) + SCORED + 1


def test_traffic_is_that_counted_by_hand() -> None:
    product = (WEIGHTS + ROW) + ROW
    materialised = (WEIGHTS + ROW + WEIGHTS) + (WEIGHTS + ROW)
    # a row of the table; the cache is written in place; the counter
    body = product + materialised + (3 * ROW + NUMBER) + (2 * ROW + NUMBER) + 2 * NUMBER
    draft = (2 * NUMBER + 2 * ROW) + DRAFTED * body + (DRAFTED + 1) * (2 * NUMBER + FLAG)
    score = (NUMBER + FLAG) + (3 * ROW + NUMBER) + (2 * NUMBER + 2 * ROW) + SCORED * (product + 2 * NUMBER + 2 * ROW)
    stages = account(run(), None)
    assert (stages["draft"].hbm_bytes, stages["score"].hbm_bytes) == (draft, score)


def test_command_buffers_and_waits_are_those_of_the_compilers_list() -> None:
    buffers = gpu.read(DUMP)
    assert buffers == [
        frozenset(("input_reduce_fusion.1", "loop_multiply_fusion.1", "input_reduce_fusion", "loop_multiply_fusion"))
        | {"loop_dynamic_update_slice_fusion", "loop_add_fusion"}
    ]
    work = gpu.launches(run(), buffers)
    assert (work.captured, work.graphs) == (DRAFTED * 6, DRAFTED)
    assert (work.host_waits, work.loops, work.conditionals) == (DRAFTED + 1 + 1, 2, 1)


def test_without_the_compilers_list_no_kernel_counts_as_captured() -> None:
    work = gpu.launches(run(branch=0), ())
    assert (work.captured, work.graphs) == (0, 0)
    assert (work.host_waits, work.loops, work.conditionals) == (DRAFTED + 1 + 1, 1, 1)


def test_decisions_inside_a_command_buffer_need_no_wait_of_the_host() -> None:
    text = (
        "000: kCommandBuffer [source | sink]\n    001: kCopy [source] kCopy\n    004: kWhile [prev] \ncondition:\n"
        "        005: kCustomKernel [source] c\n      body:\n        006: kCustomKernel [source] b\n"
        "012: kCustomKernel [prev] outside\n000: kCommandBuffer [source]\n    013: kCopy [source] kCopy\n"
    )
    metadata = "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
        for number, name in {1: "copy.1", 4: "while.14", 5: "c", 6: "b", 12: "outside", 13: "copy.2"}.items()
    )
    buffers = gpu.command_buffers(text, metadata)
    assert buffers == [frozenset(("copy.1", "while.14", "c", "b")), frozenset(("copy.2",))]
    assert gpu.launches(run(), buffers).host_waits == 1


def test_a_program_without_command_buffers_has_one_list_only(tmp_path: Path) -> None:
    for name in ("one.thunk_sequence.txt", "one.thunk_metadata.txt"):
        (tmp_path / name).write_text((DUMP / name).read_text())
    assert gpu.read(tmp_path) == []


def test_a_dump_in_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="another format"):
        gpu.read(tmp_path)


def test_the_compilers_list_and_its_program_hold_the_same_work() -> None:
    metadata, module = (DUMP / "one.thunk_metadata.txt").read_text(), run().module
    assert sorted(listed_work(metadata)) == sorted(step.instruction.name for step in all_steps(module))


def test_arrays_of_collectives_count_as_memory_of_the_gpu() -> None:
    line = "  %all-reduce.1 = bf16[512]{0:S(1)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add"
    text = f"ENTRY %main (x: bf16[512]) -> bf16[512] {{\n  %x = bf16[512]{{0:S(1)}} parameter(0)\n{line}\n}}\n"
    text = text.replace("  %all-reduce", "  ROOT %all-reduce")
    stages = account(execution.execute(hlo.parse(gpu.without_spaces(text)), Assumptions()), None)
    (costs,) = stages.values()
    assert (costs.hbm_bytes, costs.collectives, costs.sent_bytes, costs.ops) == (2 * ROW, 1, ROW, 1)


def test_a_band_of_a_gpu_is_traffic_and_kernels() -> None:
    chip = chips.CHIPS["h100"]
    seconds = band(Costs(hbm_bytes=chip.bandwidth, ops=1000, collectives=2, sent_bytes=chip.link), chip)
    assert (seconds.memory, seconds.compute) == (1.0, 0.0)
    assert seconds.low == pytest.approx(1 + 2 * chip.latency + 1)
    assert seconds.high == pytest.approx(seconds.low + 1000 * 3e-6)


def test_a_report_survives_json() -> None:
    costs = {"score": Costs(ops=3)}
    memory = Memory(arguments=1, outputs=1, aliases=1, temporaries=1, code=0)
    launches = Launches(captured=2, graphs=1, host_waits=1, loops=1)
    written = Report(job={"topology": "h100"}, chip="h100", memory=memory, stages=costs, launches=launches)
    read = Report.from_json(json.loads(json.dumps(written.as_json())))
    assert (read.launches, read.stages, read.memory) == (launches, costs, memory)
    assert Report.from_json(dataclasses.replace(written, launches=None).as_json()).launches is None


@pytest.mark.parametrize("name", GPUS)
def test_the_compilers_description_of_a_gpu_has_the_chips_numbers(name: str) -> None:
    chip = chips.CHIPS[name]
    numbers = dict(re.findall(r"(\w+): ([\d.]+)", chip.target_config))
    assert int(numbers["memory_bandwidth"]) == chip.bandwidth
    assert int(numbers["device_memory_size"]) == chip.memory
    assert chip.target_config.count("{") == chip.target_config.count("}")
    # the tensor cores of each generation do twice as much per clock, and do it at no more than the fastest clock
    major = re.findall(r"cuda_compute_capability \{ major: (\d+)", chip.target_config)
    clock = chip.flops / int(numbers["core_count"]) / {"8": 2048, "9": 4096, "10": 8192}[major[0]]
    assert 0.9 < clock / 1e9 / float(numbers["clock_rate_ghz"]) <= 1.001


def test_chips_with_a_description_are_gpus() -> None:
    assert {name for name, chip in chips.CHIPS.items() if chip.is_gpu} == set(GPUS)
    assert set(topologies.SMALLEST) == set(chips.CHIPS)


def test_a_missing_plugin_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(ImportError, match=re.escape("pip install 'speccascade_jax[cuda12]'")) as caught:
        topologies.devices("h100:3")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", ["2x4", "0", "1x1x0", "eight", "1x1x1x8"])
def test_invalid_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, sizes: str) -> None:
    monkeypatch.setattr(topologies, "PLUGINS", ("json",))
    with pytest.raises(ValueError, match=rf"topology='h100:{sizes}'.*give the number of GPUs on one host"):
        topologies.devices(f"h100:{sizes}")


def test_the_dump_is_switched_on_for_the_chips_compiler() -> None:
    on_gpu = compiling._dump_flags(preflight.Job(target="t5_1_1_small", topology="h100"), "/folder")
    on_tpu = compiling._dump_flags(preflight.Job(target="t5_1_1_small", topology="v5e"), "/folder")
    assert "--xla_dump_to=/folder" in on_gpu["XLA_FLAGS"] and set(on_gpu) == {"XLA_FLAGS"}
    assert set(on_tpu) == {"LIBTPU_INIT_ARGS"}


def listed_work(metadata: str) -> list[str]:
    """Returns the instructions for which the compiler lists work of the device."""
    listed = re.findall(r'profile_annotation: "([^"]+)"\s+thunk_id: \d+\s*\}\s*thunk_kind: "(\w+)"', metadata)
    return [name for name, kind in listed if kind not in NO_WORK]


def all_steps(module: hlo.Module) -> list[execution.Step]:
    """Returns every instruction of a program once, as a step that runs."""
    reached, queue = list[str](), [module.entry]
    for name in queue:  # the list grows while the loop reads it
        reached.append(name)
        for part in module.computations[name].instructions:
            called = (part.called("condition"), part.called("body"), *part.branches)
            if part.opcode in ("while", "conditional", "call"):
                queue += [inner for inner in (*called, part.called("to_apply")) if inner]
    parts = [part for name in reached for part in module.computations[name].instructions]
    return [execution.Step(part, "", 1, "", False, True) for part in parts if not execution.is_free(part)]


needs_plugin = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, topologies.PLUGINS)), reason=topologies.NO_PLUGIN
)


@pytest.mark.accelerators_gpu
@needs_plugin
@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_compiler_takes_its_description(name: str) -> None:
    layout = SingleDeviceSharding(topologies.devices(name)[0])
    rows, weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=layout) for s in ((256, 512), (512, 512)))
    compiled = jax.jit(lambda x, w: jnp.tanh(x @ w) @ w).lower(rows, weights).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == (256 + 512) * 512 * 2
    assert len(all_steps(hlo.parse(compiled.as_text()))) >= 2


@pytest.mark.accelerators_gpu
@needs_plugin
def test_a_split_product_sends_its_sum_between_the_gpus_of_a_host() -> None:
    mesh = topologies.mesh_of("h100:8", (1, 8))
    assert mesh is not None and topologies.host_count("h100:8") == 1
    split, whole = (NamedSharding(mesh, s) for s in (PartitionSpec("model", None), PartitionSpec()))
    rows, weights = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=layout) for s, layout in (((1, 512), whole), ((512, 512), split))
    )
    text = jax.jit(lambda x, w: x @ w, out_shardings=whole).lower(rows, weights).compile().as_text()
    costs = account(execution.execute(hlo.parse(gpu.without_spaces(text)), Assumptions()), None)
    assert sum(stage.collectives for stage in costs.values()) == 1
    assert sum(stage.sent_bytes for stage in costs.values()) == ROW


@pytest.mark.accelerators_gpu
@needs_plugin
def test_a_round_of_t5_starts_without_the_host_but_for_loops_and_branches() -> None:
    small = {"topology": "h100", "method": "spec_decode", "block_size": 3, "prompt_length": 16, "max_new_tokens": 16}
    compiled = preflight.report("t5_1_1_small", "exit:2", **small)
    work = compiled.launches
    assert work is not None and compiled.dumped and compiled.fits
    assert compiled.total.ops > 200 and compiled.total.cycles == 0
    # eight kernels per layer: of the target, of the exit in its loop, and in the loop that catches up, whose last layer
    # only writes its cache
    assert len(compiled.kernels) == 8 * (8 + 2 + 1) + 2
    assert 0.9 < work.captured / compiled.total.ops <= 1 and work.graphs < compiled.total.ops / 15
    # the condition of the drafting loop is evaluated once more than its body runs, that of the catch-up loop twice
    assert work.host_waits >= 3 + 1 + 2
    weights = compiled.memory.arguments
    assert weights < compiled.total.hbm_bytes < 40 * weights
    assert (compiled.cache_copies, compiled.callbacks, compiled.f64) == (0, 0, 0)
