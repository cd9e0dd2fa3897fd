"""Parts of exported models, mutated at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from tvm import ir, relax, tirx

from relax_fusion.equivalence.sizes import variables
from relax_fusion.matching.effects import free_vars
from relax_fusion.matching.shapes import dtype_of
from relax_fusion.models import config_from_dict, export

from .bindings import Binding, Function, of, substituted

LLAMA = {
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 33,
    "n_embd": 24,
    "n_layer": 1,
    "n_head": 3,
    "n_positions": 16,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
}


@cache
def exported() -> list[Function]:
    """Return the functions of small models, in two dtypes, with and without symbolic batches."""
    found = []
    for config in (LLAMA, GPT2, BERT):
        for dtype in ("float32", "float16"):
            batch: int | str = 2 if dtype == "float32" else "batch_size"
            mod = export(config_from_dict(config), dtype=dtype, max_seq_len=16, batch=batch).mod
            kernels = ir.IRModule({g: f for g, f in mod.functions_items() if _is_kernel(f)})
            for _, func in mod.functions_items():
                if isinstance(func, relax.Function) and len(func.body.blocks[0].bindings) > 4:
                    found.append(of(func, kernels))
    return found


def _is_kernel(func: ir.BaseFunc) -> bool:
    return isinstance(func, tirx.PrimFunc)


def mutated(rng: Random) -> Function:
    """Return some consecutive bindings of a model, changed in up to three places."""
    whole = rng.choice(exported())
    count = len(whole.bindings)
    length = rng.randint(6, min(count, 40))
    begin = rng.randint(0, count - length)
    bindings = [*whole.bindings[begin : begin + length]]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        change = rng.choice((_swap, _drop, _duplicate, _reorder, _constant, _operand, _operator))
        changed = change(rng, bindings)
        if changed is not None and _is_typed(changed, whole):
            bindings = changed
    function = _closed(bindings, whole)
    return replace(function, bounds={"seq_len": 16, "total_len": 16} if rng.random() < 0.5 else {})


def _is_typed(bindings: list[Binding], whole: Function) -> bool:
    """Tell whether TVM infers types for bindings."""
    try:
        _closed(bindings, whole).module()
    except (ValueError, TypeError, IndexError):
        return False
    return True


def _closed(bindings: Sequence[Binding], whole: Function) -> Function:
    """Return a function of what bindings read that returns what nothing of them reads."""
    made = {var for var, _, _ in bindings}
    read = list(dict.fromkeys(v for _, value, _ in bindings for v in free_vars(value)))
    kinds = relax.TensorType | relax.TupleType | relax.ShapeType
    params = [v for v in read if v not in made and isinstance(v.ty, kinds)]
    params = list({id(p): p for p in params}.values())
    dims = [d for p in params for d in _dims(p.ty)]
    used = {s for var, value, _ in bindings for s in (*variables(_dims(var.ty)), *_numbers(value))}
    every = sorted({*used, *variables(dims)}, key=str)
    missing = [s for s in every if not any(d.same_as(s) for d in dims)]
    if missing:
        params.append(relax.Var("sizes", relax.ShapeType(missing)))
    tensors = [v for v, _, _ in bindings if isinstance(v.ty, relax.TensorType)]
    results = [v for v in tensors if v not in read] or tensors[-1:] or [bindings[-1][0]]
    # A parameter cannot be a DataflowVar of where it was cut out
    fresh = {p: relax.Var(p.name, p.ty) for p in params if isinstance(p, relax.DataflowVar)}
    bound = tuple((v, substituted(value, fresh), c) for v, value, c in bindings)
    return Function(tuple(fresh.get(p, p) for p in params), bound, tuple(results), whole.base)


def _dims(ty: ir.Type) -> Iterator[Any]:
    if isinstance(ty, relax.TupleType):
        for part in ty.fields:
            yield from _dims(part)
    elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        yield from ty.shape.values
    elif isinstance(ty, relax.ShapeType) and ty.values is not None:
        yield from ty.values


def _numbers(value: Any) -> Iterator[tirx.Var]:
    """Yield the symbolic sizes in the operands of a call."""
    for arg in value.args if isinstance(value, relax.Call) else ():
        if isinstance(arg, relax.ShapeExpr):
            yield from variables(arg.values)
        elif isinstance(arg, relax.Tuple):
            yield from variables([f for f in arg.fields if not _is_tensor(f)])
        elif not _is_tensor(arg) and not isinstance(arg, ir.GlobalVar | relax.ExternFunc):
            yield from variables([arg])


def _is_tensor(expr: Any) -> bool:
    kinds = relax.TensorType | relax.TupleType | relax.ShapeType
    return isinstance(getattr(expr, "ty", None), kinds)


# --- changes: each returns other bindings, or None where it finds no place --------------------


def _calls(bindings: Sequence[Binding], *ops: str) -> list[int]:
    return [
        n
        for n, (_, value, _) in enumerate(bindings)
        if isinstance(value, relax.Call)
        and isinstance(value.op, ir.Op)
        and (not ops or value.op.name.removeprefix("relax.") in ops)
    ]


def _with(bindings: list[Binding], n: int, value: relax.Expr) -> list[Binding]:
    var, _, is_cast = bindings[n]
    return [*bindings[:n], (var, value, is_cast), *bindings[n + 1 :]]


def _swap(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Swap the operands of a binary operator."""
    places = _calls(bindings, "add", "subtract", "multiply", "divide", "matmul", "maximum")
    if not places:
        return None
    n = rng.choice(places)
    call = bindings[n][1]
    return _with(bindings, n, relax.Call(call.op, [call.args[1], call.args[0]], call.attrs))


