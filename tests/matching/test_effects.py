"""What bindings read, write and share, and what passes make of it."""

from __future__ import annotations

import pytest
import tvm
from tvm import ir, relax

from relax_fusion import Reason
from relax_fusion.matching.effects import HIDDEN, Memory
from relax_fusion.matching.known_effects import known_effects, memory_of
from relax_fusion.matching.pattern import BlockView
from relax_fusion.mend.in_place import SeparateWrites
from relax_fusion.mend.memory_planning import NameInPlaceResults
from relax_fusion.mend.transposed_matmul import FuseTransposeMatmul
from relax_fusion.transforms.views import FoldReshapes

from ..support.chains import assert_declined, calls, run_pass

MATRIX = 'R.Tensor((4, 4), "float32")'
TYPED = f"ty_args={MATRIX}"
IN_PLACE = f"inplace_indices=[0], out_ty={MATRIX}"
HEADER = f"""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def zero(a: T.Buffer((T.int64(4), T.int64(4)), "float32")):
        for i, j in T.grid(T.int64(4), T.int64(4)):
            with T.sblock("zero"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = T.float32(0)

    @T.prim_func(private=True, s_tir=True)
    def both(a: T.Buffer((T.int64(4), T.int64(4)), "float32"),
             b: T.Buffer((T.int64(4), T.int64(4)), "float32"),
             c: T.Buffer((T.int64(4), T.int64(4)), "float32")):
        T.evaluate(0)

    @R.function(private=True)
    def writes_second(a: {MATRIX}, b: {MATRIX}) -> {MATRIX}:
        cls = Module
        with R.dataflow():
            c = R.call_tir_inplace(cls.zero, (b,), {IN_PLACE})
            d = R.add(a, c)
            R.output(d)
        return d

    @R.function(private=True)
    def returns_first(a: {MATRIX}, b: {MATRIX}) -> {MATRIX}:
        return a

    @R.function(private=True)
    def calls_itself(a: {MATRIX}, b: {MATRIX}) -> {MATRIX}:
        cls = Module
        c: {MATRIX} = cls.calls_itself(a, b)
        return c
"""
PARAMETERS = f"""x: {MATRIX}, w: {MATRIX}, p: R.Tuple({MATRIX}, R.Tuple({MATRIX}, {MATRIX})),
             flag: R.Tensor((), "bool"), cache: R.Object, call: R.Callable(ret={MATRIX}),
             table: R.Tensor((16,), "float32")"""


def function(name: str, body: str, result: str = "y") -> str:
    """Return a function of `PARAMETERS` as TVMScript; its bindings are parted by semicolons."""
    lines = ["cls = Module", *body.split("; "), f"return {result}"]
    text = "".join(f"        {line}\n" for line in lines)
    return f"\n    @R.function(pure=False)\n    def {name}({PARAMETERS}):\n{text}"


def module(body: str, result: str = "y") -> ir.IRModule:
    return tvm.script.from_source(HEADER + function("main", body, result))


def memory(mod: ir.IRModule, name: str = "main") -> tuple[Memory, dict[str, relax.Var]]:
    """Return the memory of a function, and its variables by name."""
    found = Memory(mod[name], mod)
    return found, {v.name: v for v in (*mod[name].params, *found.values)}


ZERO = f"R.call_tir_inplace(cls.zero, ({{}},), {IN_PLACE})"
PACKED = f'R.call_inplace_packed("f", {{}}, inplace_indices=[0], {TYPED})'
SECOND = (
    f"R.call_tir_inplace(cls.both, (x, w), inplace_indices=[-1, 1], out_ty=[{MATRIX}, {MATRIX}])"
)
BRANCH = "if flag:;     a = x;     y = a; else:;     b = w;     y = b"


