"""Matches of chains that are written down in few words."""

from __future__ import annotations

from contextlib import suppress

from tvm import ir

from relax_fusion import PATTERNS, FuseOptions, host_target
from relax_fusion.matching.effects import Memory
from relax_fusion.matching.pattern import BlockView, Match, Refused

from ..support.chains import Chain, module


def matched(name: str, inputs: str, body: str, result: str = "y") -> tuple[BlockView, Match]:
    """Return the largest match of a pass in a chain whose tensors are float32."""
    return largest_match(module([Chain("main", inputs, body, result)]), name)


def largest_match(mod: ir.IRModule, name: str) -> tuple[BlockView, Match]:
    """Return the match of a pass in a module that takes the most bindings."""
    func = mod["main"]
    view = BlockView(func.body.blocks[0], mod, {}, Memory(func, mod))
    matcher = PATTERNS[name](FuseOptions(target=host_target())).match
    found: list[Match] = []
    for binding in view.bindings:
        with suppress(Refused):
            match = matcher(view, binding.var) or []
            found += match if isinstance(match, list) else [match]
    assert found, f"{name} matches nothing in {mod}"
    return view, max(found, key=lambda match: len(match.covers))
