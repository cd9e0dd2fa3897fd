"""What the instructions that multiply matrices do, on numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = 32

TF32_LOST = np.uint32(0x1FFF)
"""The bits of a float32 that tf32 does not have."""


class Matrices:
    """Part of a `Block`: what loads operands by matrices, and multiplies them."""

    # Of the block
    threads: int
    epoch: int
    active: np.ndarray
    shared: np.ndarray
    landed: np.ndarray
    read: np.ndarray
    busy: np.ndarray
    fenced: np.ndarray
    arrived: np.ndarray
    owner: np.ndarray
    private: dict[Any, np.ndarray]
    products: list[list[np.ndarray]]
    begun: list[np.ndarray]

    def value(self, node: Any) -> Any:
        raise NotImplementedError

    def set_register(self, target: Any, value: Any) -> None:
        raise NotImplementedError

    def ldmatrix(self, name: str, args: Any) -> None:
        """Give lane i the four bytes from 4 * (i % 4) on of line i // 4 of each matrix."""
        self._whole_warps()
        targets, address = args[:4], np.asarray(self.value(args[4])).astype(int)
        transposed = any(is_text(a) and a.value == "trans" for a in args)
        element = self.shared.itemsize
        at = address.reshape(-1, 4, 8)[..., None] // element + np.arange(16 // element)
        banks = np.sort(address.reshape(-1, 8) // 16 % 8, -1)
        assert (banks == np.arange(8)).all(), "lines of a matrix share a bank"
        assert (self.landed[at] < self.epoch).all(), "what a copy brought is read without a barrier"
        self.read[at] = self.epoch
        matrices = self.shared[at]  # warp, matrix, line, element
        if transposed:
            assert element == 2, "elements are transposed two bytes at a time"
            matrices = matrices.swapaxes(-1, -2)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(at), 4, LANES)
        for matrix, target in enumerate(targets):
            self.set_register(target, pairs[:, matrix].reshape(-1))

    def load_shared(self, args: Any) -> None:
        """Give each lane the words at its address."""
        *targets, address = (a for a in args if not is_text(a))
        at = self._words(address, len(targets))
        seen = (self.landed[at] < self.epoch) | self._owned(at)
        assert seen.all(), "what a copy brought is read without a barrier"
        self.read[at] = np.maximum(self.read[at], np.where(self._owned(at), 0, self.epoch))
        found = np.ascontiguousarray(self.shared[at]).view(np.uint32)
        for i, target in enumerate(targets):
            self.set_register(target, found[:, i])

    def store_copies(self, address: Any, values: list[np.ndarray]) -> None:
        """Take the words of each lane to its address, which it must have copied to."""
        at = self._words(address, len(values))
        assert self._owned(at).all(), "a thread overwrites what it did not copy"
        assert not self.busy[at].any(), "a thread overwrites what is being multiplied"
        found = np.stack(values, -1).astype(np.uint32)
        self.shared[at] = np.ascontiguousarray(found).view(self.shared.dtype)
        self.landed[at], self.fenced[at] = self.epoch, False

    def _owned(self, at: Any) -> Any:
        """Tell which elements have arrived by a copy of the thread that asks."""
        return self.arrived[at] & (self.owner[at] == self.active[:, None])

    def _words(self, address: Any, count: int) -> Any:
        """Return the elements of some words at an address, and fail if lanes share a bank."""
        assert len(self.active) == self.threads
        address = np.asarray(self.value(address)).astype(int)
        banks = np.sort(address.reshape(-1, LANES // count) // (4 * count) % (32 // count), -1)
        assert (banks == np.arange(LANES // count)).all(), "lanes of a warp share a bank"
        element = self.shared.itemsize
        return address[:, None] // element + np.arange(4 * count // element)

    def mma(self, name: str, args: Any) -> None:
        """Multiply 16 rows by 8 columns, 32 bytes of k, in each warp."""
        dtype = self.shared.dtype
        self._whole_warps()
        d, a, b, c = args[:4], args[4:8], args[8:10], args[10:14]
        total_dtype = np.int32 if dtype.kind in "iu" else np.float32
        row, quad = np.arange(LANES) // 4, np.arange(LANES) % 4
        in_word, k = 4 // dtype.itemsize, 32 // dtype.itemsize
        assert any(is_text(x) and x.value == f"m16n8k{k}" for x in args)

        def registers(loads: Any) -> np.ndarray:
            columns = [np.broadcast_to(self.value(x), self.active.shape) for x in loads]
            return np.ascontiguousarray(np.stack(columns, -1)).reshape(-1, LANES, len(columns))

        left, right = (registers(r).view(dtype).astype(wide(dtype)) for r in (a, b))
        sums = registers(c).view(total_dtype)
        x = np.zeros((len(left), 16, k), left.dtype)
        w = np.zeros((len(left), k, 8), left.dtype)
        total = np.zeros((len(left), 16, 8), total_dtype)
        if dtype == np.float32:
            bits = np.concatenate([registers(r).ravel() for r in (a, b)])
            assert not (bits & TF32_LOST).any(), "an operand is not rounded to tf32"
        for e in range(4 * in_word):
            word, inside = divmod(e, in_word)
            x[:, row + word % 2 * 8, quad * in_word + inside + word // 2 * k // 2] = left[..., e]
        for e in range(2 * in_word):
            word, inside = divmod(e, in_word)
            w[:, quad * in_word + inside + word * k // 2, row] = right[..., e]
        for e in range(4):
            total[:, row + e // 2 * 8, quad * 2 + e % 2] = sums[..., e]
        total += x @ w
        for e, target in enumerate(d):
            own = np.ascontiguousarray(total[:, row + e // 2 * 8, quad * 2 + e % 2]).reshape(-1)
            self.set_register(target, own.view(self.private[target.source].dtype))

    def wgmma(self, name: str, args: Any) -> None:
        """Multiply 64 rows by n columns in each group of four warps; wait for such products."""
        if name.endswith("wait_group"):
            keep = int(args[0])
            for group in self.products[: len(self.products) - keep]:
                for at in group:
                    self.busy[at] -= 1
                    self.read[at] = self.epoch
            self.products = self.products[len(self.products) - keep :]
        elif name.endswith("commit_group"):
            self.products.append(self.begun)
            self.begun = []
        elif not name.endswith("fence"):
            self._group_product(args)

    def _group_product(self, args: Any) -> None:
        shape = next(str(a.value) for a in args if is_text(a) and "m64n" in str(a.value))
        n, k = map(int, shape.removeprefix("m64n").split("k"))
        assert k == 32 // self.shared.itemsize
        sums, rest = args[: n // 2], args[n // 2 :]
        sides = [self._described(self.value(rest[side]), (64, n)[side]) for side in (0, 1)]
        for at in sides:
            self.begun.append(at)
            self.busy[at] += 1
            assert (self.landed[at] < self.epoch).all(), "a copy is multiplied without a barrier"
            assert self.fenced[at].all(), "a copy is multiplied without a fence of the proxy"
        if self.shared.dtype == np.float32:
            bits = np.concatenate([self.shared[at].view(np.uint32).ravel() for at in sides])
            assert not (bits & TF32_LOST).any(), "an operand is not rounded to tf32"
        left, right = (self.shared[at].astype(wide(self.shared.dtype)) for at in sides)
        total = (left @ right.swapaxes(-1, -2)).reshape(-1, 4, 16, n)  # group, warp, row, column
        row, pair = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2
        for e, target in enumerate(sums):
            column = e // 4 * 8 + pair + e % 2
            added = total[:, :, row + e // 2 % 2 * 8, column].reshape(-1)
            held = self.private[target.source]
            held[:, int(target.indices[0])] += added.astype(held.dtype)
            self.open_sums.add((target.source, int(target.indices[0])))

    def _described(self, descriptor: Any, lines: int) -> np.ndarray:
        """Return where the elements of 32 bytes of lines are, by descriptors of the threads."""
        whole = np.broadcast_to(descriptor, (self.threads,)).astype(np.uint64).reshape(-1, 128)
        assert (whole == whole[:, :1]).all(), "the warps of a group must agree"
        first = whole[:, 0]
        assert (first >> np.uint64(62) == 1).all(), "lines are swizzled over 128 bytes"
        assert (first >> np.uint64(32) & np.uint64(0x3FFF) == 1024 >> 4).all(), "eight lines of 128"
        start = (first & np.uint64(0x3FFF)).astype(int) * 16
        size = self.shared.itemsize
        line, element = np.arange(lines)[:, None], np.arange(32 // size)
        address = start[:, None, None] + line * 128 + element * size
        return (address ^ (address >> 7 & 7) << 4) // size


def wide(dtype: np.dtype) -> type:
    """Return the dtype in which operands are multiplied and added up."""
    return np.int32 if dtype.kind in "iu" else np.float32


def is_text(node: Any) -> bool:
    return node.kind == "StringImm"


def words(args: Any) -> list[str]:
    """Return the modifiers of an instruction."""
    return [str(a.value) for a in args if is_text(a)]
