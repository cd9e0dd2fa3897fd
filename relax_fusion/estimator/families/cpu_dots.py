"""Words of neighbours along k, and the instructions of CPUs that add up their products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...hardware import DeviceSpec
from ...hardware.instructions import Dot
from ...workload import INTEGER_DTYPES, GatedFFN, NormMatmul
from ..shape import MatmulShape
from .matmuls import MatmulWork, packed_form

DOTS, FOURS, MIXED = FAMILIES = ("dots", "fours", "mixed_fours")
"""The kernels: of two elements in a word, of four bytes, and of four where the instruction
multiplies unsigned bytes by signed ones."""

ROUNDED = "rounded"
"""The kernel that rounds rows to bytes, where that is allowed, and multiplies fields as bytes."""

COUNTS = {DOTS: 2, FOURS: 4, MIXED: 4, ROUNDED: 4}
"""Elements of a word."""

ROUNDED_SUMS = 16
"""Vectors of sums of a tile whose rows are rounded: each has a scaled one beside it.  Measured on
Zen 4, 2048 x 2048 at 128 rows: 12 and 16 take 0.4 of the time of 24 and 28."""

GROUP_CYCLES_PER_VECTOR = 4
"""To take zeros off a vector of sums of a group, convert, scale and add it.  Counted."""

SIGN, FLIP = 0x80, 0x80808080
"""An int8 with this bit flipped is a uint8 that is greater by as much; four of them in a word."""

_OTHER = dict(zip(INTEGER_DTYPES, reversed(INTEGER_DTYPES), strict=True))


@dataclass(frozen=True)
class Word:
    """A word of 32 bits: so many elements, and their types in rows and in columns."""

    count: int
    rows: str
    columns: str

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 32 // self.count

    @property
    def sums(self) -> str:
        """The type of sums of products."""
        return "float32" if self.rows == "bfloat16" else "int32"

    @property
    def is_flipped(self) -> bool:
        """Whether the elements of columns have another sign than they have in memory."""
        return self.rows != self.columns


def word_of(family: str, dtype: str) -> Word | None:
    """Return the words that a kernel multiplies where x and the weights are of `dtype`."""
    if family not in COUNTS:
        return None
    if family == ROUNDED:
        return Word(COUNTS[family], "int8", "uint8")
    if family == DOTS:
        kept = "int16" if dtype in INTEGER_DTYPES else dtype
        return Word(COUNTS[family], kept, kept)
    return Word(COUNTS[family], dtype, _OTHER.get(dtype, "") if family == MIXED else dtype)


def instruction_of(word: Word, dev: DeviceSpec) -> Dot | None:
    """Return what multiplies vectors of words, as wide as the device has them."""
    for found in dev.capabilities.matrix_instructions:
        if not isinstance(found, Dot) or {found.dtype, found.other} != {word.rows, word.columns}:
            continue
        if (found.n, found.k) == (dev.vector_bytes // 4, word.count):
            return found
    return None


def dot_families(dtype: str, dev: DeviceSpec) -> Iterator[str]:
    """Yield the kernels that a device has an instruction for, the fastest first."""
    for family in (FOURS, MIXED, DOTS):
        word = word_of(family, dtype)
        if word is not None and instruction_of(word, dev) is not None:
            yield family


def why_no_dots(family: str, shape: MatmulShape, dev: DeviceSpec) -> str | None:
    """Return why words of neighbours are not multiplied by an instruction, if they are not."""
    word, known = word_of(family, shape.dtype), (*INTEGER_DTYPES, "bfloat16")
    assert word is not None, "a kernel of words"
    if shape.unpacked_bytes or shape.dtype not in known[: 3 if family == DOTS else 2]:
        return f"family {family!r} multiplies {', '.join(known)} that is stored as such"
    if instruction_of(word, dev) is None:
        types = " by ".join((word.rows, word.columns))
        return f"{dev.label} has no instruction for {word.count} x {types} in each lane of a vector"
    if shape.k % word.count:
        return f"k is {shape.k}, family {family!r} has words of {word.count}"
    return None


def why_no_rounding(work: MatmulWork, dev: DeviceSpec) -> str | None:
    """Return why rows are not rounded to bytes, if they are not."""
    if not dev.capabilities.int8_rows:
        return f"family {ROUNDED!r} rounds rows to int8, which allow_int8_rows would allow"
    form, word = packed_form(work), word_of(ROUNDED, work.dtype)
    layouts = {work.layout} if isinstance(work, GatedFFN) else {p.layout for p in work.outputs}
    words = form is not None and form.is_plain and form.word == "uint32" and form.bits in (4, 8)
    if form is None or not words or form.axis != -1 or layouts != {"nk"}:
        return f"family {ROUNDED!r} takes weights of 4 and 8 bits, in words of 32 along k"
    if work.k % form.group or form.group % 8:
        return f"groups of {form.group} do not divide k={work.k}, or have no multiple of 8 elements"
    assert word is not None, "of every dtype"
    return None if instruction_of(word, dev) else f"{dev.label} multiplies no bytes of both signs"


def refuses_sums(work: MatmulWork, dev: DeviceSpec) -> str | None:
    """Return why a CPU does not add up products of integers, if it does not."""
    if work.dtype not in INTEGER_DTYPES:
        return None
    outputs = work.outputs if isinstance(work, NormMatmul) and work.norm is None else ()
    if not outputs or any(p.rope or p.head_norm for p in outputs):
        return f"dtype is {work.dtype}, of which a CPU has matmuls without norms, gates, rotations"
    if not any(dot_families(work.dtype, dev)):
        return f"dtype is {work.dtype}, {dev.label} has no instruction that adds up its products"
    return None
