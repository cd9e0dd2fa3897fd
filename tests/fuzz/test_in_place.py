"""Tensors overwritten in place, between the steps of what our passes fuse."""

from __future__ import annotations

import random

import pytest
import tvm
from tvm import ir, relax

from relax_fusion import PATTERNS, FuseOptions

from ..support.quick import quick_host, quickly
from . import in_place
from .in_place import Draft, parse

RANDOM = 24

CASES = [
    # A kernel that reads w itself in place of its transpose
    ("t=transpose w; u={} w; a=add x u; y=matmul a t", "y"),
    ("t=transpose w; n=alias w; u={} n; a=add x u; y=matmul a t", "y"),
    ("t=transpose w; p=pair x w; n=second p; u={} n; y=matmul x t; z=add y u", "z"),
    ("t=transpose w; u={} w; y=matmul x t; z=matmul x w", "y z"),
    ("t=transpose w; m=matmul x t; u={} t; n=matmul x t; y=add m n", "y"),
    ("t=transpose w; m=matmul x t; u={} w; s=transpose w; n=matmul x s; y=add m n", "y"),
    ("q=lift x; k=lift w; t=swap k; u={} w; s=matmul q t; p=softmax s; e=lift v; o=matmul p e; "
     "y=square o; z=add y u", "z"),
    ("q=lift x; k=lift w; t=swap k; s=matmul q t; p=softmax s; u={} v; e=lift v; o=matmul p e; "
     "y=square o", "y"),
    # One that reads w where it lies, or what another tensor was moved from
    ("f=flip w; u={} w; m=matmul f x; y=sine m; z=add y u", "z"),
    ("a=sine x; f=twice a; u={} a; m=matmul f w; y=add m u", "y"),
    ("a=sine x; f=flip a; t=transpose f; m=matmul t w; y=add m v; u={} a; z=add y u", "z"),
    # Norms, residuals, gates, chains
    ("h=norm x g; u={} x; m=matmul h w; y=add m u", "y"),
    ("s=add x w; u={} s; h=norm s g; y=matmul h w", "y"),
    ("a=norm x g; u=vector g; b=norm x g; m=matmul a w; n=matmul b v; y=add m n", "y"),
    ("m=matmul x w; u={} v; y=add m v", "y"),
    ("m=matmul x w; u={} m; y=add m x", "y"),
    ("m=matmul x w; n=alias m; u={} n; y=add m x", "m y"),
    ("a=matmul x w; u={} x; b=matmul x v; c=silu a; y=multiply c b", "y"),
    ("m=matmul x w; u={} w; y=matmul m w", "y"),
    # Element-wise steps that TVM fuses, and calls that it would remove
    ("a=sine w; u={} w; y=add a u", "y"),
    ("a=sine w; u={} w; y=add a w", "y"),
    ("u={} w; a=sine w", "a"),
    ("a=sine x; u={} w", "a"),
    ("a=sine x; u={} a; b=half u; y=add x b", "y a"),
    ("u={} x; s=add v v; h=norm s g; m=matmul h x; y=add u s", "h m y"),
    ("n=half x; u={} n; m=matmul x w; h=norm m g; s=add h v; y=matmul s v", "u y"),
    # Copies that could be views
    ("a=once w; u={} a; y=add x u; z=add w w", "y z"),
    ("a=once w; u={} w; y=add a u", "y"),
    ("a=square w; u={} a; y=add x u; z=add w w", "y z"),
    ("a=flat w; b=square a; u={} b; y=add x u; z=add w w", "y z"),
    ("a=flat w; u={} w; b=square a; y=add b u", "y"),
    ("a=lift x; u={} x; m=matmul a w; y=square m; z=add y u", "z"),
    ("m=matmul x w; a=flat m; y=square a; u={} y; z=matmul y w; o=square a", "z o"),
]  # fmt: skip


def pipeline(disable: tuple[str, ...] = ()) -> tvm.transform.Pass:
    return relax.get_pipeline("relax_fusion", target=quick_host(), disable=disable)


def compiled(mod: ir.IRModule, way: str) -> relax.VMExecutable:
    """Compile with the pipeline, or run the passes alone first: aliases are still there then."""
    if way == "pipeline":
        return quickly(mod, pipeline())
    for make in PATTERNS.values():
        mod = make(FuseOptions(target=quick_host(), always_fuse=True))(mod)
        relax.analysis.well_formed(mod)
    return quickly(mod, pipeline(tuple(PATTERNS)))


def test_a_write_keeps_its_turn() -> None:
    programs = [
        parse(text.format(kind), results, dataflow=(number + turn) % 3 > 0)
        for turn, kind in enumerate(("tir", "packed", "callee"))
        for number, (text, results) in enumerate(CASES)
    ]
    assert in_place.wrong(compiled(in_place.module(programs), "pipeline"), programs) == []


@pytest.mark.parametrize("way", ["pipeline", "alone"])
def test_random_programs(way: str) -> None:
    programs = [Draft(random.Random(seed)).draw() for seed in range(RANDOM)]
    assert in_place.wrong(compiled(in_place.module(programs), way), programs) == []
