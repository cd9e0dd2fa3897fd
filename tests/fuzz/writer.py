"""A Relax function that is being written: operators are appended, with accidents between them.

Values are Relax variables with the types that TVM infers.  Nothing is parsed and nothing compiled,
so that a function costs a few milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.relax import op
from tvm_ffi import structural_equal

from relax_fusion.matching.shapes import dtype_of, same_shape
from relax_fusion.workload.reference import numpy_dtype

from .bindings import Bindings, Function, value_of

LENGTHS = (1, 1, 2, 3, 5, 8, 17, 0)
"""Static lengths of sequences and batches."""

PACKED = "relax_fusion_tests.rewrite"
"""A packed function that overwrites its argument."""


class IllTyped(Exception):
    """Raised for a call that TVM refuses: what was written so far is a function as well."""


Dim = Any
"""A size: a number, or an expression of symbolic variables."""


class Writer:
    """The bindings so far, and the choices of one function.

    Parameters
    ----------
    rng : random.Random
        Makes all choices.
    accidents : int
        How often, in percent, a value that was made is disturbed before it is read.
    """

    def __init__(self, rng: Random, accidents: int = 3):
        self.rng, self.accidents = rng, accidents
        self.dtype = rng.choice(("float32",) * 10 + ("float16",) * 6 + ("bfloat16",) * 2)
        self.normalizer = relax.BlockBuilder()
        self.params: list[relax.Var] = []
        self.bindings: Bindings = []
        self.results: list[relax.Var] = []
        self.weights: dict[tuple[Any, ...], list[relax.Var]] = {}
        self.device = relax.VDevice("cuda") if rng.random() < 0.01 else None

    # --- choices -----------------------------------------------------------------------------

    def chance(self, percent: int) -> bool:
        """Draw true in about `percent` of the cases."""
        return self.rng.randrange(100) < percent

    def pick(self, *options: Any) -> Any:
        """Draw one of the options."""
        return self.rng.choice(options)

    # --- leaves ------------------------------------------------------------------------------

    def param(self, shape: Sequence[Dim], dtype: str | None = None) -> relax.Var:
        """Add a parameter, or rarely take one of the same type, which is an operand then twice."""
        ty = relax.TensorType(list(shape), dtype or self.dtype, vdevice=self.device)
        same = [p for p in self.params if structural_equal(p.ty, ty)]
        if same and self.chance(self.accidents):
            return self.pick(*same)
        self.params.append(relax.Var(f"p{len(self.params)}", ty))
        return self.params[-1]

    def leaf(self, shape: Sequence[Dim], dtype: str | None = None) -> relax.Expr:
        """Add a parameter, or sometimes a constant where its size is known."""
        if all(isinstance(d, int) for d in shape) and math.prod(shape) < 500 and self.chance(8):
            values = np.random.default_rng(self.rng.randrange(2**31)).standard_normal(shape)
            dtype = dtype or self.dtype
            return relax.const(values.astype(numpy_dtype(dtype)), dtype)
        return self.param(shape, dtype)

    def scalar(self, value: float, like: relax.Expr) -> relax.Expr:
        """Return a constant of one element, in the dtype of a tensor."""
        number = relax.const(value, dtype_of(like))
        if not self.chance(8):
            return number
        shape = relax.ShapeExpr(self.pick((1,), (1, 1), ()))
        return self.emit(op.full(shape, number, dtype_of(like)))

    def symbol(self, name: str) -> tirx.Var:
        """Return a symbolic size."""
        return tirx.Var(name, "int64")

    # --- values ------------------------------------------------------------------------------

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind a value."""
        try:
            value = self.normalizer.normalize(expr)
        except (ValueError, TypeError) as err:
            raise IllTyped(str(err)) from err
        if _is_negative(value.ty):
            raise IllTyped("a size below 0, which TVM infers of slices")
        var = relax.Var(f"v{len(self.bindings)}", value.ty)
        self.bindings.append((var, value, False))
        return var

    def __call__(self, function: Callable[..., relax.Expr], *args: Any, **kwargs: Any) -> relax.Var:
        """Append a call, and sometimes an accident."""
        if function is op.reshape and _has_zero(args[1]):
            raise IllTyped("a reshape takes 0 for the size that was there")
        try:
            call = function(*args, **kwargs)
        except (ValueError, IndexError) as err:
            raise IllTyped(str(err)) from err
        made = self.emit(call)
        return self.accident(made) if self.shape(made) and self.chance(self.accidents) else made

    def either(self, function: Callable[..., relax.Expr], a: Any, b: Any) -> relax.Var:
        """Append a function of two operands, in a drawn order."""
        return self(function, *((a, b) if self.chance(50) else (b, a)))

    def shape(self, x: relax.Expr) -> list[Dim]:
        """Return the sizes of a tensor, known ones as numbers."""
        if not isinstance(x.ty.shape, relax.ShapeExpr):
            raise IllTyped("a tensor of unknown shape")
        return [int(d) if isinstance(d, tirx.IntImm) else d for d in x.ty.shape.values]

    def times(self, x: relax.Expr, value: float) -> relax.Var:
        """Multiply by a number, or divide by its inverse."""
        if self.chance(25):
            return self(op.divide, x, self.scalar(1.0 / value, x))
        return self.either(op.multiply, x, self.scalar(value, x))

    def like(self, x: relax.Expr) -> list[relax.Var]:
        """Return the tensors so far that have the type of `x`."""
        made = [var for var, _, _ in self.bindings if isinstance(var.ty, relax.TensorType)]
        found = [v for v in (*self.params, *made) if dtype_of(v) == dtype_of(x) and v is not x]
        return [v for v in found if same_shape(self.shape(v), self.shape(x))]

    # --- accidents ---------------------------------------------------------------------------

    def accident(self, x: relax.Var) -> relax.Var:
        """Return `x` under another name, moved there and back, rounded, or overwritten."""
        whats = (
            *(self._alias, self._result, self._reader, self._pair, self._cast, self._match_cast),
            *(self._reshaped, self._expanded, self._permuted, self._split, self._sliced),
            *(self._broadcast, self._overwritten, self._overwritten_before, self.sized),
        )
        try:
            found: relax.Var = self.pick(*whats)(x)
        except (IllTyped, ValueError, IndexError):  # some movements of nothing are none
            return x
        return found

    def _alias(self, x: relax.Var) -> relax.Var:
        return self.emit(x)

    def _result(self, x: relax.Var) -> relax.Var:
        self.results.append(x)
        return x

    def _reader(self, x: relax.Var) -> relax.Var:
        self.results.append(self.emit(op.negative(x) if dtype_of(x) != "bool" else x))
        return x

    def _pair(self, x: relax.Var) -> relax.Var:
        pair = self.emit(relax.Tuple([x, self.pick(x, *self.like(x))]))
        return self.emit(relax.TupleGetItem(pair, 0))

    def _cast(self, x: relax.Var) -> relax.Var:
        if "float" not in dtype_of(x):
            return x
        other = self.pick("float16", "bfloat16", "float32")
        return self.emit(op.astype(self.emit(op.astype(x, other)), dtype_of(x)))

    def _match_cast(self, x: relax.Var) -> relax.Var:
        var = relax.Var(f"v{len(self.bindings)}", x.ty)
        self.bindings.append((var, x, True))
        return var

    def sized(self, x: relax.Var) -> relax.Var:
        """Reshape to sizes that a match_cast binds, which nothing reads; maybe long before."""
        shape = self.shape(x)
        if _has_zero(shape) or not all(isinstance(d, int | tirx.Var) for d in shape):
            return x
        values = [value_of(d) for d in shape]
        sizes = [self.symbol(f"is{value_of(d)}") if self.chance(60) else d for d in shape]
        name = "_".join(map(str, values))
        known = relax.Var(f"are_{name}_{len(self.params)}", relax.ShapeType(ndim=len(values)))
        self.params.append(known)
        bound = relax.Var(f"v{len(self.bindings)}", relax.ShapeType(sizes))
        place = self.pick(0, len(self.bindings), self.rng.randint(0, len(self.bindings)))
        self.bindings.insert(place, (bound, known, True))
        made = self.emit(op.reshape(x, sizes))
        if self.chance(50):
            opposite = op.logical_not if dtype_of(made) == "bool" else op.negative
            made = self.emit(opposite(self.emit(opposite(made))))
        return self.emit(op.reshape(made, shape)) if self.chance(80) else made

    def _reshaped(self, x: relax.Var) -> relax.Var:
        shape = self.shape(x)
        if _has_zero(shape):
            return x
        flat = math.prod(shape[1:], start=shape[0]) if shape else 1
        middle = self.pick([flat], [1, *shape], [*shape, 1], [flat, 1])
        return self.emit(op.reshape(self.emit(op.reshape(x, middle)), shape))

    def _expanded(self, x: relax.Var) -> relax.Var:
        axis = self.rng.randint(0, len(self.shape(x)))
        return self.emit(op.squeeze(self.emit(op.expand_dims(x, [axis])), [axis]))

    def _permuted(self, x: relax.Var) -> relax.Var:
        axes = list(range(len(self.shape(x))))
        self.rng.shuffle(axes)
        back = [axes.index(n) for n in range(len(axes))]
        return self.emit(op.permute_dims(self.emit(op.permute_dims(x, axes)), back))

    def _split(self, x: relax.Var) -> relax.Var:
        shape = self.shape(x)
        axes = [n for n, d in enumerate(shape) if isinstance(d, int) and d > 1]
        if not axes:
            return x
        axis = self.pick(*axes)
        parts = self.emit(op.split(x, [self.rng.randint(1, shape[axis] - 1)], axis))
        items = [self.emit(relax.TupleGetItem(parts, n)) for n in range(2)]
        items = items[::-1] if self.chance(10) else items
        return self.emit(op.concat(items, axis))

    def _sliced(self, x: relax.Var) -> relax.Var:
        shape = self.shape(x)
        if not shape:
            return x
        axis = self.rng.randrange(len(shape))
        twice = self.emit(op.concat([x, self.pick(x, *self.like(x))], axis))
        begin = self.pick(0, 0, shape[axis])
        return self.emit(op.strided_slice(twice, [axis], [begin], [begin + shape[axis]]))

    def _broadcast(self, x: relax.Var) -> relax.Var:
        shape = self.shape(x)
        if _has_zero(shape):
            return x
        wide = self.emit(op.broadcast_to(self.emit(op.expand_dims(x, [0])), [2, *shape]))
        one = self.emit(op.strided_slice(wide, [0], [1], [2]))
        return self.emit(op.reshape(one, shape))

    def _overwritten(self, x: relax.Var) -> relax.Var:
        """Overwrite a tensor, and read what became of it or its old name."""
        written = self.write(x)
        return written if self.chance(60) else x

    def _overwritten_before(self, x: relax.Var) -> relax.Var:
        """Overwrite another tensor, which may be an operand of what is behind or in front."""
        tensors = [v for v, _, _ in self.bindings if isinstance(v.ty, relax.TensorType)]
        written = self.write(self.pick(x, *self.params, *tensors[-6:]))
        self.results.append(written)
        return x

    def write(self, x: relax.Var) -> relax.Var:
        """Overwrite a tensor in place, as TVM's operators or a function of one can."""
        if "float" not in dtype_of(x) or not self.shape(x):
            return x
        if not all(isinstance(d, int | tirx.Var) for d in self.shape(x)):
            return x  # TVM infers such sizes in another form the next time
        if self.chance(50):
            call = op.call_inplace_packed(PACKED, x, inplace_indices=[0], ty_args=x.ty)
            return self.emit(call)
        _, rewrite = rewriting()
        gvar = rewrite.get((len(self.shape(x)), dtype_of(x)))
        if gvar is None:  # of more dimensions than there are functions for
            return x
        return self.emit(op.call_tir_inplace(gvar, relax.Tuple([x]), [0], x.ty))

    # --- the result --------------------------------------------------------------------------

    def finish(self, *outputs: relax.Var) -> Function:
        """Return the function; what was returned by accident comes behind `outputs`."""
        made = {var for var, _, _ in self.bindings}
        wanted = [v for v in (*outputs, *self.results) if v in made]
        results = tuple(dict.fromkeys(wanted)) or tuple(v for v, _, _ in self.bindings[-1:])
        cut = self.rng.randrange(len(self.bindings)) if self.chance(4) else None
        dataflow = self.chance(97)
        module, _ = rewriting()
        if self.device is not None:
            module = ir.IRModule(dict(module.functions))
            module.update_global_info("vdevice", [self.device])
        return Function(
            tuple(self.params), tuple(self.bindings), results, module, cut, dataflow=dataflow
        )


