"""Runs kernels in CUDA C++ for Hopper on this processor, compiled with `hopper/`.

The text of a kernel is compiled as it is, but for the functions that are written in assembly: those
of `hopper/hopper.h` take their place.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.cuda_kernels.launch import TF32
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.launch.arguments import Out, Part, TensorMap, Workspace, is_tensor
from relax_fusion.launch.cuda_source import CUDASource
from relax_fusion.launch.kernel import TensorMapLayout
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.launches import FixedWeights, SourceStep
from relax_fusion.workload import GatedFFN, NormMatmul
from relax_fusion.workload.reference import numpy_dtype, sizes_of

from .buffers import Buffer, Tensor, unwritten
from .interpreted import Interpreter
from .launches import H200, Values, launch_of, parameters
from .workloads import Arrays, shape_of

HERE = Path(__file__).parent / "hopper"
COMPILER = ("g++", "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-w", f"-I{HERE}")


def has_compiler() -> bool:
    """Tell whether the compiler is here."""
    return shutil.which(COMPILER[0]) is not None


needs_compiler = pytest.mark.skipif(not has_compiler(), reason=f"needs {COMPILER[0]}")

FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [^{]*\{(?:[^\n]*\}\n|.*?^\}\n)",
    re.MULTILINE | re.DOTALL,
)
MEMORY = "extern __shared__ __align__(1024) unsigned char memory[];"
OWN_MEMORY = "unsigned char* const memory = on_cpu::shared_memory();"
PRODUCTS = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.([fs]32)\.(\w+)\.(\w+) .*?"
    r"more((?:, 1, 1)?)(?:(?:, ([01]))?, 0)?;",
    re.DOTALL,
)
DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8, "s8": 32, "u8": 32}
"""Elements of k of an instruction: 32 bytes."""


class LaunchError(Exception):
    """A launch that hangs, or does what a GPU would not allow."""


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("clusters", "cluster", "threads", "shared_bytes")),
        *((name, ctypes.c_int) for name in ("blocks", "stages", "dependent", "late")),
        ("seed", ctypes.c_uint32),
        ("tensors", ctypes.c_int),
        ("tensor", ctypes.POINTER(Tensor)),
        ("outs", ctypes.c_int),
        ("conflicts", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class How:
    """What a GPU leaves open: the order of threads, and when copies arrive.

    With `seed` 0, threads run in turn, each as far as it can; with others, some warps run before
    others.  `late` copies arrive when no thread can go on without them, others at once.
    """

    seed: int = 0
    late: bool = False


AT_ONCE = How()


def on_cpu(source: CUDASource) -> str:
    """Return the text of a kernel in C++ for this processor, and a function that launches it."""
    found = PRODUCTS.search(source.text)
    assert found is not None and source.text.count(MEMORY) == 1
    lines, depth, total, dtype, other, scales, turned = found.groups()
    halves, integers = dtype in ("f16", "bf16"), dtype in ("s8", "u8")
    assert dtype == other and int(depth) == DEPTHS[dtype]
    assert (total == "s32", scales == "") == (integers, integers)
    in_memory = "#define REGISTERS 0" in source.text  # as registers, lines are never turned
    assert (turned is not None) == (halves and in_memory)
    assert not integers or int(lines) in (8, 24) or int(lines) % 16 == 0
    text = FUNCTION.sub(lambda f: "" if "asm" in f[0] else f[0], source.text)
    text = text.replace(MEMORY, OWN_MEMORY)
    (layout,) = re.findall(r"constexpr u32 LAYOUT = (\w+);", text)
    assert not re.search(r"\basm\b", text)
    arguments = ", ".join(
        f"argument<{_c_type(kind)}>(arguments[{i}])" for i, kind in enumerate(source.params)
    )
    return f"""#define PRODUCT_LINES {lines}