WRITTEN = [
    ("y = R.add(x, w)", ""),
    (f"y = R.call_tir(cls.both, (x, w), out_ty={MATRIX})", ""),
    (f'y = R.call_dps_packed("f", (x, cache), out_ty={MATRIX})', ""),
    (f'y = R.call_pure_packed("f", x, {TYPED})', ""),
    ("y = R.reshape(x, (16,))", ""),
    ("y = R.print(x, format='')", ""),
    (f"y = {ZERO.format('x')}", "x"),
    (f"y = {PACKED.format('x')}", "x"),
    (f"y = {SECOND}", "w"),
    (f"a = {SECOND}; b = a[0]; y = {ZERO.format('b')}", "a b w"),
    (f'y = R.call_packed("f", x, (w, p), {TYPED})', "x w p"),
    ("y = call(x)", "x call"),
    (f"y = R.invoke_closure(call, (x,), {TYPED})", "x call"),
    (f"a = x; y = {ZERO.format('a')}", "x a"),
    (f"a = R.match_cast(x, {MATRIX}); y = {ZERO.format('a')}", "x a"),
    (f"a = R.reshape(table, (4, 4)); y = {ZERO.format('a')}", "table a"),
    (f"a = R.memory.ensure_zero_offset(x); y = {ZERO.format('a')}", "x a"),
    (f"a = R.add(x, x); y = {ZERO.format('a')}", "a"),
    (f"a = (x, w); b = a[1]; y = {ZERO.format('b')}", "a b w"),
    (f"a = p[0]; y = {ZERO.format('a')}", "a p"),
    (f"{BRANCH}; z = {ZERO.format('y')}", "x w a b y"),
    ("y = cls.writes_second(x, w)", "w"),
    ("y = cls.returns_first(x, w)", ""),
    (f"a = cls.returns_first(x, w); y = {ZERO.format('a')}", "x a"),
    ("y = cls.calls_itself(x, w)", "x w"),
    (f'a = R.call_pure_packed("f", x, {TYPED}); y = {ZERO.format("a")}', "x a"),
    (f'a = R.call_packed("f", {TYPED}); y = {ZERO.format("a")}', "a"),
]
"""Bindings, and the variables whose memory they write, but for the results y and z."""


def test_what_is_written() -> None:
    scripts = [function(f"f{i}", body) for i, (body, _) in enumerate(WRITTEN)]
    mod = tvm.script.from_source(HEADER + "".join(scripts))
    for i, (body, names) in enumerate(WRITTEN):
        found, variables = memory(mod, f"f{i}")
        changed = {n for n, v in variables.items() if not found.is_constant(v)}
        written = set(names.split())
        assert changed - ({"y", "z"} - written) == written, body
        assert found.given >= found.of(variables["x"])


def test_fields_of_a_tuple_are_told_apart() -> None:
    found, v = memory(module(f"a = p[1]; b = a[0]; c = a[1]; y = {ZERO.format('b')}"))
    assert not found.is_constant(v["p"]) and not found.is_constant(v["a"])
    assert found.is_constant(v["c"]) and found.of(v["b"]).isdisjoint(found.of(v["c"]))


def test_what_changes_while_it_is_in_use() -> None:
    found, v = memory(
        module(
            f"a = R.reshape(table, (4, 4)); b = a; c = {ZERO.format('x')}; "
            f"d = R.reshape(table, (4, 4)); e = {ZERO.format('d')}; f = R.add(b, d); "
            f"g = {ZERO.format('a')}; y = R.add(f, f)"
        )
    )
    assert found.changes(v["table"], v["a"], v["f"]) and not found.changes(v["w"], v["a"], v["y"])
    assert found.changes_in_use(v["a"], v["a"]) and not found.changes_in_use(v["f"], v["f"])
    assert not found.changes(v["a"], v["a"], v["e"])  # e's own write is not in front of it


def test_packed_calls_keep_their_order() -> None:
    found, v = memory(
        module(
            f'a = R.call_dps_packed("f", (cache,), out_ty={MATRIX}); b = R.add(a, a); '
            f'c = R.call_pure_packed("g", cache, {TYPED}); y = R.add(b, c)'
        )
    )
    ordered = {name for name, var in v.items() if var in found.effects}
    assert {n for n in ordered if found.effects[v[n]].written & HIDDEN} == {"a", "c"}


