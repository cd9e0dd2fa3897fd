"""Schedule rules that must be noticed: one computes too little, one raises, one ends the
process."""

from __future__ import annotations

import os

from tvm import s_tir, tirx
from tvm.target import Target

from relax_fusion.dlight_rules.safe_rule import SafeRule


class Wrong(SafeRule):
    """Leaves out the last row."""

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        loop = func.body.block.body
        short = tirx.For(loop.loop_var, loop.min, loop.extent - 1, loop.kind, loop.body)
        root = func.body.block
        block = s_tir.SBlock([], [], [], "root", short, alloc_buffers=root.alloc_buffers)
        return s_tir.Schedule(func.with_body(s_tir.SBlockRealize([], True, block)))


class Raising(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        raise KeyError("a mistake")


class Crashing(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        os._exit(3)
