"""A compiled piece: called with tensors of PyTorch, on the caller's device and stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tvm_ffi.libinfo import load_lib_ctypes

from .record import PieceRecord, Uses, inverse, is_row_major
from .replay import Replay

MAIN = "main"
"""The name of the function that a piece becomes."""

_POOLED = 2
"""Of TVM's kinds of allocators the one that keeps memory that was used."""


class Program:
    """A piece that runs as compiled code.

    Calls from several threads wait for each other: a virtual machine of TVM has one stack.

    `record`: what it takes and returns.
    `library`: its code: a part of what `relax_fusion.build` made, or `load_library`.
    `device`: where its tensors are.
    `uses`: what becomes of the results.
    `eager`: the same in PyTorch: for tensors without elements.
    `replay`: whether calls are captured as CUDA graphs.
    """

    def __init__(
        self,
        record: PieceRecord,
        library: Any,
        device: torch.device,
        uses: Uses,
        eager: Callable[..., Any] | None = None,
        *,
        replay: bool = False,
    ):
        self._record = record
        self._eager = eager
        self._device = device
        self._uses = uses
        self._lock = threading.Lock()
        self._tvm_device = tvm_ffi.device(device.type, device.index or 0)
        self._main = _machine(library, self._tvm_device)[MAIN]
        self._places = tuple((record.inputs.index(arg), result) for arg, result in uses.copies)
        self._written = (*record.written, *(place for place, _ in self._places))
        self._weights = _Weights(record.taken[len(record.inputs) - record.weights :])
        self._replay = None
        if replay and device.type == "cuda" and not record.sizes:
            self._replay = Replay(self._launch, self._written, uses.returned)

    def __reduce__(self) -> Any:
        raise TypeError("a compiled piece cannot be pickled or copied")

    def __call__(self, *args: Any) -> Any:
        """Return what the piece computes, as its module in PyTorch would."""
        if self._eager is not None and any(args[n].numel() == 0 for n in self._record.inputs):
            found = self._eager(*args)
            for arg, result in self._uses.copies:
                args[arg].copy_(found[result] if isinstance(found, tuple | list) else found)
            return found
        results = self.results(args)
        return results[0] if len(results) == 1 else results

    def results(self, args: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Return all results; None for one that nobody looks at.

        Raises `ValueError` if a tensor has no elements.
        """
        record = self._record
        given = [args[n] for n in record.inputs]
        if any(tensor.numel() == 0 for tensor in given):
            raise ValueError("a tensor has no elements; compiled code takes none such")
        at = len(given) - record.weights
        pairs = zip(given[:at], record.taken, strict=False)
        with self._lock, torch.no_grad():
            passed = [_passed(tensor, order) for tensor, order in pairs]
            passed += self._weights.passed(given[at:])
            if self._replay is not None:
                made = self._replay(passed, at, self._weights.version)
            else:
                made = self._launch(passed, tuple(int(args[n]) for n in record.sizes))
            for n in self._written:
                if passed[n].data_ptr() != given[n].data_ptr():  # it was passed as a copy
                    given[n].copy_(_restored(passed[n], record.taken[n]))
        return made

    def _launch(
        self, passed: Sequence[torch.Tensor], sizes: tuple[int, ...] = ()
    ) -> list[torch.Tensor]:
        """Return the results as tensors of their own: no argument, constant or other result."""
        record = self._record
        at = len(passed) - record.weights
        shape = [tvm_ffi.Shape(sizes)] if sizes else []
        with self._stream():
            made = self._main(*passed[:at], *shape, *passed[at:])
        taken = {tensor.data_ptr() for tensor in passed}
        results = []
        # behind the results are the caches that were written in place
        for n, (value, order) in enumerate(zip(made, record.returned, strict=False)):
            tensor = torch.utils.dlpack.from_dlpack(value)
            if n in record.constant or tensor.data_ptr() in taken:
                tensor = tensor.clone()
            taken.add(tensor.data_ptr())
            results.append(_restored(tensor, order))
        for place, n in self._places:
            _restored(passed[place], record.taken[place]).copy_(results[n])
        return results

    def _stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        context: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(self._tvm_device, stream)
        return context


def load_library(path: Path, device: torch.device) -> Any:
    """Load code that was kept in a file; for a CPU only TVM's runtime is loaded with it."""
    if device.type != "cpu" or "TVM_LIBRARY_PATH" in os.environ:
        import tvm  # noqa: F401  (loads what runs on other devices, and from other places)
    else:
        _load_runtime()
    return tvm_ffi.load_module(str(path))


@cache
def _load_runtime() -> None:
    """Load TVM's runtime as importing TVM does, which takes a second more."""
    spec = find_spec("tvm")
    folders = [Path(root) / "lib" for root in (spec and spec.submodule_search_locations) or ()]
    try:
        load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", folders)
        load_lib_ctypes("tvm", "tvm_runtime_extra", "RTLD_LOCAL", folders)
    except (OSError, RuntimeError):
        import tvm  # noqa: F401  (a build from source has them elsewhere)


def _machine(library: Any, device: Any) -> Any:
    """Return TVM's virtual machine for a library, as `tvm.relax.VirtualMachine` starts it."""
    machine = library["vm_load_executable"]()
    cpu = tvm_ffi.device("cpu", 0)
    devices = dict.fromkeys((device, cpu))  # sizes are computed on a CPU
    machine["vm_initialization"](
        *(n for d in devices for n in (d.dlpack_device_type(), d.index, _POOLED))
    )
    return machine


class _Weights:
    """The weights as compiled code takes them, as long as they are the same memory."""

    def __init__(self, orders: Sequence[tuple[int, ...]]):
        self.version = 0
        self._orders = orders
        self._pointers: list[int] = []
        self._kept: list[torch.Tensor] = []

    def passed(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights to pass; `version` is another number where their memory is."""
        pointers = [tensor.data_ptr() for tensor in given]
        if pointers != self._pointers or self.version == 0:
            made = [_passed(t, order) for t, order in zip(given, self._orders, strict=True)]
            # a copy of a weight does not follow its changes: it is made anew in each call
            shared = all(t.data_ptr() == at for t, at in zip(made, pointers, strict=True))
            self._pointers = pointers if shared else []
            self._kept = made
            self.version += 1
        return self._kept


def _passed(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as compiled code takes it: row-major, and with nothing left to be done."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor if is_row_major(order) else tensor.permute(order)).contiguous()


def _restored(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a row-major tensor with its dimensions as PyTorch has them."""
    return tensor if is_row_major(order) else tensor.permute(inverse(order))
