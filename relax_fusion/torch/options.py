"""What ``torch.compile(model, backend="relax_fusion", options={...})`` can be told."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from ..errors import PipelineError, TargetError
from ..validation import Count, check, shown

if TYPE_CHECKING:
    from tvm.target import Target

    TargetLike: TypeAlias = str | Target | None
else:
    TargetLike = Any  # checked without importing TVM

Backend: TypeAlias = Literal["auto", "tir", "triton"]
"""As of the pipeline; the estimator, which has it too, is imported where something is compiled."""


@dataclass(frozen=True)
class TorchOptions:
    """How a model of PyTorch is compiled.

    Parameters
    ----------
    target : str or Target, optional
        A name that `relax_fusion.make_target` knows, or a target; by default the GPU, or the CPU
        with as many threads as ``torch.get_num_threads()``, that holds the inputs.
    backend : {"auto", "tir", "triton"}
        Which families of kernels may be chosen, as of the pipeline.
    validate : bool
        Compare every fused kernel with what it replaces, interpreted by NumPy, while compiling.
    use_cuda_graph : bool
        On CUDA, replay launches of static shapes as CUDA graphs.
    allow_tf32 : bool
        Let tensor cores multiply float32 as tf32.
    allow_int8_rows : bool
        Let CPUs round rows to int8 in front of weights of 4 and 8 bits.
    exact : bool
        Keep to algebraic rules that round as the numerical contract says.
    database : str or Path, optional
        A tuning database, as `relax_fusion.tune` writes it.
    report : str or Path, optional
        A file to which the report of every graph is written: what was fused, what stayed in
        PyTorch, and why.  A later graph of a process is appended.
    min_block_size : int
        The fewest operators that a compiled piece has; smaller ones stay in PyTorch.
    strict : bool
        Raise an error where an operator would stay in PyTorch, or a piece cannot be compiled.
    dryrun : bool
        Compile nothing: print the pieces and what the estimator says, and run in PyTorch.
    check : bool
        Run each piece in PyTorch as well, in every call, and warn where results differ.
    cache : bool
        Keep compiled pieces on disk, and take them from there.
    """

    target: TargetLike = None
    backend: Backend = "auto"
    validate: bool = False
    use_cuda_graph: bool = True
    allow_tf32: bool = False
    allow_int8_rows: bool = False
    exact: bool = True
    database: str | Path | None = None
    report: str | Path | None = None
    min_block_size: Count = 2
    strict: bool = False
    dryrun: bool = False
    check: bool = False
    cache: bool = True

    def __post_init__(self) -> None:
        check(self, PipelineError, "option")
        if self.database is not None and not Path(self.database).is_file():
            raise PipelineError(f"option database is {shown(self.database)}; there is no such file")
        if self.target is None or isinstance(self.target, str):
            return
        from tvm.target import Target

        if not isinstance(self.target, Target):
            text = f"option target is {shown(self.target)}; must be a name, or a tvm.target.Target"
            raise PipelineError(text)

    def compiled_for(self, device: torch.device) -> str:
        """Return what code depends on, beside these options, as a text: the target, or the device.

        Raises
        ------
        TargetError
            As `target_for`.
        """
        if self.target is not None or device.type not in ("cpu", "cuda"):
            return str(self.target_for(device))
        if device.type == "cpu":
            return f"{_processor()} {torch.get_num_threads()} threads"
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"

    def target_for(self, device: torch.device) -> Target:
        """Return what to compile for.

        Raises
        ------
        TargetError
            If the target is for another kind of device than `device`, or none is known for it.
        """
        from ..hardware.target import is_cpu, is_cuda, make_target

        target = _target_of(device) if self.target is None else make_target(self.target)
        fits = is_cuda if device.type == "cuda" else is_cpu
        if not fits(target):
            raise TargetError(f"the target {target} cannot run where the inputs are: on {device}")
        return target

    def pipeline(self, target: Target) -> dict[str, Any]:
        """Return the arguments of the pipeline."""
        from ..hardware.target import is_cuda

        names = ("backend", "validate", "allow_tf32", "allow_int8_rows", "exact", "database")
        given = {name: getattr(self, name) for name in names}
        if is_cuda(target):
            given |= {"use_cuda_graph": False, "cubins": True}  # PyTorch captures whole pieces
        return given


def options_of(given: Mapping[str, Any] | TorchOptions | None) -> TorchOptions:
    """Return options from what a user passed.

    Raises `PipelineError` if a name is unknown, or a value is none that the option can have.
    """
    if isinstance(given, TorchOptions):
        return given
    known = [each.name for each in fields(TorchOptions)]
    for name in given or {}:
        if name not in known:
            text = f"backend 'relax_fusion' has no option {name!r}; it takes {', '.join(known)}"
            raise PipelineError(text)
    return TorchOptions(**(given or {}))


@cache
def _processor() -> str:
    """Return what this machine's CPU is and can do."""
    found = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
        found += dict.fromkeys(line for line in lines if line.startswith(names))
    return "\n".join(found)


def _target_of(device: torch.device) -> Target:
    from tvm.target import Target

    from ..hardware.target import host_target, make_target

    if device.type == "cpu":
        attrs = {str(name): value for name, value in host_target().attrs.items()}
        return Target({"kind": "llvm", **attrs, "num-cores": torch.get_num_threads()})
    if device.type != "cuda":
        raise TargetError(f"the inputs are on {device}; relax_fusion compiles for cpu and cuda")
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device).lower()
    for known in ("h200", "h100", "a100", "rtx4090"):
        if known in name.replace(" ", "").replace("geforce", ""):
            return make_target(known)
    return make_target({"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major == 9 else ''}"})
