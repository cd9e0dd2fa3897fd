"""Sources and their keys; compiled kernels and what they say of their parameters."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from tvm import relax

from relax_fusion.errors import KernelError
from relax_fusion.launch.arguments import Out
from relax_fusion.launch.kernel import (
    CompiledKernel,
    LaunchOptions,
    c_type,
    check_entry,
    tensor_map_rank,
)
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.specialize import specialize

from .common import add, add_source, copy_tile_source, source


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernels([add_source()])[0]


@pytest.fixture(scope="module")
def tile_kernel() -> CompiledKernel:
    return compile_kernels([copy_tile_source()])[0]


@pytest.mark.parametrize("value", [0, 3, 64, -4, 4.0, True, "4", None])
def test_num_warps_is_a_power_of_two(value: Any) -> None:
    with pytest.raises(KernelError, match=r"num_warps is .*a power of two, 1 to 32"):
        KernelOptions(num_warps=value)


@pytest.mark.parametrize("value", [0, 3, 32, True, 2.0])
def test_num_ctas_is_a_power_of_two(value: Any) -> None:
    with pytest.raises(KernelError, match=rf"num_ctas is {value}; .*a power of two, 1 to 16"):
        KernelOptions(num_ctas=value)


@pytest.mark.parametrize("value", [-1, 65, 2.0, True, None, "3"])
def test_num_stages_has_limits(value: Any) -> None:
    with pytest.raises(KernelError, match=r"num_stages is .*from 0 to 64"):
        KernelOptions(num_stages=value)


@pytest.mark.parametrize("value", [0, 256, 1.5, True, "64"])
def test_maxnreg_has_limits(value: Any) -> None:
    with pytest.raises(KernelError, match=r"maxnreg is .*from 1 to 255"):
        KernelOptions(maxnreg=value)


@pytest.mark.parametrize("name", ["cooperative", "dependent_launch"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_a_bool(name: str, value: Any) -> None:
    with pytest.raises(KernelError, match=name):
        KernelOptions(**{name: value})


def with_block(value: Any) -> KernelSource:
    return replace(add_source(), constexprs={"BLOCK": value})


CONSTANTS = [
    *(1, True, 1.0, "1", "True", None, "None", -1, 0, False, 0.0, "", "1.0"),
    *(tl.float16, "fp16", "float16", tl.bfloat16, (1,), (True,), (1.0,), ("1",), [1], "(1,)"),
    *((1, 2), ((1,), 2), (tl.float16,), tl.constexpr(1), tl.constexpr("1"), tl.constexpr(True)),
]


def test_every_constant_has_a_key_of_its_own() -> None:
    keys: dict[str, Any] = {}
    for value in CONSTANTS:
        other = keys.setdefault(with_block(value).key(), value)
        assert other is value, f"{value!r} has the key of {other!r}"


def test_constants_that_look_alike_when_joined() -> None:
    def key(x: Any, y: Any) -> str:
        types = {"out": "*fp32", "n": "i32"}
        return source(add, types, {"x": x, "y": y, "BLOCK": 32}).key()

    assert key("a-b", "c") != key("a", "b-c")
    assert key("a", "b") != key("b", "a")


OTHERS = [
    {"dtype": "fp16"},
    {"block": 256},
    {"aligned": ()},
    {"aligned": ("x", "y")},
    {"aligned": ("x", "out")},
    {"aligned": ("x", "y", "out", "n")},
    {"capability": 80},
    {"capability": 89},
    {"capability": 100},
    {"num_warps": 8},
    {"num_stages": 2},
    {"num_ctas": 2},
    {"maxnreg": 64},
    {"cooperative": True},
    {"dependent_launch": True},
]


def test_whatever_differs_is_in_the_key() -> None:
    keys = [add_source(**kwargs).key() for kwargs in [{}, *OTHERS]]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys)


def test_every_type_is_in_the_key() -> None:
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    others = [{}, {"n": "i64"}, {"n": "u32"}, {"x": "*kfp32"}, {"x": "*fp16"}, {"y": "*fp16"}]
    keys = {source(add, {**types, **o}, {"BLOCK": 32}, ("x",)).key() for o in others}
    assert len(keys) == len(others)


BODY = """
import triton
import triton.language as tl

