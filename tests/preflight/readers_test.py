"""Tests of the reader of compiled programs, on texts cut from compilations of `by_hand.PROGRAMS` for v5e."""

import re
from pathlib import Path

import pytest

from speccascade_jax.preflight import bundles, hlo, trips
from speccascade_jax.preflight.execution import Assumptions, execute
from speccascade_jax.preflight.report import Costs, account
from speccascade_jax.preflight.traffic import hbm_bytes
from tests.preflight import second_reader

CASES = Path(__file__).parent / "cases"
D = 12_288
WEIGHTS = 2 * D * D
"""Bytes of the square matrix that the loops read."""


def text_of(name):
    return (CASES / f"{name}.hlo.txt").read_text()


def total_of(text, cycles=None, **assumed):
    total = Costs()
    for costs in account(execute(hlo.parse(text), Assumptions(**assumed)), cycles).values():
        total = total.plus(costs)
    return total


def costs_of(entry, before=""):
    """Returns the bytes of the last instruction of a program of one computation."""
    module = hlo.parse(f"{before}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{entry}\n}}\n")
    computation = module.computations["main"]
    return hbm_bytes(module, computation, computation.instructions[-1])


@pytest.mark.parametrize(
    ("name", "expected", "branches"),
    [
        ("nested", 3 * 4 * WEIGHTS, {}),
        ("condloop", 6 * WEIGHTS, {"/cond:2": 1}),
        ("cacheloop", 5 * 2 * 64 * 32 * 2 * 8 * 128, {}),
        ("vdus", 8 * 3 * 2 * 64 * 128, {}),
        ("scatter", 3 * 4 * 256 * 1024, {}),
    ],
)
def test_bytes_of_stored_programs_equal_those_counted_by_hand_and_by_the_second_reader(name, expected, branches):
    text = text_of(name)
    read = total_of(text, branches=branches).hbm_bytes
    assert read == pytest.approx(expected, rel=0.03)
    assert read == pytest.approx(second_reader.Reader(text, branches=branches).total().hbm, rel=1e-6)


def test_branch_of_a_conditional_in_a_loop_is_the_one_assumed():
    assert total_of(text_of("condloop"), branches={"/cond:2": 0}).hbm_bytes < 0.1 * WEIGHTS


@pytest.mark.parametrize(
    ("name", "expected"), [("nested", [3, 4]), ("condloop", [6]), ("cacheloop", [5]), ("vdus", [8])]
)
def test_constants_decide_the_iterations_of_loops(name, expected):
    assert sorted(counts_of(text_of(name)).values()) == expected


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "expected"),
    [(0, 7, 1, "LT", 7), (0, 7, 1, "LE", 8), (1, 8, 3, "LT", 3), (9, 0, -2, "GT", 5), (9, 0, -2, "GE", 5),
     (5, 5, 1, "LT", 0), (0, 7, -1, "LT", None), (0, 6, 2, "NE", 3)],
)  # fmt: skip
def test_iterations_follow_from_start_limit_and_step(start, limit, step, direction, expected):
    text = f"""
%body (t: (s32[])) -> (s32[]) {{
  %t = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%step, %i)
  ROOT %out = (s32[]) tuple(%next)
}}
%test (u: (s32[])) -> pred[] {{
  %u = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %limit = s32[] constant({limit})
  ROOT %more = pred[] compare(%j, %limit), direction={direction}
}}
ENTRY %main (a: s32[]) -> (s32[]) {{
  %zero = s32[] constant({start})
  %copied = s32[] copy(%zero)
  %first = (s32[]) tuple(%copied)
  ROOT %loop = (s32[]) while(%first), condition=%test, body=%body
}}
"""
    module = hlo.parse(text)
    main = module.computations["main"]
    assert trips.trip_count(module, main, main.root) == expected


