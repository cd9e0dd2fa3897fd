"""The CPU schedule of contractions whose weights are repacked into panels, some by transposing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, s_tir, te, tirx

from ...compute.dot_words import WORD, first_of
from ...estimator.families.cpu_tiles import CpuPlan
from ...matching.expressions import int64, is_if_then_else, substitute
from ...tvm_ir import SBlock, SBlockRV, TensorLoad, structural_map
from .. import verbs

GROUPS = "part"
"""How the blocks of sums over groups of weights are called."""


def place_panels(
    sch: s_tir.Schedule,
    blocks: tuple[SBlockRV, SBlockRV],
    packed: Sequence[SBlockRV],
    plan: CpuPlan,
    run: int,
) -> SBlockRV:
    """Give tasks a panel each, to pack and take through tiles of rows; return the partial sums.

    rewrite::

        for panel, r, j: w_panels        ->    for panel in parallel:
        for i, j, k: acc                           for r, j: w_panels[panel, r, j]
        for i, j: out                              for tile of rows:
                                                       for k_part, i, j, k: partial
                                                       for i, j, k_part: acc += partial
                                                       for i: vectors j: out

    Results are computed alike in runs of so many columns, or all are where `run` is 0.  No vector
    has columns of two runs: TVM makes a loop of such lanes, whose angles of a rotation LLVM 22
    reads as if they were neighbours.
    """
    acc, out = blocks
    groups = [b for b in sch.get_producers(acc) if sch.get(b).name_hint.startswith(GROUPS)]
    partial = groups[0] if groups else _in_parts(sch, acc, plan.steps)
    i, j, *inner = sch.get_loops(out)
    tile, i_reg = sch.split(i, [None, plan.reg_m])
    panel, j_reg = sch.split(j, [None, plan.reg_n])
    if plan.split_m > 1:
        part, tile = sch.split(tile, [plan.split_m, None])
        sch.reorder(panel, part, tile, i_reg, j_reg)
        panel = sch.fuse(panel, part)
    else:
        sch.reorder(panel, tile, i_reg, j_reg)
    sch.parallel(panel)
    sch.compute_at(acc, tile, preserve_unit_loops=True)
    if groups:
        p, *inside, group = sch.get_loops(acc)[-4:]
        sch.reorder(group, p, *inside)
        sch.compute_at(partial, group, preserve_unit_loops=True)
    else:
        sch.compute_at(partial, tile, preserve_unit_loops=True)
    for copied in packed:  # panels, and what they are made of
        sch.compute_at(copied, panel, preserve_unit_loops=True)
    sch.unroll(verbs.vectorise_inner(sch, j_reg, math.gcd(run, plan.lanes)))
    verbs.unroll_all(sch, inner)
    return partial


def _in_parts(sch: s_tir.Schedule, acc: SBlockRV, steps: int) -> SBlockRV:
    """Add up so many elements in one go; return the block that does."""
    k_part, _ = sch.split(sch.get_loops(acc)[-1], [None, steps])
    return sch.rfactor(k_part, 0)


def vectorised(
    sch: s_tir.Schedule,
    copies: Sequence[SBlockRV],
    sums: Sequence[tuple[SBlockRV, SBlockRV | None]],
    lanes: int,
) -> tirx.PrimFunc:
    """Return the function, its placed blocks in vector registers: the last step of a schedule.

    `copies`: the blocks that repack operands.
    `sums`: the sums, and the sums over parts of the reduction, where it is cut into such.
    """
    squares: dict[str, int] = {}
    for packed in copies:
        squares |= pack(sch, packed, lanes)
    for acc, partial in sums:
        accumulate_in_registers(sch, partial or acc, lanes)
        if partial is not None and sch.get(partial).name_hint.startswith(GROUPS):
            scale_groups(sch, acc, lanes)
        elif partial is not None:
            add_parts(sch, acc, lanes)
    func = sch.mod["main"]
    for name, width in squares.items():
        func = transpose_in_registers(func, name, width)
    return func


def accumulate_in_registers(sch: s_tir.Schedule, partial: SBlockRV, lanes: int) -> None:
    """Keep a tile in vector registers over a part of the reduction.

    rewrite: ``for p, i, j, k: sum += x * w`` -> ``init; for k: unrolled i, p, j: vector l: sum``
    """
    p, i, j, k = sch.get_loops(partial)[-4:]
    j, lane = sch.split(j, [None, lanes])
    sch.reorder(k, i, p, j, lane)  # x[i, k] serves all vectors of its row, then makes room
    sch.set_scope(partial, 0, "local")
    sch.vectorize(lane)
    verbs.unroll_all(sch, [i, p, j])
    sch.decompose_reduction(partial, k)


def add_parts(sch: s_tir.Schedule, acc: SBlockRV, lanes: int) -> None:
    """Add up the sums over parts of the reduction.

    rewrite: ``for part, p, i, j: acc += sum`` -> ``for p, i, j: init; for part: vector l: acc``
    """
    part, p, i, j = sch.get_loops(acc)[-4:]  # in the order of its block variables
    j, lane = sch.split(j, [None, lanes])
    sch.reorder(p, i, j, part, lane)
    sch.vectorize(lane)
    sch.decompose_reduction(acc, part)


def scale_groups(sch: s_tir.Schedule, acc: SBlockRV, lanes: int) -> None:
    """Scale the sums of a group of weights, and add them to those of the groups before.

    rewrite: ``for g: part; for p, i, j: acc += part * scale`` -> the same, in vectors along j
    """
    group, p, i, j = sch.get_loops(acc)[-4:]
    j, lane = sch.split(j, [None, lanes])
    sch.vectorize(lane)
    verbs.unroll_all(sch, [p, i, j])
    sch.decompose_reduction(acc, group)


def pack(sch: s_tir.Schedule, packed: SBlockRV, lanes: int) -> dict[str, int]:
    """Copy whole vectors: along the last axis where its elements lie side by side, else by squares.

    Returns name and width of the blocks that copy squares, which are left to be transposed.
    """
    _, r, *parts, j = sch.get_loops(packed)[-len(sch.get(packed).iter_vars) :]
    if not _reads_along(sch, packed) or not is_moved(sch.get(packed).body.value):
        verbs.vectorise_inner(sch, j, math.gcd(verbs.extent(sch, j) or 1, lanes))
        return {}
    square = math.gcd(verbs.extent(sch, r) or 1, verbs.extent(sch, j) or 1, lanes)
    r, r_inner = sch.split(r, [None, square])
    j, j_inner = sch.split(j, [None, square])
    sch.reorder(*parts, j, r, r_inner, j_inner)
    if square == 1:
        return {}
    return {str(sch.get(sch.blockize(r_inner)).name_hint): square}


def _reads_along(sch: s_tir.Schedule, packed: SBlockRV) -> bool:
    """Tell whether what is copied lies along k, or its words do."""
    block = sch.get(packed)
    return first_of(block.body.value) is not None or verbs.reads_along(sch, packed, 0, 1)


def transpose_in_registers(func: tirx.PrimFunc, name: str, lanes: int) -> tirx.PrimFunc:
    """Return `func` with the squares that its blocks `name` copy transposed by shuffles.

    rewrite::

        for r in lanes:                  ->    row_j = w[j, vector r]       (for every j < lanes)
            for j in lanes:                    row_j, row_i = shuffles of both  (log2(lanes) times)
                block: p[r, j] = w[j, r]       p[r, vector j] = row_r       (for every r < lanes)

    The value may be converted on the way, and chosen by an `if_then_else` that is one for all.
    """

    def visit(block: SBlock) -> SBlock:
        if block.name_hint != name:
            return block
        body = _transposed(block.body, lanes)
        return SBlock(block.iter_vars, block.reads, block.writes, name, body)

    return func.with_body(structural_map(func.body, (SBlock, visit)))


def is_moved(value: tirx.Expr) -> bool:
    """Tell whether a value is one that is loaded, converted or chosen, as `along` takes it.

    What is rounded to bfloat16 on the way is none: only what is loaded has its bits.
    """
    found = first_of(value)
    if found is not None:
        return is_moved(found[0])
    if isinstance(value, tirx.Cast):
        return str(value.ty.dtype) != "bfloat16" and is_moved(value.value)
    if is_if_then_else(value):
        return all(map(is_moved, value.args[1:]))
    # TVM 0.27 has no vectors of 8-bit floats on a CPU
    return isinstance(value, TensorLoad) and "float8" not in str(value.ty.dtype)


def _transposed(along_r: tirx.For, lanes: int) -> tirx.Stmt:
    """Return the transposition that the loops over r and then j describe, element by element."""
    along_j = along_r.body
    realize = along_j.body
    block = realize.block
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    store = block.body
    value, *indices = (substitute(e, places) for e in (store.value, *store.indices))
    r, j = along_r.loop_var, along_j.loop_var
    statements: list[tirx.Stmt] = []
    rows = [
        bound(statements, along(substitute(value, {j: int64(column)}), r, lanes), f"row{column}")
        for column in range(lanes)
    ]
    width = 1
    while width < lanes:
        rows = _exchanged(statements, rows, width)
        width *= 2
    for step, row in enumerate(rows):
        *outer, last = (substitute(index, {r: int64(step), j: int64(0)}) for index in indices)
        vector = tirx.Ramp(last, int64(1), lanes)
        statements.append(tirx.BufferStore(store.buffer, row, [*outer, vector]))
    return tirx.SeqStmt(statements)


def _exchanged(statements: list[tirx.Stmt], rows: list[tirx.Var], width: int) -> list[tirx.Var]:
    """Swap the off-diagonal halves of every square of ``2 * width`` elements."""
    lanes = len(rows)
    upper = [c if not c & width else lanes + c - width for c in range(lanes)]
    lower = [c + width if not c & width else lanes + c for c in range(lanes)]
    swapped = list(rows)
    for first in (row for row in range(lanes) if not row & width):
        second = first + width
        for target, order in ((first, upper), (second, lower)):
            lanes_of_both = [tirx.IntImm("int32", lane) for lane in order]
            shuffle = tirx.Shuffle([rows[first], rows[second]], lanes_of_both)
            swapped[target] = bound(statements, shuffle, f"swapped{width}_{target}")
    return swapped


def bound(statements: list[tirx.Stmt], value: tirx.Expr, name: str) -> tirx.Var:
    """Give a value a name."""
    var = tirx.Var(name, value.ty)
    statements.append(tirx.Bind(var, value))
    return var


def along(value: tirx.Expr, r: tirx.Var, lanes: int) -> tirx.Expr:
    """Return the vector of `value` for `lanes` successive values of r, the first of them 0."""
    if isinstance(value, tirx.BitwiseXor):
        return along(value.a, r, lanes) ^ tirx.Broadcast(value.b, lanes)
    found = first_of(value)
    if found is not None:
        element, count = found
        parts, bits = along(element, r, count * lanes), f"uint{32 // count}x{count * lanes}"
        parts = parts if str(parts.ty.dtype) == bits else tirx.reinterpret(bits, parts)
        return tirx.reinterpret(f"{WORD}x{lanes}", parts)
    if isinstance(value, tirx.Cast):
        vector = along(value.value, r, lanes)
        if str(value.value.ty.dtype) == "bfloat16":
            return float32_bits(vector, lanes)
        return vector.astype(f"{value.ty.dtype}x{lanes}")
    if isinstance(value, ir.Call):  # if_then_else
        condition, first, second = value.args
        return te.if_then_else(condition, along(first, r, lanes), along(second, r, lanes))
    *outer, last = (substitute(index, {r: int64(0)}) for index in value.indices)
    return tirx.BufferLoad(value.source, [*outer, tirx.Ramp(last, int64(1), lanes)])


def float32_bits(value: tirx.Expr, lanes: int = 1) -> tirx.Expr:
    """Turn bfloat16 into float32: TVM 0.27 legalises no value that is bound to a name."""
    many = f"x{lanes}" if lanes > 1 else ""
    bits = tirx.reinterpret(f"uint16{many}", value).astype(f"uint32{many}")
    shift = tirx.const(16, "uint32")
    shift = tirx.Broadcast(shift, lanes) if lanes > 1 else shift
    return tirx.reinterpret(f"float32{many}", bits << shift)
