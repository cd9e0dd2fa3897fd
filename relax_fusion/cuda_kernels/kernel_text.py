"""The text of a kernel in CUDA C++: constants and maths of a form, then what all forms share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import gcd
from typing import NamedTuple

from ..estimator.families.cuda_matmul.tiles import (
    CudaPlan,
    copies_residual,
    line_bytes,
    lines_copied,
    sets_made,
)
from ..hardware.instructions import PIECE_BYTES
from ..workload import Packed
from ..workload.dtypes import DTYPE_BYTES, accumulator, step_dtype
from .unpacking import numbers_of
from .wgmma import TallOperand, products_text

COPYING_REGISTERS, OTHER_REGISTERS = {2: 40, 3: 32}, {2: 232, 3: 160}
"""Registers of a thread that copies, and of one that multiplies, by warp groups that multiply:
together 65,536 at most, each a multiple of 8 (PTX ISA, ``setmaxnreg``).  One warp group has 255
for each thread anyway."""

_HALVES = {"float16": "f16", "bfloat16": "bf16"}
_UNITS = {16: "uint4", 8: "unsigned long long", 4: "unsigned", 2: "unsigned short"}
_C_TYPES = {**dict.fromkeys(_HALVES, "unsigned short"), "float32": "float", "int32": "int"}

_FUNCTIONS = {"tanh": "hyperbolic_tangent"}
"""Activations whose functions have another name in ``maths.cu``."""


class RotatedForm(NamedTuple):
    """How features of some products turn: heads of `head_dim`, whose first `width` features do.

    The features of a pair are `distance` apart; `columns` angles of `dtype` turn a row.  `heads`
    has for each product how many features of each period are of heads that turn, and the period;
    None for a product that is not rotated, 0 for all of its features.
    """

    head_dim: int
    width: int
    distance: int
    columns: int
    dtype: str
    heads: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class MatmulForm:
    """What a matmul kernel is compiled for; the sizes of its tensors come at run time."""

    plan: CudaPlan
    """Tile, stages, warp groups and cluster."""
    dtype: str
    """Of x and the weights: "float16", "bfloat16", "float32" (multiplied as tf32), "int8" or
    "uint8".  What is added to sums of integers, or multiplies them, is float32."""
    activation: str = ""
    """Of a gate; ``""`` where there is one weight."""
    biased: bool = False
    """Whether vectors are added first: one, or one for each of gate and up."""
    steps: tuple[str, ...] = ()
    """What follows, as `Form.steps` of the Triton kernels has it: ``"times:0.5"``, ``"add:0:row"``,
    ``"multiply:1:row"``, ``"add:2:whole"``, or an activation."""
    products: int = 1
    """Weights of the same rows, each with operands like these and a result of its own."""
    turned: bool = False
    """Whether weights are ``[k, n]``."""
    packed: Packed | None = None
    """How weights are stored, which go through registers then."""
    dependent: bool = False
    early: bool = False
    """Whether it is launched before the kernel in front has ended, and whether weights are read
    before that."""
    out_dtype: str = ""
    """Of the results: "float16", "bfloat16", "float32", or "int32" of integers without steps;
    ``""`` stands for `dtype`."""
    rotated: RotatedForm | None = None
    """How features turn behind a bias; then there are no steps."""
    released: bool = False
    """Whether the kernel behind it may begin when it does, because that waits for it by itself."""
    adapter_steps: int = 0
    """Steps of 64 that it goes on for behind those along k, with the ``x A`` and the B of an
    adapter of each product.  The kernel in front makes the former, and nothing else of what this
    one reads; where that is dependent, it has to be `released`."""
    unit_bytes: int = PIECE_BYTES
    """Bytes of a row of the results that a thread stores at once."""

    @property
    def result_dtype(self) -> str:
        """Of the results and of a residual."""
        return self.out_dtype or self.dtype

    @property
    def vector_dtype(self) -> str:
        """Of the operands along the features."""
        return step_dtype(self.dtype)

    @property
    def half(self) -> int:
        """Distance of the features of a pair that are those of two weights, or 0."""
        rotated = self.rotated
        return rotated.distance if rotated and rotated.distance > 1 else 0

    @property
    def weights(self) -> int:
        """Weights of a tile: of gate and up, of low and high features of pairs, or one."""
        return 2 if self.activation or self.half else 1

    @property
    def run(self) -> int:
        """Lines of a weight that one copy brings: of pairs, those that lie side by side."""
        return gcd(lines_copied(self.plan, self.weights, self.packed), self.half)

    @property
    def vectors(self) -> int:
        """Operands along the features, biases first."""
        first = self.weights if self.biased else 0
        return first + sum(step.endswith(":row") for step in self.steps)

    @property
    def has_residual(self) -> bool:
        """Whether a tensor of the result's size is added."""
        return any(step.endswith(":whole") for step in self.steps)

    @property
    def copies_residual(self) -> bool:
        """Whether a residual comes through the ring, by a tensor map."""
        bytes_each = DTYPE_BYTES[self.result_dtype]
        return self.has_residual and copies_residual(self.plan, bytes_each, self.unit_bytes)

    @property
    def units(self) -> int:
        """Elements of the tall operand's tensor that a stage has of a line."""
        return self.plan.block_k // self.packed.fields if self.packed else self.plan.block_k

    @property
    def text(self) -> str:
        """The whole source."""
        plan = self.plan
        tall: TallOperand = "turned" if self.turned else "lines"
        if self.packed is not None:
            tall = "registers"
        return "\n".join(
            [
                f'#define DTYPE "{self._half}"',
                *self._types(),
                *self._constants(),
                _shared("maths.cu"),
                self._epilogue(),
                _shared("hopper.cu"),
                products_text(self.dtype, plan.wide // plan.groups_wide, tall),
                *self._registers(),
                _shared("rotation.cu"),
                _shared("matmul.cu"),
            ]
        )

    @property
    def _half(self) -> str:
        """The type of two bytes that is read or stored; if there is none, any."""
        found = (_HALVES.get(each) for each in (self.result_dtype, self.vector_dtype))
        return next(filter(None, found), "f16")

    def _types(self) -> list[str]:
        value = "int" if self.result_dtype == "int32" else "float"
        types = {
            "Number": _C_TYPES[self.vector_dtype],
            "Result": _C_TYPES[self.result_dtype],
            "Sum": _C_TYPES[accumulator(self.dtype)],
            "Value": value,
            "Unit": _UNITS[self.unit_bytes],
        }
        return [f"typedef {known} {name};" for name, known in types.items()]

    def _constants(self) -> list[str]:
        plan = self.plan
        numbers = {
            "SWAPPED": plan.swapped,
            "TURNED": int(self.turned),
            "BLOCK_K": plan.block_k,
            "TALL_LINE": line_bytes(plan, self.packed),
            "TALL_UNITS": self.units,
            "TALL": plan.tall,
            "GROUPS_TALL": plan.groups_tall,
            "WIDE": plan.wide,
            "GROUPS_WIDE": plan.groups_wide,
            "TURNS": plan.turns,
            "GROUPS_THAT_SPLIT": plan.groups_k,
            "STAGES": plan.num_stages,
            "BLOCKS": plan.blocks,
            "CLUSTER_ROWS": plan.cluster_m,
            "CLUSTER_FEATURES": plan.cluster_n,
            "BLOCKS_THAT_SHARE": plan.cluster // plan.split_k,
            "BLOCKS_THAT_SPLIT": plan.split_k,
            "WEIGHTS": self.weights,
            "RUN": self.run,
            "VECTORS": self.vectors,
            "RESIDUAL": int(self.has_residual),
            "COPIES_RESIDUAL": int(self.copies_residual),
            "DEPENDENT": int(self.dependent),
            "EARLY": int(self.early),
            "ELEMENT_BYTES": DTYPE_BYTES[self.dtype],
            "RELEASED": int(self.released),
            "ADAPTER_STEPS": self.adapter_steps,
            "COPYING_REGISTERS": COPYING_REGISTERS.get(plan.multiplying, 0),
            "OTHER_REGISTERS": OTHER_REGISTERS.get(plan.multiplying, 0),
            "ROTATED": int(self.rotated is not None),
            "HALF": self.half,
            "HEAD": self.rotated.head_dim if self.rotated else 8,
            "WIDTH": self.rotated.width if self.rotated else 8,
            "COLUMNS": self.rotated.columns if self.rotated else 8,
        }
        angle = "float" if self.rotated and self.rotated.dtype == "float32" else "u16"
        return [
            f"#define REGISTERS {int(self.packed is not None)}",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"#define Angle {angle}",
            f"#define PARAMETERS {', '.join(self._parameters())}",
            f"#define PRODUCTS {', '.join(map(self._product, range(self.products)))}",
        ]

    def _parameters(self) -> Iterator[str]:
        """Yield the kernel's parameters: of the first product, rows and k among them; of others."""
        for i in range(self.products):
            maps = [f"weight{i}", f"up_weight{i}", *(["x"] if i == 0 else [])]
            maps += [f"adapter{i}", f"narrow{i}"] if self.adapter_steps else []
            residual = [f"residual{i}"] if self.has_residual else []
            maps += residual if self.copies_residual else []
            yield from (f"const __grid_constant__ TensorMap {name}" for name in maps)
            yield f"Result* out{i}"
            operands = [*self._scales(i), *self._vectors(i)]
            yield from (f"const Number* {name}" for name in operands)
            if not self.copies_residual:
                yield from (f"const Result* {name}" for name in residual)
            if self.turns(i):
                yield from (f"const Angle* cos{i}", f"const Angle* sin{i}", f"int positions{i}")
            yield from ["int rows", "int features0", "int k"] if i == 0 else [f"int features{i}"]

    def _product(self, i: int) -> str:
        vectors = ", ".join(self._vectors(i))
        copied = f"&residual{i}" if self.copies_residual else "nullptr"
        read = f"residual{i}" if self.has_residual and not self.copies_residual else "nullptr"
        adapter = f"&adapter{i}, &narrow{i}" if self.adapter_steps else "nullptr, nullptr"
        scales = f"{{{', '.join(self._scales(i))}}}"
        rotation = f", {self._rotation(i)}" if self.rotated else ""
        maps, operands = f"&weight{i}, &up_weight{i}, {copied}", f"{{{vectors}}}, {read}"
        return f"{{{maps}, out{i}, {operands}, features{i}, {adapter}, {scales}{rotation}}}"

    def _rotation(self, i: int) -> str:
        heads = self.rotated.heads[i] if self.rotated else None
        if heads is None:
            return "{nullptr, nullptr, 0, 1, 1}"
        features, period = (each or f"features{i}" for each in heads)
        return f"{{cos{i}, sin{i}, {features}, {period}, positions{i}}}"

    def turns(self, i: int) -> bool:
        """Tell whether features of a product turn."""
        return self.rotated is not None and self.rotated.heads[i] is not None

    def _vectors(self, i: int) -> list[str]:
        return [f"vector{i}_{number}" for number in range(self.vectors)]

    def _scales(self, i: int) -> list[str]:
        names = [f"scales{i}", f"up_scales{i}"][: 2 if self.activation else 1]
        return names if self.packed is not None else []

    def _registers(self) -> list[str]:
        """Return what brings the tall operand to registers, where it goes through them."""
        if self.packed is None:
            return []
        numbers = {"TALL_BITS": self.packed.bits, **numbers_of(self.packed, self.dtype)}
        constants = [f"constexpr unsigned {name} = {value:#x};" for name, value in numbers.items()]
        constants.append(f"constexpr int MADE = {sets_made(self.plan)};")
        source = ["#define LINES PackedLines", _shared("packed.cu")]
        return [*constants, _shared("registers.cu"), *source]

    def _epilogue(self) -> str:
        """Return the function of a sum (a gate's and an up's), and of what is loaded."""
        bias = ["sum += vector[0];"] if self.biased else []
        vectors = len(bias)
        if self.activation:
            bias += ["up += vector[1];"] * len(bias)
            vectors = len(bias)
            bias.append(f"sum = {_function(self.activation)}(sum) * up;")
        lines = [*bias]
        for step in self.steps:
            kind, *rest = step.split(":")
            if kind == "times":
                lines.append(f"sum *= {float(rest[0])!r}f;")
            elif rest[1:] == ["whole"]:
                lines.append("sum += residual;")
            elif rest:
                lines.append(f"sum {'+' if kind == 'add' else '*'}= vector[{vectors}];")
                vectors += 1
            else:
                lines.append(f"sum = {_function(kind)}(sum);")
        body = "".join(f"  {line}\n" for line in [*lines, "return sum;"])
        arguments = "Value sum, Value up, const float* vector, float residual"
        return f"__device__ __forceinline__ Value epilogue({arguments}) {{\n{body}}}"


def _function(activation: str) -> str:
    return _FUNCTIONS.get(activation, activation)


@lru_cache
def _shared(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
