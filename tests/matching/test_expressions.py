"""What is in an expression, and what is replaced in it."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, te, tirx

from relax_fusion.matching import expressions as found

ROW, COLUMN = (tirx.Var(name, "int64") for name in "ij")
A = tirx.decl_buffer((8, 8), "float32", "a")
B = tirx.decl_buffer((8,), "int64", "b")
VALUE = A[ROW, COLUMN] + A[B[ROW], COLUMN] * A[ROW, COLUMN]


def test_loads_are_found_inside_of_others_first() -> None:
    assert [str(load.source) for load in found.loads_of(VALUE)] == ["a", "b", "a", "a"]
    assert len(found.different(found.loads_of(VALUE))) == 3
    assert found.variables_of(VALUE) == {A, B, ROW, COLUMN}
    assert len(found.found_in(VALUE, tirx.Mul)) == 1


def test_variables_are_replaced_in_indices_too() -> None:
    made = found.substitute(VALUE, {ROW: COLUMN})
    assert found.variables_of(made) == {A, B, COLUMN}
    assert tvm_ffi.structural_equal(found.substitute(made, {}), made)


def test_a_choice_is_told_from_a_selection() -> None:
    assert found.chooses(
        te.if_then_else(ROW < COLUMN, A[ROW, COLUMN], A[COLUMN, ROW]) + A[ROW, ROW]
    )
    assert not found.chooses(tirx.Select(ROW < COLUMN, A[ROW, COLUMN], A[COLUMN, ROW]))


def test_numbers_are_whole_and_known() -> None:
    one = tirx.IntImm("int64", 1)
    assert found.is_number(one, 1) and not found.is_number(one, 0)
    assert not found.is_number(ROW, 1) and not found.is_number(tirx.FloatImm("float32", 1.0), 1)


def test_only_parallel_loops_become_serial() -> None:
    def loop(kind: int) -> tirx.For:
        return tirx.For(ROW, 0, 8, kind, tirx.Evaluate(0), step=tirx.IntImm("int64", 2))

    made = found.serial(loop(tirx.ForKind.PARALLEL))
    assert tvm_ffi.structural_equal(made, loop(tirx.ForKind.SERIAL))
    vector = loop(tirx.ForKind.VECTORIZED)
    assert found.serial(vector).same_as(vector) and found.thread_tag(vector) == ""


def test_a_ramp_has_the_type_of_its_first_index() -> None:
    vector = found.ramp(COLUMN, 4)
    assert isinstance(vector, tirx.Ramp) and isinstance(vector.stride, ir.Expr)
    assert str(vector.ty.dtype) == "int64x4" and int(vector.stride) == 1
