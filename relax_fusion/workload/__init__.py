"""What is computed: frozen descriptions of the chains that the library fuses.

A workload is the contract between a pass (which proves that a chain computes it), the estimator
(which prices it) and a back end (which emits it).  It holds sizes, dtypes and the order of the
steps, and nothing of how they are executed: that is
:class:`relax_fusion.estimator.tile_plan.TilePlan`.

Each has a block graph (:mod:`.graph`), which says what it computes, statement by statement.  The
order of its operands, its numbers (:mod:`.reference`) and its roofline follow from that.
"""

from .attention import Attention, BiasOp, Causal, HeadLayout, Heads, Lengths, MaskDims
from .base import Atom
from .chain import Chain
from .dims import Dim, DynamicDim, extent
from .dtypes import DTYPE_BYTES, FLOAT_BYTES, INTEGER_DTYPES
from .epilogues import (
    EPILOGUE_STEPS,
    HeadNorm,
    Norm,
    PostNorm,
    Step,
    operand_name,
    operand_names,
    per_rows,
)
from .experts import ExpertMatmul, Gate
from .formats import Operand, Packed
from .gated_ffn import GatedFFN
from .graph import Graph, in_order
from .norm_matmul import Adapter, NormMatmul, Projection, WeightLayout, narrow_matmuls
from .operators import ACTIVATIONS
from .rope import Rope

Workload = NormMatmul | GatedFFN | Attention | ExpertMatmul | Chain

__all__ = [
    "ACTIVATIONS",
    "DTYPE_BYTES",
    "EPILOGUE_STEPS",
    "FLOAT_BYTES",
    "INTEGER_DTYPES",
    "Adapter",
    "Atom",
    "Attention",
    "BiasOp",
    "Causal",
    "Chain",
    "Dim",
    "DynamicDim",
    "ExpertMatmul",
    "Gate",
    "GatedFFN",
    "Graph",
    "HeadLayout",
    "HeadNorm",
    "Heads",
    "Lengths",
    "MaskDims",
    "Norm",
    "NormMatmul",
    "Operand",
    "Packed",
    "PostNorm",
    "Projection",
    "Rope",
    "Step",
    "WeightLayout",
    "Workload",
    "extent",
    "in_order",
    "narrow_matmuls",
    "operand_name",
    "operand_names",
    "per_rows",
]
