"""A Triton kernel before compilation: everything that decides its code."""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
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
from ..launch.kernel import ALIGNMENT, LaunchOptions, power_of_two

CONSTEXPR = "constexpr"
"""The type that Triton gives to a parameter whose value is fixed at compile time."""

_FORMAT = 2  # part of every key: raise it when `CompiledKernel` changes


@dataclass(frozen=True)
class KernelOptions(LaunchOptions):
    """How a kernel is compiled, and launched as `LaunchOptions` says."""

    num_warps: int = 4  # warps of one program, a power of two from 1 to 32
    num_stages: int = 3  # depth of the software pipelines of its loops
    maxnreg: int | None = None  # most registers a thread may use

    def __post_init__(self) -> None:
        power_of_two("num_warps", self.num_warps, 32)
        super().__post_init__()
        for name, least, most in (("num_stages", 0, 64), ("maxnreg", 1, 255)):
            value = getattr(self, name)
            optional = name == "maxnreg" and value is None
            if not optional and (type(value) is not int or not least <= value <= most):
                raise KernelError(f"{name} is {value!r}; it must be from {least} to {most}")

    @property
    def launch(self) -> LaunchOptions:
        """What a launch needs of them."""
        return LaunchOptions(self.num_ctas, self.cooperative, self.dependent_launch)

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


@dataclass(frozen=True)
class KernelSource:
    """Everything that decides the code of one kernel."""

    function: JITFunction
    types: Mapping[str, str]
    """Triton's type of every parameter: ``"*fp16"``, ``"i32"``, ``"fp32"``, ``"constexpr"``,
    ``"tensordesc<fp16[64, 64]>"``; fields of a named tuple by names like ``"x.stride"``."""
    constexprs: Mapping[str, Any]
    """The value of every ``"constexpr"`` parameter."""
    aligned: frozenset[str]
    """Parameters whose address or value is a multiple of `ALIGNMENT`."""
    capability: int
    """Compute capability, ten times major plus minor: 90 for sm_90a."""
    options: KernelOptions = field(default_factory=KernelOptions)
    """How it is compiled and launched."""

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
        source = GluonASTSource if self.function.is_gluon() else ASTSource
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


# --- tuples as parameters, which are as many arguments as they have fields -----------------------


def flat_fields(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a tuple and of those in it, or any other value under its own name.

    A field has a name like ``"x.stride"``, or ``"x.operands.0"`` in a tuple without names.
    """
    if not isinstance(value, tuple):
        return {name: value}
    names = getattr(value, "_fields", range(len(value)))
    found: dict[str, Any] = {}
    for own, each in zip(names, value, strict=True):
        found |= flat_fields(f"{name}.{own}", each)
    return found


def nested(types: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return Triton's type of every parameter, and where in them each of `types` is."""
    tree: dict[str, Any] = {}
    position: dict[str, tuple[int, ...]] = {}
    for name, kind in types.items():
        *outer, last = name.split(".")
        inside, place = tree, []
        for part in outer:
            inside.setdefault(part, {})
            place.append(list(inside).index(part))
            inside = inside[part]
        inside[last] = kind
        position[name] = (*place, len(inside) - 1)
    return {name: _tuple(name, kind) for name, kind in tree.items()}, position


def _tuple(name: str, kind: Any) -> Any:
    """Return the types of a parameter as the tuple that it is, with names if it has them."""
    if not isinstance(kind, dict):
        return kind
    inside = [_tuple(own, each) for own, each in kind.items()]
    return tuple(inside) if "0" in kind else namedtuple(name, list(kind))(*inside)


def constant(value: Any) -> Any:
    """Return a constant for a kernel, in which each field of a named tuple is one too."""
    return type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
