"""Runs scheduled functions on numpy: every launch, and views of parameters.

Kernels for few rows run as `few_rows_on_cpu` has it, all others as `warps_on_cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from relax_fusion.workload.reference import numpy_dtype

from ..support.generic_cases import SIZES, array, shape_of
from .few_rows_on_cpu import WarpsBlock
from .nodes import Node
from .warps_on_cpu import Block


def run_generic(func: tirx.PrimFunc, like: tirx.PrimFunc) -> tuple[list[np.ndarray], np.ndarray]:
    """Run a scheduled function; return its inputs and its result.  `like` has its signature."""
    *ins, result = like.params
    arrays = [array(shape_of(p), str(p.ty.dtype), seed) for seed, p in enumerate(ins)]
    out = np.full(shape_of(result), np.nan, numpy_dtype(str(result.ty.dtype)))
    flat = [a.copy().reshape(-1) for a in arrays] + [out.reshape(-1)]
    tensors = {p.name: a for p, a in zip(func.params, flat, strict=True)}
    Launches(tensors).run(Node(func.body))
    return arrays, out


def of_few_rows(blocks: list[s_tir.SBlock]) -> bool:
    """Tell whether warps add up their sums in a kernel."""
    return any(buffer.name == "shared_float32" for b in blocks for buffer in b.alloc_buffers)


class Launches:
    """Walks over host code, and runs the thread blocks of every launch.

    Parameters
    ----------
    tensors : dict
        Flat arrays for the buffers of the function, by name; they are written.
    sizes : mapping
        Values of the symbolic sizes, by name.
    chosen : callable
        Whether a kernel of some blocks of TIR is run; by default all are.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        sizes: Mapping[str, int] = SIZES,
        chosen: Callable[[list[s_tir.SBlock]], bool] = bool,
    ) -> None:
        self.tensors, self.sizes, self.chosen = tensors, sizes, chosen
        self.host = Block(tensors, sizes)

    def run(self, node: Node) -> None:
        if node.kind == "SeqStmt":
            for statement in node.seq:
                self.run(statement)
        elif node.kind == "For" and _tag(node):
            self._launch(node)
        elif node.kind == "For":
            for i in range(int(self.host.value(node.extent))):
                self.host.env[node.loop_var] = np.asarray(i)
                self.run(node.body)
        elif node.kind == "SBlockRealize":
            for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
                self.host.env[axis.var] = self.host.value(value)
            for buffer in node.block.alloc_buffers:
                size = int(np.prod([int(self.host.value(d)) for d in buffer.ty.shape]))
                empty = np.full(size, np.nan, numpy_dtype(str(buffer.ty.dtype)))
                self.tensors.setdefault(buffer.name, empty)
            self.run(node.block.body)
        elif node.kind == "IfThenElse":
            case = node.then_case if self.host.value(node.condition) else node.else_case
            if case is not None:
                self.run(case)
        else:
            self.host.run(node)

    def _launch(self, node: Node) -> None:
        """Run the blocks of a grid, cluster by cluster; a grid may have other code inside."""
        loops: dict[str, Node] = {}
        while node.kind == "For" and (tag := _tag(node)):
            loops[tag], node = node, node.body
        extents = {tag: int(self.host.value(loop.extent)) for tag, loop in loops.items()}
        axis = next((tag[-1] for tag in loops if tag.startswith("cluster")), "x")
        size = extents.get(f"clusterCtaIdx.{axis}", 1)
        grid = [tag for tag in loops if tag.startswith("blockIdx")]
        steps = [size if tag[-1] == axis else 1 for tag in grid]
        for at in product(*(range(0, extents[t], n) for t, n in zip(grid, steps, strict=True))):
            places = dict(zip(grid, at, strict=True))
            ranks = [
                {loops[t].loop_var: np.asarray(v + r * (t[-1] == axis)) for t, v in places.items()}
                | {loops[t].loop_var: np.asarray(r) for t in loops if t.startswith("cluster")}
                for r in range(size)
            ]
            if "threadIdx.x" in loops:
                self._cluster(loops["threadIdx.x"], ranks)
            else:
                self.host.env |= ranks[0]
                self.run(node)

    def _cluster(self, thread: Node, ranks: list[dict[Node, np.ndarray]]) -> None:
        found: list[s_tir.SBlock] = []
        tvm_ffi.structural_walk(thread.node, (s_tir.SBlock, found.append))
        if not self.chosen(found):
            return
        make = WarpsBlock if of_few_rows(found) else Block
        cluster: list[Block] = []
        meeting = Barrier(len(ranks))
        for rank in ranks:
            block = make(self.tensors, self.sizes, cluster, meeting)
            block.threads = int(self.host.value(thread.extent))
            block.active = np.arange(block.threads)
            block.views = self.host.views
            block.env = {**self.host.env, **rank, thread.loop_var: block.active}
            cluster.append(block)
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(lambda block: block.run_to_the_end(thread.body), cluster))
        for block in cluster:
            block.check_end()


def _tag(loop: Node) -> str | None:
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else None
