"""Triton's kernels for a GPU that was never measured, which borrows the numbers of another."""

from __future__ import annotations

import pytest
from tvm import relax

from relax_fusion import Report, make_target
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge import emit

from ..support.chains import Chain, module
from ..support.patterns import attentions, linears
from ..support.slow import quick_if

TARGET = {"kind": "cuda", "arch": "sm_100a", "model": "h200"}
LINEARS = {chain.name: chain for chain in linears(64, "float16", 128, 256)}
ATTENTIONS = {chain.name: chain for chain in attentions(64, "float16")}
TWO_MATMULS = Chain(
    "two_matmuls",
    "x[64,64] U[64,32] V[32,64]",
    "h = R.matmul(x, U); o = R.matmul(h, V)",
    "o",
    dtype="float16",
)
CASES = {
    "FuseRMSNormMatmul": LINEARS["norm_matmul"],
    "FuseGatedFFN": LINEARS["gated_ffn"],
    "FuseMatmulEpilogue": LINEARS["matmul_residual"],
    "FuseAttentionChain": ATTENTIONS["attention_causal_grouped"],
    "FuseChains": TWO_MATMULS,
}
QUICK = ("FuseMatmulEpilogue", "FuseAttentionChain", "FuseChains")
"""Passes with a kernel each: that of a matmul and its epilogue is that of the other two, too."""


@pytest.mark.parametrize("pattern", quick_if(QUICK.__contains__, CASES))
def test_every_pass_has_a_kernel_of_triton_for_sm_100(pattern: str, monkeypatch, tmp_path) -> None:
    made: list[CompiledKernel] = []

    def kept(*args, **kwargs):
        found = compiler(*args, **kwargs)
        made.extend(found)
        return found

    compiler = emit.try_kernels
    monkeypatch.setattr(emit, "try_kernels", kept)
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))
    report, target = Report(), make_target(TARGET)
    options = {"report": report, "always_fuse": True, "backend": "triton"}
    relax.get_pipeline("relax_fusion", target=target, **options)(module([CASES[pattern]]))
    (decision,) = report.decisions
    assert (decision.pattern, decision.fused) == (pattern, True)
    assert made and all(b".target sm_100a" in kernel.ptx for kernel in made)
