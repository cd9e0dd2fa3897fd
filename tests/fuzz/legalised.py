"""One call of every Relax operator that TVM legalises, as inputs and a function of them.

Sizes ``"b"``, ``"s"`` and ``"t"`` are symbolic in one variant and numbers in the other.  Inputs of
dtype None take the dtype of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.ir import Op

from ..support.generic_cases import SIZES, Input, Shape

op: Any = relax.op

UNTRIED = {
    "relax.nn.attention_var_len": "is legalised by a call into a library",
    "relax.nn.pixel_shuffle": "TVM 0.27 has no such topi function",
    "relax.shape_to_tensor": "makes no PrimFunc",
    "relax.vision.all_class_non_max_suppression": "emits opaque loops, tried by TVM itself",
    "relax.vision.get_valid_counts": "emits opaque loops, tried by TVM itself",
    "relax.vision.multibox_transform_loc": "emits opaque loops, tried by TVM itself",
    "relax.vision.non_max_suppression": "emits opaque loops, tried by TVM itself",
}
"""Operators without a call here, and why."""

NOT_LEGALISED_ALONE = ("relax.ccl.", "relax.dist.", "relax.inspect.", "relax.grad.")
"""Operators of communication, of pointers, and of a training graph's marks."""


@dataclass(frozen=True)
class Call:
    inputs: tuple[tuple[Shape, str | None], ...]
    emit: Callable[..., Any]
    floats: bool = True
    """Whether the run's dtype matters: the others are run once."""

    def typed(self, dtype: str, symbolic: bool) -> list[Input]:
        return [
            Input(tuple(d if symbolic else SIZES.get(d, d) for d in shape), own or dtype)
            for shape, own in self.inputs
        ]


def f(emit: Callable[..., Any], *shapes: Shape) -> Call:
    return Call(tuple((s, None) for s in shapes), emit)


def i(emit: Callable[..., Any], *inputs: tuple[Shape, str | None]) -> Call:
    return Call(inputs, emit, any(dtype is None for _, dtype in inputs))


X: Shape = ("b", "s", 8)
IMAGE: Shape = ("b", 4, 8, 8)
VOLUME: Shape = ("b", 4, 4, 6, 6)
INT, INT64, BOOL = "int32", "int64", "bool"

UNARY = """abs acos acosh asin asinh atan atanh ceil cos cosh erf exp floor isfinite isinf isnan log
negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc nn.silu nn.gelu nn.gelu_tanh
nn.relu nn.selu nn.softplus nn.leakyrelu nn.softmax nn.log_softmax sum mean max min prod std
variance argmax argmin zeros_like ones_like flatten median nn.batch_flatten tril triu size"""
BINARY = """add subtract multiply divide floor_divide maximum minimum mod floor_mod power atan2
log_add_exp equal not_equal less less_equal greater greater_equal"""
INTEGER = "bitwise_and bitwise_or bitwise_xor left_shift right_shift"
LOGICAL = "logical_and logical_or logical_xor"


def named(name: str) -> Callable[..., Any]:
    found = op
    for part in name.split("."):
        found = getattr(found, part)
    return found


def calls() -> dict[str, Call]:
    """Return a call by operator; a few have several, told apart by a suffix in brackets."""
    found = {name: f(named(name), X) for name in UNARY.split()}
    found |= {name: f(named(name), X, ("b", 1, 8)) for name in BINARY.split()}
    found |= {name: i(named(name), (X, INT), (X, INT)) for name in INTEGER.split()}
    found |= {name: i(named(name), (X, BOOL), (X, BOOL)) for name in LOGICAL.split()}
    for part in (_tensors, _movements, _indexed, _reductions, _matmuls, _networks, _images, _rest):
        found |= part()
    return found


