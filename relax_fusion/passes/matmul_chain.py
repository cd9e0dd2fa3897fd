"""FuseMatmulChain: two matmuls with a narrow tensor between them become one kernel."""

from __future__ import annotations

import tvm
from tvm import relax

from ..errors import Reason
from ..matching import Side, matmul_chain, named
from ..matching.pattern import BlockView, KernelArg, KernelOut, Match, PrimExpr, check_inner, guard
from ..matching.shapes import (
    as_dims,
    check_dtype,
    check_operands,
    dtype_of,
    known_shape,
    product,
    static,
)
from ..workload import MatmulChain, operand_names
from .driver import FusingPass


@tvm.transform.module_pass(opt_level=0, name="FuseMatmulChain")
class FuseMatmulChain(FusingPass):
    """Fuse two matmuls where the tensor between them is narrow enough to stay on the chip.

    These are the adapters of LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685), bottlenecks,
    and layers that were factorised; and the batched chains of MCFuser (Zhang et al., SC'24).

    rewrite::

        h = R.matmul(x, R.permute_dims(A))              # A, B as [out, in] or [in, out]
        h = act(R.add(R.multiply(h, c), b))             # optional steps, in any order
        y = R.matmul(h, R.permute_dims(B))
        z = R.add(base, R.multiply(y, R.const(2.0)))    # optional: number, bias, residual, act
            ->
        z = R.call_tir(fuse_matmul_chain_..., (x, A, b, B, base))

        y = R.matmul(R.matmul(p, q), r)                 # p, q and r with the same batch
            ->
        y = R.call_tir(fuse_matmul_chain_..., (p, q, r))

    The intermediate is rounded to its dtype, as the tensor that it was.  Chains whose input is a
    norm are left to the passes that take the norm and the first matmul together.

    declines when:
        the intermediate is read elsewhere, or is of another dtype than the input; a size of a
        weight is dynamic; operands differ in dtype, or it is none of float16, bfloat16, float32;
        tensors are on several virtual devices, or on one of another kind than the target; the
        estimator predicts that the two matmuls alone are as fast, as where the intermediate is
        wide, or finds no plan.  On a GPU only Triton has such kernels: with the back end "tir"
        there is none.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the chain whose first matmul `var` is."""
        sides = matmul_chain(view, var)
        if sides is None:
            return None
        inner, outer = sides
        x = inner.linear.x
        dtype = check_dtype(dtype_of(x), "the input")
        detail = f"the intermediate is {inner.dtype}, the input {dtype}"
        guard(inner.dtype == dtype, Reason.DTYPE, detail)
        lead, rows = _rows(inner)
        guard(all(d != 0 for d in (*lead, rows)), Reason.SHAPE, "the input has no rows")
        k, r, n = inner.linear.k, inner.linear.n, outer.linear.n
        args = {
            "x": KernelArg(x, (*lead, rows, k)),
            **_operands(inner, 0, (*lead, rows, r)),
            **_operands(outer, 1, (*lead, rows, n)),
        }
        check_operands([a.expr for a in args.values()], dtype)
        dims = as_dims((*lead, rows), self.options.bounds)
        work = MatmulChain(
            *(dims[-1], k, r, n, (inner.linear.layout, outer.linear.layout)),
            inner=inner.steps,
            outer=outer.steps,
            dtype=dtype,
            out_dtype=check_dtype(outer.dtype, "the result"),
            batch=dims[0] if lead else None,
        )
        covers = tuple(dict.fromkeys((*inner.covers, *outer.covers)))
        check_inner(view, covers, {outer.out})
        outs = {"out1": KernelOut(outer.out, (*lead, rows, n), work.out_dtype)}
        spelling = " -> ".join(map(_spelling, sides))
        return Match.of(spelling, covers, (args, outs), work)


def _rows(side: Side) -> tuple[tuple[PrimExpr | int, ...], PrimExpr | int]:
    """Return the size of the batch, if there is one, and the rows of a matrix."""
    shape = known_shape(side.linear.x, "the input")
    static(shape[-1], "the input's features")
    if not side.batch:
        return (), product(shape[:-1])
    return (product(side.batch),), product(shape[-2:-1])


def _operands(side: Side, which: int, wide: tuple[PrimExpr | int, ...]) -> dict[str, KernelArg]:
    """Return the weight and the operands of the steps in the shapes in which the kernel has them.

    Biases have theirs already; residuals lie as the result does, which is of shape `wide`.
    """
    k, n = side.linear.k, side.linear.n
    matrix = (n, k) if side.linear.layout == "nk" else (k, n)
    weight = KernelArg(side.linear.weight, (*wide[:-2], *matrix) if side.batch else None)
    steps = (a if a.shape else KernelArg(a.expr, wide) for a in side.args)
    names = operand_names(side.steps, which)
    return {f"w{which}": weight, **dict(zip(names, steps, strict=True))}


def _spelling(side: Side) -> str:
    layout = {"nk": "NT", "kn": "NN"}[side.linear.layout]
    return " ".join([f"{'batched ' if side.batch else ''}matmul {layout}", *named(side.steps)])
