"""What ptxas says of the matmul kernel for Hopper: no warning, and registers that are enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from relax_fusion.cuda_kernels.kernel_text import MatmulForm, RotatedForm
from relax_fusion.estimator import violations
from relax_fusion.estimator.families.cuda_matmul.family import MOST_ACCUMULATORS
from relax_fusion.estimator.families.cuda_matmul.tiles import accumulators
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc, require_nvrtc
from relax_fusion.workload import Rope

from ..support.slow import sampled
from .cases import H200, gated, matmul, plan, rotated
from .packed_cases import Q4, Q8, bfloat16, packed
from .packed_cases import plan as packed_plan

STEPS = ("gelu", "multiply:0:row", "times:0.5", "add:1:row", "add:2:whole")
IN_TURNS = STEPS[:-1]
LONG = {
    "one_group": plan(256, 64, num_stages=5),
    "one_group_rows_tall": plan(64, 256, swapped=1, num_stages=5),
    "two_groups_of_rows": plan(128, 320, groups_m=2, num_stages=3),
    "two_blocks": plan(128, 64, num_stages=4, blocks=2),
    "split": plan(128, 128, groups_n=2, num_stages=6, split_k=2),
    "two_groups_of_features": plan(176, 256, groups_n=2, num_stages=4),
    "three_groups": plan(192, 192, groups_n=3, num_stages=4),
    "turns": plan(160, 128, turns=2, num_stages=5),
    "turns_rows_tall": plan(128, 128, swapped=1, turns=2, num_stages=5),
}
"""Plans of one weight, with a long epilogue."""

GATED = {
    "gated": plan(176, 64, num_stages=5),
    "gated_two_groups": plan(176, 128, groups_n=2, num_stages=3),
    "gated_three_groups": plan(96, 192, groups_n=3, num_stages=3),
    "gated_split": plan(128, 64, num_stages=6, split_k=4),
    "gated_rows_tall": plan(128, 176, swapped=1, groups_n=2, num_stages=3),
}
OTHERS = {
    "int8": MatmulForm(plan(176, 256, groups_n=2, block_k=128), "int8", out_dtype="int32"),
    "int8_rows_tall": MatmulForm(
        plan(128, 256, swapped=1, groups_m=2, block_k=128), "int8", out_dtype="int32"
    ),
    "int8_one_group": MatmulForm(
        plan(256, 64, num_stages=5, block_k=128), "int8", out_dtype="int32"
    ),
    "int8_three_groups": MatmulForm(
        plan(192, 192, groups_n=3, block_k=128), "int8", out_dtype="int32"
    ),
    "int8_turns": MatmulForm(
        plan(160, 128, turns=2, num_stages=5, block_k=128), "int8", out_dtype="int32"
    ),
    "int8_split": MatmulForm(plan(64, 64, split_k=4, block_k=128), "int8", out_dtype="int32"),
    "uint8_to_float16": MatmulForm(
        plan(128, 128, groups_n=2, block_k=128), "uint8", "", False, STEPS[1:4], out_dtype="float16"
    ),
    "tf32": MatmulForm(plan(176, 256, groups_n=2, block_k=32), "float32"),
    "tf32_steps": MatmulForm(plan(128, 256, groups_n=2, block_k=32), "float32", "", True, STEPS),
    "tf32_rows_tall": MatmulForm(plan(128, 256, swapped=1, groups_m=2, block_k=32), "float32"),
    "tf32_turns": MatmulForm(plan(128, 128, swapped=1, turns=2, block_k=32), "float32"),
    "tf32_gated": MatmulForm(plan(176, 64, block_k=32), "float32", "silu", True),
    "float16_to_float32": MatmulForm(
        plan(176, 256, groups_n=2), "float16", "", True, out_dtype="float32"
    ),
}
"""Other operands and results than halves."""

ROTATED = {
    "rotated": (plan(128, 64, num_stages=5), 64, "float16"),
    "rotated_two_groups": (plan(176, 128, groups_n=2, num_stages=3), 64, "float16"),
    "rotated_two_blocks": (plan(32, 64, num_stages=4, blocks=2), 64, "float16"),
    "rotated_rows_tall": (plan(128, 160, swapped=1, groups_m=2, num_stages=3), 64, "float16"),
    "rotated_turns": (plan(160, 64, turns=2, num_stages=4), 64, "float16"),
    "rotated_float32": (plan(160, 64, turns=2, num_stages=4), 64, "float32"),
    "rotated_neighbours": (plan(176, 256, groups_n=2, num_stages=3), 1, "float16"),
}
"""Plans, how far the features of a pair are apart, and the type of angles."""

HEADS = ((0, 0), (0, 0), None)
PACKED = {
    "packed": packed_plan(256, 64, num_stages=5),
    "packed_steps_of_256": packed_plan(64, 64, 256, num_stages=3, split_k=4),
    "packed_two_parts": packed_plan(128, 256, groups_n=2, num_stages=5),
    "packed_two_groups": packed_plan(256, 128, groups_n=2, num_stages=5),
    "packed_three_groups": packed_plan(176, 192, groups_n=3, num_stages=5),
    "packed_sets": packed_plan(64, 64, 128, groups_k=3, num_stages=9),
    "packed_turns": packed_plan(128, 128, turns=2, num_stages=5),
}
PACKED_GATED = {
    "packed_gated": packed_plan(128, 64, num_stages=5),
    "packed_gated_two_groups": packed_plan(144, 128, groups_n=2, num_stages=5),
    "packed_gated_three_groups": packed_plan(64, 192, groups_n=3, num_stages=5),
    "packed_gated_steps_of_256": packed_plan(64, 64, 256, num_stages=3),
}
FORMS = {
    **{
        name: MatmulForm(p, "float16", "", True, steps, packed=Q4, dependent=True, early=True)
        for name, p in PACKED.items()
        for steps in [STEPS if p.turns == 1 else IN_TURNS]
    },
    **{
        name: MatmulForm(p, "bfloat16", "silu", True, packed=bfloat16(Q4), dependent=True)
        for name, p in PACKED_GATED.items()
    },
    "packed_bytes": MatmulForm(packed_plan(128, 64, 128, num_stages=3), "float16", packed=Q8),
    "packed_bytes_bfloat16": MatmulForm(
        packed_plan(128, 64, num_stages=5), "bfloat16", packed=bfloat16(Q8)
    ),
    **{
        name: MatmulForm(p, "float16", "", True, steps, dependent=True, early=True)
        for name, p in LONG.items()
        for steps in [STEPS if p.turns == 1 else IN_TURNS]
    },
    **{name: MatmulForm(p, "bfloat16", "silu", True, dependent=True) for name, p in GATED.items()},
    **OTHERS,
    **{
        name: MatmulForm(
            *(p, "float16", "", True, (), 3),
            dependent=True,
            rotated=RotatedForm(128, 128, apart, 128, dtype, HEADS),
        )
        for name, (p, apart, dtype) in ROTATED.items()
    },
    **{
        f"adapters_{name}": MatmulForm(
            *(LONG[name], "float16", "", True), products=3, dependent=True, adapter_steps=1
        )
        for name in ("one_group", "two_groups_of_features", "turns_rows_tall", "split")
    },
    **{
        f"units_of_{unit}": MatmulForm(
            LONG["turns"], "float16", "", True, STEPS[1:4], dependent=True, unit_bytes=unit
        )
        for unit in (2, 4, 8)
    },
    "narrow": MatmulForm(
        *(plan(64, 64, swapped=1, num_stages=12, split_k=8), "float16"),
        steps=("times:0.5",),
        dependent=True,
        early=True,
        released=True,
    ),
}
KNOWN_SPILLS = {
    "two_groups_of_features": 92,
    "turns": 16,
    "turns_rows_tall": 564,
    "gated_rows_tall": 416,
    "int8": 112,
    "int8_turns": 44,
    "tf32": 112,
    "tf32_steps": 52,
    "float16_to_float32": 104,
    "rotated_two_groups": 176,
    "rotated_rows_tall": 136,
    "rotated_turns": 16,
    "rotated_float32": 56,
    "adapters_two_groups_of_features": 52,
    "adapters_turns_rows_tall": 48,
    "adapters_split": 80,
    "packed_gated_three_groups": 8,
}
"""Bytes that CUDA 13.0 stores beside the registers, at the end of a tile with a long epilogue, of
results of four bytes, or with features that turn; with three adapters, of the thread that copies
(none where they are left out)."""

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")


def test_forms_are_of_allowed_plans_and_have_the_most_accumulators() -> None:
    most = dict.fromkeys(MOST_ACCUMULATORS, 0)
    for form in FORMS.values():
        out, tf32 = form.result_dtype, form.dtype == "float32"
        changes = {"k": 4096, "dtype": form.dtype, "out_dtype": out, "allow_tf32": tf32}
        one = rotated((256, Rope(128, 256, "float16"))) if form.half else matmul()
        work = replace(gated() if form.activation else one, **changes)
        if form.packed is not None:
            work = replace(packed(work, form.packed, 4096), dtype=form.dtype, out_dtype=form.dtype)
        assert [*violations(form.plan, work, H200)] == []
        groups = form.plan.multiplying
        most[groups] = max(most[groups], accumulators(form.plan, form.weights))
    assert most == MOST_ACCUMULATORS


@needs_nvrtc
@pytest.mark.parametrize("name", sampled(FORMS, 6))
def test_ptxas_neither_warns_nor_spills(name: str) -> None:
    log = require_nvrtc().log(name, FORMS[name].text, "sm_90a")
    assert not re.search(r"warning|serialized|setmaxnreg|Performance Loss", log), log
    (stores,) = re.findall(r"(\d+) bytes spill stores", log)
    assert int(stores) <= KNOWN_SPILLS.get(name, 0)


@needs_nvrtc
def test_warnings_are_in_the_log() -> None:
    """As of products that wait for each other, because a loop has more sums than registers."""
    form = replace(FORMS["one_group"], plan=plan(256, 128))
    log = require_nvrtc().log("spills", form.text, "sm_90a")
    assert re.search(r"wgmma.mma_async instructions are serialized", log)
    assert re.search(r"[1-9]\d* bytes spill stores", log)