def _tensors() -> dict[str, Call]:
    return {
        "bitwise_not": i(op.bitwise_not, (X, INT)),
        "logical_not": i(op.logical_not, (X, BOOL)),
        "astype": f(lambda x: op.astype(x, "float16"), X),
        "clip": f(lambda x: op.clip(x, 0, 1), X),
        "where": i(op.where, (X, BOOL), (X, None), (X, None)),
        "zeros": i(lambda x: op.zeros((4, 8), "float32"), ((1,), INT)),
        "ones": i(lambda x: op.ones((4, 8), "float32"), ((1,), INT)),
        "full": f(lambda x: op.full((4, 8), x), ()),
        "full_like": f(op.full_like, X, ()),
        "eye": i(lambda x: op.eye(4, 8), ((1,), INT)),
        "eye_like": f(op.eye_like, (4, 8)),
        "arange": i(lambda x: op.arange(0, 8, 1, "int64"), ((1,), INT)),
        "hamming_window": i(lambda x: op.hamming_window(8, True, 0.5, 0.4, "float32"), ((1,), INT)),
        "one_hot": i(
            lambda x: op.one_hot(
                x, relax.prim_value(tirx.FloatImm("float32", 1.0)),
                relax.prim_value(tirx.FloatImm("float32", 0.0)), 8),
            (("b", 4), INT),
        ),
        "quantize": i(
            lambda x, s, z: op.quantize(x, s, z, axis=-1),
            (X, "float32"), ((8,), "float32"), ((8,), "int8"),
        ),
        "dequantize": i(
            lambda x, s, z: op.dequantize(x, s, z, axis=-1),
            (X, "int8"), ((8,), "float32"), ((8,), "int8"),
        ),
    }  # fmt: skip


def _movements() -> dict[str, Call]:
    return {
        "reshape": f(lambda x: op.reshape(x, (-1, 4)), (6, 8)),
        "permute_dims": f(lambda x: op.permute_dims(x, (2, 0, 1)), X),
        "expand_dims": f(lambda x: op.expand_dims(x, 1), X),
        "squeeze": f(lambda x: op.squeeze(x, [1]), ("b", 1, 8)),
        "broadcast_to": f(lambda x: op.broadcast_to(x, (3, 5, 8)), (3, 1, 8)),
        "concat": f(lambda x, y: op.concat([x, y], 1), X, ("b", "t", 8)),
        "split": f(lambda x: op.split(x, 2, -1), X),
        "stack": f(lambda x, y: op.stack([x, y], 1), X, X),
        "strided_slice": f(lambda x: op.strided_slice(x, [2], [1], [7], [2]), X),
        "dynamic_strided_slice": i(op.dynamic_strided_slice, ((8, 8), None), *[((2,), INT64)] * 3),
        "slice_scatter": f(
            lambda x, y: op.slice_scatter(x, y, 1, 5, 1, axis=1), ("b", 8), ("b", 4)
        ),
        "repeat": f(lambda x: op.repeat(x, 2, 1), X),
        "tile": f(lambda x: op.tile(x, (1, 2, 2)), X),
        "flip": f(lambda x: op.flip(x, 1), X),
        "reverse_sequence": i(
            lambda x, n: op.reverse_sequence(x, n, 1, 0), (("b", 8), None), (("b",), INT)
        ),
        "meshgrid": f(lambda x, y: op.meshgrid([x, y], "ij"), (4,), (6,)),
        "layout_transform": f(
            lambda x: op.layout_transform(x, lambda a, b: (b // 4, a, b % 4)), (6, 8)
        ),
        "collapse_sum_like": f(op.collapse_sum_like, (3, 5, 8), (5, 8)),
        "collapse_sum_to": f(lambda x: op.collapse_sum_to(x, (5, 1)), (3, 5, 8)),
        "nn.pad": f(lambda x: op.nn.pad(x, (0, 0, 1, 1, 2, 2)), X),
    }


def _indexed() -> dict[str, Call]:
    return {
        "take": i(lambda x, n: op.take(x, n, 0), ((16, 8), None), (("b", "s"), INT)),
        "gather_elements": i(op.gather_elements, ((6, 8), None), ((4, 8), INT64)),
        "gather_nd": i(op.gather_nd, ((6, 8), None), (("b", 2), INT64)),
        "scatter_elements": i(
            op.scatter_elements, ((6, 8), None), ((4, 8), INT64), ((4, 8), None)
        ),
        "scatter_nd": i(op.scatter_nd, ((6, 8), None), ((4, 1), INT64), ((4, 8), None)),
        "index_put": i(
            lambda x, n, v: op.index_put(x, (n,), v), ((6,), None), ((4,), INT64), ((4,), None)
        ),
        "index_tensor": i(lambda x, n: op.index_tensor(x, [n]), ((6, 8), None), (("b",), INT64)),
        "bucketize": f(op.bucketize, ("b", 8), (5,)),
        "grad.take_backward": i(
            lambda g, x, n: op.grad.take_backward(g, x, n, 0),
            ((4, 8), "float32"), ((16, 8), "float32"), ((4,), INT),
        ),
    }  # fmt: skip


def _reductions() -> dict[str, Call]:
    found = {}
    for name in ("sum", "mean", "max", "variance"):
        for axis in (0, 1, 2):
            found[f"{name} (axis {axis})"] = f(lambda x, n=name, a=axis: named(n)(x, axis=a), X)
    return found | {
        "nn.softmax (axis 1)": f(lambda x: op.nn.softmax(x, 1), X),
        "nn.layer_norm": f(lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]), X, (8,), (8,)),
        "nn.rms_norm": f(lambda x, g: op.nn.rms_norm(x, g, [-1]), X, (8,)),
        "nn.group_norm": f(
            lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2, 3]), IMAGE, (4,), (4,)
        ),
        "nn.instance_norm": f(
            lambda x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]), IMAGE, (4,), (4,)
        ),
        "nn.batch_norm": f(
            lambda x, *a: op.nn.batch_norm(x, *a, axis=1, training=False)[0], IMAGE, *[(4,)] * 4
        ),
        "nn.cross_entropy_with_logits": f(op.nn.cross_entropy_with_logits, (3, 8), (3, 8)),
        "nn.nll_loss": i(
            lambda x, t, w: op.nn.nll_loss(x, t, w), ((3, 8), None), ((3,), INT), ((8,), None)
        ),
    }


