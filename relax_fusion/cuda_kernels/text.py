"""The text of a kernel in CUDA C++: constants and maths of a form, then what all forms share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..estimator.families.cuda_matmul.tiles import LINE_BYTES, CudaPlan, line_bytes
from ..workload import Packed
from ..workload.reference import numpy_dtype

COPYING_REGISTERS, OTHER_REGISTERS = {2: 40, 3: 32}, {2: 232, 3: 160}
"""Registers of a thread that copies, and of one that multiplies, by warp groups that multiply:
together 65,536 at most, each a multiple of 8 (PTX ISA, ``setmaxnreg``).  One warp group has 255
for each thread anyway."""

_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
_FUNCTIONS = {"tanh": "hyperbolic_tangent"}
"""Activations whose functions have another name in ``maths.cu``."""


@dataclass(frozen=True)
class MatmulForm:
    """What a matmul kernel is compiled for; the sizes of its tensors come at run time.

    Parameters
    ----------
    plan : CudaPlan
        Tile, stages, warp groups and cluster.
    dtype : str
        Of all tensors, "float16" or "bfloat16".
    activation : str
        Of a gate; ``""`` where there is one weight.
    biased : bool
        Whether vectors are added first: one, or one for each of gate and up.
    steps : tuple of str
        What follows, as `Form.steps` of the Triton kernels has it: ``"times:0.5"``,
        ``"add:0:row"``, ``"multiply:1:row"``, ``"add:2:whole"``, or an activation.
    products : int
        Weights of the same rows, each with operands like these and a result of its own.
    turned : bool
        Whether weights are ``[k, n]``.
    packed : Packed, optional
        How weights are stored, which go through registers then.
    dependent, early : bool
        Whether it is launched before the kernel in front has ended, and whether weights are read
        before that.
    """

    plan: CudaPlan
    dtype: str
    activation: str = ""
    biased: bool = False
    steps: tuple[str, ...] = ()
    products: int = 1
    turned: bool = False
    packed: Packed | None = None
    dependent: bool = False
    early: bool = False

    @property
    def vectors(self) -> int:
        """Operands along the features, biases first."""
        first = (2 if self.activation else 1) if self.biased else 0
        return first + sum(step.endswith(":row") for step in self.steps)

    @property
    def has_residual(self) -> bool:
        """Whether a tensor of the result's size is added."""
        return any(step.endswith(":whole") for step in self.steps)

    @property
    def line_bytes(self) -> int:
        """Bytes that a stage has of a line of the tall operand."""
        return line_bytes(self.plan, self.packed) if self.packed else LINE_BYTES

    @property
    def units(self) -> int:
        """Elements of the tall operand's tensor that a stage has of a line."""
        return self.plan.block_k // self.packed.fields if self.packed else self.plan.block_k

    @property
    def text(self) -> str:
        """The whole source."""
        return "\n".join(
            [
                f'#define DTYPE "{_PTX_TYPES[self.dtype]}"',
                *self._constants(),
                _shared("maths.cu"),
                self._epilogue(),
                _shared("hopper.cu"),
                self._products(),
                *self._registers(),
                _shared("matmul.cu"),
            ]
        )

    def _constants(self) -> list[str]:
        plan = self.plan
        numbers = {
            "SWAPPED": plan.swapped,
            "TURNED": int(self.turned),
            "BLOCK_K": plan.block_k,
            "TALL_LINE": self.line_bytes,
            "TALL_UNITS": self.units,
            "TALL": plan.tall,
            "GROUPS_TALL": plan.groups_tall,
            "WIDE": plan.wide,
            "GROUPS_WIDE": plan.groups_wide,
            "TURNS": plan.turns,
            "STAGES": plan.num_stages,
            "BLOCKS": plan.blocks,
            "CLUSTER_ROWS": plan.cluster_m,
            "CLUSTER_FEATURES": plan.cluster_n,
            "BLOCKS_THAT_SHARE": plan.cluster // plan.split_k,
            "BLOCKS_THAT_SPLIT": plan.split_k,
            "WEIGHTS": 2 if self.activation else 1,
            "VECTORS": self.vectors,
            "RESIDUAL": int(self.has_residual),
            "DEPENDENT": int(self.dependent),
            "EARLY": int(self.early),
            "COPYING_REGISTERS": COPYING_REGISTERS.get(plan.multiplying, 0),
            "OTHER_REGISTERS": OTHER_REGISTERS.get(plan.multiplying, 0),
        }
        return [
            f"#define REGISTERS {int(self.packed is not None)}",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"#define PARAMETERS {', '.join(self._parameters())}",
            f"#define PRODUCTS {', '.join(map(self._product, range(self.products)))}",
        ]

    def _parameters(self) -> Iterator[str]:
        """Yield the kernel's parameters: of the first product, rows and k among them; of others."""
        for i in range(self.products):
            maps = [f"weight{i}", f"up_weight{i}", *(["x"] if i == 0 else [])]
            residual = [f"residual{i}"] if self.has_residual else []
            operands = [*self._scales(i), *self._vectors(i), *residual]
            yield from (f"const __grid_constant__ TensorMap {name}" for name in maps)
            yield f"Number* out{i}"
            yield from (f"const Number* {name}" for name in operands)
            yield from ["int rows", "int features0", "int k"] if i == 0 else [f"int features{i}"]

    def _product(self, i: int) -> str:
        vectors = ", ".join(self._vectors(i))
        residual = f"residual{i}" if self.has_residual else "nullptr"
        scales = ", ".join(self._scales(i))
        operands = f"{{{vectors}}}, {residual}, features{i}, {{{scales}}}"
        return f"{{&weight{i}, &up_weight{i}, out{i}, {operands}}}"

    def _vectors(self, i: int) -> list[str]:
        return [f"vector{i}_{number}" for number in range(self.vectors)]

    def _scales(self, i: int) -> list[str]:
        names = [f"scales{i}", f"up_scales{i}"][: 2 if self.activation else 1]
        return names if self.packed is not None else []

    def _registers(self) -> list[str]:
        """Return what brings the tall operand to registers, where it goes through them."""
        if self.packed is None:
            return []
        numbers = {"TALL_BITS": self.packed.bits, **_numbers_of(self.packed, self.dtype)}
        constants = [f"constexpr unsigned {name} = {value:#x};" for name, value in numbers.items()]
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
        arguments = "float sum, float up, const float* vector, float residual"
        return f"__device__ __forceinline__ float epilogue({arguments}) {{\n{body}}}"

    def _products(self) -> str:
        """Return wgmma of as many rows as a warp group has, which no template can spell."""
        lines = self.plan.wide // self.plan.groups_wide
        count, dtype = lines // 2, _PTX_TYPES[self.dtype]
        sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
        registers = ", ".join(f"%{i}" for i in range(count))
        if self.packed is not None:
            tall, given = "const u32 (&tall)[4]", ", ".join(f'"r"(tall[{i}])' for i in range(4))
            places = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
            wide, turned = count + 4, ""
        else:
            tall, given, places = "u64 tall", '"l"(tall)', f"%{count}"
            wide, turned = count + 1, f"{int(self.turned)}, "
        return f"""
// sums[tall, wide] = tall * wide + (more ? sums : 0), 16 elements of k
__device__ __forceinline__ void multiply(float (&sums)[{count}], {tall}, u64 wide, int more) {{
  asm volatile("{{\\n.reg .pred more;\\nsetp.ne.b32 more, %{wide + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{lines}k16.f32.{dtype}.{dtype} {{{registers}}}, "
    "{places}, %{wide}, more, 1, 1, {turned}0;\\n}}"
    : {sums} : {given}, "l"(wide), "r"(more));
}}

// Wait until the sums are there.
__device__ __forceinline__ void settle(float (&sums)[{count}]) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");
}}
"""