INNER = """
%inner (t: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %t = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %step = s32[] get-tuple-element(%t), index=1
  %end = s32[] get-tuple-element(%t), index=2
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], s32[], s32[]) tuple(%next, %step, %end)
}
%inner_test (u: (s32[], s32[], s32[])) -> pred[] {
  %u = (s32[], s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %limit = s32[] get-tuple-element(%u), index=2
  ROOT %more = pred[] compare(%j, %limit), direction=LT
}
%outer (v: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %v = (s32[], s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%v), index=0
  %by = s32[] get-tuple-element(%v), index=1
  %to = s32[] get-tuple-element(%v), index=2
  %zero = s32[] constant(0)
  %first = (s32[], s32[], s32[]) tuple(%zero, %by, %to)
  %loop = (s32[], s32[], s32[]) while(%first), condition=%inner_test, body=%inner
  %later = s32[] add(%k, %by)
  ROOT %result = (s32[], s32[], s32[]) tuple(%later, %by, %to)
}
%outer_test (w: (s32[], s32[], s32[])) -> pred[] {
  %w = (s32[], s32[], s32[]) parameter(0)
  %l = s32[] get-tuple-element(%w), index=0
  %three = s32[] constant(3)
  ROOT %go = pred[] compare(%l, %three), direction=LT
}
ENTRY %main (a: s32[]) -> (s32[], s32[], s32[]) {
  %none = s32[] constant(0)
  %two = s32[] constant(2)
  %ten = s32[] constant(10)
  %begin = (s32[], s32[], s32[]) tuple(%none, %two, %ten)
  ROOT %all = (s32[], s32[], s32[]) while(%begin), condition=%outer_test, body=%outer
}
"""


def counts_of(text):
    module = hlo.parse(text)
    loops = {loop.name: (room, loop) for room in module for loop in room.instructions if loop.opcode == "while"}
    return {name: trips.trip_count(module, room, loop) for name, (room, loop) in loops.items()}


def test_constants_are_found_through_the_tuples_of_outer_loops():
    assert counts_of(INNER) == {"loop": 5, "all": 2}


def test_a_value_that_an_outer_loop_changes_gives_no_number_of_iterations():
    changed = INNER.replace("tuple(%later, %by, %to)", "tuple(%later, %by, %later)")
    assert counts_of(changed) == {"loop": None, "all": 2}


def test_iterations_that_depend_on_data_are_assumed():
    text = text_of("nested").replace("constant(4)", 'custom-call(), custom_call_target="Limit"')
    counts = [total_of(text, loops={"closed_call/while": count}).hbm_bytes for count in (1, 2)]
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.03)


def test_no_estimate_of_the_compiler_is_read():
    text = text_of("vdus")
    garbage, count = re.subn(r'"estimated_cycles":"\d+"', '"estimated_cycles":"987654321"', text)
    assert count > 5
    assert total_of(text) == total_of(garbage)


ROWS, TABLE, HALF = "f32[8,128]{1,0:T(8,128)}", "f32[64,128]{1,0:T(8,128)}", "bf16[3,100]{1,0:T(8,128)(2,1)}"
FLAGS, NIBBLES = "pred[32,128]{1,0:T(32,128)(4,1)}", "s4[64,128]{1,0:T(64,128)(8,1)E(4)}"
ROW, TURNED, INDEX = "f32[1,128]{1,0:T(1,128)S(1)}", "f32[8,128]{0,1:T(8,128)}", "s32[]{:T(128)S(6)}"
SEMAPHORE = "u32[]{:S(2)}"


def near(kind):
    """Returns the type of an array in VMEM."""
    return kind.replace("}", "S(1)}") if "E(" not in kind else kind.replace("E(", "S(1)E(")


@pytest.mark.parametrize(
    ("arguments", "instruction", "expected"),
    [
        # from HBM into VMEM, from VMEM into HBM, and from HBM to HBM
        ([ROWS], f"({near(ROWS)}, {ROWS}, {SEMAPHORE}) copy-start(%p0)", 4096),
        ([near(ROWS)], f"({ROWS}, {near(ROWS)}, {SEMAPHORE}) copy-start(%p0)", 4096),
        ([ROWS], f"{TURNED} copy(%p0)", 4096 + 4 * 128 * 128),
        # a slice that its start fetches, with its indices among the operands
        ([TABLE, INDEX], f"(({TABLE}, {INDEX}), {near(ROWS)}, {SEMAPHORE}) dynamic-slice-start(%p0, %p1)", 4096),
        # rows that fill tiles are written; a part of a tile is read, completed and written; a slice reads whole tiles
        ([TABLE, near(ROWS)], f"{TABLE} dynamic-update-slice(%p0, %p1)", 4096),
        ([TABLE, ROW], f"{TABLE} dynamic-update-slice(%p0, %p1)", 2 * 4096),
        ([TABLE], f"{ROW} dynamic-slice(%p0)", 4096),
        # padding by two levels of tiles, a byte for a predicate, half a byte for 4 bits
        ([HALF], f"{near(HALF)} negate(%p0)", 2048),
        ([FLAGS], f"{near(FLAGS)} not(%p0)", 4096),
        ([NIBBLES], f"{near(NIBBLES)} negate(%p0)", 4096),
    ],
)
def test_bytes_of_one_instruction(arguments, instruction, expected):
    entry = [f"  %p{number} = {kind} parameter({number})" for number, kind in enumerate(arguments)]
    assert costs_of("\n".join([*entry, f"  ROOT %last = {instruction}"])) == expected


