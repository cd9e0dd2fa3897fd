"""A compiled piece: called with tensors of PyTorch, on the caller's device and stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import relax

from .graph import MAIN
from .record import PieceRecord, inverse, is_row_major


class Program:
    """A piece that runs as compiled code.

    Calls from several threads wait for each other: a virtual machine of TVM has one stack.

    Parameters
    ----------
    record : PieceRecord
        What it takes and returns.
    library : tvm.runtime.Module
        What `relax_fusion.build` made, loaded.
    device : torch.device
        Where its tensors are.
    eager : callable
        The same in PyTorch: for tensors without elements.
    """

    def __init__(
        self,
        record: PieceRecord,
        library: Any,
        device: torch.device,
        eager: Callable[..., Any],
    ):
        self._record = record
        self._eager = eager
        self._device = device
        self._lock = threading.Lock()
        self._run = relax.VirtualMachine(library, _tvm_device(device))[MAIN]

    def __call__(self, *args: Any) -> Any:
        """Return what the piece computes, as its module in PyTorch would."""
        record = self._record
        tensors = [args[n] for n in record.inputs]
        if any(tensor.numel() == 0 for tensor in tensors):
            return self._eager(*args)
        passed = [_passed(t, order) for t, order in zip(tensors, record.taken, strict=True)]
        at = len(passed) - record.weights
        sizes = [tvm_ffi.Shape([args[n] for n in record.sizes])] if record.sizes else []
        with self._lock, torch.no_grad(), self._stream():
            made = self._run(*passed[:at], *sizes, *passed[at:])
        results = self._returned(made, passed)
        return results[0] if len(results) == 1 else results

    def _stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        stream: AbstractContextManager[Any] = tvm_ffi.use_torch_stream(
            torch.cuda.stream(torch.cuda.current_stream(self._device))
        )
        return stream

    def _returned(self, made: Iterable[Any], passed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results as tensors of their own: views of no argument, constant or result."""
        taken = {tensor.data_ptr() for tensor in passed}
        results = []
        for n, (value, order) in enumerate(zip(made, self._record.returned, strict=True)):
            tensor = value if isinstance(value, torch.Tensor) else torch.from_dlpack(value)
            if n in self._record.constant or tensor.data_ptr() in taken:
                tensor = tensor.clone()
            taken.add(tensor.data_ptr())
            results.append(tensor if is_row_major(order) else tensor.permute(inverse(order)))
        return results


def _passed(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as compiled code takes it: row-major, and with nothing left to be done."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor if is_row_major(order) else tensor.permute(order)).contiguous()


def _tvm_device(device: torch.device) -> tvm.runtime.Device:
    return tvm.cuda(device.index or 0) if device.type == "cuda" else tvm.cpu(0)