def _has_zero(shape: Sequence[Dim]) -> bool:
    return any(isinstance(d, int) and d == 0 for d in shape)


def _is_negative(ty: Any) -> bool:
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    return isinstance(shape, relax.ShapeExpr) and any(
        isinstance(d, tirx.IntImm) and int(d) < 0 for d in shape.values
    )


@cache
def rewriting() -> tuple[ir.IRModule, dict[tuple[int, str], ir.GlobalVar]]:
    """Return a module of PrimFuncs that overwrite their argument, by its rank and dtype."""
    functions = []
    for rank in range(1, 6):
        sizes = ", ".join(f"n{i}" for i in range(rank))
        lines = "".join(f"        n{i} = T.int64()\n" for i in range(rank))
        for dtype in ("float32", "float16", "bfloat16"):
            functions.append(
                "    @T.prim_func(private=True, s_tir=True)\n"
                f"    def rewrite_{rank}_{dtype}(a: T.handle):\n{lines}"
                f'        A = T.match_buffer(a, ({sizes},), "{dtype}")\n'
                "        for i in T.grid(1):\n"
                '            with T.sblock("rewrite"):\n'
                "                v = T.axis.spatial(1, i)\n"
                f"                A[{', '.join(['v'] * rank)}] = T.{dtype}(0)\n"
            )
    text = "@I.ir_module\nclass Module:\n" + "".join(functions)
    mod = tvm.script.from_source(text)
    found = {}
    for gvar in mod.get_global_vars():
        _, rank, dtype = gvar.name_hint.split("_")
        found[int(rank), dtype] = gvar
    return mod, found
