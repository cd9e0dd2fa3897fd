"""Small blocks of models as one kernel, apart, and in torch, on an NVIDIA GPU, in one run.

Blocks that no pattern is for: token mixers, narrow MLPs of two and three layers, memories that a
softmax reads.  They come as `torch.export` writes them, with weights as parameters.  Everything is
captured into CUDA graphs, and L2 is flushed before each replay.  "fused" fuses whether that pays or
not, "chosen" where the estimator expects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from tvm import ir, relax

from benchmarks import building
from benchmarks.report import Entry
from benchmarks.suite import Suite
from benchmarks.torch_compile import compiled
from relax_fusion.frontends.torch import from_exported_program

DTYPE = "float16"


class Mixer(nn.Module):
    """What MLP-Mixer does across tokens (Tolstikhin et al., 2021)."""

    def __init__(self, tokens: int, hidden: int, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.mlp = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    """``x + body(norm(x))``."""

    def __init__(self, norm: nn.Module, *body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = norm, nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


class Memory(nn.Module):
    """External attention (Guo et al., 2021): a softmax over learned keys."""

    def __init__(self, features: int, slots: int) -> None:
        super().__init__()
        self.keys = nn.Linear(features, slots, bias=False)
        self.values = nn.Linear(slots, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(torch.softmax(self.keys(x), -1)) + x


def mlp(*widths: int, between: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    """Return linear layers with ReLU between them, and perhaps norms."""
    layers: list[nn.Module] = []
    for k, n in pairwise(widths):
        layers += [nn.Linear(k, n), *([between(n)] if between else []), nn.ReLU()]
    return nn.Sequential(*layers[: -2 if between else -1])


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tokens of Mixer-S/16, 8 images": (lambda: Mixer(196, 256, 512), (8, 196, 512)),
    "tokens of Mixer-B/32, 16 images": (lambda: Mixer(49, 384, 768), (16, 49, 768)),
    "MLP of ViT-Ti/16, 8 images": (
        lambda: Residual(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192)),
        (8, 197, 192),
    ),
    "MLP of BERT-mini, 32 x 128 tokens": (
        lambda: Residual(nn.Identity(), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        (32, 128, 256),
    ),
    "MLP of BERT-small, 4 x 512 tokens": (
        lambda: Residual(nn.Identity(), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
        (4, 512, 512),
    ),
    "three layers of 64, 65536 rows": (lambda: mlp(64, 64, 64, 64), (65536, 64)),
    "three layers of 128, 8192 rows": (lambda: mlp(128, 128, 128, 128), (8192, 128)),
    "norms between 256, 4096 rows": (
        lambda: mlp(256, 256, 256, between=nn.LayerNorm),
        (4096, 256),
    ),
    "adapter of 64 in 768, 2048 rows": (
        lambda: Residual(nn.LayerNorm(768), nn.Linear(768, 64), nn.GELU(), nn.Linear(64, 768)),
        (2048, 768),
    ),
    "memory of 64 in 512, 4096 rows": (lambda: Memory(512, 64), (4096, 512)),
}
"""What makes each block, and the shape of its input."""


@dataclass(frozen=True)
class Job:
    """A block to be compiled for a target."""

    name: str
    case: str
    target: str


WAYS: dict[str, dict[str, Any]] = {
    "apart": {"disable": ["FuseChains", "FuseMatmulChain"]},
    "fused": {"always_fuse": True},
    "chosen": {},
}
"""The options of the pipeline, by contender of ours."""


@cache
def exported(case: str) -> tuple[nn.Module, ir.IRModule, list[torch.Tensor]]:
    """Return a block, its import, and its operands: the input and the weights."""
    torch.manual_seed(0)
    make, shape = BLOCKS[case]
    block = make().half().eval()
    x = torch.randn(shape).half()
    program = torch.export.export(block, (x,), strict=False)
    mod, params = relax.frontend.detach_params(
        from_exported_program(program, keep_params_as_input=True)
    )
    weights = [torch.from_dlpack(p) for p in params["main"]]
    return block, mod, [x, *weights]


def build(job: Job) -> building.Built:
    """Compile a block."""
    return building.compiled(exported(job.case)[1], job.target, **WAYS[job.name])


class Regions(Suite):
    """Blocks of fixed sizes; ours may err twice as much as torch."""

    name, device = "bench_regions", "gpu"
    cases = tuple(BLOCKS)
    contenders = ("torch", "compile", *WAYS)
    usual = contenders
    ours = tuple(WAYS)
    head = ("block", "torch, us", "torch.compile", "apart", "fused", "chosen", "kernels")

    def items(self) -> list[str]:
        return [case for case in BLOCKS if case in self.args.cases]

    def facts(self, item: str) -> Entry:
        return {"case": item}

    def prepare(self, items: Sequence[str]) -> None:
        names = [(name, case) for case in items for name in self.contenders if name in WAYS]
        building.fill_cache(build, [Job(name, case, self.args.target) for name, case in names])

    @torch.no_grad()
    def measured(self, item: str) -> Entry:
        """Return microseconds and errors of a block."""
        timing = self.session.timing
        block, _, operands = exported(item)
        x, *weights = (t.to(timing.DEVICE) for t in operands)
        exact = block.double().to(timing.DEVICE)(x.double())
        block = block.half()
        errors = {"torch": timing.error_of(block(x), exact)}
        allowed = timing.allowed_error(errors["torch"], DTYPE)
        kernels: list[str] = []

        def contender(name: str) -> Callable[[], Any]:
            if name == "torch":
                return lambda: block(x)
            if name == "compile":
                return compiled(lambda: block(x))
            built = build(Job(name, item, self.args.target))
            if name == "chosen":
                kernels.extend(sorted({d.pattern for d in built.report.decisions if d.fused}))
            return built.call("main", [x, *weights])

        def check(name: str, call: Any) -> None:
            errors[name] = timing.error_of(timing.as_torch(call.checked_result()), exact)

        calls, failed = self.session.captured(self.asked(item), contender, check)
        return {
            "failed": failed,
            "wrong": [name for name, error in errors.items() if not error <= allowed],
            **self.session.times(calls),
            "errors": errors,
            "kernels": kernels,
        }

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = {name: f"{t:.2f}" for name, t in entry["us"].items()}
        cells = (times.get(name, "") for name in self.contenders)
        return entry["case"], *cells, ", ".join(entry["kernels"])
