"""What is computed: frozen descriptions of the chains that the library fuses.

A workload is the contract between a pass (which proves that a chain computes it), the estimator
(which prices it) and a back end (which emits it).  It holds sizes, dtypes and the order of the
steps, and nothing of how they are executed: that is :class:`relax_fusion.tile_plan.TilePlan`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element, for the floating-point dtypes a workload may have."""

INTEGER_DTYPES = ("int8", "uint8")
"""Integer dtypes whose products a workload may add up, exactly, as int32."""

DTYPE_BYTES = {**FLOAT_BYTES, **dict.fromkeys(INTEGER_DTYPES, 1), "int32": 4}
"""Bytes of one element, for the dtypes a workload may have."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
EPILOGUE_STEPS = ("bias", "residual", *ACTIVATIONS)

WeightLayout = Literal["nk", "kn"]
Causal = Literal["none", "top_left", "bottom_right"]
HeadLayout = Literal["bsnh", "bnsh"]
BiasOp = Literal["add", "min"]
MaskDims = tuple[bool, bool, bool, bool]


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that is only known at run time.

    Parameters
    ----------
    name : str
        How the Relax module calls it, for reports (``"batch_size"``, ``"b * s"``).
    upper : int, optional
        The largest value it can take, from the pipeline's ``variable_bounds``.
    """

    name: str
    upper: int | None = None


Dim = int | DynamicDim


def extent(dim: Dim, value: int) -> int:
    """Return the size of `dim`, taking `value` for a dynamic one."""
    return dim if isinstance(dim, int) else value


