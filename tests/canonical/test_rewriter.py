"""The frame of the canonical passes: what rules are not asked about, and results of a function."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from relax_fusion.canonical import MoveReshapes, MoveTransposes

from ..support.quick import machine, quickly
from .common import module, operators


def test_what_has_no_elements_stays() -> None:
    """A size of 0 in a reshape is that of another tensor."""
    before = module(
        "x: R.Tensor(('b', 0, 2, 4), 'float32')",
        "h = R.reshape(x, R.shape([b, 0, 4]))\np = R.split(h, 2, axis=2)\nq = p[0]\ny = R.exp(q)",
    )
    assert MoveReshapes()(before).same_as(before)


def test_results_keep_the_sizes_that_a_function_says() -> None:
    before = module(
        "x: R.Tensor(('b', 's', 4), 'float32')",
        "a = R.broadcast_to(x, R.shape([b, T.max(s, 0), 4]))\ny = R.negative(a)",
    )
    after = MoveReshapes()(before)
    *_, binding = after["main"].body.blocks[0].bindings
    assert isinstance(binding, relax.MatchCast)
    assert str(after["main"].ret_ty) == str(before["main"].ret_ty)
    relax.analysis.well_formed(after)  # raises
    vm = machine(quickly(after))
    x = np.arange(24, dtype="float32").reshape(2, 3, 4)
    np.testing.assert_array_equal(vm["main"](tvm.runtime.tensor(x)).numpy(), -x)


def test_what_nothing_reads_is_no_reader() -> None:
    """A result that is read inside stays as it is; here, nothing that is read does so."""
    before = module(
        "x: R.Tensor(('b', 's', 4), 'float32')",
        "h = R.reshape(x, R.shape([b * s, 4]))\ny = R.exp(h)\nz = R.negative(y)\nw = z",
    )
    assert operators(MoveReshapes()(before)) == ["exp", "reshape"]


def test_results_of_one_shape_are_views_once() -> None:
    before = module(
        "x: R.Tensor((2, 1, 4), 'float32')",
        "a = R.permute_dims(x, axes=[1, 0, 2])\ny = R.reshape(a, R.shape([1, 2, 4]))",
        "",
    )
    assert MoveTransposes()(before).same_as(before)