def _numbers_of(packed: Packed, dtype: str) -> dict[str, int]:
    """Return how fields become numbers, as `packed.cu` has it."""
    zero, flipped = packed.zero or 0, 0
    if packed.number == "int8":  # as unsigned ones
        zero, flipped = zero + 0x80, 0x80
    group = {"GROUP": max(packed.group, 0)}
    if packed.bits == 8 and dtype == "bfloat16":
        none = {"FACTOR": 0, "OFFSET": 0}
        return {**group, "FIELDS": 0xFF00FF, "LARGE": _twice(flipped), **none, "ZERO": zero}
    large = 1024 if dtype == "float16" else 128
    step = 16 if (packed.bits, dtype) == (4, "float16") else 1  # of the higher half
    kind: Any = numpy_dtype(dtype)

    def pair(low: float, high: float) -> int:
        return int(np.array([low, high], kind).view("uint32")[0])

    return {
        **group,
        "FIELDS": {(4, 16): 0xF0000F, (4, 1): 0xF000F, (8, 1): 0xFF00FF}[packed.bits, step],
        "LARGE": pair(large, large) ^ _twice(flipped),
        "FACTOR": pair(1, 1 / step),
        "OFFSET": pair(-large - zero, -large / step - zero),
        "ZERO": zero,
    }


def _twice(bits: int) -> int:
    return bits << 16 | bits


def _function(activation: str) -> str:
    return _FUNCTIONS.get(activation, activation)


@lru_cache
def _shared(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
