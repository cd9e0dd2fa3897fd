"""Convolutions as matmuls of the patches that they look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, relax, te, tirx

from ..matching.pattern import calls_in
from ..matching.shapes import dtype_of, product, shape_of
from ..transforms.modules import OPAQUE, functions_of, module_pass
from ..tvm_ir import Analyzer
from ..workload import FLOAT_BYTES
from .rewriter import Rewriter, Rule, canonicalise, same_type
from .transposes import TRANSPOSES, transposed

GROUP = "G"
"""The axis of groups, beside N, C, O and those of space in a layout."""


@module_pass
class MultiplyConvolutions:
    """Make a matmul of a convolution, which then fuses its bias, activation and residual.

    rewrite::

        y = R.nn.conv1d(x, w, strides=s, padding=p)          # x as [b, c, l], w as [n, c, r]
            ->
        p = R.call_tir(patches, (x,))                        # as [b, m, c, r]
        h = R.matmul(R.reshape(p, [b, m, c * r]), R.permute_dims(R.reshape(w, [n, c * r])))
        y = R.permute_dims(h, [0, 2, 1])

    The same of conv2d and conv3d, and of other layouts.  Where a kernel has one element and takes
    every position, x itself is multiplied; of groups, the matmul is a batch.  Transposes move as by
    `MoveTransposes`, so that a convolution reads the rows that another one made.

    declines when:
        x and w are not of one dtype of floating point; the sizes of w are dynamic; a group has one
        channel; the layout of w neither begins nor ends with the results, or does not begin with
        them and there are groups; a layout splits the channels.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        functions = functions_of(mod, relax.Function).values()
        if not any(calls_in(func, *CONVOLUTIONS) for func in functions):
            return mod
        return canonicalise(mod, {**TRANSPOSES, **CONVOLUTIONS})


