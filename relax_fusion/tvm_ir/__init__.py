"""The names of TVM's IR that TVM renames from one minor version to the next.

All else in the library has them from here, and ruff refuses them elsewhere (TID251); what has kept
its name (`relax.Call`, `tirx.PrimFunc`, `ir.IRModule`) comes from TVM itself.
"""

from tvm.ir import GenericConst as GenericConst
from tvm.ir import TensorLoad as TensorLoad
from tvm.ir import TensorRegion as TensorRegion
from tvm.ir import is_prim_expr as is_prim_expr
from tvm.s_tir import SBlock as SBlock
from tvm.s_tir import SBlockRealize as SBlockRealize
from tvm.s_tir.schedule import SBlockRV as SBlockRV
from tvm.script.ir_builder import IRBuilder as IRBuilder
from tvm.script.ir_builder import tirx
from tvm.sym import Analyzer as Analyzer
from tvm.sym import ConstIntBound as ConstIntBound
from tvm.sym import detect_linear_equation as detect_linear_equation
from tvm_ffi import structural_equal as structural_equal
from tvm_ffi import structural_hash as structural_hash
from tvm_ffi import structural_map as structural_map
from tvm_ffi import structural_walk as structural_walk

T = tirx
"""What writes the statements of a PrimFunc into the `IRBuilder` in scope."""