FUSED = """
%view (q: bf16[16,128]) -> bf16[16,128] {{
  %q = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %b = bf16[16,128]{{1,0:T(8,128)(2,1)}} bitcast(%q)
}}
%fused (p1: bf16[8,16], p0: bf16[16,128]) -> {result} {{
  %p0 = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %p1 = bf16[8,16]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %w = bf16[16,128]{{1,0:T(8,128)(2,1)}} fusion(%p0), kind=kLoop, calls=%view
{inside}
}}
"""
PRODUCT = "  ROOT %d = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} convolution(%p1, %w), dim_labels=bf_io->bf"
PART = "  ROOT %d = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} slice(%w), slice={[0:8], [0:128]}"
UPDATE = "  ROOT %d = bf16[16,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %p1)"
FRESH = """  %z = bf16[]{:T(256)} constant(0)
  %f = bf16[16,128]{1,0:T(8,128)(2,1)} broadcast(%z), dimensions={}
  ROOT %d = bf16[16,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%f, %p1)"""


@pytest.mark.parametrize(
    ("result", "inside", "expected"),
    [
        # a product's matrix goes through a view, and its number among the parameters is not its place in the list
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", PRODUCT, 2 * 16 * 128),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", PART, 2 * 8 * 128),
        # a view of all of the matrix is the result
        (
            "bf16[16,128]{1,0:T(8,128)(2,1)S(1)}",
            "  ROOT %d = bf16[16,128]{1,0:T(8,128)(2,1)} bitcast(%w)",
            2 * 16 * 128,
        ),
        # an update in place writes 8 rows of 128 columns, and reads them because it fills 16 columns only
        ("bf16[16,128]{1,0:T(8,128)(2,1)}", UPDATE, 2 * 2 * 8 * 128),
        # an update of a value that the fusion makes writes all of it
        ("bf16[16,128]{1,0:T(8,128)(2,1)}", FRESH, 2 * 16 * 128),
    ],
)
def test_bytes_of_fusions(result, inside, expected):
    entry = f"""  %x = bf16[8,16]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %m = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(1)
  %fusion = {result} fusion(%x, %m), kind=kOutput, calls=%fused"""
    assert costs_of(entry, FUSED.format(result=result, inside=inside)) == expected


def test_ops_are_the_instructions_with_a_schedule_and_collectives():
    text = """ENTRY %main (a: f32[8]) -> f32[8] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %s = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)
  %d = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%s)
  %i = s32[]{:T(128)S(6)} constant(3)
  %j = s32[]{:T(128)S(6)} add(%i, %i)
  %k = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%d), custom_call_target="ConcatBitcast"
  %n = f32[8,128]{1,0:T(8,128)} negate(%k)
  ROOT %r = f32[8,128]{1,0:T(8,128)} all-reduce(%n), to_apply=%add
}
"""
    costs = total_of(text, {"n": 40})
    assert (costs.ops, costs.transfers, costs.scalar_ops, costs.collectives, costs.cycles) == (2, 1, 1, 1, 40)
    assert costs.hbm_bytes == 4096 * 4
    without = total_of(text)
    assert (without.ops, without.transfers, without.scalar_ops) == (3, 1, 0)


def test_schedules_are_shared_and_calls_belong_to_the_program(tmp_path):
    schedule = "     0   :  { %v0_v0 = vlaneseq }\n   0x1   :  {}\n"
    program = "".join(
        f"  0x{number}   :  {{ {inside} }}\n"
        for number, inside in enumerate(
            ("%s1_s1 = smov 0", "%4 = inlined_call %s1_s1 /* %negate.1 = negate(%p) */", "%s2_s2 = smov 0",
             "%5 = inlined_call %s2_s2 /* %negate.2 = negate(%q) */")
        )
    )  # fmt: skip
    (tmp_path / "12-negate.1-01-final_bundles.txt").write_text(schedule)
    (tmp_path / "12-negate.1-00-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:\n")
    (tmp_path / "12-TLP-02-final_bundles.txt").write_text(program)
    (tmp_path / "12-TLP-00-deduplication-map.txt").write_text("key:negate.1\nordinal:1\n  negate.1\n  negate.2\n")
    assert bundles.read(tmp_path) == {"negate.1": 2 + 2, "negate.2": 2 + 1}
    assert second_reader.cycles_by_name(tmp_path) == {"negate.1": 2 + 2, "negate.2": 2 + 1}
