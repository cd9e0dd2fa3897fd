"""Defects that the kernel for Hopper might have are seen on this processor."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest

from relax_fusion.launch.cuda_source import CUDASource

from ..support import emulated
from ..support.emulated import LaunchError, on_cpu
from ..support.slow import sampled
from .cases import CASES, HOWS
from .packed_cases import PACKED


class Defect(NamedTuple):
    """What stands in the text instead, in which case it is seen, and how."""

    case: str
    right: str
    wrong: str
    seen: str


NUMBERS = "wrong at"
HANGS_EMPTY, HANGS_FULL = (rf"no thread can go on:(.|\n)*{name}\[" for name in ("empty", "full"))
ARRIVAL = "if (before >= 0 && lane < BLOCKS_THAT_SHARE) barrier_arrive"
SYNC = "          threads_sync<128>(group + 1);\n"
PIECES = "          for_units([&](Unit* here, u64 there) {\n"
STORES = PIECES + "            *(Unit*)(at.product.out"
ENDS = "        }\n      }\n      for (int step = 0"
EXPECT = "            barrier_expect(barrier, STAGE_BYTES{});\n            copy"
WAIT = "      if constexpr (DEPENDENT && !LATE) wait_for_predecessor();\n"
RELEASE = "      if constexpr (RELEASED) release_successor();\n"
ALL_GROUPS = "        threads_sync<128 * MULTIPLYING>(ALL_GROUPS);  // all"
SETS = "        } else {\n          threads_sync<128 * MULTIPLYING>(ALL_GROUPS);"
HEADS = "place < by.heads"
BEFORE = "      products_of_before<MADE - 1>();\n"
RELEASES = "      if (piece == MADE - 2) release();\n"
ROTATED_SYNC = "    threads_sync<128>(share.meeting);\n"
DEFECTS = {
    "an_arrival_is_missing": Defect(
        "plain", ARRIVAL, ARRIVAL.replace("before >= 0", "false"), HANGS_EMPTY
    ),
    "arrivals_at_block_0_only": Defect(
        *(
            "split",
            "if constexpr (BLOCKS_THAT_SHARE == 1) {\n    barrier",
            "if (false) {\n    barrier",
        ),
        HANGS_EMPTY,
    ),
    "arrivals_of_one_block_only": Defect(
        *("sharing_both", "4 * GROUPS * BLOCKS_THAT_SHARE", "4 * GROUPS"),
        "one arrival too many|no thread can go on",
    ),
    "parity": Defect("plain", "u32 parity = 1;", "u32 parity = 0;", HANGS_EMPTY),
    "bytes": Defect("plain", EXPECT.format(""), EXPECT.format(" - 128"), HANGS_FULL),
    "swizzle": Defect(
        "plain", "PRODUCT_LAYOUT 0x40000040", "PRODUCT_LAYOUT 0x80000040", "another layout"
    ),
    "distance_of_lines": Defect(
        "plain", "PRODUCT_LAYOUT 0x40000040", "PRODUCT_LAYOUT 0x40000008", NUMBERS
    ),
    "transposed": Defect("plain", "store_matrices<!SWAPPED>", "store_matrices<SWAPPED>", NUMBERS),
    "banks": Defect("parts", "(piece ^ turn) << 4", "piece << 4", "meet in banks"),
    "banks_of_interleaved": Defect(
        "q4_gate_and_up", "(piece ^ turn) << 4", "piece << 4", "meet in banks"
    ),
    "mask_of_residual": Defect(
        *("split", "wide < WIDE_PART && row < rows &&", "wide < WIDE_PART &&", "nor of a tensor")
    ),
    "residual_of_other_features": Defect(
        "groups_tall", "feature / 64 % RESIDUALS_OF_STAGE *", "0 *", NUMBERS
    ),
    "stages_of_a_residual_are_kept": Defect(
        *(
            "groups_tall",
            "step = 0; step < RESIDUAL_STEPS; ++step)\n        if",
            "step = 1; false;)\n if",
        ),
        HANGS_EMPTY,
    ),
    "banks_of_words": Defect("tf32", "(piece ^ turn) << 4", "piece << 4", "meet in banks"),
    "banks_of_words_swapped": Defect(
        "tf32_swapped", "(piece ^ turn) << 4", "piece << 4", "meet in banks"
    ),
    "words_of_another_row": Defect("int8", "8 * (i / 2);", "8 * (i % 2);", NUMBERS),
    "elements_of_k": Defect("int8_split", "LINE / ELEMENT_BYTES", "LINE / 2", "outside of"),
    "mask_of_lines": Defect("parts", "own && wide < WIDE_PART && row", "own && row", NUMBERS),
    "stages_before_their_products": Defect(
        *("plain", "        products_of_before<1>();\n", "        on_cpu::commit_products();\n"),
        NUMBERS,
    ),
    "no_fence": Defect("plain", "        products_begin();\n", "", "without products_begin"),
    "no_wait_before_stores": Defect("plain", SYNC + STORES, STORES, NUMBERS),
    "no_wait_behind_stores": Defect("groups_wide", SYNC + ENDS, ENDS, NUMBERS),
    "no_wait_before_sums": Defect("split_groups", ALL_GROUPS, "//", NUMBERS),
    "no_wait_for_sums_of_other_sets": Defect("sets", SETS, "        } else {", NUMBERS),
    "sets_begin_at_the_same_stage": Defect(
        "sets", "(number * steps + split) % STAGES", "number * steps % STAGES", HANGS_EMPTY
    ),
    "scales_of_the_next_stage": Defect(
        "q4_sets", "ask(min(step + GROUPS_THAT_SPLIT, last))", "ask(min(step + 1, last))", NUMBERS
    ),
    "no_wait_at_the_end": Defect(
        *("split", "  if constexpr (CLUSTER > 1) cluster_sync();", "", "block . has ended")
    ),
    "copies_before_barriers": Defect("plain", "    barriers_ready();\n", "", "not known to copies"),
    "reads_too_early": Defect("plain", WAIT + RELEASE, RELEASE, NUMBERS),
    "reads_weights_too_early": Defect(
        "not_early", "if constexpr (DEPENDENT && EARLY)", "if constexpr (DEPENDENT)", NUMBERS
    ),
    "adapter_reads_too_early": Defect(
        "adapter", "        if (LATE && adapted) wait_for_predecessor();\n", "", NUMBERS
    ),
    "adapter_releases_too_early": Defect(
        *(
            "adapter_split",
            "      if constexpr (LATE) wait_for_predecessor();\n      if",
            "      if",
        ),
        "the next kernel begins before",
    ),
    "adapter_is_released_too_early": Defect(
        "adapter", WAIT + RELEASE, RELEASE + WAIT, "the next kernel begins before"
    ),
    "adapter_begins_again": Defect(
        "adapter_steps",
        "        if (adapted) step -= steps_of_k;\n        if",
        "        if",
        NUMBERS,
    ),
    "adapter_has_other_rows": Defect("adapters", "*at.product.narrow : x", "x : x", NUMBERS),
    "registers": Defect(
        "groups_tall", "COPYING_REGISTERS = 40", "COPYING_REGISTERS = 48", "wait for registers"
    ),
    "rotated_the_other_way": Defect(
        "rotated", "at(cos[0], first) - y", "at(cos[0], first) + y", NUMBERS
    ),
    "angles_of_the_other_half": Defect("rotated", "at(cos[SIDES - 1]", "at(cos[0]", NUMBERS),
    "all_of_a_head_turns": Defect(
        "rotated_parts_of_heads", f"{HEADS} && inside < WIDTH", HEADS, "nor of a tensor"
    ),
    "values_turn": Defect("rotated_in_periods", f"{HEADS} && inside", "inside", NUMBERS),
    "positions_do_not_repeat": Defect(
        "rotated_in_periods", "(row % by.positions)", "row", "nor of a tensor"
    ),
    "angles_of_the_step_before": Defect(
        "rotated_turns", "angles_of(top + ROTATED_AT_ONCE)", "angles_of(top)", NUMBERS
    ),
    "halves_side_by_side": Defect(
        "rotated", "OF_WEIGHT ? feature_of(line + i) : line + i", "line + i", NUMBERS
    ),
    "pairs_behind_the_last": Defect(
        "rotated_behind_the_last", "row < rows && column < columns", "row < rows", "nor of a tensor"
    ),
    "no_wait_before_rotation": Defect("rotated", ROTATED_SYNC + "    const", "    const", NUMBERS),
    "no_wait_behind_rotation": Defect("rotated_qkv", ROTATED_SYNC + "  }", "  }", NUMBERS),
}
DEFECTS |= {  # of packed weights
    "one_set_of_registers": Defect("q4", "made[piece % MADE]", "made[0]", NUMBERS),
    "sets_that_products_read": Defect(
        "q4_steps_of_128", "made[piece % MADE]", "made[piece % (MADE - 1)]", NUMBERS
    ),
    "no_fence_behind_numbers": Defect(
        "q4", "      products_begin();\n      #pragma", "      #pragma", "without products_begin"
    ),
    "numbers_before_their_products": Defect(
        *("q4", BEFORE + RELEASES, "      on_cpu::commit_products();\n" + RELEASES, NUMBERS)
    ),
    "swizzle_of_words": Defect("q4", "& TURNS_OF) << 4", "& 0) << 4", NUMBERS),
    "scales_of_another_step": Defect(
        "q4", "ask(min(step + GROUPS_THAT_SPLIT, last))", "ask(step)", NUMBERS
    ),
    "scales_of_another_group": Defect(
        "q4", "higher ? multiply_by_half<true>", "false ? multiply_by_half<true>", NUMBERS
    ),
    "scales_of_the_gate": Defect("q4_gate_first", "scales[half % WEIGHTS]", "scales[0]", NUMBERS),
    "ups_of_another_feature": Defect(
        "q4_gate_and_up", "SECOND = WEIGHTS > 1 ? 0 : 8", "SECOND = 8", NUMBERS
    ),
    "words_of_the_gate": Defect("q4_gate_first", "WEIGHTS > 1 ? TALL : 8", "8", NUMBERS),
    "up_is_the_gate": Defect("q4_up_first", "[4 * eight + 2 + i]", "[4 * eight + i]", NUMBERS),
    "scales_beyond_the_last_feature": Defect(
        *("q4_steps_of_128", "SECOND * half, features - 1)", "SECOND * half, 1 << 30)"),
        "nor of a tensor",
    ),
    "bytes_of_another_thread": Defect(
        "q8",
        "0x1100 + 0x2222 * quarter);\n          found[1]",
        "0x1100);\n          found[1]",
        NUMBERS,
    ),
}


@pytest.mark.parametrize("defect", sampled(DEFECTS.values(), 8), ids=DEFECTS)
def test_a_defect_is_seen(defect: Defect) -> None:
    case = (CASES | PACKED)[defect.case]

    def broken(source: CUDASource) -> str:
        text = on_cpu(source)
        if text.count(defect.right) != 1:  # no AssertionError, which would count as the defect seen
            pytest.fail(f"{text.count(defect.right)} places of the text have {defect.right!r}")
        return text.replace(defect.right, defect.wrong)

    with (
        mock.patch.object(emulated, "on_cpu", broken),
        pytest.raises((AssertionError, LaunchError), match=defect.seen),
    ):
        for how in HOWS:
            case.check(how)
