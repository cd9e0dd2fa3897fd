"""Movements of which one reads what another made, in one kernel: the indices of all pairs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.relax import op

from relax_fusion.equivalence.interpreter import evaluate
from relax_fusion.mend.whole_buffers import ReadWholeBuffers
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.movements import MOVEMENTS
from ..support.quick import loaded, machine, quick_host, quickly

Shape = tuple[int | str, ...]


def pairs(shape: Shape) -> ir.IRModule:
    """Return a function for each pair of movements along each axis."""
    builder = relax.BlockBuilder()
    for (one, first), (other, second) in product(MOVEMENTS.items(), MOVEMENTS.items()):
        for axis in range(len(shape)):
            dims = [tirx.Var(d, "int64") if isinstance(d, str) else d for d in shape]
            x = relax.Var("x", relax.TensorType(dims, "float32"))
            with builder.function(f"{one}, {other}, {axis}".replace(" ", "_"), [x]):
                with builder.dataflow():
                    made = builder.emit(first(builder.emit, x, axis))
                    last = min(axis, len(made.ty.shape.values) - 1)
                    made = builder.emit(second(builder.emit, made, last))
                    made = builder.emit_output(op.negative(made))
                builder.emit_func_output(made)
    return builder.get()


TVM_ENDS = {f"{kind}_pad,_repeat,_1" for kind in ("circular", "constant", "reflect", "replicate")}
"""Functions of ``(4, n, 4)`` that TVM's own pipeline cannot compile: its analysis of indices
(``PadDividendToDivisor``) ends with an internal error."""

SLOW: list[Shape] = [("n",), (4, 8), ("n", 6), (4, "n", 4)]


@pytest.mark.parametrize(
    "shape", [(8,), *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)], ids=str
)
def test_all_pairs(shape: Shape) -> None:
    mod = pairs(shape)
    for gvar in mod.get_global_vars():
        if shape == (4, "n", 4) and gvar.name_hint in TVM_ENDS:
            del mod[gvar]
    fused = relax_fusion_pipeline(quick_host(), validate=False)
    compiled = machine(quickly(mod, fused))
    sizes = [5 if isinstance(d, str) else d for d in shape]
    x = np.arange(1, 1 + np.prod(sizes), dtype="float32").reshape(sizes)
    wrong = [
        gvar.name_hint
        for gvar in mod.get_global_vars()
        if not np.array_equal(
            compiled[gvar.name_hint](tvm.runtime.tensor(x)).numpy(), evaluate(mod[gvar], [x])[0]
        )
    ]
    assert wrong == []


def test_a_buffer_that_is_read_backwards() -> None:
    text = (Path(__file__).parents[1] / "data/passes/ReadWholeBuffers.txt").read_text()
    mod = ReadWholeBuffers()(tvm.script.from_source(text.partition("# expected")[0]))
    x, y = (
        np.arange(15, dtype="float32").reshape(5, 3),
        tvm.runtime.tensor(np.zeros((3, 3), "float32")),
    )
    loaded(quickly(mod))["backwards"](tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy(), np.exp(x)[::-2], rtol=1e-5)
