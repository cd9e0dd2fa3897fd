"""Memory of tensors in which a kernel's wrong writes, and its missing ones, are seen."""

from __future__ import annotations

import ctypes

import numpy as np
import tvm
import tvm_ffi

UNWRITTEN = 0xFEED
"""The bits of a NaN that no conversion makes: what is in results, and around tensors."""

MARGIN = 512
"""Bytes in front of a tensor, and behind it."""


class Tensor(ctypes.Structure):
    """Where a tensor lies, its bytes, and where those that come later lie; as in hopper.h."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("after", ctypes.c_void_p))


BEFORE, BEHIND = slice(None, MARGIN), slice(-MARGIN, None)


class Buffer:
    """A tensor in memory of its own, with margins."""

    def __init__(self, values: np.ndarray, later: bool = False) -> None:
        """Take the values; `later`, they come when the kernel in front has ended."""
        self.values = np.ascontiguousarray(values).reshape(-1).view("uint8")
        size = -(-self.values.size // 2) * 2
        room = np.full(size // 2 + MARGIN + 32, UNWRITTEN, "uint16").view("uint8")
        skipped = -room.ctypes.data % 64
        self.around = room[skipped : skipped + size + 2 * MARGIN]
        self.inside = self.around[MARGIN : MARGIN + self.values.size]
        self.later = later
        if not later:
            self.inside[:] = self.values

    @property
    def at(self) -> int:
        return self.inside.ctypes.data

    @property
    def described(self) -> Tensor:
        return Tensor(self.at, self.inside.nbytes, self.values.ctypes.data if self.later else None)

    def check(self) -> None:
        """Check that nothing has been written beside the tensor."""
        before, behind = (self.around[part].view("uint16") for part in (BEFORE, BEHIND))
        assert (before == UNWRITTEN).all(), "written in front of a tensor"
        assert (behind == UNWRITTEN).all(), "written behind a tensor"

    def results(self, like: np.ndarray) -> np.ndarray:
        """Return what has been written; each element must have been."""
        got = self.inside.view(like.dtype).reshape(like.shape)
        words = got.view(f"uint{8 * got.itemsize}")
        missing = np.argwhere(words == int(f"{UNWRITTEN:x}" * (got.itemsize // 2), 16))
        assert not missing.size, f"{len(missing)} results are not written, first {missing[0]}"
        return got


def unwritten(like: np.ndarray) -> np.ndarray:
    """Return an array of the same shape and dtype in which nothing has been written."""
    words = np.full(like.nbytes // 2, UNWRITTEN, "uint16")
    return words.view(like.dtype).reshape(like.shape)


def unaligned(values: np.ndarray, offset: int | None = None) -> tvm.runtime.Tensor:
    """Return a tensor that begins `offset` bytes behind a multiple of 64, or an element behind."""
    shape, values = values.shape, np.ascontiguousarray(values)
    room = np.empty(values.nbytes + 128 + (offset or 0), "uint8")
    first = -room.ctypes.data % 64 + (values.itemsize if offset is None else offset)
    inside = room[first : first + values.nbytes]
    inside[:] = values.reshape(-1).view("uint8")
    made = tvm_ffi.from_dlpack(inside) if inside.size else tvm.runtime.tensor(inside)
    return made._create_view(shape, str(values.dtype))
