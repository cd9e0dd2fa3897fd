"""Compiled kernels: an image for one architecture, and what it takes to launch it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from ..errors import KernelError
from ..hardware.nvidia import native_arch
from ..validation import Natural, check, read_json

_C_TYPES = {
    **{f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    "i1": "int8_t",
    "u1": "uint8_t",
    "fp32": "float",
    "fp64": "double",
}
_SIZES = {"tensor_map": 128, "void*": 8, "float": 4, "double": 8}


def c_type(kind: str) -> str:
    """Return the C type in which a launch passes an argument of Triton's type `kind`.

    Raises `KernelError` if there is none.
    """
    if kind.startswith("*"):
        return "void*"
    if kind not in _C_TYPES:
        raise KernelError(f"type {kind!r} cannot be passed at run time; use fp32 or an integer")
    return _C_TYPES[kind]


def is_tensor_map(kind: str) -> bool:
    """Tell whether an argument is a tensor map."""
    return kind.startswith("tensordesc")


def tensor_map_rank(kind: str) -> int:
    """Return the rank of a type like ``tensordesc<fp16[64, 64]>``; a layout may follow the tile."""
    return kind[: kind.index("]")].count(",") + 1


def size_of(c: str) -> int:
    """Return the bytes of a C type of `c_type`, or of a tensor map."""
    return _SIZES[c] if c in _SIZES else int("".join(filter(str.isdigit, c))) // 8


ALIGNMENT = 16
"""Bytes, or elements of an integer, that a specialised argument is a multiple of: with them known,
a warp loads 16 bytes per lane (PTX ``ld.global.v4``)."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]*$")]
"""A name that stands in source code."""


@dataclass(frozen=True)
class LaunchOptions:
    """How a kernel is launched; raise `KernelError` if a value is none that a device takes."""

    num_ctas: int = 1
    """Thread blocks in a cluster, a power of two from 1 to 16.  More than one needs sm_90; a grid
    counts clusters."""
    cooperative: bool = False
    """All programs of a launch are resident at once, so that they may wait for each other."""
    dependent_launch: bool = False
    """The kernel may begin while the one before it in the stream ends (programmatic dependent
    launch).  Each of its programs must execute ``griddepcontrol.wait`` (in Triton,
    ``tl.extra.cuda.gdc_wait``): before it touches what an earlier kernel wrote or still reads, and
    in any case before it ends, as its successor takes it for a sign that all before it have ended.
    It may let that begin in front of its wait where the kernel before it has waited and neither
    writes what the successor reads in front of its own.  Needs sm_90."""

    def __post_init__(self) -> None:
        power_of_two("num_ctas", self.num_ctas, 16)
        for name in ("cooperative", "dependent_launch"):
            if type(getattr(self, name)) is not bool:
                raise KernelError(f"{name} is {getattr(self, name)!r}; it must be True or False")


def power_of_two(name: str, value: object, most: int) -> None:
    """Refuse a number that is no power of two up to `most`."""
    if type(value) is not int or not 1 <= value <= most or value & (value - 1):
        raise KernelError(f"{name} is {value!r}; it must be a power of two, 1 to {most}")