# --- passes ----------------------------------------------------------------------------------


def chain(body: str, result: str = "y") -> ir.IRModule:
    """Return a module whose ``main`` has one dataflow block."""
    lines = [
        "with R.dataflow():",
        *(f"    {b}" for b in (*body.split("; "), f"R.output({result})")),
    ]
    return module("; ".join(lines), result)


def test_a_weight_overwritten_in_front_of_its_matmul_is_declined_by_name() -> None:
    mod = chain(
        f"t = R.permute_dims(w); u = {ZERO.format('w')}; a = R.add(x, u); y = R.matmul(a, t)"
    )
    words = "u writes the memory of w, which the chain reads before"
    assert_declined(mod, "FuseMatmulEpilogue", Reason.OVERWRITTEN, words)


def test_a_kernel_stands_in_front_of_a_later_write() -> None:
    body = f"t = R.permute_dims(w); u = {PACKED.format('w')}; y = R.matmul(x, t)"
    mod = chain(body, "y, u")
    out, _ = run_pass(mod, "FuseMatmulEpilogue", always_fuse=True)
    names = calls(out["main"])
    assert names.index("call_tir") < names.index("call_inplace_packed")


def test_an_overwritten_constant_has_no_value() -> None:
    numbers = ", ".join(["[1.0, 1.0, 1.0, 1.0]"] * 4)
    mod = chain(
        f"k = R.const([{numbers}], 'float32'); j = R.const([{numbers}], 'float32'); "
        f"u = {ZERO.format('k')}; b = k; c = j; y = R.add(b, c)"
    )
    (block,) = mod["main"].body.blocks
    view = BlockView(block, mod)
    b, c = view.defs[block.bindings[-1].var].args
    assert view.definition(b).same_as(b)
    assert isinstance(view.definition(c), ir.GenericConst)


def test_another_name_is_no_chain() -> None:
    mod = chain(f"a = R.matmul(x, w); b = a; u = {ZERO.format('b')}; y = R.add(u, a)")
    out, decisions = run_pass(mod, "FuseMatmulEpilogue")
    assert [d.where for d in decisions] == ["a"] and calls(out["main"]).count("call_tir") == 1


def test_an_overwritten_transpose_is_read_where_it_is_made() -> None:
    mod = chain(
        f"t = R.permute_dims(w); a = R.matmul(x, t); u = {ZERO.format('t')}; y = R.matmul(a, t)"
    )
    assert calls(FuseTransposeMatmul()(mod)["main"]).count("matmul") == 1


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ("a = R.reshape(x, (16,)); y = R.reshape(a, (2, 8))", "x"),
        (f"a = R.reshape(x, (16,)); u = {ZERO.format('x')}; y = R.reshape(a, (2, 8))", "a"),
        (f"a = R.reshape(x, (16,)); u = {ZERO.format('w')}; y = R.reshape(a, (2, 8))", "x"),
    ],
)
def test_reshapes_are_folded_where_nothing_changes(body: str, read: str) -> None:
    block = FoldReshapes()(chain(body))["main"].body.blocks[0]
    (last,) = [b.value for b in block.bindings if b.var.name == "y"]
    assert last.args[0].name == read


def test_a_gamma_that_is_overwritten_is_not_looked_through_to() -> None:
    mod = chain(
        "v = R.reshape(x, (16,)); o = R.add(v, R.const(1.0)); r = R.reshape(w, (1, 16)); "
        f"p = R.zeros((16, 4), 'float32'); u = {ZERO.format('x')}; "
        "n = R.nn.rms_norm(r, o, axes=[-1]); y = R.matmul(n, p)",
        "y, u",
    )
    _, (decision,) = run_pass(mod, "FuseRMSNormMatmul", always_fuse=True)
    assert decision.fused and not decision.workload.norm.unit_offset


def test_no_argument_takes_the_place_of_a_result() -> None:
    mod = FoldReshapes()(chain("a = R.reshape(x, (16,)); y = R.reshape(a, (4, 4))"))
    assert calls(mod["main"])[-1] == "reshape"


