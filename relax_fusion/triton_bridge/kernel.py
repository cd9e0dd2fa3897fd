"""A Triton kernel before compilation, as :class:`KernelSource`, and after, as `CompiledKernel`."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from ..errors import KernelError
from ..hardware.nvidia import native_arch
from ..validation import check
from .abi import c_type, constant, nested, size_of, tensor_map_rank

ALIGNMENT = 16
"""Bytes, or elements of an integer, that a specialised argument is a multiple of: with them known,
a warp loads 16 bytes per lane (PTX ``ld.global.v4``)."""

CONSTEXPR = "constexpr"
"""The type that Triton gives to a parameter whose value is fixed at compile time."""

_FORMAT = 1  # part of every key: raise it when `CompiledKernel` changes


@dataclass(frozen=True)
class KernelOptions:
    """How a kernel is compiled and launched.

    Parameters
    ----------
    num_warps : int
        Warps of one program, a power of two from 1 to 32.
    num_stages : int
        Depth of the software pipelines of its loops.
    num_ctas : int
        Thread blocks in a cluster that together run one program, a power of two from 1 to 16.
        More than one needs sm_90.
    maxnreg : int, optional
        Most registers a thread may use.
    cooperative : bool
        All programs of a launch are resident at once, so that they may wait for each other.
    dependent_launch : bool
        The kernel may begin while the one before it in the stream ends (programmatic dependent
        launch).  Each of its programs must call ``tl.extra.cuda.gdc_wait``: before it touches what
        an earlier kernel wrote or still reads, before it lets its own successor begin, and in any
        case before it ends, as that successor takes it for a sign that all before it have ended.
        Needs sm_90.
    """

    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    cooperative: bool = False
    dependent_launch: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no device takes."""
        for name, most in (("num_warps", 32), ("num_ctas", 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most or value & (value - 1):
                raise KernelError(f"{name} is {value!r}; it must be a power of two, 1 to {most}")
        for name, least, most in (("num_stages", 0, 64), ("maxnreg", 1, 255)):
            value = getattr(self, name)
            optional = name == "maxnreg" and value is None
            if not optional and (type(value) is not int or not least <= value <= most):
                raise KernelError(f"{name} is {value!r}; it must be from {least} to {most}")
        for name in ("cooperative", "dependent_launch"):
            if type(getattr(self, name)) is not bool:
                raise KernelError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    def for_triton(self) -> dict[str, Any]:
        """Return them under the names of Triton's CUDA back end."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
            "launch_cooperative_grid": self.cooperative,
            "launch_pdl": self.dependent_launch,
            # Said aloud: contracting a*b+c is the default up to Triton 3.9, and not after
            "enable_fp_fusion": True,
        }


_PARSING = threading.Lock()


class _OneAtATime:
    """A source that only one thread turns into Triton's IR at a time.

    That part runs under Python's lock anyway; and CPython 3.11's `ast.parse` counts its recursion
    in one place for all threads, and fails when they interleave.
    """

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Return the IR, as the class behind this one makes it."""
        with _PARSING:
            return super().make_ir(*args, **kwargs)  # type: ignore[misc]


class _TritonSource(_OneAtATime, ASTSource):
    """A kernel of `triton.jit`."""


class _GluonSource(_OneAtATime, GluonASTSource):
    """A kernel of `gluon.jit`."""


@dataclass(frozen=True)
class KernelSource:
    """Everything that decides the code of one kernel.

    Parameters
    ----------
    function : triton.JITFunction
        The kernel.
    types : mapping of str to str
        Triton's type of every parameter: ``"*fp16"``, ``"i32"``, ``"fp32"``, ``"constexpr"``,
        ``"tensordesc<fp16[64, 64]>"``; fields of a named tuple by names like ``"x.stride"``.
    constexprs : mapping of str to object
        The value of every ``"constexpr"`` parameter.
    aligned : frozenset of str
        Parameters whose address or value is a multiple of `ALIGNMENT`.
    capability : int
        Compute capability, ten times major plus minor: 90 for sm_90a.
    options : KernelOptions
        How it is compiled and launched.
    """

    function: JITFunction
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: frozenset[str]
    capability: int
    options: KernelOptions = field(default_factory=KernelOptions)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def gpu_target(self) -> GPUTarget:
        """The target, as Triton calls it."""
        return GPUTarget("cuda", self.capability, 32)

    def ast(self) -> ASTSource:
        """Return what `triton.compile` takes."""
        signature, position = nested(self.types)
        source = _GluonSource if self.function.is_gluon() else _TritonSource
        return source(
            self.function,
            signature=signature,
            constexprs={position[name]: constant(value) for name, value in self.constexprs.items()},
            attrs={
                position[name]: [["tt.divisibility", ALIGNMENT]]
                for name in self.types
                if name in self.aligned
            },
        )

    def key(self) -> str:
        """Return 16 hex digits that no other kernel of any Triton version shares.

        They hash the source of the function and of all that it calls, its types, constants,
        alignment and options, the device, and the versions of Triton and of ptxas.  (Triton's own
        key spells constants without their names and types: 1, True and "1" look the same.)
        """
        from triton._C.libtriton import get_cache_invalidating_env_vars

        backend = make_backend(self.gpu_target)
        options = backend.parse_options(self.options.for_triton())
        theirs = get_cache_key(self.ast(), backend, options, get_cache_invalidating_env_vars())
        constants = sorted((name, _spelled(value)) for name, value in self.constexprs.items())
        ours = json.dumps([_FORMAT, theirs, constants, asdict(self.options)])
        return hashlib.sha256(ours.encode()).hexdigest()[:16]


def _spelled(value: Any) -> Any:
    """Return JSON that no other constant shares."""
    if isinstance(value, tl.constexpr):
        return ["constexpr", _spelled(value.value)]
    if isinstance(value, tuple | list):
        return [type(value).__qualname__, [_spelled(v) for v in value]]
    return [type(value).__qualname__, str(getattr(value, "cache_key", value))]


@dataclass(frozen=True)
class TensorMapLayout:
    """How the host encodes one tensor-map argument (CUDA driver API, `cuTensorMapEncodeTiled`).

    Parameters
    ----------
    block : tuple of int
        Elements that one copy moves, outermost dimension first.
    element_bytes, element_type, swizzle : int
        Bytes of an element, and the driver's enumerators ``CUtensorMapDataType`` and
        ``CUtensorMapSwizzle``.
    """

    block: tuple[int, ...]
    element_bytes: int
    element_type: int
    swizzle: int


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture, and what it takes to launch it.

    Parameters
    ----------
    symbol : str
        Its name everywhere: the function's name and the key.
    entry : str
        Its name in the image.
    capability : int
        What the image was compiled for; it loads on devices of the same major version.
    constants : tuple of (str, str)
        Parameters whose value is part of the code, and that value, for people to read.
    params : tuple of str
        Triton types of the arguments of a launch, in order, constants left out.
    aligned : tuple of bool
        Which of them must be multiples of `ALIGNMENT`.
    tensor_maps : tuple of TensorMapLayout
        One for each ``tensordesc`` among `params`.
    options : KernelOptions
        As in the source.
    num_warps : int
        Warps of a thread block: those of the options, and those that warp specialisation added.
    shared_bytes : int
        Dynamic shared memory of one thread block.
    scratch_bytes, scratch_align : int
        Global memory that each thread block needs while it runs, and its alignment.
    image, ptx : bytes
        The cubin, and the text it was assembled from.
    """

    symbol: str
    entry: str
    capability: int
    constants: tuple[tuple[str, str], ...]
    params: tuple[str, ...]
    aligned: tuple[bool, ...]
    tensor_maps: tuple[TensorMapLayout, ...]
    options: KernelOptions
    num_warps: int
    shared_bytes: int
    scratch_bytes: int
    scratch_align: int
    image: bytes = field(repr=False)
    ptx: bytes = field(repr=False)

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
        return 32 * self.num_warps

    def to_json(self) -> str:
        """Return everything but the image and the PTX, as JSON."""
        fields = asdict(self)
        del fields["image"], fields["ptx"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, image: bytes, ptx: bytes = b"") -> CompiledKernel:
        """Rebuild a kernel from `to_json` and its image.

        Raises
        ------
        KeyError, TypeError, ValueError
            If `text` is no such JSON.
        """
        fields = json.loads(text)
        fields["options"] = KernelOptions(**fields["options"])
        fields["tensor_maps"] = tuple(
            TensorMapLayout(**{**m, "block": tuple(m["block"])}) for m in fields["tensor_maps"]
        )
        fields["constants"] = tuple((name, value) for name, value in fields["constants"])
        fields["params"], fields["aligned"] = tuple(fields["params"]), tuple(fields["aligned"])
        made = cls(**fields, image=image, ptx=ptx)
        check(made, ValueError, "kernel")
        return made

    def machine_params(self) -> list[str]:
        """Return the C type of every parameter of the machine code, in order.

        A tensor map is followed by the sizes (int32) and strides (int64, in elements) of its
        tensor; behind the arguments stand the two pointers that Triton adds: global scratch memory
        and the buffer of its profiler.
        """
        out: list[str] = []
        for kind in self.params:
            if kind.startswith("tensordesc"):
                rank = tensor_map_rank(kind)
                out += ["tensor_map", *["int32_t"] * rank, *["int64_t"] * rank]
            else:
                out.append(c_type(kind))
        return [*out, "void*", "void*"]


def check_entry(kernel: CompiledKernel) -> None:
    """Check that the machine code takes what a launch will pass, by the PTX of its entry.

    Raises
    ------
    KernelError
        If the numbers or sizes of the parameters differ: this Triton has another calling
        convention.
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
            f"{kernel.entry}: Triton compiled it with parameters of {sizes} bytes where a launch "
            f"passes {expected}; this version of Triton has another calling convention"
        )
