"""``wgmma`` as functions of CUDA C++."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..estimator.prediction import HALF_DTYPES
from ..workload.dtypes import accumulator

TallOperand = Literal["lines", "turned", "registers"]
"""Where ``wgmma`` takes the tall operand from: memory that has its lines along k, or along the
lines; or registers."""


class _Products(NamedTuple):
    """How ``wgmma`` of a dtype is written, behind its lines; it takes 32 bytes of k."""

    depth: int
    types: str
    scales: str = ", 1, 1"


_PRODUCTS = {
    "float16": _Products(16, "f32.f16.f16"),
    "bfloat16": _Products(16, "f32.bf16.bf16"),
    "float32": _Products(8, "f32.tf32.tf32"),
    "int8": _Products(32, "s32.s8.s8", ""),
    "uint8": _Products(32, "s32.u8.u8", ""),
}


def products_text(dtype: str, lines: int, tall: TallOperand) -> str:
    """Return ``wgmma`` of so many lines of the wide operand, which no template can spell."""
    count, own = lines // 2, _PRODUCTS[dtype]
    kind = "f" if accumulator(dtype) == "float32" else "r"
    sums = ", ".join(f'"+{kind}"(sums[{i}])' for i in range(count))
    registers = ", ".join(f"%{i}" for i in range(count))
    if tall == "registers":
        argument, given = "const u32 (&tall)[4]", ", ".join(f'"r"(tall[{i}])' for i in range(4))
        places = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        wide, turned = count + 4, ", 0"
    else:
        argument, given, places = "u32 tall", '"r"(tall)', "tall"
        wide = count + 1
        turned = f", {int(tall == 'turned')}, 0" if dtype in HALF_DTYPES else ""
    layout = wide + 2
    operand = "" if tall == "registers" else f"mov.b64 tall, {{%{count}, %{layout}}};\\n"
    return f"""
// sums[tall, wide] = tall * wide + (more ? sums : 0), {own.depth} elements of k
__device__ __forceinline__ void multiply(Sum (&sums)[{count}], {argument}, u32 wide, int more) {{
  asm volatile("{{\\n.reg .pred more;\\n.reg .b64 tall, wide;\\n"
    "setp.ne.b32 more, %{wide + 1}, 0;\\n{operand}mov.b64 wide, {{%{wide}, %{layout}}};\\n"
    "wgmma.mma_async.sync.aligned.m64n{lines}k{own.depth}.{own.types} {{{registers}}}, "
    "{places}, wide, more{own.scales}{turned};\\n}}"
    : {sums} : {given}, "r"(wide), "r"(more), "n"(LAYOUT));
}}

// Wait until the sums are there.
__device__ __forceinline__ void settle(Sum (&sums)[{count}]) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");
}}
"""
