"""The whole matrix of patterns and targets: ``python -m tests.targets.matrix [target ...]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from relax_fusion.hardware.target import device_of, is_webgpu

from ..support.chains import Chain
from ..support.patterns import odd_sizes, patterns, wide_rows
from ..support.targets import TARGETS, Compiled, compile_chain, generator

WIDEST_BYTES = 32
"""What one thread loads or stores at once at most: TVM's own rule for Adreno takes eight floats."""

SCRATCH_BYTES = 2048
"""Shared memory for what threads add up between them, which no plan counts."""


def forms() -> Iterator[tuple[str, Chain]]:
    """Yield every pattern, of few rows and of many, of static and symbolic size."""
    for dtype in ("float32", "float16"):
        for rows in (16, 1, "n"):
            for chain in patterns(rows, dtype):
                yield f"{rows}", chain


def check(compiled: Compiled) -> list[str]:
    """Return what is wrong with the kernels; generates code where that is possible."""
    dev, wrong = device_of(compiled.target), []
    limits = {k: int(v) for k, v in compiled.target.attrs.items() if str(k).startswith("max_")}
    threads = limits.get("max_threads_per_block", limits["max_num_threads"])
    for kernel in compiled.kernels():
        shared = sum(kernel.shared.values())
        if kernel.threads > threads:
            wrong.append(f"{kernel.threads} threads of {threads}")
        if shared > dev.smem_per_block_bytes + SCRATCH_BYTES:
            wrong.append(f"{shared} B of shared memory of {dev.smem_per_block_bytes}")
        if kernel.vector_bytes > WIDEST_BYTES:
            wrong.append(f"a vector of {kernel.vector_bytes} B")
        if is_webgpu(compiled.target) and "blockIdx.z" in kernel.axes:
            wrong.append("three grid dimensions")
    for decision in compiled.report.decisions:
        if not decision.fused and decision.decline is None:
            wrong.append(f"{decision.where} declined for no reason")
    if compiled.kernels() and generator(compiled.target) is None and not compiled.source():
        wrong.append("no code")
    return wrong


def main() -> int:
    """Go through the matrix, print what is wrong, and return how often that was."""
    failures = 0
    for name in sys.argv[1:] or TARGETS:
        cells = [*forms(), *(("odd", chain) for chain in (*odd_sizes(), *wide_rows()))]
        for form, chain in cells:
            try:
                wrong = check(compile_chain(chain, TARGETS[name]))
            except Exception as err:  # anything: that nothing is raised is what is tested
                wrong = [f"{type(err).__name__}: {str(err).splitlines()[-1]}"]
            for problem in wrong:
                print(f"{name} {chain.name} {form} {chain.dtype}: {problem}", flush=True)
            failures += bool(wrong)
        print(f"{name}: {len(cells)} compiled, {failures} wrong so far", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