class _Keyed:
    """Adds a short stable name made of the whole description, so that no two kernels share one."""

    @property
    def key(self) -> str:
        """Eight hex digits of the SHA-1 of every field."""
        return hashlib.sha1(repr(self).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last axis, with an optional residual add in front of it.

    Parameters
    ----------
    kind : {"rms", "layer"}
        ``x / sqrt(mean(x^2) + eps)`` or ``(x - mean) / sqrt(var + eps)``, times gamma (plus beta).
    eps : float
        Added to the mean square or the variance.
    beta : bool
        Whether a shift is added (LayerNorm only).
    residual : bool
        Whether the input is the sum of two tensors, added here.
    returns_sum : bool
        Whether that sum is an output too.
    returns_norm : bool
        Whether the normalised value is an output too (a post-norm residual reads it).
    """

    kind: Literal["rms", "layer"]
    eps: float
    beta: bool = False
    residual: bool = False
    returns_sum: bool = False
    returns_norm: bool = False


@dataclass(frozen=True)
class Rope:
    """A rotation of pairs of features by angles that depend on the row (rotary embedding).

    The features are heads of width `head_dim`.  Feature j of a head is paired with
    ``j + head_dim / 2`` ("half split", the order of Hugging Face checkpoints)::

        out[j] = x[j] * cos[row, j] - x[j + head_dim / 2] * sin[row, j]
        out[j + head_dim / 2] = (
            x[j + head_dim / 2] * cos[row, j + head_dim / 2] + x[j] * sin[row, j + head_dim / 2]
        )

    Parameters
    ----------
    head_dim : int
        Width of a head; even.
    features : int
        How many features, from the first on, are rotated; a multiple of `head_dim`.  Those behind
        them (the values of a merged projection) stay as they are.
    dtype : str
        Of the cosines and sines, two tensors ``[positions, head_dim]``.
    positions : Dim, optional
        Rows of those tensors, where row i of the result takes row ``i % positions`` of them (the
        sequence length, for rows of several sequences).  None: as many as the result has.
    """

    head_dim: int
    features: int
    dtype: str
    positions: Dim | None = None

    @property
    def half(self) -> int:
        """Distance between the features of a pair."""
        return self.head_dim // 2


@dataclass(frozen=True)
class Projection:
    """One matmul with its weight of `n` output features and the steps after it.

    Parameters
    ----------
    n : int
        Output features.
    layout : {"nk", "kn"}
        Whether the weight lies as ``[n, k]`` (rows are outputs, PyTorch's Linear) or ``[k, n]``.
    epilogue : tuple of str
        Members of `EPILOGUE_STEPS` in the order in which they are applied.
    rope : Rope, optional
        A rotation after the epilogue, which then has no step but a bias.
    """

    n: int
    layout: WeightLayout
    epilogue: tuple[str, ...] = ()
    rope: Rope | None = None


@dataclass(frozen=True)
class NormMatmul(_Keyed):
    """``outputs[i] = epilogue_i(norm(x) @ W_i)`` for x of shape ``[rows, k]``.

    Parameters
    ----------
    rows : Dim
        Rows of x: the product of its leading dimensions.
    k : int
        Features of x, the reduced dimension.
    outputs : tuple of Projection
        The matmuls that share the norm, in the order of the results.
    norm : Norm, optional
        None for a plain matmul with an epilogue.
    dtype, out_dtype : str
        Of x and the weights, and of the results.  Sums are kept in float32, of integers in int32.
    allow_tf32 : bool
        Whether tensor cores may multiply float32 operands as tf32, with 10 bits of mantissa.
    """

    rows: Dim
    k: int
    outputs: tuple[Projection, ...]
    norm: Norm | None
    dtype: str
    out_dtype: str
    allow_tf32: bool = False

    @property
    def n(self) -> int:
        """Output features of all projections together."""
        return sum(p.n for p in self.outputs)

    def flops(self, rows: int) -> float:
        """Floating-point operations of the matmuls at `rows` rows."""
        return 2.0 * rows * self.k * self.n


@dataclass(frozen=True)
class GatedFFN(_Keyed):
    """``epilogue(act(norm(x) @ Wg) * (norm(x) @ Wu))`` for x of shape ``[rows, k]``.

    Parameters
    ----------
    rows, k, norm, dtype, out_dtype, allow_tf32
        As in `NormMatmul`.
    n : int
        Features of the gate, which are those of the result.
    layout : {"nk", "kn"}
        Of the weights.
    merged : bool
        Whether gate and up are the two halves of one weight of ``2 n`` features.
    gate_first : bool
        Whether the gate is the first half (or, unmerged, simply True).
    activation : str
        One of `ACTIVATIONS`, applied to the gate.
    bias : bool
        Whether gate and up each have a bias (merged: one of ``2 n``).
    """

    rows: Dim
    k: int
    n: int
    layout: WeightLayout
    merged: bool
    gate_first: bool
    activation: str
    norm: Norm | None
    dtype: str
    out_dtype: str
    bias: bool = False
    allow_tf32: bool = False

    def flops(self, rows: int) -> float:
        """Floating-point operations of both matmuls at `rows` rows."""
        return 4.0 * rows * self.k * self.n


@dataclass(frozen=True)
class Attention(_Keyed):
    """``softmax(bias(softcap(scale * q @ k^T)), masked) @ v`` per head.

    A query whose keys are all hidden gives zeros.  Position i of the queries stands at key
    ``p = i``, bottom-right aligned at ``p = i + kv_len - q_len``.

    Parameters
    ----------
    batch, q_len, kv_len : Dim
        Sizes that may be dynamic.
    q_heads, kv_heads : int
        Query heads, and key/value heads, which divide them (grouped-query attention).
    head_dim, v_dim : int
        Features of a query or key, and of a value.
    scale : float
        Multiplies the scores first of all.
    causal : {"none", "top_left", "bottom_right"}
        Query i sees keys ``<= i`` (top left) or ``<= i + kv_len - q_len`` (bottom right).
    bias_dims : tuple of bool, optional
        For a bias of four dimensions ``[batch, heads, q_len, kv_len]``: which of them have their
        full size (the others are 1 and broadcast).  None: no bias.
    q_layout, kv_layout, out_layout : {"bsnh", "bnsh"}
        Order of batch (b), sequence (s), heads (n) and features (h).
    kv_prefix : bool
        Whether k and v are handed over as larger buffers of which the first `kv_len` positions
        are read (a preallocated cache).
    dtype, out_dtype : str
        Of q, k, v and of the result.  Scores and sums are kept in float32.
    bias_dtype : str
        Of the bias.
    bias_op : {"add", "min"}
        Whether the bias is added to a score, or is the most that it can be.
    mask_dims : tuple of bool, optional
        As `bias_dims`, for a boolean mask that is true where a query sees a key.
    window : int, optional
        A query sees keys ``> p - window`` only; with a causal mask, that many at most.
    softcap : float, optional
        Scaled scores s become ``softcap * tanh(s / softcap)`` before the bias.
    alibi : str, optional
        Dtype of slopes ``[q_heads]``: ``slope[head] * (key - p)`` is added to the scores, after
        the bias (Press et al., 2022, https://arxiv.org/abs/2108.12409).  None: no slopes.
    sinks : str, optional
        Dtype of sinks ``[q_heads]``: each softmax has a further score, whose value is zero
        (attention sinks, as in gpt-oss); it is neither scaled nor masked.  None: no sinks.
    """

    batch: Dim
    q_len: Dim
    kv_len: Dim
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    causal: Causal
    bias_dims: MaskDims | None
    dtype: str
    out_dtype: str
    q_layout: HeadLayout = "bsnh"
    kv_layout: HeadLayout = "bsnh"
    out_layout: HeadLayout = "bsnh"
    kv_prefix: bool = False
    bias_dtype: str = "float32"
    bias_op: BiasOp = "add"
    mask_dims: MaskDims | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: str | None = None
    sinks: str | None = None

    def flops(self, batch: int, q_len: int, kv_len: int) -> float:
        """Floating-point operations of the two matmuls (a causal mask is not discounted)."""
        return 2.0 * batch * self.q_heads * q_len * kv_len * (self.head_dim + self.v_dim)


@dataclass(frozen=True)
class MatmulChain(_Keyed):
    """``outer(inner(x @ A) @ B)``, where ``inner(x @ A)`` has few columns.

    The intermediate ``inner(x @ A)`` is rounded to `dtype`, as the tensor that it replaces.

    Parameters
    ----------
    rows : Dim
        Rows of x; of one matrix where there is a batch.
    k, r, n : int
        Features of x ``[rows, k]``, of the intermediate, and of the result.
    layouts : tuple of {"nk", "kn"}
        Of A and of B: "nk" is the transposed ``[r, k]`` and ``[n, r]``.
    inner, outer : tuple of str or float
        Steps on the intermediate and on the result, in order: members of `EPILOGUE_STEPS` (inside,
        no residual), or the number that multiplies.
    dtype, out_dtype : str
        Of x, A, B and the intermediate, and of the result.  Sums are kept in float32.
    batch : Dim, optional
        x, A, B and the result are so many matrices each.  None: they are one.
    """

    rows: Dim
    k: int
    r: int
    n: int
    layouts: tuple[WeightLayout, WeightLayout]
    inner: tuple[str | float, ...]
    outer: tuple[str | float, ...]
    dtype: str
    out_dtype: str
    batch: Dim | None = None

    def flops(self, rows: int) -> float:
        """Floating-point operations of both matmuls at `rows` rows (of one matrix)."""
        return 2.0 * rows * self.r * (self.k + self.n)


Workload = NormMatmul | GatedFFN | MatmulChain | Attention
