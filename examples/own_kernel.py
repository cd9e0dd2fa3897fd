"""Compile a Triton kernel of one's own into a library, for a GPU that need not be there.

The kernel divides each row of a matrix by its norm; the number of rows is known at run time only.
docs/writing_a_kernel.md says what else an argument can be.

python own_kernel.py
"""

from pathlib import Path

import triton
import triton.language as tl
from tvm import relax, tirx
from tvm.script import relax as R

import relax_fusion

COLUMNS = 1000


@triton.jit
def unit_rows(x, out, columns, BLOCK: tl.constexpr):
    """Each program has one row, of at most BLOCK columns."""
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    row = tl.load(x + at, column < columns, 0.0).to(tl.float32)
    tl.store(out + at, row / tl.sqrt(tl.sum(row * row)), column < columns)


rows = tirx.Var("rows", "int64")
x = relax.Var("x", R.Tensor((rows, COLUMNS), "float16"))
weight = relax.Var("weight", R.Tensor((COLUMNS, 256), "float16"))
builder = relax.BlockBuilder()
with builder.function("main", [x, weight]):
    call = relax_fusion.call_tir_extern(
        unit_rows,
        (rows,),  # programs
        [x, relax_fusion.OUT, COLUMNS],
        x.ty,  # of the result
        constexprs={"BLOCK": triton.next_power_of_2(COLUMNS)},
        target="h200",
        num_warps=4,
    )
    product = relax.op.matmul(builder.emit(call), weight)
    builder.emit_func_output(builder.emit(product))

# The matmul behind it gets kernels of the library's own, for up to 64 rows.
executable = relax_fusion.build(builder.get(), "h200", variable_bounds={"rows": 64})
library = Path("own_kernel.so")
executable.export_library(str(library))

code = library.read_bytes()
print(f"{library}: {len(code)} bytes")
for name in ("unit_rows", "matmul"):
    print(f"launches of {name}: {b'launch_' + name.encode() in code}")
