"""Two matmuls as one kernel against two of ours and against torch, on an NVIDIA GPU, in one run.

The GEMM chains G1 to G12 of MCFuser (SC'24), adapters of LoRA, and a bottleneck.  Everything is
captured into CUDA graphs, and L2 is flushed before each replay.  "fused" has the plan that the
estimator finds best; "by itself" says whether it would fuse without being told to.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tvm import ir, relax

from benchmarks import building, recording
from benchmarks import gpu_timing as timing
from relax_fusion.errors import Decline
from relax_fusion.estimator import choose
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import MatmulChain

PASS = "FuseMatmulChain"
GEMM_CHAINS = (  # batch, m, n, k, h of MCFuser's table: n is between the matmuls
    *((1, 512, 256, 64, h) for h in (64, 128, 256)),
    *((1, 512, 512, k, 256) for k in (256, 512, 1024)),
    *((1, m, 512, 128, 128) for m in (512, 1024, 2048)),
    *((b, 1024, 1024, 128, 128) for b in (1, 4, 8)),
)


@dataclass(frozen=True)
class Case:
    """A chain of fixed sizes."""

    name: str
    work: MatmulChain

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of x, A, B, and what the steps read."""
        work = self.work
        lead = () if work.batch is None else (work.batch,)
        sizes = ((work.k, work.r), (work.r, work.n))
        weights = [
            (*lead, *(size[::-1] if layout == "nk" else size))
            for size, layout in zip(sizes, work.layouts, strict=True)
        ]
        rest = [((work.r,), s) for s in work.inner if s == "bias"]
        wide = (*lead, work.rows, work.n)
        rest += [((work.n,) if s == "bias" else wide, s) for s in work.outer]
        return [
            (*lead, work.rows, work.k),
            *weights,
            *(shape for shape, step in rest if step in ("bias", "residual")),
        ]

    def module(self) -> ir.IRModule:
        """Return the chain as a Relax function."""
        types = [relax.TensorType(shape, self.work.dtype) for shape in self.shapes()]
        params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types)]
        builder, rest = relax.BlockBuilder(), iter(params[3:])
        with builder.function("main", params):
            with builder.dataflow():
                value = params[0]
                for side, steps in enumerate((self.work.inner, self.work.outer)):
                    weight = params[1 + side]
                    if self.work.layouts[side] == "nk":
                        weight = builder.emit(relax.op.permute_dims(weight))
                    value = builder.emit(relax.op.matmul(value, weight))
                    for step in steps:
                        value = builder.emit(self._step(step, value, rest))
                out = builder.emit_output(value)
            builder.emit_func_output(out)
        return builder.get()

    def _step(self, step: str | float, value: relax.Expr, rest: Iterator[relax.Var]) -> relax.Expr:
        if isinstance(step, float):
            return relax.op.multiply(value, relax.const(step, self.work.dtype))
        if step in ("bias", "residual"):
            return relax.op.add(value, next(rest))
        return getattr(relax.op.nn, step)(value)

    def torch(self, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return the chain as torch is best told to compute it."""
        x, a, b, *rest = tensors
        if self.work.batch is not None:
            return lambda: torch.bmm(torch.bmm(x, a), b)
        if not self.work.inner:
            return lambda: torch.addmm(rest[0], x @ a.t(), b.t(), alpha=self.work.outer[0])
        gelu = torch.nn.functional.gelu
        return lambda: torch.addmm(rest[1], gelu(torch.addmm(rest[0], x, a.t())), b.t()).add_(
            rest[2]
        )


def cases() -> list[Case]:
    """Return what is timed."""
    half = {"inner": (), "dtype": "float16", "out_dtype": "float16"}
    found = [
        Case(f"G{i}", MatmulChain(m, k, n, h, ("kn", "kn"), outer=(), batch=b, **half))
        for i, (b, m, n, k, h) in enumerate(GEMM_CHAINS, 1)
    ]
    for r in (16, 64):
        for rows in (16, 512, 4096):
            outer = (2.0, "residual")
            work = MatmulChain(rows, 4096, r, 4096, ("nk", "nk"), outer=outer, **half)
            found.append(Case(f"LoRA of rank {r}, {rows} rows", work))
    steps = ("bias", "gelu"), ("bias", "residual")
    work = MatmulChain(1024, 768, 64, 768, ("nk", "nk"), *steps, "bfloat16", "bfloat16")
    return [*found, Case("bottleneck of 64 in 768, 1024 rows", work)]


@dataclass(frozen=True)
class Job:
    """A case to be compiled for a target, with one kernel or with two."""

    name: str
    case: Case
    target: str


CONTENDERS = {"two": {"disable": [PASS]}, "fused": {"always_fuse": True}}


def build(job: Job) -> building.Built:
    """Compile a case."""
    return building.compiled(job.case.module(), job.target, **CONTENDERS[job.name])


def fits(case: Case, target: str) -> bool:
    """Tell whether there is a plan for one kernel."""
    dev = device_of(make_target(target))
    return not isinstance(choose(case.work, dev, always=True, backend="triton"), Decline)


def measured(case: Case, target: str, sampler: timing.Sampler) -> dict[str, object]:
    """Return microseconds and errors of a case."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.work.dtype)
    scales = (1.0, case.work.k**-0.5, case.work.r**-0.5)
    tensors = [
        (torch.randn(shape, device=timing.DEVICE) * (scales[i] if i < 3 else 1.0)).to(dtype)
        for i, shape in enumerate(case.shapes())
    ]
    peer = case.torch(tensors)
    exact = case.torch([t.double() for t in tensors])()
    calls = {"torch": timing.Call(peer)}
    for name in CONTENDERS:
        calls[name] = timing.Call(build(Job(name, case, target)).call("main", tensors))
    errors = {
        n: timing.error_of(timing.as_torch(c.checked_result()), exact) for n, c in calls.items()
    }
    times = sampler.sample_ms({name: call.launch for name, call in calls.items()})
    alone = choose(case.work, device_of(make_target(target)), backend="triton")
    return {
        "microseconds": {name: 1e3 * statistics.median(ms) for name, ms in times.items()},
        "errors": errors,
        "by itself": not isinstance(alone, Decline),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h200", help="a device of the table (default: h200)")
    parser.add_argument("--output", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    sampler, rows = timing.Sampler(), [("chain", "torch, us", "two of ours", "fused", "by itself")]
    record = {**recording.facts(), "gpu": torch.cuda.get_device_name(), "cases": {}}
    found_plans = [case for case in cases() if fits(case, args.target)]
    jobs = [Job(name, case, args.target) for case in found_plans for name in CONTENDERS]
    for why in building.fill_cache(build, jobs):
        print(why)
    for case in cases():
        if case not in found_plans:
            rows.append((case.name, "", "", "no plan fits", ""))
            continue
        found = record["cases"][case.name] = measured(case, args.target, sampler)
        times = [f"{found['microseconds'][name]:.2f}" for name in ("torch", "two", "fused")]
        rows.append((case.name, *times, "yes" if found["by itself"] else "no"))
        print(*rows[-1], flush=True)
    for path in recording.write("bench_chain", record, recording.markdown_table(rows), args.output):
        print(path)


if __name__ == "__main__":
    main()
