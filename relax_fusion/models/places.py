"""Where the tokens of a call stand in their sequence: told by the host, or by a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.core import wrap_nested
from tvm.script import tirx as T

from ..transforms.modules import OPAQUE
from .kv_cache import Cache, End, first_row, for_sizes
from .layers import attention, masked_attention, slice_rows


@dataclass(frozen=True)
class Hidden:
    """What changes the scores of keys, beside that none is seen by queries in front of it."""

    window: int | None = None
    """How many keys a query sees, itself included."""
    cap: float | None = None
    """Scores are soft-capped by it."""
    sinks: Tensor | None = None
    """Of each head a score more, of a key without a value, ``[heads]``."""


ALL_SEEN = Hidden()


@dataclass(frozen=True)
class Place:
    """The last tokens of a sequence, whose keys and values are in caches."""

    seq_len: tirx.Expr | int
    """Tokens of the call."""
    total_len: tirx.Var
    """Tokens in the caches after it."""
    length: Tensor | None = None
    """Tells how many there were before it, int32 ``[1]``, so that a step that counts it up is
    followed by the next one without the host.  `total_len` is then at least the one after it, and
    the call is of one token."""

    @property
    def end(self) -> End:
        """Where the tokens' keys and values go."""
        return self.total_len if self.length is None else self.length

    def rows(self, table: Tensor) -> Tensor:
        """Return the rows of a table that are for the tokens, ``[seq_len, width]``."""
        if self.length is None:
            return slice_rows(table, 0, self.total_len - self.seq_len, self.total_len)
        row = relax.op.take(table._expr, self.length._expr, axis=0, mode="clip")
        return wrap_nested(row, "row")

    def angles(self, cos: Tensor, sin: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
        """Return the rows of two tables, ``[seq_len, 1, width]`` in `dtype`, by one kernel."""
        func = _two_rows(*map(int, cos.shape), dtype, self.length is not None)
        row = Tensor.placeholder((self.seq_len, 1, cos.shape[1]), dtype)
        if isinstance(self.seq_len, int):
            sizes = [tirx.IntImm("int64", n) for n in (self.seq_len, 1, int(cos.shape[1]))]
            func = func.specialize({func.params[-1]: tirx.decl_buffer(sizes, dtype)})
        return tuple(op.tensor_ir_op(func, "angles", [cos, sin, self.end], [row, row]))

    def attend(self, q: Tensor, cache: Cache, scale: float, hidden: Hidden = ALL_SEEN) -> Tensor:
        """Attend to the tokens up to each one, or the last of them.

        Returns ``[batch, seq_len, heads * dim]``.

        `q`: ``[batch, seq_len, heads, dim]``.
        `cache`: after the call's keys and values were written.
        `scale`: scores are multiplied by it.
        `hidden`: what else becomes of them.
        """
        k, v = (slice_rows(x, 1, 0, self.total_len) for x in cache)
        if self.length is None and hidden.cap is None and hidden.sinks is None:
            return attention(q, k, v, scale, window=hidden.window)
        seen = self._seen(hidden.window)
        return masked_attention(q, k, v, scale, seen, hidden.cap, hidden.sinks)

    def _seen(self, window: int | None) -> Tensor:
        """Tell which keys each token sees, boolean ``[seq_len, total_len]``."""
        keys = relax.op.arange(0, self.total_len, 1, "int64")
        if self.length is None:
            first = self.total_len - self.seq_len
            queries = relax.op.arange(first, self.total_len, 1, "int64")
        else:
            queries = relax.op.astype(self.length._expr, "int64")
        keys, queries = (
            relax.op.reshape(keys, (1, self.total_len)),
            relax.op.reshape(queries, (self.seq_len, 1)),
        )
        seen = relax.op.less_equal(keys, queries)
        if window is not None:
            after = relax.op.subtract(queries, relax.const(window, "int64"))
            seen = relax.op.logical_and(seen, relax.op.greater(keys, after))
        return wrap_nested(seen, "seen")


class Decoder(nn.Module):
    """What makes logits and the next caches of the tokens of a call, by `_run`."""

    _run: Callable[[Tensor, Place, list[Tensor]], tuple[Tensor, list[Tensor]]]

    def prefill(self, input_ids: Tensor, total_len: tirx.Var, caches: list[Tensor]) -> Any:
        """Run ``[batch, seq_len]`` tokens; logits of the last one, and the caches."""
        return self._run(input_ids, Place(input_ids.shape[1], total_len), caches)

    def decode(
        self, input_ids: Tensor, length: Tensor, total_len: tirx.Var, caches: list[Tensor]
    ) -> Any:
        """Run one token of each sequence, and make the tokens that follow those of the next step.

        `input_ids`, int32 ``[batch, 1]``, is overwritten by the tokens with the largest logits,
        and the length counted up.  Both are returned behind the logits and the caches.
        """
        logits, caches = self._run(input_ids, Place(1, total_len, length), caches)
        chosen = wrap_nested(relax.op.argmax(logits._expr, axis=-1), "chosen")
        input_ids, length = op.tensor_ir_inplace_op(
            for_sizes(_advance(), chosen),
            "advance",
            args=[chosen, length, input_ids, length],
            inplace_indices=[2, 3],
            out=[input_ids, length],
        )
        return logits, caches, input_ids, length


@cached
def _two_rows(rows: int, width: int, dtype: str, counted: bool) -> tirx.PrimFunc:
    """Build the PrimFunc that takes the same rows of two tables; `counted` as of `kv_append`."""
    size, wide = (tirx.IntImm("int64", n) for n in (rows, width))

    @T.prim_func(private=True, s_tir=True)
    def func(
        cos_handle: T.handle,
        sin_handle: T.handle,
        end: T.handle if counted else T.int64,  # type: ignore[valid-type]
        cosines_handle: T.handle,
        sines_handle: T.handle,
    ) -> None:
        T.func_attr({"op_pattern": OPAQUE, "tirx.noalias": True})
        seq_len = T.int64()
        cos = T.match_buffer(cos_handle, (size, wide), "float32")
        sin = T.match_buffer(sin_handle, (size, wide), "float32")
        cosines = T.match_buffer(cosines_handle, (seq_len, T.int64(1), wide), dtype)
        sines = T.match_buffer(sines_handle, (seq_len, T.int64(1), wide), dtype)
        first = T.meta_var(first_row(end, size, seq_len) if counted else end - seq_len)
        for iters in T.grid(seq_len, wide):
            with T.sblock("angles"):
                s, d = T.axis.remap("SS", iters)
                cosines[s, 0, d] = T.Cast(dtype, cos[first + s, d])
                sines[s, 0, d] = T.Cast(dtype, sin[first + s, d])

    return func


@cached
def _advance() -> tirx.PrimFunc:
    """Build the PrimFunc that takes over the tokens that were chosen, and counts.

    The length is passed twice: TVM binds no block to threads that reads what it writes.
    """

    @T.prim_func(private=True, s_tir=True)
    def func(
        chosen_handle: T.handle,
        length_handle: T.handle,
        ids_handle: T.handle,
        counted_handle: T.handle,
    ) -> None:
        T.func_attr({"op_pattern": OPAQUE})
        batch = T.int64()
        chosen = T.match_buffer(chosen_handle, (batch, T.int64(1)), "int64")
        ids = T.match_buffer(ids_handle, (batch, T.int64(1)), "int32")
        length = T.match_buffer(length_handle, (1,), "int32")
        counted = T.match_buffer(counted_handle, (1,), "int32")
        for i in range(batch + 1):
            with T.sblock("advance"):
                b = T.axis.spatial(batch + 1, i)
                if b < batch:
                    ids[b, 0] = T.Cast("int32", chosen[b, 0])
                else:
                    counted[b - batch] = length[b - batch] + 1

    return func