SCALE = tl.constexpr({scale})

@triton.jit
def helper(x):
    return x {op} 2

@triton.jit
def kernel(x, F: tl.constexpr):
    tl.store(x, helper(tl.load(x)) {outer} SCALE)
"""


def load(directory: Path, **parts: Any) -> Any:
    """Return the module of BODY with `parts`; the name of the module is always the same."""
    path = directory / f"{'_'.join(str(ord(str(p)[0])) for p in parts.values())}.py"
    path.write_text(BODY.format(**parts))
    spec = importlib.util.spec_from_file_location("same_name", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_code_is_in_the_key(tmp_path: Path) -> None:
    def key(**parts: Any) -> str:
        kernel = load(tmp_path, **parts).kernel
        return source(kernel, {"x": "*fp32"}, {"F": 1}).key()

    first = key(scale=3, op="*", outer="+")
    assert first == key(scale=3, op="*", outer="+")
    assert first != key(scale=3, op="+", outer="+"), "a helper"
    assert first != key(scale=3, op="*", outer="-"), "the body"
    assert first != key(scale=4, op="*", outer="+"), "a global constant"


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: (f,), lambda f: ((f, 1), 2)])
def test_the_code_of_a_function_that_is_a_constant_is_in_the_key(tmp_path: Path, wrap: Any) -> None:
    def key(op: str) -> str:
        made = load(tmp_path, scale=1, op=op, outer="+")
        return source(add, {"x": "*fp32"}, {"BLOCK": wrap(made.helper)}).key()

    assert key("*") == key("*")
    assert key("*") != key("+")


@pytest.mark.parametrize("warps", [0, 33, True, "4"])
def test_a_kernel_made_by_hand_is_checked(kernel: CompiledKernel, warps: Any) -> None:
    with pytest.raises(KernelError, match=r"^kernel: num_warps is .*must be"):
        replace(kernel, num_warps=warps)


def test_json_goes_there_and_back(kernel: CompiledKernel, tile_kernel: CompiledKernel) -> None:
    assert tile_kernel.tensor_maps
    odd = replace(kernel, options=LaunchOptions(2, True, True), constants=(("a", '"\n'),))
    for k in (kernel, tile_kernel, odd):
        assert CompiledKernel.from_json(k.to_json(), k.image, k.ptx) == k
        assert CompiledKernel.from_json(k.to_json(), b"i") == replace(k, image=b"i", ptx=b"")
        assert "image" not in json.loads(k.to_json())


def test_from_json_refuses_options_that_nobody_takes(kernel: CompiledKernel) -> None:
    text = kernel.to_json().replace('"num_ctas": 1', '"num_ctas": 3')
    with pytest.raises(KernelError, match="num_ctas is 3"):
        CompiledKernel.from_json(text, b"")


def test_machine_params(kernel: CompiledKernel, tile_kernel: CompiledKernel) -> None:
    pointers = ["void*"] * 2
    assert kernel.machine_params() == ["void*", "void*", "void*", "int32_t", *pointers]
    sizes = ["int32_t", "int32_t", "int64_t", "int64_t"]
    assert tile_kernel.machine_params() == ["tensor_map", *sizes, "void*", *pointers]
    for rank in range(1, 6):
        kind = f"tensordesc<fp32[{', '.join(['4'] * rank)}]>"
        made = replace(kernel, params=(kind,)).machine_params()
        assert made == ["tensor_map", *["int32_t"] * rank, *["int64_t"] * rank, *pointers]
        assert tensor_map_rank(kind) == rank


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((f"i{bits}", f"int{bits}_t") for bits in (8, 16, 32, 64)),
        *((f"u{bits}", f"uint{bits}_t") for bits in (8, 16, 32, 64)),
        *(("i1", "int8_t"), ("u1", "uint8_t"), ("fp32", "float"), ("fp64", "double")),
        *(("*fp16", "void*"), ("*ki8", "void*"), ("*fp8e4nv", "void*")),
    ],
)
def test_c_types(kind: str, expected: str) -> None:
    assert c_type(kind) == expected


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8e5", "i128", "constexpr", "", "float"])
def test_types_that_are_not_passed(kind: str) -> None:
    with pytest.raises(KernelError, match="cannot be passed at run time; use fp32 or an integer"):
        c_type(kind)


def test_the_entry_is_checked(kernel: CompiledKernel, tile_kernel: CompiledKernel) -> None:
    check_entry(kernel)
    check_entry(tile_kernel)
    fp = ("*fp32", "*fp32", "*fp32")
    for params in [fp, (*fp, "i32", "i32"), (*fp, "i64"), ("*fp32", "i32", "*fp32", "*fp32"), ()]:
        with pytest.raises(KernelError, match=r"add: .*by the calling convention"):
            check_entry(replace(kernel, params=params))
    with pytest.raises(KernelError, match=r"of \[128, 4, 4, 8, 8, 8, 8, 8\] bytes"):
        check_entry(replace(tile_kernel, params=tile_kernel.params[:1]))
    with pytest.raises(KernelError, match=r"of \[128, .*passes \[128, 4, 8"):
        check_entry(replace(tile_kernel, params=("tensordesc<fp16[64]>", "*fp16")))


def test_an_entry_that_is_not_there_is_refused(kernel: CompiledKernel) -> None:
    for changed in (replace(kernel, entry="ad"), replace(kernel, ptx=b"")):
        with pytest.raises(KernelError, match=r"parameters of \[\] bytes"):
            check_entry(changed)


def test_what_a_kernel_says_of_itself(kernel: CompiledKernel) -> None:
    assert kernel.symbol == f"add_{add_source().key()}" and kernel.entry == "add"
    assert kernel.arch == "sm_90a" and replace(kernel, capability=89).arch == "sm_89"
    assert kernel.threads == 128 and replace(kernel, num_warps=8).threads == 256
    assert kernel.constants == (("BLOCK", "128"),)
    assert kernel.aligned == (True, True, True, False)
    assert "image" not in repr(kernel) and len(repr(kernel)) < 1000


class Rows(NamedTuple):
    """A matrix of which a kernel knows the width."""

    ptr: Any
    stride: Any
    width: Any


class Sizes(NamedTuple):
    """Constants of a kernel."""

    block: int
    shift: float


@triton.jit
def shifted(x, out, n, C: tl.constexpr):
    i = tl.arange(0, C.block)
    row = tl.load(x.ptr + tl.program_id(0) * x.stride + i, i < x.width)
    tl.store(out + i, row + C.shift, i < n)


def test_a_named_tuple_is_as_many_arguments_or_constants() -> None:
    x = relax.Var("x", relax.TensorType([4, 64], "float32"))
    args = {"x": Rows(x, 48, tl.constexpr(40)), "out": Out(0), "n": 33}

    def of(c: Sizes) -> KernelSource:
        made, passed = specialize(shifted, args, {"C": c}, KernelOptions(), [x.ty], 90)
        assert len(passed) == 4 and passed[0] is x and passed[1] == 48
        return made

    first = of(Sizes(64, 0.5))
    assert first.constexprs == {"C": Sizes(64, 0.5), "x.width": 40}
    assert first.aligned == {"x.ptr", "x.stride", "out"}
    assert first.key() == of(Sizes(64, 0.5)).key() != of(Sizes(64, 1.5)).key()
    kernel = compile_kernels([first])[0]  # which checks the parameters of the machine code
    assert kernel.params == ("*fp32", "i32", "*fp32", "i32")
    assert kernel.aligned == (True, True, True, False)