def _matmuls() -> dict[str, Call]:
    matmul = op.matmul
    return {
        "matmul": f(matmul, X, (8, 12)),
        "matmul (batch)": f(matmul, ("b", 2, "s", 8), ("b", 2, 8, 12)),
        "matmul (shared heads)": f(matmul, ("b", 4, "s", 8), ("b", 1, 8, 12)),
        "matmul (symbolic n)": f(matmul, (5, 8), (8, "t")),
        "matmul (symbolic k)": f(matmul, (5, "t"), ("t", 12)),
        "matmul (symbolic all)": f(matmul, ("b", "s", "t"), ("b", "t", "s")),
        "matmul (empty rows)": f(matmul, (0, 8), (8, 12)),
        "matmul (empty k)": f(matmul, ("b", 0), (0, 12)),
        "matmul (empty n)": f(matmul, ("b", 8), (8, 0)),
        "matmul (one of each)": f(matmul, ("b", 1), (1, 1)),
        "matmul (odd)": f(matmul, ("b", 17, 31), (31, 33)),
        "matmul (vector)": f(matmul, ("b", "s", 8), (8,)),
        "matmul (vectors)": f(matmul, (8,), (8,)),
        "matmul (float32 result)": f(lambda x, w: matmul(x, w, "float32"), X, (8, 12)),
        "matmul (int8)": i(lambda x, w: matmul(x, w, "int32"), (X, "int8"), ((8, 12), "int8")),
        "matmul (float64)": i(matmul, (X, "float64"), ((8, 12), "float64")),
        "matmul (wide)": f(matmul, ("b", "s", 64), (64, 96)),
        "einsum": f(lambda x, y: op.einsum([x, y], "bij,bjk->bik"), (3, 5, 8), (3, 8, 4)),
        "einsum (transposed)": f(lambda x, y: op.einsum([x, y], "ji,jk->ik"), (8, 5), (8, 4)),
        "outer": f(op.outer, (5,), (7,)),
        "nn.attention": f(op.nn.attention, *[(2, 5, 2, 8)] * 3),
        "nn.attention_bias": f(op.nn.attention, *[(2, 5, 2, 8)] * 3, (2, 2, 5, 5)),
    }


