"""FuseAttentionChain: the mask of a kernel is that of the graph, whatever it is made of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tvm import ir, relax
from tvm.relax import op

from relax_fusion.matching.pattern import BlockView, Refused
from relax_fusion.passes import FuseAttentionChain

from ..support.chains import numpy_dtype
from ..support.masks import assert_same_mask
from ..support.masks_at_random import Draft, symbolic
from ..support.typed import Typed

HEADS, DIM = 2, 4
NUMBERS = (0, 0, 1, 1, -1, 2, 3, 5, 127, 255, 256, 257, 0.5, 2.5, -0.0, -1e4, -1e9, -65504, -3.4e38)
NUMBERS += (float("-inf"), float("-inf"))


class Attention:
    """An attention of symbolic or static sizes under a mask that is made at random."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.dynamic = self.rng.random() < 0.2
        self.dtype = self.rng.choice(("float32", "float32", "float16"))
        large = (1, 140), (3, 300), (140, 140)
        small = self.rng.randint(1, 6), self.rng.randint(1, 6)
        self.sizes = self.rng.choice(large) if self.rng.random() < 0.1 else small
        self.rows, self.columns = symbolic() if self.dynamic else self.sizes
        kinds = (("bool", "mask", self.columns), ("bool", "all", None), (self.dtype, "bias", None))
        given = [
            relax.Var(
                name, relax.TensorType((self.rows, self.columns) if one is None else (1, one), t)
            )
            for t, name, one in kinds
        ]
        self.draft = Draft(self.rng, self.rows, self.columns, given, NUMBERS)
        self.draft.block(self.rng.randint(3, 25))
        self._operands()
        self.scores = self._masked()
        weights = self.draft.emit(op.nn.softmax(self.scores, axis=-1))
        self.out = self.draft.emit(op.matmul(weights, self.v))

    def _operands(self) -> None:
        def heads(name: str, rows: Any) -> relax.Var:
            return relax.Var(name, relax.TensorType((1, HEADS, rows, DIM), self.dtype))

        self.q, self.k, self.v = (
            heads(n, d) for n, d in (("q", self.rows), ("k", self.columns), ("v", self.columns))
        )
        keys = self.draft.emit(op.permute_dims(self.k, [0, 1, 3, 2]))
        self.product = self.draft.emit(op.matmul(self.q, keys))

    def _masked(self) -> relax.Var:
        """Apply one mask or two, in the ways that front ends have."""
        scores = self.product
        for _ in range(self.rng.randint(1, 2)):
            pool = self.draft.pool
            conditions = [v for v in pool if str(v.ty.dtype) == "bool"]
            addends = [v for v in pool if str(v.ty.dtype) == self.dtype]
            hidden = relax.const(self.rng.choice((-1e4, -6e4, float("-inf"))), self.dtype)
            condition = self.rng.choice(conditions)
            if self.rng.random() < 0.7:
                condition = self._banded(condition)
            how = self.rng.randrange(5)
            if how == 0:
                scores = op.where(condition, scores, hidden)
            elif how == 1:
                scores = op.where(condition, hidden, scores)
            else:
                at = self._addend(condition, self.rng.choice(addends), hidden)
                scores = op.minimum(scores, at) if how == 4 else op.add(scores, at)
            scores = self.draft.emit(scores)
        return scores

    def _banded(self, other: relax.Var) -> relax.Var:
        """Return a causal mask or a window, together with another condition or not."""
        band = self.draft.emit(self.draft.band())
        how = self.rng.randrange(4)
        if how == 0:
            return self.draft.emit(op.logical_not(band))
        if how == 1:
            join = self.rng.choice((op.logical_and, op.logical_or, op.bitwise_and, op.bitwise_xor))
            other = self.rng.choice((other, self.draft.emit(self.draft.band())))
            return self.draft.emit(join(band, other))
        return band

    def _addend(self, condition: relax.Var, addend: relax.Var, hidden: relax.Expr) -> relax.Expr:
        how = self.rng.randrange(4)
        if how == 0:
            return addend
        if how == 1:
            return self.draft.emit(op.where(condition, addend, hidden))
        zero = relax.const(0.0, self.dtype)
        mask = self.draft.emit(op.where(condition, zero, hidden))
        return self.draft.emit(op.add(addend, mask)) if how == 2 else mask


def compare(attention: Attention) -> bool:
    """Compare the graph's mask with that of the workload, if there is one."""
    block = relax.DataflowBlock(attention.draft.bindings)
    view = BlockView(block, ir.IRModule())
    try:
        match = FuseAttentionChain().match(view, attention.out)
    except Refused:
        return False
    assert match is not None
    for size in ((1, 1), (5, 7), (7, 5)) if attention.dynamic else [attention.sizes]:
        assert_same_mask(match, _typed(attention, size), attention.scores)
    return True


def _typed(attention: Attention, size: tuple[int, int]) -> Typed:
    rng = np.random.default_rng(0)
    given: dict[Any, Any] = {attention.rows: size[0], attention.columns: size[1]}
    given[attention.product] = np.zeros((1, HEADS, *size), numpy_dtype(attention.dtype))
    for var in attention.draft.given:
        dims = np.broadcast_shapes((1, 1), (1 if var.name == "mask" else size[0], size[1]))
        values = rng.standard_normal(dims)
        boolean = str(var.ty.dtype) == "bool"
        given[var] = values > -0.5 if boolean else values.astype(numpy_dtype(attention.dtype))
    return Typed(attention.draft.bindings, given)


@pytest.mark.parametrize("shard", range(4))
def test_random_masks(shard: int) -> None:
    matched = sum(compare(Attention(seed)) for seed in range(shard, 160, 4))
    assert matched > 15
