"""A compiled piece: called with tensors of PyTorch, on the caller's device and stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import tvm_ffi
from tvm import relax

from .graph import MAIN
from .record import PieceRecord, inverse, is_row_major
from .replay import Replay


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
    replay : bool
        Whether calls are captured as CUDA graphs.
    """

    def __init__(
        self,
        record: PieceRecord,
        library: Any,
        device: torch.device,
        eager: Callable[..., Any] | None = None,
        *,
        replay: bool = False,
    ):
        self._record = record
        self._eager = eager
        self._device = device
        self._lock = threading.Lock()
        self._tvm_device = tvm_ffi.device(device.type, device.index or 0)
        self._main = relax.VirtualMachine(library, self._tvm_device)[MAIN]
        self._run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = self._launch
        if replay and device.type == "cuda" and not record.sizes:
            weights = range(len(record.inputs) - record.weights, len(record.inputs))
            self._run = Replay(self._launch, frozenset([*record.written, *weights]))

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
        given = [args[n] for n in record.inputs]
        if any(tensor.numel() == 0 for tensor in given):
            raise ValueError("a tensor has no elements; compiled code takes none such")
        passed = [_passed(t, order) for t, order in zip(given, record.taken, strict=True)]
        sizes = tuple(int(args[n]) for n in record.sizes)
        with self._lock, torch.no_grad():
            made = self._launch(passed, sizes) if sizes else self._run(passed)
            for n in record.written:
                _write_back(given[n], passed[n], record.taken[n])
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
            tensor = (
                value if isinstance(value, torch.Tensor) else torch.utils.dlpack.from_dlpack(value)
            )
            if n in record.constant or tensor.data_ptr() in taken:
                tensor = tensor.clone()
            taken.add(tensor.data_ptr())
            results.append(tensor if is_row_major(order) else tensor.permute(inverse(order)))
        return results

    def _stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        context: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(self._tvm_device, stream)
        return context


def _passed(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as compiled code takes it: row-major, and with nothing left to be done."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor if is_row_major(order) else tensor.permute(order)).contiguous()


def _write_back(given: torch.Tensor, passed: torch.Tensor, order: tuple[int, ...]) -> None:
    """Copy a cache that was written to where the caller has it, if it was passed as a copy."""
    if passed.data_ptr() != given.data_ptr():
        given.copy_(passed if is_row_major(order) else passed.permute(inverse(order)))
