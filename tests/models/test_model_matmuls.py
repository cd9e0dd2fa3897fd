"""On an H200, every matmul of every model is a kernel of ours, or one that TVM makes well.

A matmul that a fusing pass leaves behind meets TVM's rules in phase 4.  Of those only GEMV, which
serves one row, comes near the machine; the others make scalar loops, 20 to 40 times slower.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import dlight as dl

from relax_fusion import PipelineOptions, Report, make_target
from relax_fusion.dlight_rules import GenericMatmulRule, ScalarMatmulRule
from relax_fusion.estimator.families.matmuls import SCALAR_FAMILIES
from relax_fusion.estimator.tile_plan import PLAN_ATTR, TilePlan
from relax_fusion.models import export, zoo_config
from relax_fusion.pipeline import PHASES

from ..support.chains import Chain, module
from ..support.slow import sampled

H200 = make_target("h200")
RULES = (
    GenericMatmulRule,
    ScalarMatmulRule,
    dl.gpu.GEMV,
    dl.gpu.Reduction,
    dl.gpu.GeneralReduction,
    dl.gpu.Fallback,
)
"""Those of phase 4 for functions that no pass made, in its order."""


def multiplies_and_sums(func: tirx.PrimFunc) -> bool:
    """Tell whether a function sums products whose factors are of different tensors.

    The square of a deviation from the mean is no such product.
    """
    found = []

    def block(node: s_tir.SBlock) -> None:
        if node.init is not None and isinstance(node.body, tirx.BufferStore):
            products: list[tirx.Mul] = []
            tvm_ffi.structural_walk(node.body.value, (tirx.Mul, products.append))
            found.extend(p for p in products if set() != tensors(p.a) != tensors(p.b) != set())

    def tensors(value: ir.Expr) -> set[str]:
        loads: list[str] = []
        tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda x: loads.append(str(x.source))))
        return set(loads)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, block))
    return bool(found)


def left_to_tvm(mod: ir.IRModule, **options: Any) -> tuple[dict[str, str], Report]:
    """Return the matmuls that no pass took, each with the rule that schedules it."""
    report = Report()
    made = PipelineOptions(H200, report=report, **options)
    with H200:
        for _, phase, _ in PHASES[:4]:
            mod = tvm.transform.Sequential(phase(made))(mod)
        found = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or PLAN_ATTR in func.attrs:
                continue
            if multiplies_and_sums(func):
                rules = (rule for rule in RULES if rule().apply(func, H200, False) is not None)
                found[gvar.name_hint] = next(rules).__name__
    return found, report


def scalar_plans(report: Report) -> list[TilePlan]:
    """Return the plans of matmuls that are not for tensor cores, but for a GEMV."""
    plans = [plan for d in report.fused for _, plan in d.plans.entries]
    return [p for p in plans if p.family in SCALAR_FAMILIES]


MODELS = (
    *itertools.product(("gpt2", "llama-3.1-8b", "bert-base"), (1, 8, "batch_size")),
    *(("llama-3.2-1b", 1), ("llama-2-7b", "batch_size")),  # graphs like that of 8B, other widths
)


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    sampled(((*case, d) for case, d in zip(MODELS, itertools.cycle(("float16", "bfloat16")))), 5),
)
def test_no_matmul_of_a_model_is_a_scalar_loop(name: str, batch: int | str, dtype: str) -> None:
    config = replace(zoo_config(name), num_layers=1)
    found, report = left_to_tvm(export(config, dtype=dtype, max_seq_len=512, batch=batch).mod)
    found = {k: v for k, v in found.items() if not k.startswith("attention")}  # are no projections
    assert not scalar_plans(report) and set(found.values()) <= {"GEMV"}
    # One row may go to TVM where the estimator finds that faster, and only there
    declined = [d for d in report.declined if d.pattern == "FuseMatmulEpilogue"]
    assert len(found) <= len(declined)
    assert all(d.workload.rows == 1 for d in declined)


NT = "t = R.permute_dims(W); "
SPELLINGS = {
    "nt": ("x[n,1024] W[512,1024]", NT + "y = R.matmul(x, t)"),
    "nn": ("x[n,1024] W[1024,512]", "y = R.matmul(x, W)"),
    "one_row": ("x[1,1024] W[512,1024]", NT + "y = R.matmul(x, t)"),
    "odd_n": ("x[n,1024] W[1023,1024]", NT + "y = R.matmul(x, t)"),
    "odd_n_nn": ("x[n,1024] W[1024,1023]", "y = R.matmul(x, W)"),
    "one_column": ("x[n,1024] W[1,1024]", NT + "y = R.matmul(x, t)"),
    "odd_k": ("x[n,1001] W[512,1001]", NT + "y = R.matmul(x, t)"),
    "odd_k_nn": ("x[n,1001] W[1001,512]", "y = R.matmul(x, W)"),
    "odd_k_one_row": ("x[1,1001] W[512,1001]", NT + "y = R.matmul(x, t)"),
    "small_k": ("x[n,3] W[512,3]", NT + "y = R.matmul(x, t)"),
    "float32_out": ("x[n,1024] W[512,1024]", NT + "y = R.matmul(x, t, out_dtype='float32')"),
    "vocabulary": ("x[n,512] W[128256,512]", NT + "y = R.matmul(x, t, out_dtype='float32')"),
    "batches": ("x[2,b,n,1024] W[512,1024]", NT + "y = R.matmul(x, t)"),
    "weight_is_a_value": ("x[n,256] v[256,256]", "W = R.nn.relu(v); y = R.matmul(x, W)"),
    "weight_is_reshaped": (
        "x[n,256] V[512,4,64]",
        "W = R.reshape(V, (512, 256)); " + NT + "y = R.matmul(x, t)",
    ),
    "two_residuals": (
        "x[n,1024] W[512,1024] r[n,512] s[n,512]",
        NT + "m = R.matmul(x, t); a = R.add(m, r); y = R.add(a, s)",
    ),
    "two_biases": (
        "x[n,1024] W[512,1024] b[512] c[512]",
        NT + "m = R.matmul(x, t); a = R.add(m, b); y = R.add(a, c)",
    ),
    "norm_and_two_residuals": (
        "x[n,1024] g[1024] W[512,1024] r[n,512] s[n,512]",
        "h = R.nn.rms_norm(x, g, axes=[-1]); "
        + NT
        + "m = R.matmul(h, t); a = R.add(m, r); y = R.add(a, s)",
    ),
    "activation_then_bias": (
        "x[n,1024] W[512,1024] b[512]",
        NT + "m = R.matmul(x, t); a = R.nn.relu(m); y = R.add(a, b)",
    ),
    "scaled": ("x[n,1024] W[512,1024] r[n,512]", NT + "m = R.matmul(x, t); y = R.multiply(m, r)"),
}


@pytest.mark.parametrize("dtype", sampled(["float16", "bfloat16"]))
@pytest.mark.parametrize("name", SPELLINGS)
def test_no_spelling_of_a_projection_is_a_scalar_loop(name: str, dtype: str) -> None:
    inputs, body = SPELLINGS[name]
    found, report = left_to_tvm(module([Chain("main", inputs, body, "y", dtype=dtype)]))
    assert found == {} and len(report.fused) == 1 and not scalar_plans(report)


def test_what_a_kernel_of_ours_would_have_to_learn() -> None:
    """Known gaps: this test tells when one is closed."""
    gaps = {"symbolic_k": ("x[n,m] W[512,m]", NT + "y = R.matmul(x, t)")}
    for name, (inputs, body) in gaps.items():
        chain = Chain("main", inputs, body, "y", dtype="float16")
        found, _ = left_to_tvm(module([chain]))
        assert list(found.values()) == ["ScalarMatmulRule"], name


def test_what_no_pass_takes_is_scheduled_as_ours() -> None:
    left = {
        "batched": ("x[4,n,64] W[4,64,128]", "y = R.matmul(x, W)"),
        "einsum": ("x[n,256] W[512,256]", "y = R.einsum((x, W), 'ij,kj->ik')"),
    }
    for name, (inputs, body) in left.items():
        chain = Chain("main", inputs, body, "y", dtype="float16")
        found, _ = left_to_tvm(module([chain]))
        assert list(found.values()) == ["GenericMatmulRule"], name


def test_the_detector_sees_a_matmul_that_is_left() -> None:
    chain = Chain("main", *SPELLINGS["nt"], "y", dtype="float16")
    found, _ = left_to_tvm(module([chain]), disable=("FuseMatmulEpilogue",))
    assert list(found.values()) == ["GenericMatmulRule"]
    norm = "y = R.nn.layer_norm(x, g, b, axes=[-1])"
    alone = Chain("main", "x[n,64] g[64] b[64]", norm, "y", dtype="float16")
    assert left_to_tvm(module([alone]))[0] == {}
