"""Parts of nested tuples reach kernels as they are."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from relax_fusion import PipelineOptions
from relax_fusion.matching.pattern import is_call
from relax_fusion.pipeline import phase1_fuse, phase2_lower
from relax_fusion.transforms.item_groups import InlineItemGroups

from ..support.chains import HEADER
from ..support.quick import quick_host

MATRIX = 'R.Tensor((8, 8), "float32")'


def module(value: str) -> tvm.IRModule:
    text = f"""
    @R.function
    def main(x: {MATRIX}, p: R.Tuple({MATRIX}, R.Tuple({MATRIX}, {MATRIX}))):
        with R.dataflow():
            q = p[1]
            w = q[0]
            y = {value}
            R.output(y)
        return y
"""
    return tvm.script.from_source(HEADER + text)


@pytest.mark.parametrize("value", ["R.matmul(x, w)", "R.cumsum(w, axis=0)", "R.add(x, w)"])
def test_kernels_read_parts_of_nested_tuples(value: str) -> None:
    options = PipelineOptions(quick_host(), always_fuse=True)
    mod = module(value)
    with options.target:
        for step in (*phase1_fuse(options), *phase2_lower(options)):
            mod = step(mod)
    assert [g.name_hint for g, f in mod.functions_items() if isinstance(f, relax.Function)] == [
        "main"
    ]
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    assert is_call(values[-1], "relax.call_tir")


def test_other_modules_stay_the_same() -> None:
    mod = module("R.add(x, w)")
    assert InlineItemGroups()(mod).same_as(mod)
