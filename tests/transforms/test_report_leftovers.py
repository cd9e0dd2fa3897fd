"""Nothing that transformers are made of is left without a word."""

from __future__ import annotations

import re

import pytest
import tvm
from tvm import ir
from tvm.target import Target

from relax_fusion import Report
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.transforms.report_leftovers import ReportLeftovers

from ..canonical.common import module

CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
ROWS, WEIGHT = "x: R.Tensor((b, s, 64), 'float32')", "w: R.Tensor((64, 64), 'float32')"
ROWS_AND = f"{ROWS}, {WEIGHT}, g: R.Tensor((64,), 'float32')"
HEADS = ", ".join(f"{name}: R.Tensor((b, 2, s, 32), 'float32')" for name in "qkv")
ANGLES = "c: R.Tensor((s, 32), 'float32'), t: R.Tensor((s, 32), 'float32')"

BY_PAIR = "c: R.Tensor((s, 1, 16), 'float32'), t: R.Tensor((s, 1, 16), 'float32')"


def leftovers(mod: ir.IRModule, **kwargs) -> list[tuple[str, str, str, str]]:
    """Return what is left behind the patterns: kind, variable, reason, chain."""
    report = Report()
    options = make_options(CPU, {"report": report, **kwargs})
    with CPU:
        tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(mod)
    return [(x.kind, x.where, x.reason, x.chain) for x in report.leftovers]


