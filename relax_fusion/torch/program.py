"""A compiled piece: called with tensors of PyTorch, on the caller's device and stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
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
    eager : callable, optional
        The same in PyTorch: for tensors without elements.
    """

    def __init__(
        self,
        record: PieceRecord,
        library: Any,
        device: torch.device,
        eager: Callable[..., Any] | None = None,
    ):
        self._record = record
        self._eager = eager
        self._device = device
        self._lock = threading.Lock()
        self._tvm_device = tvm_ffi.device(device.type, device.index or 0)
        self._run = relax.VirtualMachine(library, self._tvm_device)[MAIN]

    def __call__(self, *args: Any) -> Any:
        """Return what the piece computes, as its module in PyTorch would."""
        if self._eager is not None and any(args[n].numel() == 0 for n in self._record.inputs):
            return self._eager(*args)
        results = self.results(args)
        return results[0] if len(results) == 1 else results

    def results(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return all results.

        Raises
        ------
        ValueError
            If a tensor has no elements.
        """
        record = self._record
        passed = [
            _passed(args[n], order) for n, order in zip(record.inputs, record.taken, strict=True)
        ]
        if any(tensor.numel() == 0 for tensor in passed):
            raise ValueError("a tensor has no elements; compiled code takes none such")
        at = len(passed) - record.weights
        sizes = [tvm_ffi.Shape([args[n] for n in record.sizes])] if record.sizes else []
        with self._lock, torch.no_grad(), self._stream():
            made = self._run(*passed[:at], *sizes, *passed[at:])
        return self._returned(made, passed)

    def _stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        context: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(self._tvm_device, stream)
        return context

    def _returned(self, made: Iterable[Any], passed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results as tensors of their own: views of no argument, constant or result."""
        taken = {tensor.data_ptr() for tensor in passed}
        results = []
        # behind the results are the caches that were written in place
        for n, (value, order) in enumerate(zip(made, self._record.returned, strict=False)):
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
