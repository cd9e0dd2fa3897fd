"""Run passes of relax_fusion among one's own, and replace one phase of its pipeline.

The module is a projection, an activation and a projection back, in TVMScript.

python passes_alone.py
"""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.transform import Pass
from tvm.script import ir as I
from tvm.script import relax as R

import relax_fusion
from relax_fusion import pipeline


@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor(("n", 128), "float32"),
        up: R.Tensor((128, 512), "float32"),
        down: R.Tensor((512, 128), "float32"),
    ):
        with R.dataflow():
            inner = R.nn.silu(R.matmul(x, up))
            y = R.add(x, R.matmul(inner, down))
            R.output(y)
        return y


target = relax_fusion.make_target("llvm")

# What one pass makes of the module: the rest stays Relax, for whatever comes next.
fuse = relax_fusion.FuseMatmulEpilogue(relax_fusion.FuseOptions(target=target))
mod = tvm.transform.Sequential([fuse, relax.transform.CanonicalizeBindings()])(Module)
print(mod["main"].script())


def only_epilogues(options: relax_fusion.PipelineOptions) -> list[Pass]:
    """Stand in for the second phase, which has all passes."""
    return [relax_fusion.FuseMatmulEpilogue(options.fuse)]


# Five phases of the pipeline, and one's own.
first, _, *others = (phase for _, phase, _ in pipeline.PHASES)
options = relax_fusion.PipelineOptions(target)
passes = [each for phase in (first, only_epilogues, *others) for each in phase(options)]
executable = tvm.compile(Module, target, relax_pipeline=tvm.transform.Sequential(passes))

rng = np.random.default_rng(0)
x, up, down = (rng.standard_normal(s, "float32") / 8 for s in [(6, 128), (128, 512), (512, 128)])
machine = relax.VirtualMachine(executable, tvm.cpu())
result = machine["main"](*map(tvm.runtime.tensor, (x, up, down))).numpy()
wanted = x + (x @ up / (1 + np.exp(-x @ up))) @ down
print(f"calls of fused kernels: {mod['main'].script().count('R.call_tir')}")
print(f"largest difference from NumPy: {np.abs(result - wanted).max():.1e}")
