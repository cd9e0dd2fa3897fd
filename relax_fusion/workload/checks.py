"""What a workload must be, before anything counts with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import Any

from ..errors import GraphError
from ..validation import MAX_INT32, shown
from .attention import Attention, Heads, Lengths
from .chain import Chain
from .dims import Dim, DynamicDim
from .dtypes import DTYPE_BYTES
from .epilogues import EPILOGUE_STEPS, HeadNorm, per_rows
from .experts import ExpertMatmul
from .gated_ffn import GatedFFN
from .norm_matmul import Adapter, NormMatmul, Projection
from .operators import ACTIVATIONS
from .rope import Rope

_SIZES = ("k", "r", "n", "experts", "chosen", "q_heads", "kv_heads", "head_dim", "v_dim", "window")
_DIMS = ("rows", "batch", "q_len", "kv_len")


def check_workload(work: object) -> None:
    """Refuse sizes and names that no kernel can have.

    Raises `GraphError` if `work` is no workload, or a field has a value that it cannot take.
    """
    if not isinstance(work, NormMatmul | GatedFFN | Attention | ExpertMatmul | Chain):
        raise GraphError(f"{shown(work)} is no workload")
    sentence = next(_wrong(work), None) or next(_wrong_steps(work), None)
    if sentence is not None:
        raise GraphError(f"{type(work).__name__}: {sentence}")


def without_zeros(work: Any) -> Any:
    """Return `work` with sizes of 0 as 1, as of which it is priced: nothing has no rate."""
    zeros = [
        name for name in _DIMS if isinstance(dim := getattr(work, name, None), int) and not dim
    ]
    return replace(work, **dict.fromkeys(zeros, 1)) if zeros else work


def too_large(work: Any) -> str | None:
    """Return a sentence on a size that no tile plan can count to, None if there is none."""
    for name in (*_SIZES, "kv_len"):
        size = getattr(work, name, None)
        if isinstance(size, int) and size > MAX_INT32:
            return f"{name} is {size}, tile plans count to {MAX_INT32}"
    return None


def _wrong(work: Any) -> Iterator[str]:
    """Yield what is wrong with sizes and dtypes, whichever of them the workload has."""
    for name in _SIZES:
        value = getattr(work, name, None)
        if value is not None and not (isinstance(value, int) and value >= 1):
            yield f"{name} is {shown(value)}, must be an integer from 1 on"
    for name in _DIMS:
        value = getattr(work, name, None)
        fits = isinstance(value, DynamicDim) or (isinstance(value, int) and value >= 0)
        if value is not None and not fits:
            yield f"{name} is {shown(value)}, must be a DynamicDim or an integer from 0 on"
    for name in ("dtype", "out_dtype"):
        if getattr(work, name) not in DTYPE_BYTES:
            yield f"{name} is {shown(getattr(work, name))}, must be of {', '.join(DTYPE_BYTES)}"
    layout = getattr(work, "layout", "nk")
    if layout not in ("nk", "kn"):
        yield f"layout is {shown(layout)}, must be 'nk' or 'kn'"


def _wrong_steps(work: Any) -> Iterator[str]:
    """Yield what is wrong with steps and heads."""
    if isinstance(work, Attention):
        if work.q_heads % work.kv_heads:
            yield f"kv_heads is {work.kv_heads}, does not divide q_heads={work.q_heads}"
        yield from _wrong_heads(work)
        if not (isinstance(work.shared, int) and 0 <= work.shared < work.head_dim):
            yield f"shared is {shown(work.shared)}, must be below head_dim={work.head_dim}, from 0"
        if work.lengths is not None:
            yield from _wrong_lengths(work.lengths)
    if isinstance(work, GatedFFN) and work.activation not in ACTIVATIONS:
        yield f"activation is {shown(work.activation)}, must be of {', '.join(ACTIVATIONS)}"
    if isinstance(work, ExpertMatmul):
        names = [work.activation, *([work.gate.activation] if work.gate else [])]
        yield from (
            f"activation is {shown(name)}, must be of {', '.join(ACTIVATIONS)}"
            for name in names
            if name and name not in ACTIVATIONS
        )
        if work.gate is not None and work.activation:
            yield "there are an activation and a gate, must be one of them"
        if work.residual and not work.share:
            yield "a residual is added to what is not summed, must have shares"
    if isinstance(work, NormMatmul | GatedFFN):
        yield from _wrong_norm(work)
    if isinstance(work, NormMatmul):
        for projection in work.outputs:
            yield from _wrong_projection(projection, work.rows)


def _wrong_norm(work: NormMatmul | GatedFFN) -> Iterator[str]:
    """Yield that parameters of a norm have rows for no whole number of sequences."""
    each, rows = work.norm.each if work.norm is not None else 0, work.rows
    if each < 0 or (each and isinstance(rows, int) and rows % each):
        yield f"a norm's each is {each}, must divide a number of rows"


def _wrong_heads(work: Attention) -> Iterator[str]:
    """Yield what is wrong with heads that lie among others."""
    for name in ("q", "k", "v"):
        part, layout = getattr(work, f"{name}_in"), work.q_layout if name == "q" else work.kv_layout
        if part is None:
            continue
        if not isinstance(part, Heads):
            yield f"{name}_in is {shown(part)}, must be Heads"
        elif layout != "bsnh":
            yield f"{name} is {layout}, heads among others must be 'bsnh'"
        else:
            wrong = part.wrong(work.q_heads if name == "q" else work.kv_heads)
            yield from (f"{name}_in: {sentence}" for sentence in wrong)


def _wrong_lengths(lengths: Lengths) -> Iterator[str]:
    """Yield what is wrong with numbers of keys that a tensor tells."""
    if lengths.dtype not in ("int32", "int64"):
        yield f"lengths are {shown(lengths.dtype)}, must be int32 or int64"
    if abs(lengths.more) > MAX_INT32:
        yield f"{lengths.more} is added to lengths, must be within 32 bits"


def _wrong_projection(projection: Projection, rows: Dim) -> Iterator[str]:
    n, rope = projection.n, projection.rope
    if not isinstance(n, DynamicDim) and (not isinstance(n, int) or n < 1):
        yield f"n of a projection is {shown(n)}, must be a DynamicDim or an integer from 1 on"
    if projection.layout not in ("nk", "kn"):
        yield f"layout is {shown(projection.layout)}, must be 'nk' or 'kn'"
    yield from _unknown(projection.epilogue, rows)
    if projection.adapter is not None:
        yield from _wrong_adapter(projection.adapter, projection)
    norm = projection.head_norm
    if rope is None and norm is None:
        return
    step = "a rotation" if norm is None else "a norm of heads"
    if isinstance(n, DynamicDim):
        yield f"n of a projection is {n.name}, must be a number in front of {step}"
        return
    if projection.epilogue not in ((), ("bias",)):
        yield f"steps are {shown(projection.epilogue)}, only a bias can come before {step}"
    if rope is not None:
        yield from _wrong_rope(rope, n)
    if norm is not None:
        yield from _wrong_head_norm(norm, rope.head_dim if rope else 1, n)
        if projection.adapter is not None:
            yield "a projection with an adapter has a norm of heads, must have none"


def _wrong_adapter(adapter: Adapter, projection: Projection) -> Iterator[str]:
    """Yield what is wrong with what is added to a product."""
    if adapter.rank < 1:
        yield f"an adapter's rank is {adapter.rank}, must be an integer from 1 on"
    if adapter.layout not in ("nk", "kn"):
        yield f"an adapter's layout is {shown(adapter.layout)}, must be 'nk' or 'kn'"
    if not isfinite(adapter.scale):
        yield f"an adapter's scale is {adapter.scale}, must be finite"
    if projection.rope is not None or projection.packed is not None:
        yield "a projection with an adapter is rotated or packed, must be neither"


def _wrong_rope(rope: Rope, n: int) -> Iterator[str]:
    """Yield what is wrong with the features that are rotated."""
    period = n if rope.period is None else rope.period
    if rope.head_dim < 2 or rope.head_dim % 2:
        yield f"head_dim is {rope.head_dim}, must be even to have pairs"
    elif rope.pairing not in ("halves", "neighbours"):
        yield f"pairing is {shown(rope.pairing)}, must be 'halves' or 'neighbours'"
    elif not 2 <= rope.width <= rope.head_dim or rope.width % 2:
        yield f"rotary_dim is {rope.width}, must be even and at most head_dim={rope.head_dim}"
    elif rope.pairing == "halves" and rope.head_dim % rope.width:
        yield f"rotary_dim is {rope.width}, must divide head_dim={rope.head_dim}"
    elif period < 1 or n % period or period % rope.head_dim:
        yield f"period is {period}, must be whole heads of {rope.head_dim} and divide n={n}"
    elif rope.features % rope.head_dim or not 0 < rope.features <= period:
        sizes = f"{rope.features} of {period} features"
        yield f"{sizes} are rotated, must be whole heads of {rope.head_dim}"


def _wrong_head_norm(norm: HeadNorm, head: int, n: int) -> Iterator[str]:
    """Yield what is wrong with a norm of heads, of which one has so many features."""
    if not isinstance(norm.width, int) or norm.width < 1 or n % norm.width or norm.width % head:
        sizes = f"must be whole heads of {head} and divide n={n}"
        yield f"width of a norm is {shown(norm.width)}, {sizes}"
    if not isfinite(norm.eps):
        yield f"eps of a norm is {norm.eps}, must be finite"


def _unknown(steps: Any, rows: Dim) -> Iterator[str]:
    for step in steps:
        kind, each = per_rows(step) if isinstance(step, str) else ("", 0)
        if kind in ("bias", "scale", "residual") and each:
            if kind != "residual" and isinstance(rows, int) and rows % each:
                yield f"a step is {shown(step)}, must have a number of rows that it divides"
            continue
        if step not in EPILOGUE_STEPS and not (isinstance(step, float) and isfinite(step)):
            yield f"a step is {shown(step)}, must be a number or of {', '.join(EPILOGUE_STEPS)}"
