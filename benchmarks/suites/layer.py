"""Fused kernels on a GPU: against the same chain left to TVM, and against the estimator.

One run on a machine with an NVIDIA GPU.  Every chain of a LLaMA-3.1-8B layer, float16, is compiled
twice by the pipeline, with our passes and without, and both are timed through the VM, beside what
the estimator predicts of both.  It is the benchmark of the TIR kernels (``--backend tir``) and of
rope; the suite matmul compares the Triton kernels with peers.  L2 is not flushed; each weight but
the output projection's and qkv's is larger than it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from benchmarks import recording
from relax_fusion import PATTERNS, Report, make_target
from relax_fusion.estimator import format_seconds
from relax_fusion.models.rope import Angles

HIDDEN, WIDE, QKV = 4096, 14336, 6144
QK_HEADS, HEAD_DIM = 40, 128
ANGLES = ("cos", "sin")
CHAINS = ("norm_qkv", "norm_qkv_rope", "norm_gate_up", "out_residual", "down_residual")
REPEATS, NUMBER = 7, 10


class Chains(nn.Module):
    """The projections of a decoder layer, one chain a method."""

    def __init__(self) -> None:
        self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.qkv = nn.Linear(HIDDEN, QKV, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * WIDE, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def norm_qkv(self, x: nn.Tensor) -> nn.Tensor:
        return self.qkv(self.norm(x))

    def norm_qkv_rope(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor) -> nn.Tensor:
        return Angles(cos, sin).turn_first(self.qkv(self.norm(x)), QK_HEADS)

    def norm_gate_up(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = nn.op.split(self.gate_up(self.norm(x)), 2, axis=-1)
        return nn.op.silu(gate) * up

    def out_residual(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return residual + self.out(x)

    def down_residual(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return residual + self.down(x)


def shapes(chain: str, rows: int) -> dict[str, list[int]]:
    """Return the inputs of a chain."""
    wide = WIDE if chain == "down_residual" else HIDDEN
    inputs = {"x": [1, rows, wide]}
    if chain.endswith("residual"):
        inputs["residual"] = [1, rows, HIDDEN]
    if chain.endswith("rope"):
        inputs |= {name: [rows, 1, HEAD_DIM] for name in ANGLES}
    return inputs


def dtype_of(name: str) -> str:
    """Return the dtype of an input."""
    return "float32" if name in ANGLES else "float16"


def time_chain(
    chain: str, rows: int, target: tvm.target.Target, backend: str | None
) -> tuple[float, Report]:
    """Return the median seconds of a call, and what was decided; unfused without a back end."""
    module = Chains()
    module.to("float16")
    spec = {k: nn.spec.Tensor(v, dtype_of(k)) for k, v in shapes(chain, rows).items()}
    mod, params = module.export_tvm(spec={chain: spec})
    report = Report()
    # A user's plan is always taken; here the estimator decides, and a decline is a result too.
    pipeline = relax.get_pipeline(
        "relax_fusion",
        target=target,
        report=report,
        backend=backend,
        disable=[] if backend else list(PATTERNS),
    )
    vm = relax.VirtualMachine(tvm.compile(mod, target=target, relax_pipeline=pipeline), tvm.cuda(0))
    rng = np.random.default_rng(0)
    values = [
        rng.standard_normal(v, "float32").astype(dtype_of(k))
        for k, v in shapes(chain, rows).items()
    ]
    for _, p in params:
        weight = rng.standard_normal([int(d) for d in p.shape], "float32") * 0.02
        values.append(weight.astype("float16"))
    args = [tvm.runtime.tensor(v, tvm.cuda(0)) for v in values]
    timer = vm.time_evaluator(chain, tvm.cuda(0), number=NUMBER, repeat=REPEATS)
    return float(timer(*args).median), report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--chains", nargs="+", default=list(CHAINS), choices=CHAINS)
    parser.add_argument("--backend", default="triton", choices=("triton", "tir"))
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    target = make_target(args.target)
    rows_out = []
    table: list[tuple[str, ...]] = [
        ("chain", "rows", "ours", "left to TVM", "ratio", "predicted fused", "predicted unfused")
    ]
    for chain in args.chains:
        for rows in args.rows:
            fused_s, report = time_chain(chain, rows, target, args.backend)
            unfused_s, _ = time_chain(chain, rows, target, None)
            predicted = report.fused[0].predictions[0] if report.fused else None
            decline = report.declined[0].decline if report.declined else None
            p_fused = predicted.fused.seconds if predicted else decline.fused_s
            p_unfused = predicted.unfused.seconds if predicted else decline.unfused_s
            row = {
                "chain": chain,
                "rows": rows,
                "fused": bool(report.fused),
                "ours_s": fused_s,
                "tvm_s": unfused_s,
                "predicted_fused_s": p_fused,
                "predicted_unfused_s": p_unfused,
            }
            rows_out.append(row)
            ours = format_seconds(fused_s) + ("" if report.fused else " (declined)")
            times = [unfused_s, p_fused, p_unfused]
            texts = [format_seconds(t) for t in times]
            ratio = f"{unfused_s / fused_s:.2f}"
            table.append((chain, str(rows), ours, texts[0], ratio, *texts[1:]))
            print(*table[-1], sep="  ", flush=True)
    device = str(tvm.cuda(0).device_name)
    record = {**recording.facts(), "gpu": device, "repeats": REPEATS, "cases": rows_out}
    text = f"{device}; median of {REPEATS} x {NUMBER} calls.\n\n{recording.markdown_table(table)}"
    recording.write(f"bench_gpu_{args.backend}", record, text, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
