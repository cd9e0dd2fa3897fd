"""Compile a Relax module by relax_fusion's pipeline, and compare with TVM's own.

The module is a feed-forward block as LLaMA has it, of any number of tokens.

python as_a_pipeline.py
"""

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import relax_fusion

HIDDEN, INNER, TOKENS = 256, 704, 12


class FeedForward(nn.Module):
    """Norm, gate and up, down, and the residual."""

    def __init__(self) -> None:
        self.norm = nn.RMSNorm(HIDDEN, axes=[-1], epsilon=1e-5, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Return a tensor of the shape of x."""
        gate, up = nn.op.split(self.gate_up(self.norm(x)), 2, axis=-1)
        return x + self.down(nn.op.silu(gate) * up)


def run(executable: tvm.relax.VMExecutable, arrays: list[np.ndarray]) -> np.ndarray:
    """Call the function of a compiled module."""
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["forward"](*map(tvm.runtime.tensor, arrays)).numpy()


tokens = nn.spec.Tensor(["tokens", HIDDEN], "float32")
mod, params = FeedForward().export_tvm({"forward": {"x": tokens}})

target = relax_fusion.make_target("llvm")  # or "h200", "a100", a target of TVM
report = relax_fusion.Report()
pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
ours = tvm.compile(mod, target=target, relax_pipeline=pipeline)
default = tvm.compile(mod, target=target)

rng = np.random.default_rng(0)
shapes = [(TOKENS, HIDDEN), *(param.shape for _, param in params)]
arrays = [rng.standard_normal([int(n) for n in shape], "float32") / 16 for shape in shapes]
wanted = run(default, arrays)
difference = np.abs(run(ours, arrays) - wanted).max() / np.abs(wanted).max()

print(report.text())
print()
print(f"chains fused: {sum(decision.fused for decision in report.decisions)}")
print(f"largest difference from TVM's default pipeline, of the largest value: {difference:.1e}")
