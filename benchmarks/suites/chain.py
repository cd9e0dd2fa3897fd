"""Two matmuls as one kernel against two of ours and against torch, on an NVIDIA GPU, in one run.

The GEMM chains G1 to G12 of MCFuser (SC'24), adapters of LoRA, and a bottleneck.  Everything is
captured into CUDA graphs, and L2 is flushed before each replay.  "fused" has the plan that the
estimator finds best; "by itself" says whether it would fuse without being told to.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tvm import ir, relax

from benchmarks import building
from benchmarks.report import Entry
from benchmarks.suite import Suite
from benchmarks.torch_compile import compiled
from relax_fusion.errors import Decline
from relax_fusion.estimator import choose
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.tuning import tune
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

    def tensors(self, device: str) -> list[torch.Tensor]:
        """Draw the operands, the weights by their widths."""
        torch.manual_seed(0)
        scales = (1.0, self.work.k**-0.5, self.work.r**-0.5, *[1.0] * len(self.shapes()))
        return [
            (torch.randn(shape, device=device) * scale).to(getattr(torch, self.work.dtype))
            for shape, scale in zip(self.shapes(), scales, strict=False)
        ]

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


def _cases() -> list[Case]:
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


CHAINS = _cases()
"""What is timed."""


@dataclass(frozen=True)
class Job:
    """A case to be compiled for a target, with one kernel or with two."""

    name: str
    case: Case
    target: str
    database: Path | None = None


WAYS: dict[str, dict[str, Any]] = {
    "two": {"disable": [PASS]},
    "fused": {"always_fuse": True},
    "tuned": {"always_fuse": True},
}
"""The options of the pipeline, by contender of ours."""


def build(job: Job) -> building.Built:
    """Compile a case."""
    options = {**WAYS[job.name], "database": job.database}
    return building.compiled(job.case.module(), job.target, **options)


class MatmulChains(Suite):
    """Chains of fixed sizes; ours may err twice as much as torch."""

    name, device = "bench_chain", "gpu"
    cases = tuple(case.name for case in CHAINS)
    contenders = ("torch", "compile", *WAYS)
    usual = ("torch", "two", "fused")
    ours = tuple(WAYS)
    head = ("chain", "torch, us", "torch.compile", "two of ours", "fused", "tuned", "by itself")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        help = "times of plans, for tuned (default: measured first, into a file that is not kept)"
        parser.add_argument("--database", type=Path, metavar="FILE", help=help)

    def items(self) -> list[Case]:
        return [case for case in CHAINS if case.name in self.args.cases]

    def facts(self, item: Case) -> Entry:
        return {"case": item.name}

    def absent(self, item: Case) -> list[str]:
        return [] if self.fits(item, always=True) else ["fused"]

    def fits(self, case: Case, **options: Any) -> bool:
        """Tell whether there is a plan for one kernel that the estimator takes."""
        dev = device_of(make_target(self.args.target))
        return not isinstance(choose(case.work, dev, backend="triton", **options), Decline)

    def prepare(self, items: Sequence[Case]) -> None:
        jobs = [self.job(name, case) for case in items for name in self.asked(case) if name in WAYS]
        building.fill_cache(build, [job for job in jobs if job.name != "tuned"])
        for job in jobs:
            if job.name == "tuned" and job.database is not None:
                options = {"backend": "triton", **WAYS["tuned"]}
                tune(job.case.module(), job.database, job.target, **options)

    def job(self, name: str, case: Case) -> Job:
        """Return what is compiled for a contender."""
        if name != "tuned":
            return Job(name, case, self.args.target)
        if self.args.database is None:
            self.args.database = Path(mkdtemp(), "times.jsonl")
        return Job(name, case, self.args.target, self.args.database)

    def measured(self, item: Case) -> Entry:
        """Return microseconds and errors of a case."""
        timing = self.session.timing
        tensors = item.tensors(timing.DEVICE)
        exact = item.torch([t.double() for t in tensors])()
        errors = {"torch": timing.error_of(item.torch(tensors)(), exact)}
        allowed = timing.allowed_error(errors["torch"], item.work.dtype)

        def contender(name: str) -> Callable[[], Any]:
            if name == "torch":
                return item.torch(tensors)
            if name == "compile":
                return compiled(item.torch(tensors))
            return build(self.job(name, item)).call("main", tensors)

        def check(name: str, call: Any) -> None:
            errors[name] = timing.error_of(timing.as_torch(call.checked_result()), exact)

        calls, failed = self.session.captured(self.asked(item), contender, check)
        return {
            "failed": failed,
            "wrong": [name for name, error in errors.items() if not error <= allowed],
            **self.session.times(calls),
            "errors": errors,
            "by_itself": self.fits(item),
        }

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = {"fused": "no plan fits", **{n: f"{t:.2f}" for n, t in entry["us"].items()}}
        cells = (times.get(name, "") for name in self.contenders)
        return entry["case"], *cells, "yes" if entry["by_itself"] else "no"
