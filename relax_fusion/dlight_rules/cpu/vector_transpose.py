"""The transposition of a square of a matrix in vector registers, which no scheduling verb makes."""

from __future__ import annotations

from tvm import ir, te, tirx

from ...matching.expressions import substitute
from ...tvm_ir import SBlock, TensorLoad, structural_map


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
    if isinstance(value, tirx.Cast):
        return str(value.ty.dtype) != "bfloat16" and is_moved(value.value)
    if isinstance(value, ir.Call):
        return value.op.name == "prim.if_then_else" and all(map(is_moved, value.args[1:]))
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
        bound(statements, along(substitute(value, {j: _int(column)}), r, lanes), f"row{column}")
        for column in range(lanes)
    ]
    width = 1
    while width < lanes:
        rows = _exchanged(statements, rows, width)
        width *= 2
    for step, row in enumerate(rows):
        *outer, last = (substitute(index, {r: _int(step), j: _int(0)}) for index in indices)
        vector = tirx.Ramp(last, _int(1), lanes)
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
    if isinstance(value, tirx.Cast):
        vector = along(value.value, r, lanes)
        if str(value.value.ty.dtype) == "bfloat16":
            return float32_bits(vector, lanes)
        return vector.astype(f"{value.ty.dtype}x{lanes}")
    if isinstance(value, ir.Call):  # if_then_else
        condition, first, second = value.args
        return te.if_then_else(condition, along(first, r, lanes), along(second, r, lanes))
    *outer, last = (substitute(index, {r: _int(0)}) for index in value.indices)
    return tirx.BufferLoad(value.source, [*outer, tirx.Ramp(last, _int(1), lanes)])


def float32_bits(value: tirx.Expr, lanes: int = 1) -> tirx.Expr:
    """Turn bfloat16 into float32: TVM 0.27 legalises no value that is bound to a name."""
    many = f"x{lanes}" if lanes > 1 else ""
    bits = tirx.reinterpret(f"uint16{many}", value).astype(f"uint32{many}")
    shift = tirx.const(16, "uint32")
    shift = tirx.Broadcast(shift, lanes) if lanes > 1 else shift
    return tirx.reinterpret(f"float32{many}", bits << shift)


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)
