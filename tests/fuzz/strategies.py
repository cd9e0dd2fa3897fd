"""Random programs of the operators that transformers are made of.

A program is a list of motifs (a norm, a projection, a gated FFN, an attention, element-wise noise)
that work on one stream of shape ``[..., width]``, each in a drawn spelling, with drawn accidents:
intermediates that are returned or read elsewhere, aliases, weights used twice, sizes of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st

from . import score_steps
from .draft import Draft, default_scale, heads_of
from .graph import Graph, Size, const

WIDTHS = (1, 4, 5, 8, 12, 16, 17, 24, 33, 64)
LENGTHS = (1, 2, 3, 5, 17)
EPSILONS = (1e-6, 1e-5, 1e-3)


# --- steps -----------------------------------------------------------------------------------


def norm(d: Draft, x: int) -> int:
    """Normalise over the last axis, rarely over another one."""
    k = d.shape(x)[-1]
    gamma = d.param((k,), "gamma")
    eps = d.pick(*EPSILONS)
    spelling = d.pick("rms", "rms", "layer", "layer", "written")
    if spelling == "written":
        return _written_rms(d, x, gamma, eps)
    if d.dtype == "bfloat16":
        spelling = "rms"  # TVM has no layer_norm of bfloat16
    # ... and no lowering of an rms_norm over any axis but the last.
    axis = -1 if spelling == "rms" or d.chance(95) else -2
    axes = (axis,) if d.chance(50) else (len(d.shape(x)) + axis,)
    if axis == -2:
        if d.shape(x)[-2].symbols:
            axes = (-1,)
        else:
            gamma = d.param((d.shape(x)[-2],), "gamma")
            if d.shape(x)[-2] != d.shape(x)[-1]:
                axes, gamma = (-1,), d.param((k,), "gamma")
    if spelling == "rms":
        return d.add_node("rms_norm", (x, gamma), d.shape(x), axes=axes, eps=eps)
    beta = d.param(d.shape(gamma), "data")
    return d.add_node("layer_norm", (x, gamma, beta), d.shape(x), axes=axes, eps=eps)


def _written_rms(d: Draft, x: int, gamma: int, eps: float) -> int:
    """Write an RMSNorm out, in one of the ways of the front ends."""
    narrow = d.nodes[x].dtype
    wide = x
    if narrow != "float32" or d.chance(20):
        wide = d.astype(x, "float32") if d.chance(90) else x
    square = d.pick("square", "power", "multiply")
    if square == "power" and d.nodes[wide].dtype == "bfloat16":
        square = "square"
    if square == "square":
        squared = d.unary("square", wide)
    elif square == "power":
        squared = d.binary("power", wide, d.scalar(2.0, wide))
    else:
        squared = d.binary("multiply", wide, wide)
    axis = d.pick(-1, len(d.shape(x)) - 1)
    mean = d.reduce("mean", squared, axis)
    inverse = d.unary("rsqrt", d.either("add", mean, d.scalar(eps, mean)))
    scaled = d.either("multiply", wide, inverse)
    if d.nodes[scaled].dtype != narrow or d.chance(10):
        scaled = d.astype(scaled, narrow)
    return d.either("multiply", scaled, gamma)


def weight(d: Draft, n: int, k: int) -> int:
    """Return a right operand of shape [k, n]: plain, transposed, or one that was used before."""
    layout = d.pick("nk", "nk", "kn")
    known = d.weights.setdefault((n, k, layout), [])
    if known and d.chance(25):
        base = d.pick(*known)
    else:
        shape = (const(n), const(k)) if layout == "nk" else (const(k), const(n))
        base = d.param(shape, "weight_nk" if layout == "nk" else "weight")
        known.append(base)
    if layout == "kn":
        return base
    shared = d.weights.setdefault((n, k, "transposed"), [])
    if shared and d.chance(30):
        return d.pick(*shared)
    shared.append(d.permute(base, 1, 0))
    return shared[-1]


def bias(d: Draft, x: int, percent: int = 50) -> int:
    """Add a bias in one of its shapes, or nothing."""
    if not d.chance(percent):
        return x
    n = d.shape(x)[-1]
    rank = len(d.shape(x))
    ones = (const(1),) * (rank - 1)
    shape = d.pick(*[(n,)] * 6, (*ones, n), (const(1), n), (const(1),), (*ones, const(1)))
    return d.either("add", x, d.param(shape, "data", d.nodes[x].dtype))


def residual(d: Draft, x: int, sources: list[int]) -> int:
    """Add a tensor of the same, or of a broadcasting, shape."""
    shape = d.shape(x)
    like = (shape, d.nodes[x].dtype)
    same = [s for s in sources if (d.shape(s), d.nodes[s].dtype) == like and d.is_tensor(s)]
    if same and d.chance(70):
        return d.either("add", x, d.pick(*same))
    fewer = [shape, shape[1:], (const(1), *shape[1:]), (*shape[:-1], const(1))]
    return d.either("add", x, d.param(d.pick(*fewer), "data", d.nodes[x].dtype))


def activation(d: Draft, x: int) -> int:
    """Apply an activation in one of its spellings."""
    name = d.pick("silu", "gelu", "gelu_tanh", "relu", "silu*", "gelu*", "gelu_tanh*", "relu*")
    if not name.endswith("*"):
        return d.unary(name, x)
    if name == "silu*":
        return d.either("multiply", x, d.unary("sigmoid", x))
    if name == "relu*":
        return d.either("maximum", x, d.scalar(0.0, x))
    return _written_gelu(d, x, tanh=name == "gelu_tanh*")


def _times(d: Draft, x: int, value: float) -> int:
    """Multiply by a constant, or divide by its inverse."""
    if d.chance(25):
        return d.binary("divide", x, d.scalar(1.0 / value, x))
    return d.either("multiply", x, d.scalar(value, x))


def _written_gelu(d: Draft, x: int, tanh: bool) -> int:
    if tanh:
        # TVM 0.27 has no power of bfloat16.
        if d.chance(50) and d.nodes[x].dtype != "bfloat16":
            cube = d.binary("power", x, d.scalar(3.0, x))
        else:
            cube = d.either("multiply", d.binary("multiply", x, x), x)
        inner = d.either("add", x, _times(d, cube, 0.044715))
        inside = d.unary("tanh", _times(d, inner, math.sqrt(2 / math.pi)))
    else:
        inside = d.unary("erf", _times(d, x, math.sqrt(0.5)))
    one_plus = d.either("add", inside, d.scalar(1.0, x))
    order = d.pick("half x", "half last", "half gate")
    half = d.scalar(0.5, x)
    if order == "half x":
        return d.either("multiply", d.either("multiply", x, half), one_plus)
    if order == "half last":
        return d.either("multiply", d.either("multiply", x, one_plus), half)
    return d.either("multiply", x, d.either("multiply", one_plus, half))


def project(d: Draft, x: int, n: int, wide: bool = False) -> int:
    """Multiply by a weight; `wide` asks for a float32 result."""
    out = "float32" if wide and d.dtype != "float32" else None
    y = d.matmul(x, weight(d, n, d.width(x)), out)
    return accident(d, y, 4)


def accident(d: Draft, x: int, percent: int = 8) -> int:
    """Return `x`, sometimes with another reader of it, an alias, or as a result."""
    if not d.chance(percent):
        return x
    what = d.pick("result", "reader", "alias")
    if what == "alias":
        return d.add_node("alias", (x,), d.shape(x))
    d.extra.append(x if what == "result" else d.unary("negative", x))
    return x


# --- motifs: each takes a stream and returns one of the same shape ----------------------------


def mlp(d: Draft, x: int, width: int) -> int:
    """Project up, activate, project down."""
    y = bias(d, project(d, x, d.pick(4, 5, 16, 24, 48)))
    y = accident(d, activation(d, y))
    return bias(d, project(d, y, width), 30)


def adapter(d: Draft, x: int, width: int) -> int:
    """Project to few features and back, with no norm in front, and add a projection: LoRA."""
    x = d.unary("tanh", x)
    y = project(d, x, d.pick(1, 4, 5, 16))
    y = activation(d, bias(d, y, 50)) if d.chance(40) else y
    y = project(d, y, width)
    y = _times(d, y, d.pick(0.5, 2.0)) if d.chance(60) else y
    return d.either("add", y, project(d, x, width)) if d.chance(60) else y


def gated(d: Draft, x: int, width: int) -> int:
    """Project to gate and up, multiply, project down."""
    n = d.pick(1, 4, 5, 16, 24)
    if d.chance(50):
        both = bias(d, project(d, x, 2 * n), 25)
        sizes = (n, n) if n == 1 or d.chance(90) else (1, 2 * n - 1)
        if len(set(sizes)) == 1:
            first, second = d.split(both, sizes)
        else:
            first, second = d.split(both, (n, n))
        gate, up = (first, second) if d.chance(60) else (second, first)
        if d.chance(4):
            up = gate
    else:
        percent = d.pick(0, 0, 100, 50)
        gate, up = bias(d, project(d, x, n), percent), bias(d, project(d, x, n), percent)
    y = d.either("multiply", accident(d, activation(d, gate), 6), up)
    return bias(d, project(d, accident(d, y, 4), width), 20)


def several(d: Draft, x: int, width: int) -> int:
    """Let several matmuls read the same tensor, each with steps after it, and join them."""
    joined = None
    for _ in range(d.pick(2, 3)):
        y = bias(d, project(d, x, width))
        y = activation(d, y) if d.chance(30) else y
        joined = y if joined is None else d.binary(d.pick("add", "multiply"), joined, y)
    assert joined is not None
    return joined


def linear(d: Draft, x: int, width: int) -> int:
    """Project once, with steps after it in any order."""
    y = project(d, x, width, wide=d.chance(15))
    for _ in range(d.pick(0, 1, 2, 3)):
        step = d.pick("bias", "residual", "activation", "cast")
        if step == "cast" and d.dtype != "float32":
            y = d.astype(y, "float32" if d.nodes[y].dtype != "float32" else d.dtype)
        elif step == "residual":
            y = residual(d, y, list(range(len(d.nodes))))
        elif step == "activation":
            y = activation(d, y)
        else:
            y = bias(d, y, 100)
        y = accident(d, y, 3)
    return d.astype(y, d.dtype) if d.nodes[y].dtype != d.dtype else y


def noise(d: Draft, x: int, width: int) -> int:
    """Do something that no pattern wants."""
    what = d.pick("tanh", "scale", "flat", "negative", "transpose")
    if what == "scale":
        return _times(d, x, d.pick(0.5, 2.0, 0.3))
    if what == "flat":
        shape = d.shape(x)
        rows = const(1)
        for size in shape[:-1]:
            rows = rows * size
        flat = d.reshape(x, (rows, shape[-1]))
        return d.reshape(linear(d, flat, width), shape)
    if what == "transpose" and len(d.shape(x)) == 3:
        turned = d.permute(x, 1, 0, 2)
        return d.permute(linear(d, turned, width), 1, 0, 2)
    return d.unary("negative" if what == "negative" else "tanh", x)


# --- attention -------------------------------------------------------------------------------


def attention(d: Draft, x: int, width: int) -> int:
    """Project to q, k, v, attend, and project back; `x` is [b, s, width]."""
    heads, dim = d.pick((1, 4), (1, 8), (2, 4), (2, 5), (3, 4), (4, 8), *heads_of(width))
    groups = d.pick(*[g for g in (1, 2, 3, 4) if heads % g == 0])
    kv_heads = heads // groups
    b, s, _ = d.shape(x)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    if d.chance(50):
        qkv = d.split(bias(d, project(d, x, sum(sizes))), sizes)
    else:
        qkv = [bias(d, project(d, x, n), 25) for n in sizes]
    q = d.reshape(qkv[0], (b, s, const(heads), const(dim)))
    k, v = (d.reshape(t, (b, s, const(kv_heads), const(dim))) for t in qkv[1:])
    if d.chance(35):
        d.param((Size(1, ("t",)),), "data")  # where the symbol gets its value from
        k, v = _cache(d, k), _cache(d, v)
    y = attend(d, (q, k, v), groups)
    y = d.reshape(y, (b, s, const(heads * dim)))
    return bias(d, project(d, accident(d, y, 4), width), 30)


def _cache(d: Draft, x: int) -> int:
    """Take keys of another length, ``t``, in place of `x`: the first positions of a cache."""
    b, _, h, n = d.shape(x)
    length = Size(1, ("t",))
    if d.chance(40):
        return d.param((b, length, h, n), "data")
    cache = d.param((b, Size(1, ("c",)), h, n), "data")
    return d.slice(cache, 1, 0 if d.chance(90) else 1, length)


def attend(d: Draft, qkv: tuple[int, int, int], groups: int) -> int:
    """Attend from q over k and v, all [b, s, heads, dim], as operator or written out."""
    q, k, v = qkv
    if groups > 1:
        k, v = d.repeat(k, groups, 2), d.repeat(v, groups, 2)
    if d.chance(50):
        return _operator(d, q, k, v)
    return _written(d, q, k, v)


def _scores_mask(d: Draft, q: int, k: int, kinds: tuple[str, ...]) -> int:
    b, s, h, _ = d.shape(q)
    one = const(1)
    shape = (d.pick(b, one), d.pick(h, one), d.pick(s, one), d.shape(k)[1])
    return d.param(shape, d.pick(*kinds))


def _operator(d: Draft, q: int, k: int, v: int) -> int:
    dim = d.width(q)
    scale = d.pick(None, default_scale(dim), 0.5)
    mask = _scores_mask(d, q, k, ("data", "hidden")) if d.chance(40) else None
    same = d.shape(q)[1] == d.shape(k)[1]
    causal = None if mask is not None else d.pick(None, "TopLeft", "BottomRight")
    if causal == "BottomRight" and not same:
        causal = d.pick(None, "TopLeft", "BottomRight")
    return d.attention(q, k, v, mask, scale=scale, causal=causal)


def _written(d: Draft, q: int, k: int, v: int) -> int:
    """Write the attention out in heads-first layout."""
    dim = d.width(q)
    q = d.permute(q, 0, 2, 1, 3)
    v = d.permute(v, 0, 2, 1, 3)
    if d.chance(50):
        k = d.permute(k, 0, 2, 3, 1)
    else:
        k = d.permute(d.permute(k, 0, 2, 1, 3), 0, 1, 3, 2)
    scale = d.pick("scores", "scores", "query", "key", "none")
    if scale == "query":
        q = _times(d, q, default_scale(dim))
    if scale == "key":
        k = _times(d, k, default_scale(dim))
    scores = d.matmul(q, k)
    wide = d.dtype != "float32" and d.chance(60)
    early = wide and d.chance(50)
    if early:
        scores = d.astype(scores, "float32")
    if scale == "scores":
        scores = _times(d, scores, default_scale(dim))
    scores = score_steps.modified(d, scores)
    if wide and not early:
        scores = d.astype(scores, "float32")
    scores = accident(d, scores, 4)
    weights = score_steps.softmax(d, scores, -1 if d.chance(95) else -2)
    if d.nodes[weights].dtype != d.dtype:
        weights = d.astype(weights, d.dtype)
    mixed = accident(d, d.matmul(weights, v), 3)
    return d.permute(mixed, 0, 2, 1, 3)


def single_head(d: Draft, x: int, width: int) -> int:
    """Attend with one head on tensors of three dimensions."""
    q, k, v = (project(d, x, width) for _ in range(3))
    scores = _times(d, d.matmul(q, d.permute(k, 0, 2, 1)), default_scale(width))
    if d.chance(30):
        scores = d.either("add", scores, d.param(d.shape(scores), "hidden"))
    return d.matmul(d.reduce("softmax", scores, -1), v)


# --- programs --------------------------------------------------------------------------------

Motif = Callable[[Draft, int, int], int]
FLAT: tuple[Motif, ...] = (mlp, adapter, gated, several, linear, linear, noise)
DEEP: tuple[Motif, ...] = (*FLAT, attention, attention, single_head)


def block(d: Draft, x: int, motifs: tuple[Motif, ...]) -> int:
    """Append one block in pre-norm, post-norm, parallel or bare arrangement."""
    width = d.width(x)
    motif = d.pick(*motifs)
    arrangement = d.pick("pre", "pre", "pre", "post", "parallel", "bare")
    if arrangement == "pre":
        y = motif(d, accident(d, norm(d, x), 6), width)
        return accident(d, residual(d, y, [x]), 5) if d.chance(75) else y
    if arrangement == "post":
        y = accident(d, residual(d, motif(d, x, width), [x]), 5)
        return norm(d, y)
    if arrangement == "parallel":
        h = norm(d, x)
        other = d.pick(*FLAT)
        return d.either("add", d.either("add", motif(d, h, width), other(d, h, width)), x)
    return motif(d, x, width)


def tangle(d: Draft, x: int) -> list[int]:
    """Append operators whose operands are any earlier tensors of the same type."""
    width = d.width(x)
    pool = [x]
    for _ in range(d.pick(4, 6, 9)):
        a = d.pick(*pool)
        what = d.pick("norm", "linear", "linear", "add", "multiply", "activation", "gated", "alias")
        if what == "norm":
            pool.append(norm(d, a))
        elif what == "linear":
            pool.append(bias(d, project(d, a, width), 30))
        elif what == "activation":
            pool.append(activation(d, a))
        elif what == "gated":
            pool.append(gated(d, a, width))
        elif what == "alias":
            pool.append(d.add_node("alias", (a,), d.shape(a)))
        else:
            pool.append(d.either(what, a, d.pick(*pool)))
    count = d.pick(1, 1, 2, 3)
    return [pool[-1], *(d.pick(*pool) for _ in range(count - 1))]


def _size(d: Draft, name: str, percent: int) -> Size:
    return Size(1, (name,)) if d.chance(percent) else const(d.pick(*LENGTHS))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a program."""
    # One seed in place of hundreds of choices: hypothesis varies single choices of an example that
    # it has already made, and near twins of one program are not what a compilation is spent on.
    random = draw(st.randoms(use_true_random=True))
    d = Draft(random, random.choice(["float32"] * 12 + ["float16"] * 7 + ["bfloat16"]))
    dynamic = d.chance(50)
    rank = d.pick(2, 3, 3, 3, 3, 4)
    leading = [_size(d, name, 70 if dynamic else 0) for name in ("b", "s", "u")[: rank - 1]]
    width = const(d.pick(*WIDTHS))
    x = d.param((*leading, width), d.pick("data", "data", "data", "shifted", "zeros"))
    motifs = DEEP if rank == 3 else FLAT
    if d.chance(30):
        outputs = tangle(d, x)
    else:
        outputs = []
        if d.chance(25):
            x = d.binary("add", x, d.param(d.shape(x), "data"))
        for _ in range(d.pick(1, 1, 2, 3)):
            x = block(d, x, motifs)
            if d.chance(8):
                outputs.append(x)
        outputs.append(x)
    outputs += d.extra
    symbols = sorted({s for n in d.nodes for size in n.shape for s in size.symbols})
    # Fewer keys than queries, bottom right, is left out: what a row without keys means differs.
    runs = []
    for _ in range(2 if symbols else 1):
        run = {s: d.pick(*LENGTHS) for s in symbols}
        length = leading[-1].factor if not leading[-1].symbols else run[leading[-1].symbols[0]]
        if "t" in run and len(leading) > 1:
            run["t"] = max(run["t"], length)
        if "c" in run:
            run["c"] += run["t"]
        runs.append(run)
    return d.finish(outputs, tuple(runs), random.randrange(10**6))