WRITTEN = "it is written out as no pass reads it; "
EPS, SQUARES = 'R.const(1e-6, "float32")', "R.multiply(x, x), axis=[-1], keepdims=True"
BOUNDED = (
    f"R.maximum(R.sqrt(R.sum({SQUARES})), {EPS})",
    f'R.power(R.add(R.sum({SQUARES}), {EPS}), R.const(0.5, "float32"))',
    f"R.clip(R.sqrt(R.mean({SQUARES})), 1e-6, 1e6)",
    f"R.sqrt(R.maximum(R.mean({SQUARES}), {EPS}))",
    f"R.add(R.std(x, axis=[-1], keepdims=True), {EPS})",
)
CASES = {
    "a projection and its norm": (ROWS_AND, "h = R.nn.rms_norm(x, g, axes=[-1])\ny = h @ w", []),
    "a norm that a sum reads": (
        ROWS_AND,
        "h = R.nn.rms_norm(x, g, axes=[-1])\ny = R.add(h, x)",
        [("norm", "h", "no projection multiplies it: it is read by add", "")],
    ),
    "a norm that is a result": (
        ROWS_AND,
        "y = R.nn.layer_norm(x, g, g, axes=[-1])",
        [("norm", "y", "no projection multiplies it: it is a result", "")],
    ),
    "a norm over another axis": (
        "x: R.Tensor((b, 64, 64), 'float32'), g: R.Tensor((64,), 'float32'), " + WEIGHT,
        "h = R.nn.rms_norm(x, g, axes=[1])\ny = h @ w",
        [
            (
                "norm",
                "h",
                "FuseRMSNormMatmul: wrong axis: the norm is over axes [1], not the last one",
                "norm -> projection",
            )
        ],
    ),
    "a norm written out over another axis": (
        ROWS,
        """m = R.mean(R.multiply(x, x), axis=[1], keepdims=True)
        r = R.rsqrt(R.add(m, R.const(1e-5, "float32")))
        y = R.multiply(x, r)""",
        [
            (
                *("norm", "y"),
                "it is written out as no pass reads it; "
                "no projection multiplies it: it is a result",
                "",
            )
        ],
    ),
    "a norm that is cast": (
        ROWS_AND.replace("(64, 64), 'float32'", "(64, 64), 'float16'"),
        "h = R.nn.rms_norm(x, g, axes=[-1])\nn = R.astype(h, 'float16')\ny = n @ w",
        [
            (
                *("norm", "h"),
                "the projection that reads it behind astype, reshape is in a kernel of its own",
                "norm -> projection",
            )
        ],
    ),
    "a group norm": (
        "x: R.Tensor((b, 64, s), 'float32'), g: R.Tensor((64,), 'float32')",
        "y = R.nn.group_norm(x, g, g, num_groups=4, channel_axis=1, axes=[2])",
        [("norm", "y", "no projection multiplies it: it is a result", "")],
    ),
    "a softmax alone": (
        ROWS,
        "p = R.nn.softmax(x, axis=-1)\ny = R.sum(p, axis=[0])",
        [("softmax", "p", "its result is not multiplied by values: it is read by sum", "")],
    ),
    "a softmax written out": (
        ROWS,
        "e = R.exp(x)\ny = R.divide(e, R.sum(e, axis=[-1], keepdims=True))",
        [("softmax", "y", "its result is not multiplied by values: it is a result", "")],
    ),
    "attention": (
        HEADS,
        """p = R.nn.softmax(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])), axis=-1)
        y = R.matmul(p, v)""",
        [],
    ),
    "an expert for each part": (
        "x: R.Tensor((8, s, 64), 'float32'), w: R.Tensor((8, 64, 32), 'float32')",
        "y = x @ w",
        [("matmul", "y", "its weight is a batch of matrices, 8x64x32", "projection")],
    ),
    "experts that are looked up": (
        "x: R.Tensor((6, 64, 1), 'float32'), w: R.Tensor((8, 32, 64), 'float32'), "
        "i: R.Tensor((6,), 'int64')",
        "y = R.matmul(R.take(w, i, axis=0), x)",
        [
            (
                *("matmul", "y", "its weight is a batch of matrices, 6x32x64, looked up"),
                "projection",
            )
        ],
    ),
    "a choice of experts": (
        ROWS_AND,
        """p = x @ w
        s = R.nn.softmax(p)
        t = R.topk(s, k=2, ret_type="values")
        y = R.multiply(t, t)""",
        [
            ("softmax", "s", "its result is not multiplied by values: it is read by routing", ""),
            ("routing", "t", "it chooses of what nn.softmax made, read by multiply", ""),
        ],
    ),
    "a choice that is a result": (ROWS, 'y = R.topk(R.exp(x), k=2, ret_type="values")', []),
    "a norm in front of a roll": (
        ROWS_AND,
        """h = R.nn.rms_norm(x, g, axes=[-1])
        i = R.arange(0, 4, 1, "int64")
        y = R.take(h, i, axis=1) @ w""",
        [
            (
                *("norm", "h"),
                "the projection that reads it behind take, reshape is in a kernel of its own",
                "norm -> projection",
            )
        ],
    ),
    **{
        f"a norm whose root is bounded: {n}": (
            ROWS_AND,
            f"d = {below}\nh = R.divide(x, d)\nn = R.multiply(h, g)\ny = n @ w",
            [
                (
                    *("norm", "n"),
                    f"{WRITTEN}the projection that reads it behind reshape is in a kernel of its "
                    "own",
                    "norm -> projection",
                )
            ],
        )
        for n, below in enumerate(BOUNDED)
    },
    "a norm of float16 in float32": (
        ROWS_AND.replace("float32", "float16"),
        """d = R.add(R.astype(g, "float32"), R.const(1.0, "float32"))
        h = R.nn.rms_norm(R.astype(x, "float32"), d, axes=[-1])
        n = R.astype(h, "float16")
        y = R.add(n, x)""",
        [("norm", "n", "no projection multiplies it: it is read by add", "")],
    ),
    "heads that are normalised and rotated": (
        HEADS + ", " + ANGLES + ", g: R.Tensor((32,), 'float32')",
        """e = R.exp(q)
        n = R.nn.rms_norm(e, g, axes=[-1])
        h = R.split(n, 2, axis=-1)
        m = R.concat((R.negative(h[1]), h[0]), axis=-1)
        y = R.add(R.multiply(n, c), R.multiply(m, t))""",
        [
            (
                "rope",
                "y",
                "a kernel of its own computes it and the norm in front, of what exp made",
                "rope",
            )
        ],
    ),
    "two activations": (
        HEADS,
        "e = R.exp(R.permute_dims(k, axes=[0, 1, 3, 2]))\ny = q @ e",
        [
            (
                *("matmul", "y"),
                "both operands are batches of matrices; the right one, bx2x32xs, is of exp",
                "",
            )
        ],
    ),
    "an einsum": (
        ROWS_AND,
        "y = R.einsum((x, w), 'bsk,kn->bsn')",
        [("matmul", "y", "it is written as einsum", "projection")],
    ),
    "a vector": (
        "x: R.Tensor((b, s, 64), 'float32'), g: R.Tensor((64,), 'float32')",
        "y = x @ g",
        [("matmul", "y", "an operand is a vector", "")],
    ),
    "a rotation of a parameter": (
        HEADS + ", " + ANGLES,
        """h = R.split(q, 2, axis=-1)
        m = R.concat((R.negative(h[1]), h[0]), axis=-1)
        y = R.add(R.multiply(q, c), R.multiply(m, t))""",
        [("rope", "y", "it turns a parameter", "rope")],
    ),
    "a rotation of neighbours": (
        HEADS + ", " + ANGLES,
        """e = R.exp(q)
        f = R.strided_slice(e, axes=[3], begin=[0], end=[32], strides=[2])
        o = R.strided_slice(e, axes=[3], begin=[1], end=[32], strides=[2])
        p = R.stack((R.negative(o), f), axis=-1)
        m = R.reshape(p, (b, 2, s, 32))
        y = R.add(R.multiply(e, c), R.multiply(m, t))""",
        [("rope", "y", "it turns what exp made, which is no projection", "rope")],
    ),
    "a rotation of halves": (
        HEADS + ", " + ANGLES.replace("32)", "16)"),
        """e = R.exp(q)
        h = R.split(e, 2, axis=-1)
        l = R.subtract(R.multiply(h[0], c), R.multiply(h[1], t))
        r = R.add(R.multiply(h[1], c), R.multiply(h[0], t))
        y = R.concat((l, r), axis=-1)""",
        [("rope", "y", "it turns what exp made behind split, which is no projection", "rope")],
    ),
    "neighbours that are put in halves": (
        ROWS_AND + ", " + BY_PAIR,
        """p = x @ w
        h = R.reshape(p, (b, s, 2, 32))
        f = R.strided_slice(h, axes=[3], begin=[0], end=[32], strides=[2])
        o = R.strided_slice(h, axes=[3], begin=[1], end=[32], strides=[2])
        l = R.subtract(R.multiply(f, c), R.multiply(o, t))
        r = R.add(R.multiply(o, c), R.multiply(f, t))
        y = R.concat((l, r), axis=-1)""",
        [
            (
                *("rope", "y"),
                "it turns what FuseMatmulEpilogue made behind reshape, strided_slice; its kernel "
                "has no rotation of such pairs",
                "rope",
            )
        ],
    ),
    **{
        f"a rotation of heads {layout} in another order": (
            ROWS_AND + ", " + BY_PAIR.replace("s, 1, 16", "1, 1, 8"),
            f"""p = x @ w
        h = {heads}
        o = R.permute_dims(R.reshape(h, {shape[:-1]}, 8, 2)), axes=[0, 1, 2, 4, 3])
        u = R.reshape(o, {shape[:-1]}, 16))
        e = R.split(u, 2, axis=-1)
        l = R.subtract(R.multiply(e[0], c), R.multiply(e[1], t))
        r = R.add(R.multiply(e[1], c), R.multiply(e[0], t))
        y = R.concat((l, r), axis=-1)""",
            [("rope", "y", reason, "rope")],
        )
        for layout, heads, shape, reason in (
            (
                *("behind", "R.reshape(p, (b, s, 4, 16))", "(b, s, 4)"),
                "FuseMatmulEpilogue: wrong axis: u has the features of a head in another order, or "
                "not all of them",
            ),
            (
                *("in front", "R.permute_dims(R.reshape(p, (b, s, 4, 16)), axes=[0, 2, 1, 3])"),
                "(b, 4, s)",
                "it turns what FuseMatmulEpilogue made behind reshape, permute_dims, split; its "
                "kernel does not follow reshape",
            ),
        )
    },
    "no rotation": (HEADS, "m = R.concat((q, k), axis=-1)\ny = R.add(m, R.multiply(m, m))", []),
    "an activation of a convolution of each channel": (
        "x: R.Tensor((b, 8, 16), 'float32'), w: R.Tensor((8, 1, 3), 'float32'), "
        "a: R.Tensor((1, 8, 1), 'float32')",
        "h = R.add(R.nn.conv1d(x, w, groups=8), a)\ny = R.nn.gelu(h)",
        [
            ("convolution", "lv", "it is no matmul: nn.conv1d, weights 8x1x3, groups 8", ""),
            ("activation", "y", "gelu of what nn.conv1d made", ""),
        ],
    ),
    "an activation that no kernel has": (
        ROWS_AND,
        "h = x @ w\nm = R.clip(h, -7, 7)\ny = R.nn.leakyrelu(m)",
        [
            (
                *("activation", "y", "leakyrelu of what FuseMatmulEpilogue made"),
                "projection -> activation",
            )
        ],
    ),
    "an activation written as no pass reads it": (
        ROWS_AND,
        "h = x @ w\ne = R.exp(R.minimum(h, R.const(0.0, 'float32')))\ny = R.subtract(e, h)",
        [("activation", "e", "exp of what FuseMatmulEpilogue made", "projection -> activation")],
    ),
    "a rotation by parts of one table": (
        ROWS_AND + ", z: R.Tensor((s, 128), 'float32')",
        """a = R.split(R.exp(z), 2, axis=-1)
        p = x @ w
        q = R.multiply(p, p)
        h = R.split(q, 2, axis=-1)
        m = R.concat((R.negative(h[1]), h[0]), axis=-1)
        y = R.add(R.multiply(q, a[0]), R.multiply(m, a[1]))""",
        [
            (
                *("rope", "y"),
                "it turns what FuseMatmulEpilogue made; arithmetic stands between",
                "rope",
            )
        ],
    ),
    "what nothing reads": (ROWS_AND, "h = R.nn.rms_norm(x, g, axes=[-1])\ny = R.exp(x)", []),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_for_each(name: str) -> None:
    params, body, expected = CASES[name]
    params = re.sub(r"(?<=[( ])([bs])(?=[,)])", r"'\1'", params)
    assert leftovers(module(params, _called(body))) == expected


def _called(body: str) -> str:
    """Return lines with ``a @ b`` as TVMScript has it."""
    lines = []
    for line in body.replace("'", '"').splitlines():
        head, at, right = line.partition(" @ ")
        name, _, left = head.partition(" = ")
        lines.append(f"{name} = R.matmul({left}, {right})" if at else line)
    return "\n".join(lines)


def test_a_pass_that_is_switched_off() -> None:
    (found,) = leftovers(module(*_text("y = x @ w")), disable=["FuseMatmulEpilogue"])
    assert found == ("matmul", "y", "FuseMatmulEpilogue is switched off", "projection")


def test_a_soft_cap_of_scores_is_no_activation_of_a_projection() -> None:
    body = """c = R.tanh(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])))
    y = R.matmul(R.nn.softmax(c, axis=-1), v)"""
    mod = module(HEADS.replace("(b, 2, s", "('b', 2, 's'"), body)
    found = leftovers(mod, disable=["FuseAttentionChain", "FuseChains"])
    reason = "FuseAttentionChain is switched off"
    assert [(kind, chain) for kind, _, _, chain in found if kind != "matmul"] == [
        ("activation", ""),
        ("softmax", "attention"),
    ]
    assert [why for kind, _, why, _ in found if kind == "matmul"] == [reason, reason]


def test_attention_is_told_once_and_its_matmuls_by_it() -> None:
    body = """p = R.nn.softmax(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])), axis=-2)
    y = R.matmul(p, v)"""
    found = leftovers(module(HEADS.replace("(b, 2, s", "('b', 2, 's'"), body))
    assert [(kind, chain) for kind, _, _, chain in found] == [
        ("matmul", ""),
        ("softmax", "attention"),
        ("matmul", ""),
    ]
    (reason,) = {reason for _, _, reason, _ in found}
    assert reason.startswith("FuseAttentionChain: ")


def test_an_expert_s_softmax_is_no_attention() -> None:
    body = """p = R.nn.softmax(R.matmul(x, w), axis=-1)
    e = R.strided_slice(p, axes=[2], begin=[0], end=[1])
    m = R.multiply(x, e)
    y = R.matmul(m, w)"""
    found = leftovers(module(*_text(body)))
    assert [(kind, chain) for kind, _, _, chain in found] == [("softmax", "")]


BRANCHES = """
@I.ir_module
class Module:
    @R.function
    def main(yes: R.Tensor((), "bool"), x: R.Tensor((4, 8), "float32")):
        if yes:
            y = R.nn.softmax(x)
        else:
            y = R.nn.relu(x)
        return y

    @R.function
    def theirs(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        R.func_attr({"Codegen": "blas"})
        y = R.matmul(x, w)
        return y
"""


def test_branches_and_libraries() -> None:
    report = Report()
    mod = tvm.script.from_source(BRANCHES)
    assert ReportLeftovers(report.leftovers)(mod).same_as(mod)
    branch = "it stands in a branch of a condition, which no pass looks into"
    assert [(x.kind, x.reason) for x in report.leftovers] == [
        ("softmax", branch),
        ("activation", branch),
        ("matmul", "it belongs to a library, blas"),
    ]


def _text(body: str) -> tuple[str, str]:
    return ROWS_AND.replace("(b, s", "('b', 's'"), _called(body)
