"""The masks of a match are those of the graph, score by score."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.tirx import Var

from relax_fusion.matching.pattern import BlockView
from relax_fusion.passes import FuseAttentionChain

from ..support.cases import cases
from ..support.chain_reference import size
from ..support.chains import Chain, module
from ..support.masks import assert_same_mask
from ..support.typed import Typed

MASKS = [case.chain for case in cases("FuseAttentionChain.masks").values()]


@pytest.fixture(scope="module")
def masked():
    return module(MASKS)


@pytest.mark.parametrize("chain", MASKS, ids=lambda c: c.name)
def test_mask_is_that_of_the_graph(masked, chain: Chain) -> None:
    func = masked[chain.name]
    block = func.body.blocks[0]
    named = {b.var.name: b.var for b in block.bindings}
    product, scores = named["s0"], block.bindings[-2].value.args[0]
    given: dict = dict(zip(func.params, chain.arrays(), strict=True))
    given |= {d: chain.sizes[d.name] for p in func.params for d in p.ty.shape if isinstance(d, Var)}
    given[product] = np.zeros([size(d, given) for d in product.ty.shape], "float32")
    match = FuseAttentionChain().match(BlockView(block, masked), named["o"])
    assert match is not None
    assert_same_mask(match, Typed(block.bindings, given), scores)