#define PRODUCT_TURNED {turned or 0}
#define PRODUCT_TYPE "{dtype}"
#define PRODUCT_LAYOUT {layout}
#include "hopper.h"
{text}
template <class T> T argument(const void* at) {{
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}}
static void kernel(void** arguments) {{ {source.entry}({arguments}); }}
extern "C" const char* launch(void** arguments, on_cpu::Launch* how) {{
  how->blocks = BLOCKS;
  how->stages = STAGES;
  return on_cpu::launch(*how, DTYPE[0] == 'b', kernel, arguments);
}}
"""


def _c_type(kind: str) -> str:
    if kind.startswith("tensordesc"):
        return "TensorMap"
    halves = dict.fromkeys(("*fp16", "*bf16"), "unsigned short*")
    return {**halves, "*fp32": "float*", "*i32": "int*", "i32": "int"}[kind]


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    _compile(HERE / "hopper.cpp", "-O2", "-c", "-o", f"{folder.name}/hopper.o")
    return Path(folder.name)


def _compile(*args: str | Path) -> None:
    done = subprocess.run([*COMPILER, *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def library(text: str) -> Callable[..., bytes | None]:
    """Return the function that launches a kernel, whose text is `on_cpu`."""
    code = _folder() / f"kernel{len(list(_folder().glob('*.cpp')))}.cpp"
    code.write_text(text)
    _compile(code, _folder() / "hopper.o", "-O1", "-shared", "-o", code.with_suffix(".so"))
    launch = ctypes.CDLL(str(code.with_suffix(".so"))).launch
    launch.restype = ctypes.c_char_p
    return launch


@dataclass
class Emulated:
    """One launch: the kernel, its clusters and its arguments.

    An argument is an array, a `TensorMap` of one, a number, or None: the next result.
    """

    source: CUDASource
    clusters: int
    args: Sequence[Any]
    early: bool = False

    @property
    def later(self) -> list[bool]:
        """Which arguments the kernel in front makes, as far as the launch knows."""
        (given,) = re.findall(r"#define PARAMETERS (.*)", self.source.text)
        names = [re.findall(r"\w+", one)[-1] for one in given.split(",")]
        known = [name for name in names if self.early and "weight" in name]
        if "narrow0" in names:
            known = [name for name in names if not name.startswith("narrow")]
        return [self.source.options.dependent_launch and name not in known for name in names]

    def run(self, outs: Sequence[np.ndarray], how: How = AT_ONCE) -> int:
        """Fill `outs`; return how often lanes that load or store matrices meet in a bank."""
        if self.clusters == 0:
            return 0  # as the launcher does
        dependent = self.source.options.dependent_launch
        targets = [Buffer(unwritten(out)) for out in outs]
        left, boxes = iter(targets), iter(self.source.tensor_maps)
        buffers, arguments = [*targets], []
        for arg, later in zip(self.args, self.later, strict=True):
            array = arg.of if isinstance(arg, TensorMap) else arg
            if isinstance(array, np.ndarray):
                buffers.append(Buffer(array, later))
            at = next(left).at if arg is None else buffers[-1].at
            box = next(boxes) if isinstance(arg, TensorMap) else None
            arguments.append(_packed(arg, at, box))
        tensors = (Tensor * len(buffers))(*(b.described for b in buffers))
        options = self.source.options
        launch = _Launch(
            *(self.clusters, options.num_ctas, self.source.block[0], self.source.shared_bytes),
            *(0, 0, int(dependent), int(how.late), how.seed, len(buffers), tensors, len(outs), 0),
        )
        given = [ctypes.create_string_buffer(a, len(a)) for a in arguments]
        pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        failure = library(on_cpu(self.source))(pointers, ctypes.byref(launch))
        if failure:
            raise LaunchError(failure.decode())
        for buffer in buffers:
            buffer.check()
        for out, target in zip(outs, targets, strict=True):
            out[:] = target.results(out)
        return int(launch.conflicts)


def _packed(arg: Any, at: int, box: TensorMapLayout | None) -> bytes:
    """Return the bytes of an argument; those of a tensor map as `Map` of machine.h has them."""
    if isinstance(arg, TensorMap) and box is not None:
        (lines, k), (stride, step) = arg.layout(arg.of.shape)
        assert tuple(arg.block) == tuple(box.block) and step == 1
        assert box.element_bytes == arg.of.itemsize
        sizes = at, k, lines, box.block[1], box.block[0], stride
        return struct.pack("<16Q", *sizes, box.element_bytes, box.element_type == TF32, *[0] * 8)
    return struct.pack("<i", arg) if isinstance(arg, int) else struct.pack("<Q", at)


def emulated_launch(
    step: SourceStep, values: Values, tensors: Mapping[str, np.ndarray], outputs: Sequence[str]
) -> Emulated:
    """Return a launch of a kernel in CUDA C++, on arrays by their names in the workload."""

    def known(value: Any) -> Any:
        if isinstance(value, TensorMap):
            shape = value.shape and tuple(map(values, value.shape))
            return TensorMap(known(value.of), value.block, shape, value.strides)
        if isinstance(value, Part):
            return known(value.of).reshape(-1)[value.start :]
        if isinstance(value, Workspace):
            return tensors[f"room{id(value)}"]
        if isinstance(value, Out):  # of the norm in front
            return tensors[outputs[value.index]]
        return tensors[value.name] if is_tensor(value) else values(value)

    args = [None if _is_result(a) else known(a) for a in step.args]
    return Emulated(step.source, values(step.grid[0]), args)


def emulated(
    work: NormMatmul | GatedFFN,
    plan: CudaPlan,
    inputs: Mapping[str, np.ndarray],
    how: How = AT_ONCE,
    dev: DeviceSpec = H200,
    early: bool = True,
    interpreter: Interpreter | None = None,
) -> Arrays:
    """Return the results of a workload by name, in their dtypes.

    Parameters
    ----------
    early : bool
        Whether no kernel writes weights.
    interpreter : Interpreter, optional
        It does launches of Triton's, where there are some.
    """
    sizes, outputs = sizes_of(work.graph, inputs), work.graph.outputs
    tensors = dict(inputs)
    for o in outputs:
        tensors[o.name] = np.full(shape_of(o, sizes), 77, numpy_dtype(o.dtype))
    names, params = [o.name for o in outputs], parameters(work)
    values = Values(params, list(inputs.values()))
    for step in steps_of(work, plan, params, dev, early):
        if isinstance(step, SourceStep):
            outs = [_result(a, values, tensors, names) for a in step.args if _is_result(a)]
            launch = replace(emulated_launch(step, values, tensors, names), early=early)
            assert launch.run(outs, how) == 0, "lanes meet in banks"
            continue
        assert interpreter is not None
        dtypes = {n: str(a.dtype) for n, a in tensors.items()}
        floats = {n: a.astype("float64") for n, a in tensors.items()}
        done = launch_of(step, values, floats, dtypes, {n: n for n in tensors}, names)
        made = interpreter(floats, dtypes, [done])
        tensors |= {n: a.astype(numpy_dtype(dtypes[n])) for n, a in made.items()}
    return {name: tensors[name] for name in names}


def _is_result(value: Any) -> bool:
    return isinstance(value, Out | Workspace)


def _result(
    value: Out | Workspace, values: Values, tensors: Arrays, outputs: Sequence[str]
) -> np.ndarray:
    """Return what a launch fills: a result, or a workspace that another launch reads."""
    if isinstance(value, Out):
        return tensors[outputs[value.index]]
    room = np.full([values(n) for n in value.shape], 77, numpy_dtype(value.dtype))
    return tensors.setdefault(f"room{id(value)}", room)


def steps_of(
    work: NormMatmul | GatedFFN,
    plan: CudaPlan,
    params: Sequence[Any],
    dev: DeviceSpec = H200,
    early: bool = True,
) -> list[Any]:
    """Return the launches of a workload under a plan, where weights are written by no kernel."""
    fixed = [p for p in params if p.name.startswith("w")] if early else []
    return contraction_steps(work, plan, params, None, dev, {}, FixedWeights(fixed, leads=False))
