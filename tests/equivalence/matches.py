"""Matches of chains that are written down in few words."""

from __future__ import annotations

from tvm import ir

from relax_fusion import PATTERNS, FuseOptions, host_target
from relax_fusion.matching.effects import Memory
from relax_fusion.matching.pattern import BlockView, Match, Refused

from ..support.chains import Chain, module


def matched(name: str, inputs: str, body: str, result: str = "y") -> tuple[BlockView, Match]:
    """Return the first match of a pass in a chain whose tensors are float32."""
    return first_match(module([Chain("main", inputs, body, result)]), name)


def first_match(mod: ir.IRModule, name: str) -> tuple[BlockView, Match]:
    """Return the first match of a pass in a module."""
    func = mod["main"]
    view = BlockView(func.body.blocks[0], mod, {}, Memory(func, mod))
    matcher = PATTERNS[name](FuseOptions(target=host_target())).match
    for binding in view.bindings:
        try:
            found = matcher(view, binding.var)
        except Refused:
            continue
        if found is not None:
            return view, found
    raise AssertionError(f"{name} matches nothing in {mod}")
