"""Tests of counting the bundles that a TPU core issues, against counts by hand.

`cases/softmax.final_bundles.txt` is the schedule of one fusion in a round of T5 small and base, compiled for v5e.
"""

from pathlib import Path

import pytest

from speccascade_jax.preflight import schedules
from tests.preflight import second_reader

SOFTMAX = Path(__file__).parent / "cases" / "softmax.final_bundles.txt"
LOOP = """
     0   :  {{ %s1_s1 = smov 0  ;;  %s9_s9 = sld [smem:[#allocation1]] }}
   0x1 LB: > {{ %s3_s3 = sadd.s32 1, %s2_s1  ;;  %s2_s1 = sphi %s1_s1, %s4_s1 }} /* Start region 10 */
   0x2   :  {{}}
   0x3   : > {{ {middle} }}
   0x4   : > {{ %v5_v5 = vlaneseq /* a comment
 over two lines */  ;;  %s4_s1 = smov %s3_s3 }}
   0x5   : > {{ %p1_p1 = scmp.ge.s32.totalorder %s4_s1, {limit} /* loop exit test */ }}
   0x6   :  {{ %5 = sbr.rel (!%p1_p1) target = $region10 }}
   0x7   :  {{}}
   0x8   :  {{}}
   0x9   :  {{}}
   0xa   :  {{}}
   0xb   :  {{ %v1_v1 = vlaneseq }}
"""
NESTED = """
     0   :  { %s1_s1 = smov 0 }
   0x1 LB: > { %s2_s2 = smov 0  ;;  %s5_s1 = sphi %s1_s1, %s6_s1 } /* Start region 10 */
   0x2 LB: >> { %s3_s2 = sadd.s32 1, %s4_s2  ;;  %s4_s2 = sphi %s2_s2, %s3_s2 } /* Start region 11 */
   0x3   : >> { %p2_p2 = scmp.ge.s32.totalorder %s3_s2, 3 }
   0x4   : > { %5 = sbr.rel (!%p2_p2) target = $region11 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %s6_s1 = sadd.s32 1, %s5_s1 }
   0xa   : > { %p1_p1 = scmp.ge.s32.totalorder %s6_s1, 5 /* loop exit test */ }
   0xb   :  { %5 = sbr.rel (!%p1_p1) target = $region10 }
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
"""
SKIPPED = """
     0   :  { %s1_s1 = smov 0 }
   0x1 LB: > { %p3_p3 = scmp.lt.s32.totalorder %s2_s1, 2  ;;  %s2_s1 = sphi %s1_s1, %s4_s1 } /* Start region 10 */
   0x2   : > { %6 = sbr.rel (%p3_p3) target = $region20 }
   0x3   :  {}
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   : > { %v1_v1 = vlaneseq }
   0x8   : > { %v2_v2 = vlaneseq }
   0x9 PF: > { %s4_s1 = sadd.s32 1, %s2_s1 } /* Start/End empty region 20 */
   0xa   : > { %p1_p1 = scmp.ge.s32.totalorder %s4_s1, 6 /* loop exit test */ }
   0xb   :  { %5 = sbr.rel (!%p1_p1) target = $region10 }
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
"""


def both(text):
    counted = schedules.issued(text)
    assert counted == second_reader.cycles_of(text)
    return counted


@pytest.mark.parametrize("turns", [1, 4, 60])
def test_a_loop_counts_its_branch_and_the_delayed_bundles_after_it(turns):
    # the compiler writes no loop depth for an empty bundle
    assert both(LOOP.format(limit=turns, middle="%v2_v2 = vlaneseq")) == 1 + turns * 10 + 1


def test_a_loop_counts_through_a_register_that_is_stored_and_fetched():
    middle = "%7 = sst [smem:[#allocation5_spill]] %s3_s3  ;;  %s8_s8 = smov 7"
    text = LOOP.format(limit=4, middle=middle).replace("smov %s3_s3", "sld [smem:[#allocation5_spill]]")
    assert both(text) == 1 + 4 * 10 + 1


def test_a_loop_of_unknown_length_counts_once():
    assert both(LOOP.format(limit="%s9_s9", middle="%v2_v2 = vlaneseq")) == 12


def test_loops_multiply_within_loops_without_a_comment_on_their_exit():
    assert both(NESTED) == 1 + 5 * (1 + 3 * 7 + 7)


def test_bundles_that_an_iteration_skips_do_not_count():
    # two of six iterations skip two bundles each
    assert both(SKIPPED) == 1 + 6 * 15 - 2 * 2


def test_a_computed_difference_decides_which_bundles_an_iteration_skips():
    text = SKIPPED.replace("%p3_p3 = scmp.lt.s32.totalorder %s2_s1, 2", "%s7_s7 = ssub.s32 %s2_s1, 2")
    text = text.replace("   0x2   :", "   0x2   : > { %p3_p3 = scmp.lt.s32.totalorder %s7_s7, 0 }\n   0x2   :")
    assert both(text) == 1 + 6 * 16 - 2 * 2


def test_bundles_that_an_unknown_branch_would_skip_count():
    assert both(SKIPPED.replace("%s2_s1, 2", "%s2_s1, %s30_s30")) == 1 + 6 * 15


def test_a_schedule_written_by_the_compiler_is_counted():
    # three bundles, six turns of 54 of which two skip 38, and the last bundle
    assert both(SOFTMAX.read_text()) == 3 + 6 * 54 - 2 * 38 + 1


def test_counting_ends_even_if_a_loop_does_not(monkeypatch):
    monkeypatch.setattr(schedules, "MOST_STEPS", 1000)
    assert schedules.issued(LOOP.format(limit=100_000, middle="%v2_v2 = vlaneseq")) < 10_000
