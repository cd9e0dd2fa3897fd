"""Fused kernels on a GPU: against the same chain left to TVM, and against the estimator.

One run on a machine with an NVIDIA GPU.  Every chain of a LLaMA-3.1-8B layer, float16, is compiled
twice by the pipeline, with our passes and without, and both are timed through the VM, beside what
the estimator predicts of both.  It is the benchmark of the TIR kernels (``--backend tir``) and of
rope; the suite matmul compares the Triton kernels with peers.  L2 is not flushed; each weight but
the output projection's and qkv's is larger than it.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import ClassVar

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from benchmarks.runner import Entry, Suite
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


class Layer(Suite):
    """Chains of a decoder layer, at several numbers of rows."""

    name, device = "bench_layer", "tvm"
    plain: ClassVar = {"backend": ""}
    axes = ("cases", "rows")
    key = ("chain", "rows")
    cases = CHAINS
    case_options = ("--cases", "--chains")
    head = ("chain", "rows", "ours", "left to TVM", "ratio", "predicted fused", "predicted unfused")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        rows = [1, 16, 64, 256, 1024, 4096]
        parser.add_argument("--rows", type=int, nargs="+", default=rows)
        parser.add_argument("--backend", default="triton", choices=("triton", "tir"))

    def measured(self, item: tuple[str, int]) -> Entry:
        target = make_target(self.args.target)
        fused_s, report = time_chain(*item, target, self.args.backend)
        unfused_s, _ = time_chain(*item, target, None)
        if report.fused:
            predicted = report.fused[0].predictions[0]
            prices = predicted.fused.seconds, predicted.unfused.seconds
        else:
            decline = report.declined[0].decline
            prices = decline.fused_s, decline.unfused_s
        return {
            "fused": bool(report.fused),
            "ours_s": fused_s,
            "tvm_s": unfused_s,
            "predicted_fused_s": prices[0],
            "predicted_unfused_s": prices[1],
        }

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}; median of {REPEATS} x {NUMBER} calls."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        names = ("ours_s", "tvm_s", "predicted_fused_s", "predicted_unfused_s")
        ours, tvm_s, *prices = (format_seconds(entry[name]) for name in names)
        ours += "" if entry["fused"] else " (declined)"
        ratio = f"{entry['tvm_s'] / entry['ours_s']:.2f}"
        return entry["chain"], str(entry["rows"]), ours, tvm_s, ratio, *prices
