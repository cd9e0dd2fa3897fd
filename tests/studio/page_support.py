"""Reports to make pages of, small enough for any machine."""

from __future__ import annotations

from functools import cache, partial

import tvm
from tvm.script import from_source

from relax_fusion import Report, make_target
from relax_fusion.options import PipelineOptions
from relax_fusion.pipeline import (
    count_launches,
    phase0_annotate,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
    schedule_kernels,
)
from relax_fusion.report import Source, Text
from relax_fusion.transforms.debug_dump import reported
from relax_fusion.triton_bridge.sources import RecordSources

NASTY = "<script>alert('model')</script>"
"""What a page must never take for its own."""

LAYER = """
            n{i} = R.nn.rms_norm(x{i}, g, axes=[-1], epsilon=1e-5)
            h{i} = R.nn.silu(R.matmul(n{i}, w))
            x{j} = R.add(x{i}, R.matmul(h{i}, d))
"""

MODULE = """
@I.ir_module
class Module:
    @R.function
    def main(
        x0: R.Tensor(("rows", 256), "{dtype}"), g: R.Tensor((256,), "{dtype}"),
        w: R.Tensor((256, 1024), "{dtype}"), d: R.Tensor((1024, 256), "{dtype}"),
        q: R.Tensor((1, 128, 4, 64), "{dtype}"), m: R.Tensor((1, 4, 128, 128), "{dtype}"),
        e: R.Tensor((700, 900), "{dtype}"),
    ):
        rows = T.int64()
        with R.dataflow():
{layers}
            s = R.nn.softmax(R.astype(x4, "float32"), axis=0)
            f = R.multiply(s, s)
            r = R.nn.rms_norm(x4, g, axes=[-1], epsilon=1e-5)
            a = R.nn.attention_bias(q, q, q, m)
            t = R.permute_dims(e)
            gv = (f, r, a, t)
            R.output(gv)
        return gv
"""


@cache
def report_for(target: str) -> Report:
    """Return the report of a module of four layers and operators that no kernel of ours takes."""
    dtype = "float32" if target == "llvm" else "float16"
    layers = "".join(LAYER.format(i=i, j=i + 1) for i in range(4))
    mod = from_source(MODULE.format(dtype=dtype, layers=layers))
    report, made = Report(), make_target(target)
    options = PipelineOptions(made, report=report, variable_bounds={"rows": 512})
    report.material.model = f"small {NASTY}"
    with reported(report, made, options.fuse.backend), made:
        mod = tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(mod)
        passes = [*phase2_lower(options), *phase3_tir(options), schedule_kernels(options)]
        passes.append(RecordSources(made, report.material.sources))
        tvm.transform.Sequential([*passes, *count_launches(options)])(mod)
    return report


def source(function: str, text: str, times: int = 1) -> Source:
    """Return a source of given texts."""
    return Source(function, partial(list, [Text(f"t{i}", "CUDA C++", text) for i in range(times)]))