@dataclass(frozen=True)
class Window:
    """Where a convolution looks along one axis of space, with zeros before and after that."""

    size: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def is_point(self) -> bool:
        """Whether each element is looked at by itself."""
        return (self.size, self.stride, self.before, self.after) == (1, 1, 0, 0)

    def places(self, size: tirx.Expr) -> tirx.Expr:
        """Return how many results an axis of `size` elements has."""
        free = size + (self.before + self.after - self.dilation * (self.size - 1) - 1)
        return Analyzer().simplify(free // self.stride + 1)


@dataclass(frozen=True)
class Convolution:
    """A convolution, its axes named by the letters of its layouts."""

    layout: str  # of the tensor that is read
    parts: str  # of a patch: C and the axes of space, in the order in which the weight has them
    windows: Mapping[str, Window]  # by the axes of space, in the order of the data
    groups: int  # into how many parts the channels are cut

    @property
    def is_pointwise(self) -> bool:
        """Whether the patches are the tensor itself, its channels last."""
        return self.groups == 1 and all(window.is_point for window in self.windows.values())

    def patches(self, x: te.Tensor) -> te.Tensor:
        """Copy what each result is computed of: the axes of a patch behind those of the results."""
        sizes = dict(zip(self.layout, x.shape, strict=True))
        channels = sizes["C"] // self.groups
        lead = {"N": sizes["N"], **({GROUP: self.groups} if self.groups > 1 else {})}
        lead |= {letter: w.places(sizes[letter]) for letter, w in self.windows.items()}
        inner = [channels if letter == "C" else self.windows[letter].size for letter in self.parts]

        def element(*at: tirx.Expr) -> tirx.Expr:
            place = dict(zip(lead, at, strict=False))
            offset = dict(zip(self.parts, at[len(lead) :], strict=True))
            index = {"N": place["N"], "C": place.get(GROUP, 0) * channels + offset["C"]}
            inside = []
            for letter, window in self.windows.items():
                first = place[letter] * window.stride - window.before
                index[letter] = first + offset[letter] * window.dilation
                inside += [index[letter] >= 0] * (window.before > 0)
                inside += [index[letter] < sizes[letter]] * (window.after > 0)
            value = x(*(index[letter] for letter in self.layout))
            zero = tirx.const(0, x.dtype)
            return tirx.if_then_else(tirx.all(*inside), value, zero) if inside else value

        return te.compute([*lead.values(), *inner], element, "patches")


def _multiplied(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    moved = transposed(rewriter, call.args[0])
    source, axes = (call.args[0], None) if moved is None else (moved.source, moved.axes)
    found = _convolution(call, axes)
    if found is None:
        return None
    rows = ["N", *found.windows, "C"]
    sizes = dict(zip(_out_layout(call), shape_of(call) or (), strict=True))
    shape = [sizes[letter] for letter in rows]
    x, weight = _rows(rewriter, found, source, shape[:-1]), _weight(rewriter, found, call)
    made = rewriter.emit(relax.op.matmul(x, weight, call.attrs.out_dtype or None))
    if found.groups > 1:  # behind each other, as features of one row
        swapped = rewriter.emit(relax.op.permute_dims(made, [0, 2, 1, 3]))
        made = rewriter.emit(relax.op.reshape(swapped, shape))
    result = relax.op.permute_dims(made, [rows.index(letter) for letter in _out_layout(call)])
    return result if same_type(rewriter.builder.normalize(result), call) else None


def _convolution(call: relax.Call, axes: Sequence[int] | None) -> Convolution | None:
    """Return what a call computes, of a tensor of which `axes` are those of its operand."""
    (x, w), attrs = call.args, call.attrs
    data, kernel, shape = str(attrs.data_layout), str(attrs.kernel_layout), shape_of(w)
    if shape is None or shape_of(x) is None or dtype_of(x) not in {dtype_of(w)} & {*FLOAT_BYTES}:
        return None
    if {len(data), len(kernel), len(_out_layout(call))} != {len(shape)}:
        return None
    sizes = dict(zip(kernel, shape, strict=True))
    if not all(isinstance(size, tirx.IntImm) and int(size) for size in sizes.values()):
        return None
    groups, space = int(attrs.groups), [letter for letter in data if letter not in "NC"]
    if kernel[0] != "O" and (kernel[-1] != "O" or groups > 1):
        return None
    if groups > 1 and int(sizes["I"]) == 1:
        return None
    padding, rank = list(map(int, attrs.padding)), len(space)
    numbers = zip(attrs.strides, attrs.dilation, padding[:rank], padding[rank:], strict=True)
    windows = {
        letter: Window(int(sizes[letter]), *map(int, each))
        for letter, each in zip(space, numbers, strict=True)
    }
    layout = data if axes is None else "".join(data[list(axes).index(i)] for i in range(len(data)))
    parts = kernel.replace("O", "").replace("I", "C")
    return Convolution(layout, parts, windows, groups)


def _out_layout(call: relax.Call) -> str:
    return str(call.attrs.out_layout or call.attrs.data_layout)


def _rows(
    rewriter: Rewriter, found: Convolution, source: relax.Expr, places: Sequence[tirx.Expr]
) -> relax.Expr:
    """Return the patches as rows of features, in one axis of space where there are groups."""
    if found.is_pointwise:
        axes = [found.layout.index(letter) for letter in ("N", *found.windows, "C")]
        return rewriter.emit(relax.op.permute_dims(source, axes))
    made = rewriter.builder.call_te(
        found.patches, source, primfunc_name_hint="patches", primfunc_attrs={"op_pattern": OPAQUE}
    )
    patches = rewriter.emit(made)
    batch, *space = places
    lead = [batch, found.groups, product(space)] if found.groups > 1 else places
    features = product((shape_of(patches) or [])[-len(found.parts) :])
    return rewriter.emit(relax.op.reshape(patches, [*lead, features]))


def _weight(rewriter: Rewriter, found: Convolution, call: relax.Call) -> relax.Expr:
    """Return the weight as matrices that are multiplied from the right."""
    weight = call.args[1]
    shape = [int(size) for size in shape_of(weight) or ()]
    if not str(call.attrs.kernel_layout).startswith("O"):
        return rewriter.emit(relax.op.reshape(weight, [-1, shape[-1]]))
    groups = [found.groups] if found.groups > 1 else []
    flat = [*groups, shape[0] // found.groups, int(product(shape[1:]))]
    matrices = rewriter.emit(relax.op.reshape(weight, flat))
    *lead, n, k = range(len(flat))
    return rewriter.emit(relax.op.permute_dims(matrices, [*lead, k, n]))


CONVOLUTIONS: dict[str, Rule] = {f"relax.nn.conv{rank}d": _multiplied for rank in (1, 2, 3)}
