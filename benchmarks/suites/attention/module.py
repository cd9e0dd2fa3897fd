"""The cases of `cases` as functions of Relax modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx
from tvm.relax import op

from benchmarks.suites.attention.cases import SOFTCAP, WINDOW, Case
from relax_fusion.estimator.tile_plan import TilePlan

SWAP_HEADS = [0, 2, 1, 3]
AS_OPERATOR = ("", "bias", "window")
"""Masks that ``R.nn.attention`` takes; the others are written out."""


@dataclass(frozen=True)
class Job:
    """One function to compile.

    Parameters
    ----------
    case : Case
        What it computes.
    dtype, layout : str
        Of its tensors; ``"bsnh"`` or ``"bnsh"``.
    dynamic : bool
        Whether batch and lengths are symbolic (a single query stays one).
    target : str
        A device that `make_target` knows.
    plan : TilePlan, optional
        In place of the estimator's choice.
    """

    case: Case
    dtype: str
    layout: str
    dynamic: bool
    target: str
    plan: TilePlan | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.case.name

    @property
    def function(self) -> str:
        """A name that Relax takes."""
        return f"{self.case.name.replace('-', '_')}_{self.dtype}"


@dataclass(frozen=True)
class Sizes:
    """Batch, queries and keys of a function: integers or symbolic variables."""

    batch: Any
    queries: Any
    keys: Any


def sizes_of(job: Job) -> Sizes:
    """Return the sizes; queries and keys of a self-attention share a variable."""
    case = job.case
    queries, keys = case.lengths
    if not job.dynamic:
        return Sizes(case.batch, queries, keys)
    n = tirx.Var("kv_len", "int64")
    m = n if queries == keys else tirx.Var("q_len", "int64")
    return Sizes(tirx.Var("batch", "int64"), 1 if queries == 1 else m, n)


def module_of(jobs: Iterable[Job]) -> ir.IRModule:
    """Return a module with a function for each job."""
    builder = relax.BlockBuilder()
    for job in jobs:
        params = parameters(job, sizes_of(job))
        with builder.function(job.function, list(params.values())):
            with builder.dataflow():
                write = _operator if job.case.mask in AS_OPERATOR else _written_out
                out = builder.emit_output(write(builder, job, params))
            builder.emit_func_output(out)
    return builder.get()


def parameters(job: Job, sizes: Sizes) -> dict[str, relax.Var]:
    """Return the parameters, in the order of a problem's operands."""
    case = job.case
    extents = {"b": sizes.batch, "h": case.head_dim}
    of_queries = {**extents, "s": sizes.queries, "n": case.heads[0]}
    of_keys = {**extents, "s": sizes.keys, "n": case.heads[1]}
    types = {
        name: relax.TensorType([extent[letter] for letter in job.layout], job.dtype)
        for name, extent in (("q", of_queries), ("k", of_keys), ("v", of_keys))
    }
    scores = [1, case.heads[0], sizes.queries, sizes.keys]
    extra = {
        "bias": ("bias", scores, job.dtype),
        "where": ("mask", scores, "bool"),
        "alibi": ("slopes", [case.heads[0]], "float32"),
    }
    if case.mask in extra:
        name, shape, dtype = extra[case.mask]
        types[name] = relax.TensorType(shape, dtype)
    return {name: relax.Var(name, ty) for name, ty in types.items()}


def _operator(builder: relax.BlockBuilder, job: Job, params: dict[str, relax.Var]) -> relax.Expr:
    """Write ``R.nn.attention``, which takes ``[b, s, n, h]``."""
    case = job.case
    group = case.heads[0] // case.heads[1]
    operands = []
    for name in "qkv":
        tensor: Any = params[name]
        if job.layout == "bnsh":
            tensor = builder.emit(op.permute_dims(tensor, SWAP_HEADS))
        if group > 1 and name != "q":
            tensor = builder.emit(op.repeat(tensor, group, axis=2))
        operands.append(tensor)
    out = builder.emit(
        op.nn.attention(
            *operands,
            bias=params.get("bias"),
            scale=case.scale,
            causal_mask="BottomRight" if case.causal else None,
            window_size=WINDOW if case.mask == "window" else None,
        )
    )
    return builder.emit(op.permute_dims(out, SWAP_HEADS)) if job.layout == "bnsh" else out


def _written_out(builder: relax.BlockBuilder, job: Job, params: dict[str, relax.Var]) -> relax.Expr:
    """Write matmul, what is done to scores, softmax and matmul, as front ends do."""
    case, emit = job.case, builder.emit
    group = case.heads[0] // case.heads[1]
    heads_first = []
    for name in "qkv":
        tensor: Any = params[name]
        if job.layout == "bsnh":
            tensor = emit(op.permute_dims(tensor, SWAP_HEADS))
        if group > 1 and name != "q":
            tensor = emit(op.repeat(tensor, group, axis=1))
        heads_first.append(tensor)
    q, k, v = heads_first
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2])), "float32"))
    scores = emit(op.multiply(scores, _float32(case.scale)))
    scores = emit(_modified(builder, job, scores, params))
    weights = emit(op.astype(emit(op.nn.softmax(scores, axis=-1)), job.dtype))
    out = emit(op.matmul(weights, v))
    return emit(op.permute_dims(out, SWAP_HEADS)) if job.layout == "bsnh" else out


def _modified(
    builder: relax.BlockBuilder, job: Job, scores: relax.Expr, params: dict[str, relax.Var]
) -> relax.Expr:
    """Write what is done to scores ``[b, n, s_q, s_k]`` in float32."""
    case, emit = job.case, builder.emit
    if case.mask == "softcap":
        scores = emit(op.tanh(emit(op.divide(scores, _float32(SOFTCAP)))))
        scores = emit(op.multiply(scores, _float32(SOFTCAP)))
    if case.mask == "where":
        scores = emit(op.where(params["mask"], scores, _float32(float("-inf"))))
    if not case.causal and case.mask != "alibi":
        return scores
    shape = scores.ty.shape
    distance = _distances(builder, shape[2], shape[3])
    if case.mask == "alibi":
        slopes = emit(op.reshape(params["slopes"], [1, case.heads[0], 1, 1]))
        far = emit(op.astype(distance, "float32"))
        scores = emit(op.add(scores, emit(op.multiply(slopes, far))))
    if case.causal:
        visible = emit(op.less_equal(distance, relax.const(0, "int64")))
        scores = emit(op.where(visible, scores, _float32(float("-inf"))))
    return scores


def _distances(builder: relax.BlockBuilder, queries: Any, keys: Any) -> relax.Expr:
    """Write ``[s_q, s_k]`` positions of keys less those of queries, the last ones lined up."""
    emit = builder.emit

    def positions(begin: Any, end: Any) -> relax.Expr:
        begin, end, step = (relax.prim_value(value) for value in (begin, end, 1))
        return emit(op.arange(begin, end, step, "int64"))

    of_queries = emit(op.expand_dims(positions(keys - queries, keys), 1))
    return emit(op.subtract(positions(0, keys), of_queries))


def _float32(value: float) -> relax.Expr:
    return relax.const(value, "float32")