def _drop(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Read the operand of an operator in place of its result."""
    n = rng.randrange(len(bindings))
    var, value, _ = bindings[n]
    sources = [v for v in free_vars(value) if str(v.ty) == str(var.ty)]
    if not sources or len(bindings) < 4:
        return None
    known = {var: sources[0]}
    rest = bindings[n + 1 :]
    return [*bindings[:n], *((v, substituted(e, known), c) for v, e, c in rest)]


def _duplicate(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Compute a binding twice; later ones read the one or the other."""
    n = rng.randrange(len(bindings))
    var, value, is_cast = bindings[n]
    again = relax.Var(f"{var.name}_again", var.ty)
    twice = (again, value, is_cast)
    if isinstance(value, relax.Call) and len(value.args) == 1 and rng.random() < 0.5:
        source = value.args[0]
        if isinstance(source, relax.Var) and str(source.ty) == str(var.ty):
            twice = (again, substituted(value, {source: var}), is_cast)  # one after the other
    rest = [
        (v, substituted(e, {var: again}) if rng.random() < 0.7 else e, c)
        for v, e, c in bindings[n + 1 :]
    ]
    return [*bindings[: n + 1], twice, *rest]


def _reorder(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Swap two steps of which one reads the other, or move a binding to a later place."""
    n = rng.randrange(len(bindings) - 1)
    (first, a, c1), (second, b, c2) = bindings[n], bindings[n + 1]
    if first not in free_vars(b):
        return [*bindings[:n], bindings[n + 1], bindings[n], *bindings[n + 2 :]]
    sources = [v for v in free_vars(a) if str(v.ty) == str(first.ty)]
    if not sources or str(first.ty) != str(second.ty):
        return None
    swapped = [
        (first, substituted(b, {first: sources[0]}), c2),
        (second, substituted(a, {sources[0]: first}), c1),
    ]
    return [*bindings[:n], *swapped, *bindings[n + 2 :]]


def _constant(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Change a number."""
    places = [
        (n, i)
        for n in _calls(bindings)
        for i, a in enumerate(bindings[n][1].args)
        if isinstance(a, ir.GenericConst) and not a.ty.shape.values
    ]
    if not places:
        return None
    n, i = rng.choice(places)
    call = bindings[n][1]
    old = float(call.args[i].value.numpy())
    new = rng.choice((0.0, 1.0, -1.0, 0.5, 2.0, old * 2, -old, old + 1, old * 1.01))
    dtype = dtype_of(call.args[i])
    if abs(new) > 6e4 or "float" not in dtype:
        return None
    args = [relax.const(new, dtype) if j == i else a for j, a in enumerate(call.args)]
    return _with(bindings, n, relax.Call(call.op, args, call.attrs, call.ty_args))


def _operand(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Read another tensor of the same type."""
    n = rng.choice(_calls(bindings) or [0])
    value = bindings[n][1]
    reads = [v for v in free_vars(value) if isinstance(v.ty, relax.TensorType)]
    if not reads:
        return None
    old = rng.choice(reads)
    there = [v for v, _, _ in bindings[:n]] + [v for _, e, _ in bindings[:n] for v in free_vars(e)]
    same = [v for v in there if v is not old and str(v.ty) == str(old.ty)]
    return _with(bindings, n, substituted(value, {old: rng.choice(same)})) if same else None


def _operator(rng: Random, bindings: list[Binding]) -> list[Binding] | None:
    """Put another operator of as many operands in place of one."""
    groups = (
        ("add", "subtract", "multiply", "divide", "maximum", "minimum"),
        ("nn.silu", "nn.gelu", "nn.relu", "nn.gelu_tanh", "tanh", "negative", "sigmoid"),
    )
    group = rng.choice(groups)
    places = _calls(bindings, *group)
    if not places:
        return None
    n = rng.choice(places)
    op = ir.Op.get(f"relax.{rng.choice(group)}")
    return _with(bindings, n, relax.Call(op, list(bindings[n][1].args)))
