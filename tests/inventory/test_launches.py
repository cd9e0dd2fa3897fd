"""Which kernels a function runs, and which of them only copy."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx

from relax_fusion import Report
from relax_fusion.inventory.record_graph import RecordGraph, copied_width
from relax_fusion.mend.views import RewriteReshapes
from relax_fusion.report.coverage import Launches

from ..canonical.common import module

X = "x: R.Tensor(('n', 8), 'float16'), i: R.Tensor((4,), 'int32')"


def lowered(body: str) -> tvm.IRModule:
    passes = [relax.transform.LegalizeOps(), RewriteReshapes()]
    return tvm.transform.Sequential(passes)(module(X, body, "n"))


@pytest.mark.parametrize(
    ("value", "width"),
    [
        ("R.permute_dims(x)", 2),
        ("R.astype(x, 'float32')", 2),
        ("R.concat((x, x), axis=1)", 2),
        ("R.strided_slice(x, axes=[1], begin=[2], end=[6])", 2),
        ("R.broadcast_to(x, (3, n, 8))", 2),
        ("R.flip(x, axis=1)", 2),
        ("R.nn.pad(x, [0, 0, 1, 1])", 2),
        ("R.take(x, i, axis=1)", 0),
        ("R.take(R.reshape(x, (n, 2, 4)), i, axis=0)", 2),
        ("R.negative(x)", 0),
        ("R.add(x, x)", 0),
        ("R.where(R.greater(x, x), x, x)", 0),
        ("R.zeros((4, 4), 'float16')", 0),
        ("R.sum(x, axis=[1])", 0),
        ("R.matmul(x, R.permute_dims(x))", 0),
    ],
)
def test_what_only_copies(value: str, width: int) -> None:
    mod = lowered(f"y = {value}".replace("'", '"'))
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    last = [c for c in calls if isinstance(c, relax.Call)][-1]
    assert copied_width(mod[last.args[0]]) == width


def test_a_view_is_no_launch() -> None:
    report = Report()
    mod = lowered("""a = R.permute_dims(x)
    r = R.reshape(a, (2, 4, n))
    e = R.exp(r)
    y = R.astype(e, "float32")""")
    assert RecordGraph(report.material.after, {"n": 5})(mod).same_as(mod)
    (run,) = report.launches
    assert (run.function, run.symbols) == ("main", (("n", 5),))
    assert run.kernels == ("transpose", "tir_exp", "cast")
    assert run.copies == (("transpose", 8 * 5 * 4), ("cast", 8 * 5 * 6))


def test_calls_of_libraries_count() -> None:
    report = Report()
    body = 'y = R.call_dps_packed("blas", (x,), out_ty=R.Tensor((n, 8), "float16"))'
    RecordGraph(report.material.after)(module(X, body, "n"))
    assert report.launches == [Launches("main", ("blas",), (), (("n", 64),))]


def test_a_function_that_is_no_tir_copies_nothing() -> None:
    assert copied_width(module(X, "y = R.exp(x)", "n")["main"]) == 0
    assert copied_width(tirx.PrimFunc([], tirx.Evaluate(0))) == 0
