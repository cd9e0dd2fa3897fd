"""`EmbedTritonKernels`, alone and in the pipeline."""

from __future__ import annotations

import re
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.script import tirx as T

import relax_fusion  # noqa: F401  (registers the pipeline)
from relax_fusion.transforms.modules import KERNELS_ATTR, with_functions
from relax_fusion.triton_bridge import OUT, EmbedTritonKernels, call_tir_extern

from .common import H200, add, module, params

N = tirx.Var("n", "int64")
TY = relax.TensorType([N], "float32")


def adds(*blocks: int) -> ir.IRModule:
    """Return a module that calls `add` once for each block."""
    x = params(TY, TY)
    builder = relax.BlockBuilder()
    with builder.function("main", x):
        with builder.dataflow():
            y = x[0]
            for block in blocks:
                args, constants = [y, x[1], OUT, N], {"BLOCK": block}
                call = call_tir_extern(add, (N,), args, TY, constexprs=constants, target=H200)
                y = builder.emit(call)
            y = builder.emit_output(relax.op.add(y, x[1]))
        builder.emit_func_output(y)
    return builder.get()


def external(mod: ir.IRModule) -> list[Any]:
    return list((mod.attrs or {}).get("external_mods", []))


def sources(mod: ir.IRModule) -> list[str]:
    return [str(m.inspect_source()) for m in external(mod)]


def prim_funcs(mod: ir.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def other_module(name: str) -> tvm_ffi.Module:
    make = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")
    return make(f"int {name}(void) {{ return 0; }}\n", "c", [name], None)


def test_kernels_move_from_functions_to_a_module() -> None:
    before = adds(64, 128)
    after = EmbedTritonKernels()(before)
    assert [KERNELS_ATTR in f.attrs for f in prim_funcs(before)] == [True, True]
    assert [KERNELS_ATTR in f.attrs for f in prim_funcs(after)] == [False, False]
    assert all(int(f.attrs["tirx.is_scheduled"]) == 1 for f in prim_funcs(after))
    (text,) = sources(after)
    assert text.count("static const unsigned char rf_image_add_") == 2
    assert {g.name_hint for g in before.get_global_vars()} == {
        g.name_hint for g in after.get_global_vars()
    }
    ir.assert_structural_equal(before["main"].ret_ty, after["main"].ret_ty, map_free_vars=True)
    assert external(before) == []


def test_a_kernel_of_two_functions_is_embedded_once() -> None:
    x = params(TY, TY)
    calls = [(add, grid, [*x, OUT, N], TY) for grid in ((N,), (N, 2))]
    mod = module(x, *calls, constexprs={"BLOCK": 64})
    assert len(prim_funcs(mod)) == 2
    (text,) = sources(EmbedTritonKernels()(mod))
    assert text.count("static const unsigned char rf_image_add_") == 1


def test_modules_that_are_there_already_stay_in_front() -> None:
    other = other_module("other")
    mod = adds(64).with_attr("external_mods", [other])
    after = EmbedTritonKernels()(mod)
    first, second = external(after)
    assert first.same_as(other) and "rf_image_add_" in second.inspect_source()
    assert len(external(mod)) == 1


def test_without_kernels_nothing_changes() -> None:
    for mod in (ir.IRModule({}), adds(), ir.IRModule({"f": double()})):
        assert EmbedTritonKernels()(mod).same_as(mod)


def test_the_text_is_the_same_every_time() -> None:
    first, second = (sources(EmbedTritonKernels()(adds(*b))) for b in [(64, 128), (64, 128)])
    assert first == second
    assert first == sources(EmbedTritonKernels()(adds(128, 64))), "whatever the order of the calls"


def double() -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)
    def function(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")) -> None:
        for i in T.serial(8):
            with T.sblock("double"):
                vi = T.axis.spatial(8, i)
                y[vi] = x[vi] * T.float32(2)

    return function


def through_the_pipeline(mod: ir.IRModule, **options: Any) -> ir.IRModule:
    with H200:
        return relax.get_pipeline("relax_fusion", target=H200, **options)(mod)


def test_the_pipeline_embeds() -> None:
    after = through_the_pipeline(adds(64, 128))
    (text,) = sources(after)
    assert text.count("static const unsigned char rf_image_add_") == 2
    assert not any(KERNELS_ATTR in f.attrs for f in prim_funcs(after))
    calls = [f for f in prim_funcs(after) if "call_cpacked" in f.script()]
    assert len(calls) == 2, "not fused, not scheduled, not removed"


def test_the_pipeline_drops_kernels_that_nobody_calls() -> None:
    mod = adds(64)
    unused = adds(128)
    (gvar,) = [g for g, f in unused.functions_items() if isinstance(f, tirx.PrimFunc)]
    mod[gvar] = unused[gvar]
    (text,) = sources(through_the_pipeline(mod))
    assert text.count("static const unsigned char rf_image_add_") == 1


def test_with_ext_mods_of_the_pipeline() -> None:
    from tvm.relax.frontend.nn import SourceModule

    text = "int other_of_mine(void) { return 0; }\n"
    given = SourceModule({}, text, "cpp")
    after = through_the_pipeline(adds(64), ext_mods=[given])
    assert len(external(after)) == 2
    ours = [m for m in external(after) if m.kind == "c" and "rf_image_add_" in m.inspect_source()]
    assert len(ours) == 1


def test_what_is_added_later_is_embedded_later() -> None:
    once = EmbedTritonKernels()(adds(64, 64, 128))
    more = {g: f for g, f in adds(64, 256).functions_items() if isinstance(f, tirx.PrimFunc)}
    more = {ir.GlobalVar(f"later_{g.name_hint}"): f for g, f in more.items()}
    twice = EmbedTritonKernels()(with_functions(once, more))
    first, second = sources(twice)
    assert first == sources(once)[0]
    assert second.count("static const unsigned char rf_image_add_") == 1
    defined = [n for s in (first, second) for n in re.findall(r"int (\w+)\([^)]*\) {\n  \w", s)]
    text = twice.script(show_meta=False)
    called = re.findall(r'call_cpacked\("(\w+)"', text)
    launchers = [n for n in defined if n.startswith("launch_add")]
    assert sorted(launchers) == sorted(called) and len(set(called)) == 4
    assert EmbedTritonKernels()(twice).same_as(twice)


def test_a_second_time_nothing_changes() -> None:
    once = EmbedTritonKernels()(adds(64))
    assert EmbedTritonKernels()(once).same_as(once)


def test_with_external_modules_of_the_user() -> None:
    other = other_module("other")
    after = through_the_pipeline(adds(64).with_attr("external_mods", [other]))
    assert len(external(after)) == 2
