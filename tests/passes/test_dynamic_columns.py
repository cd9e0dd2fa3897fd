"""Weights whose number of columns is only known at run time, as a vocabulary's is."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_fusion import Reason, Report
from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.errors import GraphError
from relax_fusion.estimator import candidates, choose
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Packed, Projection, Rope
from relax_fusion.workload.checks import check_workload

from ..support.chains import Chain, assert_numbers, calls, compiled, module, run_pass
from ..support.quantised import FORMATS, Cast
from ..support.quantised_functions import Layer, add_function, projected, random_array
from ..support.quick import machine, quickly
from ..support.slow import sampled
from ..trials.formats import ZerosOfGroups

H200 = make_target("h200")
COLUMNS = DynamicDim("vocab_size")
NORM = Norm("rms", 1e-5)
Q4 = Packed(4, 32, 7)
NORMED = "h = R.nn.rms_norm(x, g, axes=[-1]); "
BOUND = {"b": 5, "v": 37}


def work(layout="nk", dtype="float16", norm=None, packed=None, **options) -> NormMatmul:
    """Return a projection of unknown width."""
    outputs = (Projection(COLUMNS, layout, ("bias",), packed=packed, **options),)
    return NormMatmul(DynamicDim("batch_size"), 4096, outputs, norm, dtype, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("x[b,32] W[32,v] c[v]", "m = R.matmul(x, W); y = R.add(m, c)"),
        ("x[b,32] W[v,32] r[b,v]", "m = R.matmul(x, R.permute_dims(W)); y = R.add(m, r)"),
        ("x[b,32] g[32] W[v,32]", NORMED + "y = R.matmul(h, R.permute_dims(W))"),
        ("x[b,32] g[32] W[32,v]", NORMED + "m = R.matmul(h, W); y = R.nn.silu(m)"),
    ],
)
def test_numbers(inputs: str, body: str, dtype: str) -> None:
    chain = Chain("main", inputs, body, "y", BOUND, dtype)
    mod, report = module([chain]), Report()
    vm = compiled(mod, [chain], report=report, always_fuse=True)
    assert len(report.fused) == 1 and not report.leftovers
    assert_numbers(vm, mod, chain)


class TurnedCast(Cast):
    """Numbers of a smaller type, stored as k x n."""

    def shapes(self, n, k: int):
        return [((k, n), self.stored)]

    def decoded(self, arrays, k: int) -> np.ndarray:
        return super().decoded(arrays, k).T


PACKED = {
    **{name: FORMATS[name] for name in ("q4f16_1", "e4m3_tensor", "int8_rows")},
    "zeros of groups": ZerosOfGroups(),
    "bytes along columns": TurnedCast("int8", layout="kn"),
}


@pytest.mark.parametrize("name", PACKED)
def test_numbers_of_packed_weights(name: str) -> None:
    k, rows, form = 128, 3, PACKED[name]
    bb, n = relax.BlockBuilder(), tirx.Var("vocab_size", "int64")
    layer = Layer(bb, form)
    x = layer.param((tirx.Var("b", "int64"), k), "float16")
    words = layer.packed(n, k)
    add_function(bb, "main", layer, lambda: [projected(layer, x, words, n, k)])
    report = Report()
    options = {"report": report, "always_fuse": True, "variable_bounds": {"b": rows}}
    pipeline = relax.get_pipeline("relax_fusion", target="llvm", **options)
    vm = machine(quickly(bb.get(), pipeline))
    layout = "NN" if form.layout == "kn" else "NT"
    assert [d.spelling for d in report.fused] == [f"matmul {layout} packed"]
    rng = np.random.default_rng(3)
    for columns in (1, 37):
        shapes = [((rows, k), "float16"), *form.shapes(columns, k)]
        arrays = [random_array(rng, *each) for each in shapes]
        (found,) = vm["main"](*map(tvm.runtime.tensor, arrays))
        wanted = arrays[0].astype("float64") @ form.decoded(arrays[1:], k).astype("float64").T
        assert np.abs(found.numpy() - wanted).max() <= 2**-10 * np.abs(wanted).max()


def test_a_gate_has_a_known_width() -> None:
    body = "h = R.nn.silu(R.matmul(x, G)); y = R.multiply(h, R.matmul(x, U))"
    mod = module([Chain("main", "x[n,32] G[32,v] U[32,v]", body, "y")])
    out, decisions = run_pass(mod, "FuseGatedFFN", always_fuse=True)
    declined = [d.decline for d in decisions if d.decline is not None]
    assert [d.reason for d in declined] == [Reason.SHAPE]
    assert "output features is dynamic (v)" in str(declined[0])
    assert calls(out["main"]).count("matmul") == 1  # the activated one is a chain by itself


@pytest.mark.parametrize("backend", ["tir", "triton"])
def test_kernels_are_of_tir(backend: str) -> None:
    choice = choose(work(norm=NORM), device_of(H200), backend=backend)
    assert not any(is_launched(plan) for _, plan in choice.plans.boxes)


@pytest.mark.parametrize(
    "case",
    sampled(
        [work(dtype=d, layout=lay) for d in ("float16", "float32") for lay in ("nk", "kn")]
        + [work(norm=NORM), work(norm=NORM, packed=Q4), work(dtype="float32", packed=Q4)],
        3,
    ),
    ids=lambda w: f"{w.dtype} {w.outputs[0].layout} {w.norm is not None} {w.outputs[0].packed}",
)
def test_a_kernel_of_each_family_compiles(case: NormMatmul) -> None:
    found = {(p.family, p.block_m == 1): p for p in candidates(case, device_of(H200), "tir")}
    assert found
    for plan in found.values():
        assert "columns0" in cuda_source(case, plan)


def cuda_source(case: NormMatmul, plan: TilePlan) -> str:
    func = build_prim_func(case, PlanTable.single(plan)).with_attr("global_symbol", "main")
    made = FusedRule().apply(func, H200, False).mod
    return tvm.compile(made, target=H200).mod.imports[0].inspect_source()


def test_work_is_counted_for_a_vocabulary() -> None:
    half, whole = (work().bytes(rows=1, columns0=n)["w0"] for n in (1000, 2000))
    assert whole == 2 * half == 2000 * 4096 * 2
    assert work().flops(rows=2) == 2 * 2 * 4096 * work().n


def test_rotated_heads_have_a_known_width() -> None:
    outputs = (Projection(COLUMNS, "nk", rope=Rope(64, 128, "float32")),)
    with pytest.raises(GraphError, match="n of a projection is vocab_size, must be a number"):
        check_workload(NormMatmul(1, 64, outputs, None, "float32", "float32"))