def _networks() -> dict[str, Call]:
    nn = op.nn
    line: Shape = ("b", 4, 8)
    return {
        "nn.conv1d": f(lambda x, w: nn.conv1d(x, w, padding=1), line, (6, 4, 3)),
        "nn.conv2d": f(lambda x, w: nn.conv2d(x, w, padding=(1, 1)), IMAGE, (6, 4, 3, 3)),
        "nn.conv2d (1x1)": f(nn.conv2d, IMAGE, (6, 4, 1, 1)),
        "nn.conv2d (depthwise)": f(lambda x, w: nn.conv2d(x, w, groups=4), IMAGE, (4, 1, 3, 3)),
        "nn.conv3d": f(nn.conv3d, VOLUME, (3, 4, 3, 3, 3)),
        "nn.conv1d_transpose": f(nn.conv1d_transpose, line, (4, 6, 3)),
        "nn.conv2d_transpose": f(nn.conv2d_transpose, IMAGE, (4, 6, 3, 3)),
        "nn.conv3d_transpose": f(nn.conv3d_transpose, (1, 4, 3, 3, 3), (4, 2, 3, 3, 3)),
        "nn.max_pool1d": f(lambda x: nn.max_pool1d(x, 2, 2), line),
        "nn.max_pool2d": f(lambda x: nn.max_pool2d(x, (2, 2), (2, 2)), IMAGE),
        "nn.max_pool3d": f(lambda x: nn.max_pool3d(x, (2, 2, 2), (2, 2, 2)), VOLUME),
        "nn.avg_pool1d": f(lambda x: nn.avg_pool1d(x, 2, 2), line),
        "nn.avg_pool2d": f(lambda x: nn.avg_pool2d(x, (2, 2), (2, 2)), IMAGE),
        "nn.avg_pool3d": f(lambda x: nn.avg_pool3d(x, (2, 2, 2), (2, 2, 2)), VOLUME),
        "nn.adaptive_avg_pool1d": f(lambda x: nn.adaptive_avg_pool1d(x, 1), line),
        "nn.adaptive_avg_pool2d": f(lambda x: nn.adaptive_avg_pool2d(x, (1, 1)), IMAGE),
        "nn.adaptive_avg_pool3d": f(lambda x: nn.adaptive_avg_pool3d(x, (1, 1, 1)), VOLUME),
        "nn.prelu": f(lambda x, a: nn.prelu(x, a, 1), IMAGE, (4,)),
        "nn.dropout": f(lambda x: nn.dropout(x)[0], X),
        "grad.nll_loss_backward": i(
            lambda g, x, t, w: op.grad.nll_loss_backward(g, x, t, w),
            ((), "float32"), ((3, 8), "float32"), ((3,), INT), ((8,), "float32"),
        ),
        "grad.max_pool2d_backward": f(
            lambda g, x: op.grad.max_pool2d_backward(g, x, (2, 2), (2, 2)),
            (2, 4, 4, 4), (2, 4, 8, 8),
        ),
        "grad.avg_pool2d_backward": f(
            lambda g, x: op.grad.avg_pool2d_backward(g, x, (2, 2), (2, 2)),
            (2, 4, 4, 4), (2, 4, 8, 8),
        ),
    }  # fmt: skip


def _images() -> dict[str, Call]:
    return {
        "image.resize2d": f(lambda x: op.image.resize2d(x, (16, 16)), IMAGE),
        "image.resize3d": f(lambda x: op.image.resize3d(x, (8, 8, 8)), (1, 2, 4, 4, 4)),
        "image.grid_sample": f(op.image.grid_sample, (2, 4, 8, 8), (2, 2, 6, 6)),
        "image.affine_grid": f(lambda x: op.image.affine_grid(x, (6, 6)), (2, 2, 3)),
        "vision.roi_align": f(
            lambda x, r: op.vision.roi_align(x, r, (2, 2), 1.0), (2, 4, 8, 8), (3, 5)
        ),
        "vision.roi_pool": f(
            lambda x, r: op.vision.roi_pool(x, r, (2, 2), 1.0), (2, 4, 8, 8), (3, 5)
        ),
    }


def _rest() -> dict[str, Call]:
    """Chains, as FuseTIR makes one function of them."""
    return {
        "fused (norm of a sum)": f(
            lambda x, r, g: op.nn.rms_norm(op.add(x, r), g, [-1]), X, X, (8,)
        ),
        "fused (masked softmax)": f(
            lambda x, m: op.nn.softmax(op.add(op.multiply(x, x), m)),
            ("b", 2, "s", 16), ("b", 1, "s", 16),
        ),
        "fused (matmul and more)": f(
            lambda x, w, c, r: op.add(op.nn.silu(op.add(op.matmul(x, w), c)), r),
            X, (8, 12), (12,), ("b", "s", 12),
        ),
        "fused (transposes)": f(
            lambda q, k: op.matmul(
                op.permute_dims(q, (0, 2, 1, 3)), op.permute_dims(k, (0, 2, 3, 1))
            ),
            ("b", "s", 2, 8), ("b", 6, 2, 8),
        ),
        "fused (matmul, reshaped)": f(
            lambda x, w: op.reshape(op.matmul(x, w), (12, 4)), (4, 8), (8, 12)
        ),
    }  # fmt: skip


def covered() -> set[str]:
    """Return the operators of the calls, by their names in Relax."""
    return {f"relax.{name.split(' ')[0]}" for name in calls() if not name.startswith("fused")}


def registered() -> Iterator[str]:
    """Return the operators that have a legalisation."""
    for name in Op.list_op_names():
        if name.startswith("relax.") and Op.get(name).get_attr("FLegalize") is not None:
            yield name