@dataclass(frozen=True)
class TensorMapLayout:
    """How the host encodes one tensor-map argument (CUDA driver API, `cuTensorMapEncodeTiled`)."""

    block: tuple[int, ...]
    """Elements that one copy moves, outermost dimension first."""
    element_bytes: int
    element_type: int
    swizzle: int
    """Bytes of an element, and the driver's enumerators ``CUtensorMapDataType`` and
    ``CUtensorMapSwizzle``."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture, and what it takes to launch it.

    Raises `KernelError` if a field has a value that its type does not allow.
    """

    symbol: Name
    """Its name everywhere: the function's name and the key."""
    entry: Name
    """Its name in the image."""
    capability: int
    """What the image was compiled for; it loads on devices of the same major version."""
    constants: tuple[tuple[str, str], ...]
    """Parameters whose value is part of the code, and that value, for people to read."""
    params: tuple[str, ...]
    """Types of the arguments of a launch, in order, as Triton spells them (``"*fp16"``, ``"i32"``,
    ``"fp32"``, ``"tensordesc<fp16[64, 64]>"``)."""
    aligned: tuple[bool, ...]
    """Which of them must be multiples of `ALIGNMENT`."""
    tensor_maps: tuple[TensorMapLayout, ...]
    """One for each ``tensordesc`` among `params`."""
    options: LaunchOptions
    """How it is launched."""
    num_warps: Annotated[int, Field(ge=1, le=32)]
    """Warps of a thread block, from 1 to 32."""
    shared_bytes: Natural
    """Dynamic shared memory of one thread block."""
    scratch_bytes: Natural
    scratch_align: Natural
    """Global memory that each thread block needs while it runs, and its alignment."""
    image: bytes = field(default=b"", repr=False)
    ptx: bytes = field(default=b"", repr=False)
    """The cubin, and the text it was assembled from."""
    convention: Literal["cuda", "triton"] = "triton"
    """What the machine code takes beside its arguments: nothing, or what Triton adds, the sizes and
    strides of tensor maps and two pointers at the end."""
    block: tuple[int, int, int] | None = None
    """Threads of a thread block in x, y and z; by default all of its warps in a row."""

    def __post_init__(self) -> None:
        check(self, KernelError, "kernel")

    @property
    def arch(self) -> str:
        """The architecture as ptxas calls it."""
        return native_arch(self.capability)

    @property
    def launcher(self) -> str:
        """The name of the function that launches it, in the library that it is embedded in."""
        return f"launch_{self.symbol}"

    @property
    def threads(self) -> int:
        """Threads of one thread block."""
        return prod(self.block) if self.block else 32 * self.num_warps

    def to_json(self) -> str:
        """Return everything but the image and the PTX, as JSON."""
        fields = asdict(self)
        del fields["image"], fields["ptx"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, image: bytes, ptx: bytes = b"") -> CompiledKernel:
        """Rebuild a kernel from `to_json` and its image.

        Raises `KernelError` if `text` is no such JSON.
        """
        made: CompiledKernel = read_json(cls, text, KernelError, "kernel")
        return replace(made, image=image, ptx=ptx)

    def machine_params(self) -> list[str]:
        """Return the C type of every parameter of the machine code, in order.

        In Triton's convention a tensor map is followed by the sizes (int32) and strides (int64, in
        elements) of its tensor, and behind the arguments stand two pointers: global scratch memory
        and the buffer of its profiler.
        """
        out: list[str] = []
        for kind in self.params:
            out.append("tensor_map" if is_tensor_map(kind) else c_type(kind))
            if is_tensor_map(kind) and self.convention == "triton":
                rank = tensor_map_rank(kind)
                out += [*["int32_t"] * rank, *["int64_t"] * rank]
        return [*out, "void*", "void*"] if self.convention == "triton" else out


def check_entry(kernel: CompiledKernel) -> None:
    """Check that the machine code takes what a launch will pass, by the PTX of its entry.

    Raises `KernelError` if the numbers or sizes of the parameters differ: a version of Triton has
    another calling convention, or a kernel is described wrongly.
    """
    text = kernel.ptx.decode(errors="replace")
    entry = re.search(rf"\.entry\s+{re.escape(kernel.entry)}\s*\(([^)]*)\)", text)
    param = r"\.param\s+(?:\.align\s+\d+\s+)?\.([bfsu])(\d+)([^,]*)"
    declared = re.findall(param, entry[1]) if entry else []
    sizes = []
    for _, bits, rest in declared:
        length = re.search(r"\[(\d+)\]", rest)
        sizes.append(int(bits) // 8 * (int(length[1]) if length else 1))
    expected = [size_of(c) for c in kernel.machine_params()]
    # Parameters narrower than a register are widened in PTX
    if len(sizes) != len(expected) or any(
        s != e and e >= 4 for s, e in zip(sizes, expected, strict=True)
    ):
        raise KernelError(
            f"{kernel.entry}: it takes parameters of {sizes} bytes where a launch passes "
            f"{expected}, by the calling convention {kernel.convention!r}"
        )
