"""The Triton kernels of normalised and gated matmuls on an NVIDIA GPU: right, and how fast?

Every plan is checked against float64 and timed beside the bare cuBLAS matmul and (``--compile``)
torch.compile of the whole chain, at the sizes of a LLaMA-3.1-8B layer: norm -> qkv (4096 -> 6144),
norm -> gate, up -> silu * up (4096 -> 2 x 14336).  A time is the median of single replays of a CUDA
graph, the L2 cache filled with other data before each, launch included.  Needs torch and Triton,
no TVM.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, QKV, WIDE = 4096, 6144, 14336
EPS = 1e-5
SAMPLES, WARMUP = 25, 3
DEVICE = "cuda"


def kernels() -> types.SimpleNamespace:
    """Import the kernels without the package around them, which needs TVM."""
    package = types.ModuleType("bridge")
    package.__path__ = [str(ROOT / "relax_fusion/triton_bridge")]  # type: ignore[attr-defined]
    sys.modules["bridge"] = package
    names = ("row_norm", "gemv", "matmul_pointer", "split_reduce", "matmul_tma")
    found = {n: getattr(importlib.import_module(f"bridge.kernels.{n}"), n) for n in names}
    return types.SimpleNamespace(**found)


class Problem:
    """Tensors of one chain at one number of rows, and its result in float64."""

    def __init__(self, case: str, rows: int, dtype: torch.dtype = torch.float16) -> None:
        torch.manual_seed(rows)
        self.case, self.rows, self.k = case, rows, HIDDEN
        self.gated = case == "gate_up"
        self.n = WIDE if self.gated else QKV
        draw = lambda *s: torch.randn(*s, device=DEVICE)  # noqa: E731
        self.x = (draw(rows, self.k) * 2).to(dtype)
        self.gamma = (1 + 0.2 * draw(self.k)).to(dtype)
        self.w = (draw(self.n * (2 if self.gated else 1), self.k) * 0.02).to(dtype)
        self.gate, self.up = (self.w[: self.n], self.w[self.n :]) if self.gated else (self.w,) * 2
        self.y = torch.empty_like(self.x)
        self.out = torch.empty(rows, self.n, device=DEVICE, dtype=dtype)
        self.workspace = torch.empty(96 << 20, device=DEVICE, dtype=torch.float32)

    def chain(self, x: torch.Tensor, w: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        """Compute the chain in the dtype of the arguments, the norm in at least float32."""
        wide = x.float() if x.dtype != torch.float64 else x
        norm = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * gamma
        product = norm @ w.T
        if not self.gated:
            return product
        gate, up = product.split(self.n, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def reference(self) -> torch.Tensor:
        """Return the result in float64."""
        return self.chain(self.x.double(), self.w.double(), self.gamma.double())

    def error(self, out: torch.Tensor, reference: torch.Tensor) -> float:
        """Return the relative error in the Frobenius norm."""
        return float((out.double() - reference).norm() / reference.norm())

    def bytes_and_flops(self) -> tuple[float, float]:
        """Return the least traffic and the operations of the chain."""
        count = self.w.numel()
        moved = 2.0 * (count + self.x.numel() + self.out.numel())
        return moved, 2.0 * self.rows * count


Launch = Callable[[bool], None]  # the argument: compile only


class Plans:
    """Builds the launches of a problem from tile numbers."""

    def __init__(self, problem: Problem, pdl: bool = True) -> None:
        # With many rows the waiting matmul would hold the room that the norm could use.
        self.p, self.f, self.pdl = problem, KERNELS, pdl and problem.rows < 512

    def launch(self, kernel, grid, args, warm: bool, stages: int = 3, **options) -> None:
        options.update(num_stages=stages)
        if warm:
            kernel.warmup(*args, grid=grid, **options)
        else:
            kernel[grid](*args, **options)

    def norm(self) -> Launch:
        p = self.p
        early = p.rows <= 128
        consts = (p.k, triton.next_power_of_2(p.k), 1, "rms", *[False] * 3, self.pdl, early)
        args = (p.x, p.x, p.gamma, p.gamma, p.y, p.y, p.rows, EPS, *consts)
        warps = 8 if p.rows < 1024 else 4
        return lambda warm: self.launch(self.f.row_norm, (p.rows,), args, warm, num_warps=warps)

    def gemv(self, bn: int, bk: int, warps: int) -> list[Launch]:
        p = self.p
        act = "silu" if p.gated else "none"
        consts = (p.n, p.k, "nk", "rms", False, p.gated, False, act, "none", bn, bk, False)
        args = (p.x, p.gamma, p.gamma, p.gate, p.up, p.gamma, p.gamma, p.out, p.out, p.rows, EPS)
        grid = (triton.cdiv(p.n, bn), p.rows)
        return [lambda warm: self.launch(self.f.gemv, grid, args + consts, warm, num_warps=warps)]

    def pointer(
        self,
        bm: int,
        bn: int,
        bk: int,
        split: int,
        warps: int,
        stages: int,
        swap: bool,
        norm: str,
    ) -> list[Launch]:
        p = self.p
        act = "silu" if p.gated else "none"
        separate = norm == "separate"
        kind = "none" if separate else norm
        consts = (
            p.n,
            p.k,
            "nk",
            kind,
            p.gated,
            False,
            act,
            "none",
            bm,
            bn,
            bk,
            split,
            8,
            swap,
        )
        x = p.y if separate else p.x
        args = (x, p.gamma, p.gate, p.up, p.gamma, p.gamma, p.out, p.out, p.workspace, p.rows, EPS)
        grid = (triton.cdiv(p.rows, bm) * triton.cdiv(p.n, bn), split)
        after = self.pdl and separate
        args = (*args, *consts, stages, after or (self.pdl and split > 1))
        steps = [self.norm()] if separate else []
        steps.append(
            lambda warm: self.launch(
                self.f.matmul_pointer, grid, args, warm, stages, num_warps=warps, launch_pdl=after
            )
        )
        if split > 1:
            rows, wide = 1, 1024
            r_consts = (
                p.n,
                p.k,
                kind,
                p.gated,
                False,
                act,
                "none",
                split,
                rows,
                wide,
                self.pdl,
            )
            r_args = (p.workspace, p.gamma, p.gamma, p.out, p.out, p.rows, EPS, *r_consts)
            r_grid = (triton.cdiv(p.n, wide), p.rows)
            steps.append(
                lambda warm: self.launch(
                    self.f.split_reduce, r_grid, r_args, warm, num_warps=4, launch_pdl=self.pdl
                )
            )
        return steps

    def descriptors(self, bm: int, bn: int, bk: int) -> tuple[TensorDescriptor, ...]:
        p = self.p
        sizes = ((p.y, bm), (p.gate, bn), (p.up, bn))
        return tuple(TensorDescriptor(t, list(t.shape), [p.k, 1], [b, bk]) for t, b in sizes)

    def tma(
        self,
        bm: int,
        bn: int,
        bk: int,
        warps: int,
        stages: int,
        flatten: bool,
        group: int = 8,
        per_sm: int = 1,
    ) -> list[Launch]:
        p = self.p
        act = "silu" if p.gated else "none"
        consts = (p.n, p.k, "nk", p.gated, False, act, "none", bm, bn, bk, group, stages)
        args = (*self.descriptors(bm, bn, bk), p.gamma, p.gamma, p.out, p.out, p.rows)
        tiles = triton.cdiv(p.rows, bm) * triton.cdiv(p.n, bn)
        grid = (min(SMS * per_sm, tiles),)
        args = (*args, *consts, flatten, self.pdl)
        return [
            self.norm(),
            lambda warm: self.launch(
                self.f.matmul_tma, grid, args, warm, stages, num_warps=warps, launch_pdl=self.pdl
            ),
        ]


def few_rows(rows: int, gated: bool) -> Iterator[tuple]:
    """Yield plans of the pointer kernel for up to 128 rows."""
    bm = max(16, triton.next_power_of_2(rows))
    tiles = [(64, 64, 1, 4, stages) for stages in (4, 6, 8, 10, 12)]
    tiles += [(64, 64, 2, 4, 8), (64, 64, 3, 4, 5), (64, 128, 1, 4, 4)]
    for norm, plan in itertools.product(("rms", "separate"), tiles):
        # Gammas of 128 columns are a 2-byte load a lane, which is not copied ahead.
        slow = norm == "rms" and (rows > 16 or plan[1] == 128)
        wide = (bm + plan[0] * (1 + gated)) * plan[1] * 2 * plan[4] > 227 << 10
        if not slow and not wide and not (gated and plan[2] > 1):
            yield (bm, *plan, True, norm)


def many_rows(rows: int, gated: bool) -> Iterator[tuple]:
    """Yield plans of the persistent kernel."""
    if gated and rows <= 64:
        yield from [(64, 64, 64, 4, 3, False, 8, 3), (64, 64, 128, 4, 4, False)]
    elif gated:
        yield from [(128, 128, 64, 8, 4, False, group) for group in (2, 4, 8, 16)]
    elif rows <= 64:
        yield (64, 64, 128, 4, 6, False)
    elif rows < 4096:
        yield from [(128, 128, 64, 8, 6, True), (128, 128, 64, 8, 7, False)]
    else:
        for stages, group in itertools.product((3, 4), (4, 8, 16)):
            yield (128, 256, 64, 8, stages, True, group)


def candidates(p: Problem) -> Iterator[tuple[str, tuple]]:
    """Yield the plans to try: family and tile numbers."""
    if p.rows == 1:
        for plan in [(2, 4096, 4), (4, 2048, 4), (2, 2048, 4), (2, 2048, 8), (2, 4096, 2)]:
            yield "gemv", plan
    elif p.rows <= 128:
        for plan in few_rows(p.rows, p.gated):
            yield "pointer", plan
    if p.rows >= 64:
        for plan in many_rows(p.rows, p.gated):
            yield "tma", plan


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `work`, warmed up before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def median_ms(work: Callable[[], object]) -> float:
    """Time `work` as single replays of a graph with a cold L2."""
    graph = graph_of(work)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES)]
    for _ in range(WARMUP):
        graph.replay()
    for start, end in events:
        FLUSH.sum()  # by reading: dirty lines would have to be written back while we are timed
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events)


def run_steps(steps: list[Launch], warm: bool = False) -> None:
    for step in steps:
        step(warm)


def compile_all(plans: list[tuple[str, tuple, list[Launch]]]) -> None:
    """Compile every plan on all cores, leaving failures for the run to report."""

    def one(plan):
        try:
            run_steps(plan[2], warm=True)
        except Exception:
            return

    one(plans[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, plans))


def peers(p: Problem, compiled: bool) -> dict[str, float]:
    """Return times of the bare matmul, and of the chain under torch.compile."""
    found = {"cublas": median_ms(lambda: p.y @ p.w.T)}
    if compiled:
        torch._dynamo.reset()
        fn = torch.compile(p.chain, mode="max-autotune-no-cudagraphs", dynamic=False)
        fn(p.x, p.w, p.gamma)
        found["compile"] = median_ms(lambda: fn(p.x, p.w, p.gamma))
    return found


def check_and_time(p: Problem, only: str | None) -> list[dict]:
    """Run every candidate of a problem, fastest first."""
    reference = p.reference()
    floor = p.error(p.chain(p.x, p.w, p.gamma), reference)
    plans = []
    for family, numbers in candidates(p):
        if only and family not in only.split(","):
            continue
        plans.append((family, numbers, getattr(Plans(p), family)(*numbers)))
    began = time.time()
    compile_all(plans)
    print(
        f"  {p.case} {p.rows}: {len(plans)} plans compiled in {time.time() - began:.0f} s",
        flush=True,
    )
    results = []
    for family, numbers, steps in plans:
        row = {"case": p.case, "rows": p.rows, "family": family, "plan": numbers}
        try:
            p.out.fill_(float("nan"))
            run_steps(steps)
            torch.cuda.synchronize()
            row["error"] = p.error(p.out, reference)
            row["eager_error"] = floor
            if not row["error"] <= 2 * floor + 2**-11:
                row["wrong"] = True
            row["ms"] = median_ms(lambda s=steps: run_steps(s))
        except Exception as err:
            row["failed"] = f"{type(err).__name__}: {str(err)[:160]}"
        results.append(row)
    for row in sorted(results, key=lambda r: r.get("ms", 1e9))[:3]:
        steps = getattr(Plans(p), row["family"])(*row["plan"])
        if len(steps) > 1 and "ms" in row:
            row["without_first_ms"] = median_ms(lambda s=steps: run_steps(s[1:]))
            serial = getattr(Plans(p, pdl=False), row["family"])(*row["plan"])
            row["without_pdl_ms"] = median_ms(lambda s=serial: run_steps(s))
            row["first_ms"] = median_ms(lambda s=steps: run_steps(s[:1]))
    return sorted(results, key=lambda r: r.get("ms", 1e9))


def ceilings() -> dict[str, float]:
    """Measure the copy bandwidth and the time of an empty graph."""
    source = torch.empty(1 << 30, device=DEVICE, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = median_ms(lambda: torch.mul(source, 2.0, out=target))
    tiny = torch.zeros(1, device=DEVICE)
    return {
        "copy_tb_s": 2 * source.nbytes / copy / 1e9,
        "launch_ms": median_ms(lambda: tiny.add_(1)),
    }


def check_small() -> int:
    """Run the unit tests' cases on the GPU, with its matrix units, and return the failures."""
    sys.path.insert(0, str(ROOT))
    cases = importlib.import_module("tests.triton_bridge.kernels.cases")
    make = importlib.import_module("tests.triton_bridge.kernels.launches")
    run = importlib.import_module("tests.triton_bridge.kernels.interpreted").run
    everything = [*cases.EPILOGUES, cases.Case(dtype="bfloat16", gated=True, activation="silu")]
    norms = [
        cases.Case(norm="rms", gated=g, bias=True, dtype=d)
        for g in (False, True)
        for d in ("float16", "bfloat16")
    ]
    work = []
    for case in (dataclasses.replace(c, rows=r) for c in everything for r in (3, 70)):
        for tile in (16, 64):
            work += [
                (case, f"pointer {s} {tile}", make.matmul_pointer(case, s, tile == 64, tile))
                for s in (1, 2)
            ]
            work += [(case, f"tma {tile}", make.matmul_tma(case, tile, flatten=tile == 64))]
        work += [(case, "gemv", make.gemv(case))]
    for case in norms:
        work += [
            (case, "gemv", make.gemv(case)),
            (case, "pointer", make.matmul_pointer(case, 1, True, 64)),
            (case, "pointer 3", make.matmul_pointer(case, 3, True, 16)),
        ]
    layer = cases.Case(norm="layer", beta=True)
    work += [(layer, "gemv", make.gemv(layer))]

    def one(item) -> int:
        case, name, launches = item
        tensors, dtypes = case.tensors()
        try:
            case.check(run(tensors, dtypes, launches, DEVICE, "bridge"), tensors)
        except Exception as err:
            print("  FAILED", name, case, f"{type(err).__name__} {str(err)[-300:]}", flush=True)
            return 1
        return 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = sum(pool.map(one, work))
    print(f"{len(work)} small cases checked, {failures} failed", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 1024, 4096])
    parser.add_argument("--cases", nargs="+", default=["qkv", "gate_up"])
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--family", help="only these families, by commas")
    parser.add_argument("--show", type=int, default=4, help="plans to print for each case")
    parser.add_argument("--check", action="store_true", help="check small cases first")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    failures = check_small() if args.check else 0
    record: dict = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    record |= {"torch": torch.__version__, **ceilings(), "peers": [], "plans": []}
    print(record)
    lines = []
    for case, rows in itertools.product(args.cases, args.rows):
        p = Problem(case, rows)
        results = check_and_time(p, args.family)
        peer = peers(p, args.compile)
        moved, flops = p.bytes_and_flops()
        floor = max(moved / record["copy_tb_s"] / 1e9, flops / 790e9)
        record["peers"].append({"case": case, "rows": rows, "floor_ms": floor, **peer})
        record["plans"] += results
        lines.append(
            f"{case} {rows}: floor {floor:.4f} " + " ".join(f"{k} {v:.4f}" for k, v in peer.items())
        )
        lines += [
            f"    {r['ms']:.4f} {r['family']} {r['plan']}"
            f" err {r['error']:.1e}/{r['eager_error']:.1e}"
            f"{' WRONG' if r.get('wrong') else ''}"
            for r in results[: args.show]
            if "ms" in r
        ]
        lines += [
            f"    FAILED {r['family']} {r['plan']} {r['failed']}" for r in results if "failed" in r
        ][:4]
        lines += [
            f"    WRONG {r['family']} {r['plan']} {r['error']:.1e}"
            for r in results
            if r.get("wrong")
        ][:4]
        if args.output is not None:  # after every case, so that an interrupted run leaves some
            args.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print("\n".join(lines))
    return int(failures > 0)


if __name__ == "__main__":
    KERNELS = kernels()
    SMS = torch.cuda.get_device_properties(0).multi_processor_count
    FLUSH = torch.zeros(64 << 20, device=DEVICE, dtype=torch.float32)
    raise SystemExit(main())