def test_blocks_are_cut_where_a_reader_could_pass_a_write() -> None:
    mod = chain(f"a = R.exp(x); u = {ZERO.format('x')}; y = R.add(a, u)")
    out = SeparateWrites()(mod)
    relax.analysis.well_formed(out)
    blocks = out["main"].body.blocks
    assert [isinstance(b, relax.DataflowBlock) for b in blocks] == [True, False, True]
    assert int(out["zero"].attrs["op_pattern"]) == 8


@pytest.mark.parametrize(
    "body",
    [
        f"u = {ZERO.format('x')}; y = R.add(u, w)",
        f"a = R.exp(w); u = {ZERO.format('x')}; y = R.add(a, u)",
        f"a = R.exp(x); u = {ZERO.format('a')}; y = R.add(u, w)",
        "a = R.exp(x); y = R.add(a, w)",
    ],
)
def test_blocks_stay_whole_elsewhere(body: str) -> None:
    assert len(SeparateWrites()(chain(body))["main"].body.blocks) == 1


def test_an_unread_write_is_kept() -> None:
    mod = SeparateWrites()(chain(f"u = {ZERO.format('x')}; y = R.add(x, w)"))
    relax.analysis.well_formed(mod)
    for removing in (relax.transform.DeadCodeElimination(), relax.transform.FoldConstant()):
        assert "call_tir_inplace" in calls(removing(mod)["main"])


IF_WRITES = (
    "if flag:;     a = R.exp(x);     b = R.call_tir_inplace(cls.zero, (x,), IN_PLACE);     y = a; "
    "else:;     y = R.exp(w); z = R.add(x, y)"
).replace("IN_PLACE", IN_PLACE)
CASTS = f"c = R.match_cast(x, {MATRIX}); a = R.exp(c); u = {ZERO.format('c')}; y = R.add(a, c)"


def test_writes_in_branches_are_kept() -> None:
    mod = relax.transform.ConvertToDataflow(min_size=1)(module(IF_WRITES, "z"))
    mod = SeparateWrites()(mod)
    relax.analysis.well_formed(mod)
    assert "call_tir_inplace" in relax.transform.DeadCodeElimination()(mod)["main"].script()


def test_casts_are_cut_too() -> None:
    mod = SeparateWrites()(chain(CASTS))
    relax.analysis.well_formed(mod)
    assert len(mod["main"].body.blocks) == 3


@pytest.mark.parametrize(
    ("body", "alias"),
    [
        (f"y = {PACKED.format('x')}", True),
        ('y = R.call_inplace_packed("f", x, inplace_indices=[0], ty_args=R.Tensor(ndim=2))', False),
    ],
)
def test_in_place_results_are_their_arguments(body: str, alias: bool) -> None:
    mod = NameInPlaceResults()(module(body))
    relax.analysis.well_formed(mod)
    (last,) = [b.value for b in mod["main"].body.blocks[0].bindings if b.var.name == "y"]
    assert isinstance(last, relax.Var) == alias


def test_passes_share_the_memory_of_functions_that_stay_as_they_are() -> None:
    mod = tvm.script.from_source(
        HEADER
        + f"""
    @R.function
    def plain(x: {MATRIX}) -> {MATRIX}:
        return R.add(x, x)

    @R.function
    def calling(x: {MATRIX}) -> {MATRIX}:
        cls = Module
        return cls.writes_second(x, x)
"""
    )
    plain, calling = mod["plain"], mod["calling"]
    changed = plain.with_attr("relax_fusion.changed", 1)
    assert memory_of("plain", plain, mod) is not memory_of("plain", plain, mod)
    with known_effects():
        first = memory_of("plain", plain, mod)
        assert memory_of("plain", plain, mod) is first
        assert memory_of("plain", changed, mod) is not first
        assert memory_of("plain", plain, mod) is not first  # only the last one is kept
        # What another function does may change without this one
        assert memory_of("calling", calling, mod) is not memory_of("calling", calling, mod)
    with known_effects():
        assert memory_of("plain", plain, mod) is not first
