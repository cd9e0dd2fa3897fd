"""`call_tir_extern`: what it writes into a module, what it makes of arguments, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import triton
import triton.language as tl
from tvm import ir, relax, tirx
from tvm.script import tirx as T
from tvm.target import Target

from relax_fusion import TargetError, make_target
from relax_fusion.errors import KernelError
from relax_fusion.launch.arguments import INT32_MAX, scalar
from relax_fusion.launch.body import kernel_of_attr
from relax_fusion.transforms.modules import KERNELS_ATTR
from relax_fusion.triton_bridge import (
    OUT,
    InOut,
    Out,
    TensorMap,
    Variant,
    Workspace,
    call_tir_extern,
)
from relax_fusion.triton_bridge.specialize import bind, triton_dtype

from .common import H200, add, copy_by_descriptor, copy_tile, double_first, module, params

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
BLOCK = {"BLOCK": 128}


@triton.jit
def fill(out, value):
    tl.store(out, value)


@triton.jit
def fill_wide(out, value: tl.int64):
    tl.store(out, value)


@triton.jit
def fill_real(out, value: tl.float32):
    tl.store(out, value)


@triton.jit(do_not_specialize=["value"])
def fill_any(out, value):
    tl.store(out, value)


@triton.jit(do_not_specialize_on_alignment=["out", "value"])
def fill_unaligned(out, value):
    tl.store(out, value)


@triton.jit
def split(x, low, high, BLOCK: tl.constexpr = 128):
    i = tl.arange(0, BLOCK)
    tl.store(low + i, tl.load(x + i))
    tl.store(high + i, tl.load(x + i) + 1)


@triton.jit
def maybe_add(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    if y is not None:
        value += tl.load(y + i)
    tl.store(out + i, value)


def tensor(*shape: Any, dtype: str = "float32") -> relax.TensorType:
    return relax.TensorType(list(shape), dtype)


def functions(mod: ir.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def script(mod: ir.IRModule) -> str:
    """Return the text of a module, symbols cut down to the name of the kernel."""
    text = mod.script(show_meta=False)
    text = re.sub(r"_[0-9a-f]{16}", "", text)
    return "\n".join(line for line in text.splitlines() if "T.func_attr" not in line)


def kernels(mod: ir.IRModule) -> dict[str, Any]:
    """Return all kernels of a module by symbol."""
    found = [f.attrs[KERNELS_ATTR].items() for f in functions(mod)]
    return {str(name): kernel_of_attr(attr) for items in found for name, attr in items}


def kernel_of(*args: Any, **kwargs: Any) -> Any:
    """Return the only kernel of `module(*args)`."""
    (kernel,) = kernels(module(*args, **kwargs)).values()
    return kernel


# --- rewrites --------------------------------------------------------------------------------


def test_one_output() -> None:
    x = params(tensor(N), tensor(N))
    mod = module(x, (add, ((N + 127) // 128,), [*x, OUT, N], tensor(N)), constexprs=BLOCK)
    text = script(mod)
    signature = 'in0: T.Buffer((n,), "float32"), in1: T.Buffer((n,), "float32"), '
    assert signature + 'out0: T.Buffer((n,), "float32"))' in text, "n is told by the buffers"
    args = "in0.data, in1.data, out0.data, n, (n + T.int64(127)) // T.int64(128)"
    assert f'T.call_cpacked("launch_add", {args}, T.int64(1), T.int64(1))' in text
    assert 'R.call_tir(cls.add, (p0, p1), out_ty=R.Tensor((n,), dtype="float32"))' in text
    (func,) = functions(mod)
    assert int(func.attrs["op_pattern"]) == 8 and int(func.attrs["tirx.is_scheduled"]) == 1
    (symbol,) = func.attrs[KERNELS_ATTR]
    assert f'"launch_{symbol}"' in mod.script() and list(kernels(mod)) == [str(symbol)]
    relax.analysis.well_formed(mod)


def test_a_grid_that_is_a_function_of_the_constants() -> None:
    x = params(tensor(N))
    seen: list[Mapping[str, Any]] = []

    def grid(c: Mapping[str, Any]) -> tuple[Any, ...]:
        seen.append(c)
        return (1, T.ceildiv(N, c["BLOCK"]))

    mod = module(x, (split, grid, [x[0], Out(0), Out(1)], [tensor(N), tensor(N)]))
    assert seen == [{"BLOCK": 128}], "a default"
    assert "T.int64(1), (n + T.int64(128) - T.int64(1)) // T.int64(128), T.int64(1))" in script(mod)


def test_several_outputs() -> None:
    x = params(tensor(128))
    outs = [tensor(128), tensor(128, dtype="float16")]
    mod = module(x, (split, (1,), [x[0], Out(1), Out(0)], outs))
    text = script(mod)
    assert 'T.call_cpacked("launch_split", in0.data, out1.data, out0.data, ' in text
    assert 'out0: T.Buffer((T.int64(128),), "float32"), out1: T.Buffer((T.int64(128),), "fl' in text
    (kernel,) = kernels(mod).values()
    assert kernel.params == ("*fp32", "*fp16", "*fp32")
    assert isinstance(mod["main"].ret_ty, relax.TupleType)


def test_in_place() -> None:
    x = params(tensor(N, dtype="int32"), tensor(N))
    mod = module(x, (add, (N,), [x[1], x[0], InOut(x[0]), N], x[0].ty), constexprs=BLOCK)
    text = script(mod)
    assert "in1.data, in0.data" in text or "in0.data, in1.data, in1.data" in text
    assert "R.call_tir_inplace(cls.add, (p1, p0), " in text and "inplace_indices=[1]" in text
    assert "out0" not in text
    assert kernel_of(x, (double_first, (1,), [InOut(x[0])], x[0].ty)).params == ("*i32",)


def test_in_place_beside_other_outputs() -> None:
    x = params(tensor(128))
    mod = module(x, (split, (1,), [x[0], Out(0), InOut(x[0], 1)], [tensor(128), tensor(128)]))
    text = script(mod)
    assert "inplace_indices=[-1, 0]" in text
    assert 'T.call_cpacked("launch_split", in0.data, out0.data, in0.data, ' in text


def test_a_workspace_is_an_output_that_nobody_reads() -> None:
    x = params(tensor(N))
    space = Workspace((2 * N, 3), "int32")
    mod = module(x, (split, (1,), [x[0], OUT, space], tensor(N)))
    text = script(mod)
    types = 'R.Tensor((n,), dtype="float32"), R.Tensor((2 * n, 3), dtype="int32")'
    assert f"out_ty=[{types}]" in text
    assert 'workspace0: T.Buffer(("T.int64(2) * n", T.int64(3)), "int32"))' in text
    assert "in0.data, out0.data, workspace0.data, T.int64(1)" in text
    ir.assert_structural_equal(mod["main"].ret_ty, tensor(N), map_free_vars=True)
    assert next(iter(kernels(mod).values())).params == ("*fp32", "*fp32", "*i32")


def test_two_workspaces_are_two_even_if_they_are_equal() -> None:
    x = params(tensor(128))
    args = [OUT, Workspace((128,)), Workspace((128,))]
    assert "workspace0.data, workspace1.data" in script(module(x, (split, (1,), args, tensor(128))))
    shared = Workspace((128,))
    text = script(module(x, (split, (1,), [OUT, shared, shared], tensor(128))))
    assert "workspace0.data, workspace0.data" in text and "workspace1" not in text


@pytest.mark.parametrize("ctas", [1, 2])
def test_scratch_memory_grows_with_the_grid(ctas: int) -> None:
    x = params(tensor(32, 64, dtype="float16"), tensor(N))
    call = (copy_by_descriptor, (N, 3), [x[0], OUT], x[0].ty)
    mod = module(x, call, constexprs={"ROWS": 32, "COLUMNS": 64}, num_ctas=ctas)
    (kernel,) = kernels(mod).values()
    assert kernel.scratch_bytes > 0
    text = script(mod)
    total = 3 * ctas * kernel.scratch_bytes
    assert f'R.Tensor((n * {total},), dtype="uint8")' in text
    assert "in0.data, out0.data, workspace0.data, n, T.int64(3), T.int64(1))" in text
    assert "n: T.int64" in text, "no buffer of the function tells it"


def test_a_tensor_map_is_passed_as_pointer_sizes_and_strides() -> None:
    x = params(tensor(N, 64, dtype="float16"))
    tile = TensorMap(x[0], (32, 64))
    constants = {"ROWS": 32, "COLUMNS": 64}
    mod = module(
        x, (copy_tile, (1,), [tile, OUT], tensor(32, 64, dtype="float16")), constexprs=constants
    )
    args = "in0.data, n, T.int64(64), T.int64(64), T.int64(1), out0.data, T.int64(1), "
    assert f'T.call_cpacked("launch_copy_tile", {args}' in script(mod)
    (kernel,) = kernels(mod).values()
    assert kernel.params == ("tensordesc<fp16[32, 64]>", "*fp16")
    assert kernel.tensor_maps[0].block == (32, 64)


def test_a_tensor_map_of_a_workspace_and_of_an_output() -> None:
    x = params(tensor(1))
    constants = {"ROWS": 32, "COLUMNS": 64}
    space = TensorMap(Workspace((32, 64), "float16"), (32, 64))
    out = tensor(32, 64, dtype="float16")
    text = script(module(x, (copy_tile, (1,), [space, OUT], out), constexprs=constants))
    assert "(workspace0.data, T.int64(32), T.int64(64)" in text.replace('"launch_copy_tile", ', "")
    mapped = TensorMap(OUT, (32, 64))
    text = script(module(x, (copy_tile, (1,), [mapped, OUT], out), constexprs=constants))
    assert "out0.data, T.int64(32), T.int64(64), T.int64(64), T.int64(1), out0.data, " in text


def test_dims_that_no_buffer_tells_are_passed_by_value() -> None:
    x = params(tensor(N * 2), relax.ShapeType([N, M]))
    mod = module(x, (fill, (M,), [OUT, N], tensor(M, M)))
    text = script(mod)
    assert "n: T.int64, out0: T.Buffer((m, m)" in text.replace(', "float32"', ""), "m is told"
    relax.analysis.well_formed(mod)


def test_variants() -> None:
    x = params(tensor(N), tensor(N))
    variants = [
        Variant(N <= 16, {"BLOCK": 16}, grid=(1,)),
        Variant(N <= 64, {"BLOCK": 64}, {"num_warps": 1}),
    ]
    mod = module(
        x, (add, lambda c: (T.ceildiv(N, c["BLOCK"]),), [*x, OUT, N], tensor(N)),
        constexprs=BLOCK, variants=variants,
    )  # fmt: skip
    (func,) = functions(mod)
    first = func.body.block.body
    assert isinstance(first, tirx.IfThenElse)
    second = first.else_case
    assert isinstance(second, tirx.IfThenElse) and second.else_case is not None
    text = script(mod)
    assert "if n <= T.int64(16):" in text and "if n <= T.int64(64):" in text
    assert "n, T.int64(1), T.int64(1), T.int64(1))" in text
    assert all(f"T.int64(1)) // T.int64({n})" in text for n in (64, 128))
    made = kernels(mod)
    assert {dict(k.constants)["BLOCK"] for k in made.values()} == {"16", "64", "128"}
    assert sorted(k.num_warps for k in made.values()) == [1, 4, 4]
    calls = [str(s.value.args[0].value) for s in (first.then_case, second.then_case)]
    by_block = {dict(k.constants)["BLOCK"]: k.launcher for k in made.values()}
    assert calls == [by_block["16"], by_block["64"]]


def test_a_variant_with_another_kernel_has_constants_of_its_own() -> None:
    @triton.jit
    def other(x, low, high):
        tl.store(low, tl.load(x))

    x = params(tensor(N))
    outs = [tensor(N), tensor(N)]
    variants = [Variant(N == 1, kernel=other)]
    mod = module(
        x, (split, (1,), [x[0], Out(0), Out(1)], outs), constexprs=BLOCK, variants=variants
    )
    assert sorted(k.entry for k in kernels(mod).values()) == ["other", "split"]


def test_two_plans_of_one_kernel_don_t_meet() -> None:
    x = params(tensor(N), tensor(N))
    builder = relax.BlockBuilder()
    with builder.function("main", x):
        y = x[0]
        for block in (64, 128):
            args, constants = [y, x[1], OUT, N], {"BLOCK": block}
            y = builder.emit(
                call_tir_extern(add, (N,), args, tensor(N), constexprs=constants, target=H200)
            )
        builder.emit_func_output(y)
    mod = builder.get()
    assert len(functions(mod)) == 2 and len(kernels(mod)) == 2


def test_the_same_call_twice_adds_one_function() -> None:
    x = params(tensor(N), tensor(N))
    call = (add, (N,), [*x, OUT, N], tensor(N))
    assert len(functions(module(x, call, call, constexprs=BLOCK))) == 1
    other = (add, (N,), [x[1], x[0], OUT, N], tensor(N))
    assert len(functions(module(x, call, other, constexprs=BLOCK))) == 1, "same shapes"


def test_the_same_kernel_on_another_grid_is_another_function() -> None:
    x = params(tensor(N), tensor(N))
    calls = [(add, grid, [*x, OUT, N], tensor(N)) for grid in ((N,), (N, 2))]
    mod = module(x, *calls, constexprs=BLOCK)
    assert len(functions(mod)) == 2 and len(kernels(mod)) == 1


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "aligned"),
    [
        *((0, "i32", True), (2, "i32", False), (16, "i32", True), (-32, "i32", True)),
        *((INT32_MAX, "i32", False), (INT32_MAX + 1, "i64", True), (-(2**31) - 1, "i64", False)),
        *((True, "i1", False), (False, "i1", False), (1.0, "fp32", False), (0.5, "fp32", False)),
        *((tirx.IntImm("int64", 7), "i32", False), (tirx.FloatImm("float32", 2.0), "fp32", False)),
        *((N, "i64", False), (N * 16, "i64", True), (N * 8, "i64", False), (N % 7, "i32", False)),
        *((N // 16 * 16, "i64", True), (tirx.Cast("int32", N), "i32", False)),
        *((tirx.Cast("int32", N * 32), "i32", True), (tirx.Var("k", "int32"), "i32", False)),
    ],
)
def test_numbers(value: Any, kind: str, aligned: bool) -> None:
    number = scalar(value, "it")
    assert (number.kind, number.aligned) == (kind, aligned)


@pytest.mark.parametrize("value", [None, 1, tirx.IntImm("int64", 1), tirx.IntImm("int32", 1)])
def test_one_and_none_are_constants(value: Any) -> None:
    assert scalar(value, "it") is None


@pytest.mark.parametrize("value", [True, tirx.IntImm("bool", 1), tirx.IntImm("bool", 0)])
def test_a_bool_is_no_integer(value: Any) -> None:
    assert scalar(value, "it").kind == "i1"


def test_a_narrowed_number_is_passed_whole() -> None:
    assert scalar(tirx.Cast("int32", N), "it").value.same_as(N), "the launcher checks it"


@pytest.mark.parametrize("value", ["text", [1], (), object, 1j, 2**63, -(2**63) - 1])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(KernelError, match=r"it is .*"):
        scalar(value, "it")


@pytest.mark.parametrize("dtype", ["float32", "uint32", "int8", "bool"])
def test_expressions_of_other_dtypes(dtype: str) -> None:
    with pytest.raises(KernelError, match="it must be a tensor, a number, an expression of int32"):
        scalar(tirx.Var("k", dtype), "it")


def filled(kernel: Any, value: Any, dtype: str = "int64") -> Any:
    return kernel_of(params(tensor(N)), (kernel, (1,), [OUT, value], tensor(N, dtype=dtype)))


@pytest.mark.parametrize(
    ("kernel", "value", "types", "constants", "aligned"),
    [
        (fill, 1, ("*i64",), {"value": "1"}, (True,)),
        (fill, tirx.IntImm("int64", 1), ("*i64",), {"value": "1"}, (True,)),
        (fill, 48, ("*i64", "i32"), {}, (True, True)),
        (fill, True, ("*i64", "i1"), {}, (True, False)),
        (fill, N, ("*i64", "i64"), {}, (True, False)),
        (fill_any, 1, ("*i64", "i32"), {}, (True, False)),
        (fill_any, 16, ("*i64", "i32"), {}, (True, False)),
        (fill_any, N * 16, ("*i64", "i64"), {}, (True, False)),
        (fill_unaligned, N * 16, ("*i64", "i64"), {}, (False, False)),
        (fill_unaligned, 1, ("*i64",), {"value": "1"}, (False,)),
        (fill_wide, 3, ("*i64", "i64"), {}, (True, False)),
        (fill_wide, 16, ("*i64", "i64"), {}, (True, True)),
        (fill_real, 0.5, ("*i64", "fp32"), {}, (True, False)),
    ],
)
def test_specialisation(
    kernel: Any, value: Any, types: tuple, constants: dict, aligned: tuple
) -> None:
    made = filled(kernel, value)
    assert made.params == types
    assert dict(made.constants) == constants
    assert made.aligned == aligned


def test_a_declared_float_is_one_whatever_its_value() -> None:
    assert filled(fill_real, 1.0).params == ("*i64", "fp32")
    with pytest.raises(KernelError, match="argument 'value' is i32; the kernel declares fp32"):
        filled(fill_real, 2)
    with pytest.raises(KernelError, match=r"'value' .*the kernel declares fp32"):
        filled(fill_real, 1)


def test_none_is_a_constant() -> None:
    x = params(tensor(128))
    made = kernel_of(x, (maybe_add, (1,), [x[0], None, OUT], tensor(128)), constexprs=BLOCK)
    assert made.params == ("*fp32", "*fp32") and dict(made.constants)["y"] == "None"


def test_the_target_in_scope() -> None:
    x = params(tensor(N), tensor(N))
    builder = relax.BlockBuilder()
    with make_target("h200"), builder.function("main", x):
        y = builder.emit(call_tir_extern(add, (N,), [*x, OUT, N], tensor(N), constexprs=BLOCK))
        builder.emit_func_output(y)
    assert [k.capability for k in kernels(builder.get()).values()] == [90]


def test_a_run_time_parameter_can_be_made_a_constant() -> None:
    x = params(tensor(N))
    made = kernel_of(x, (fill, (1,), [OUT], tensor(N)), constexprs={"value": 7})
    assert made.params == ("*fp32",) and dict(made.constants) == {"value": "7"}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *(("float16", "fp16"), ("bfloat16", "bf16"), ("float64", "fp64"), ("int8", "i8")),
        *(("uint8", "u8"), ("uint32", "u32"), ("bool", "i1"), ("float8_e4m3fn", "fp8e4nv")),
        ("float8_e5m2", "fp8e5"),
    ],
)
def test_dtypes(dtype: str, kind: str) -> None:
    assert triton_dtype(dtype, "it") == kind


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float32x4", "int4", "handle", "complex64", ""])
def test_dtypes_that_triton_has_not(dtype: str) -> None:
    with pytest.raises(KernelError, match=f"it has dtype {dtype}; Triton has float16, "):
        triton_dtype(dtype, "it")


# --- refusals --------------------------------------------------------------------------------

X = params(tensor(N), tensor(N))
GOOD = {"kernel": add, "grid": (N,), "args": [*X, OUT, N], "out_ty": tensor(N), "constexprs": BLOCK}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"args": X}, r"add takes 4 run-time arguments \(x, y, out, n\), 2 were given; 'out' is miss"),
    ({"args": [*X, OUT, N, N]}, r"add takes 4 run-time arguments .*, 5 were given"),
    ({"args": {"x": X[0], "z": N}}, "add has no run-time parameter 'z'; it takes x, y, out, n"),
    ({"args": {"x": X[0], "y": X[1], "out": OUT}}, "3 were given; 'n' is missing"),
    ({"args": {"BLOCK": 3}}, "add has no run-time parameter 'BLOCK'"),
    ({"constexprs": {}}, "add needs a value for its constexpr 'BLOCK'"),
    ({"constexprs": None}, "add needs a value for its constexpr 'BLOCK'"),
    ({"constexprs": {**BLOCK, "LOCK": 1}}, "add has no parameter 'LOCK'; it has x, y, out, n, BLO"),
    ({"num_warp": 4}, "no option 'num_warp'; there are target, num_ctas, cooperative"),
    ({"num_warps": 3}, "num_warps is 3; it must be a power of two"),
    ({"args": [X[0], OUT, Out(1), N]}, r"Out\(1\) is used; out_ty has 1 types"),
    ({"args": [X[0], OUT, Out(-1), N]}, r"Out\(-1\) is used; out_ty has 1 types"),
    ({"args": [X[0], X[1], X[0], N]}, r"add: nothing writes output 0; pass Out\(0\)"),
    ({"out_ty": [tensor(N), tensor(N)]}, r"nothing writes output 1; pass Out\(1\)"),
    ({"out_ty": []}, r"Out\(0\) is used; out_ty has 0 types"),
    ({"out_ty": relax.TensorType(dtype="float32", ndim=1)}, "it must be a tensor type with a sh"),
    ({"out_ty": relax.ShapeType([N])}, "it must be a tensor type with a shape"),
    ({"out_ty": tensor(N, dtype="float4_e2m1fn")}, "'out' has dtype float4_e2m1fn; Triton has"),
    ({"grid": (N, 1, 1, 1)}, "add: the grid is .*; it must be one to three numbers"),
    ({"grid": ()}, "it must be one to three numbers"),
    ({"grid": N}, "it must be one to three numbers"),
    ({"grid": lambda c: c["BLOCK"]}, "add: the grid is 128; it must be one to three numbers"),
    ({"grid": (1.5,)}, r"the grid.*1\.5"),
    ({"grid": (-1,)}, "the grid.*-1"),
    ({"args": [*X, OUT, "n"]}, "argument 'n' is 'n'; it must be a tensor, a number"),
    ({"args": [*X, InOut(3), N]}, "argument 'out': InOut takes a tensor, not 3"),
    ({"args": [*X, TensorMap(3, (8,)), OUT]}, "'out': a tensor map must be of a tensor, not 3"),
    ({"args": [*X, OUT, Workspace((4,), "float4_e2m1fn")]}, "'n' has dtype float4_e2m1fn"),
    ({"args": [*X, InOut(params(tensor(M))[0]), N]}, "as output 0 it is to be"),
    ({"args": [*X, InOut(params(tensor(N, dtype="int32"))[0]), N]}, "as output 0 it is to"),
    ({"args": [InOut(X[0]), InOut(X[1]), OUT, N]}, "output 0"),
    ({"kernel": fill_wide, "args": [OUT, X[0]], "constexprs": {}}, "is .fp32; the kernel dec"),
    ({"kernel": fill_wide, "args": [OUT, 0.5], "constexprs": {}}, "fp32; the kernel declares i64"),
    ({"args": 3}, "args is 3; must be a sequence"),
    ({"args": None}, "args is None; must be a sequence"),
    ({"constexprs": [1]}, r"constexprs is \[1\]; must be a mapping"),
    ({"kernel": triton.autotune([triton.Config(BLOCK)], ["n"])(add)}, "jit"),
    ({"kernel": add.fn}, "jit"),
    ({"target": Target("llvm")}, "names no CUDA architecture"),
    ({"target": Target({"kind": "vulkan"})}, "names no CUDA architecture"),
    ({"target": make_target("rtx3080"), "num_ctas": 2}, "needs sm_90 or newer; the target is"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused(change: dict[str, Any], message: str) -> None:
    kwargs = {**GOOD, "target": H200, **change}
    builder = relax.BlockBuilder()
    with builder.function("main", X):
        with pytest.raises((KernelError, TargetError), match=message):
            call_tir_extern(**kwargs)
        builder.emit_func_output(X[0])
    assert functions(builder.get()) == []


def test_a_tensor_without_a_shape_is_refused() -> None:
    x = params(relax.TensorType(dtype="float32", ndim=1), tensor(N))
    with pytest.raises(KernelError, match=r"has no known shape: R.match_cast gives it one"):
        module(x, (add, (N,), [*x, OUT, N], tensor(N)), constexprs=BLOCK)


def test_a_tensor_map_whose_rank_is_not_the_tensors_is_refused() -> None:
    x = params(tensor(N, 4, 64, dtype="float16"))
    constants = {"ROWS": 32, "COLUMNS": 64}
    call = (copy_tile, (1,), [TensorMap(x[0], (32, 64)), OUT], tensor(32, 64, dtype="float16"))
    with pytest.raises(KernelError, match="tile"):
        module(x, call, constexprs=constants)


def test_no_target() -> None:
    builder = relax.BlockBuilder()
    with builder.function("main", X):
        with pytest.raises(KernelError, match=r"no target: pass target=\.\.\. or call within"):
            call_tir_extern(**GOOD)
        builder.emit_func_output(X[0])


def test_no_builder() -> None:
    with pytest.raises(KernelError, match="call it where a BlockBuilder is active"):
        call_tir_extern(**GOOD, target=H200)


def test_bind_takes_defaults() -> None:
    @triton.jit
    def kernel(x, n=3, BLOCK: tl.constexpr = 8):
        tl.store(x, n)

    assert bind(kernel, [1], {}) == {"x": 1, "n": 3}
    assert bind(kernel, {"x": 1, "n": 4}, {}) == {"x": 1, "n": 4}
    assert bind(kernel, [1], {"n": 2}) == {"x": 1}
    with pytest.raises(KernelError, match=r"kernel takes 2 run-time .*, 0 were given; 'x' is miss"):
        bind(kernel, [], {})
