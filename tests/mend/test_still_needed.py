"""What TVM does by itself: a file of `relax_fusion.mend` that it needs no more is to go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import ir, relax, s_tir, tirx
from tvm.relax.frontend.nn.llm import kv_cache

from relax_fusion import mend
from relax_fusion.matching.expressions import found_in, is_number
from relax_fusion.matching.pattern import calls_in

from ..support.chains import HEADER

MATRIX = 'R.Tensor((2, 2), "float32")'
LOWER = (
    *(relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()),
    *(relax.transform.FoldConstant(), relax.transform.FuseOps(), relax.transform.FuseTIR()),
)
BUGS: dict[str, list[Callable[[], bool]]] = {}
"""By the name of a file: what tells whether TVM still does what it mends."""


def needs(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Add a bug to those of a file."""
    return lambda bug: BUGS.setdefault(name, []).append(bug) or bug


def module(params: str, body: str, more: str = "") -> ir.IRModule:
    """Return ``main``, which returns `y`."""
    lines = "".join(f"            {line.strip()}\n" for line in body.split(";"))
    main = f"    @R.function\n    def main({params}):\n        cls = Module\n"
    return tvm.script.from_source(
        f"{HEADER}{more}\n{main}        with R.dataflow():\n{lines}"
        "            R.output(y)\n        return y\n"
    )


def raises(passes: object, mod: ir.IRModule, kind: type[Exception] = Exception) -> bool:
    """Tell whether a pass, or several, end in an error."""
    every = passes if isinstance(passes, tuple) else (passes,)
    try:
        tvm.transform.Sequential(list(every))(mod)
    except kind:
        return True
    return False


def machine(mod: ir.IRModule) -> relax.VirtualMachine:
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())


def result(mod: ir.IRModule, *arrays: np.ndarray) -> np.ndarray:
    return machine(mod)["main"](*map(tvm.runtime.tensor, arrays)).numpy()


# --- legalisations ----------------------------------------------------------------------------


@needs("attention")
def scores_underflow() -> bool:
    heads = 'R.Tensor((1, 4, 1, 8), "float32")'
    call = 'y = R.nn.attention(q, k, v, causal_mask="BottomRight")'
    q, k, v = (np.full((1, 4, 1, 8), n, "float32") for n in (48, -48, 1))
    found = result(module(f"q: {heads}, k: {heads}, v: {heads}", call), q, k, v)
    return bool(np.isnan(found).any())


@needs("full")
def infinity_is_text() -> bool:
    mod = module("", 'y = R.full((2, 3), R.const(float("-inf"), "float32"), "float32")')
    return raises(relax.transform.LegalizeOps(), mod, TypeError)


@needs("legalize")
def activations_round_every_step() -> bool:
    x = np.linspace(-4, 4, 1000, dtype="float16")
    found = result(module('x: R.Tensor((1000,), "float16")', "y = R.nn.gelu_tanh(x)"), x)
    wide = x.astype("float64")
    exact = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    return bool((np.abs(found - exact) > np.abs(np.spacing(exact.astype("float16")))).any())


@needs("nan")
def nan_is_lost() -> bool:
    x = np.array([np.nan, 1, -np.inf], "float32")
    calls = ("R.nn.relu(x)", "R.max(x, axis=[0], keepdims=True)", "R.subtract(x, x)")
    mods = [module('x: R.Tensor((3,), "float32")', f"y = {call}") for call in calls]
    return any(not np.isnan(result(mod, x)[0]) for mod in mods)


@needs("half_sums")
def sums_stop_growing() -> bool:
    x = np.ones(4096, "float16")
    return float(result(module('x: R.Tensor((4096,), "float16")', "y = R.sum(x)"), x)) != 4096


@needs("norms")
def norms_scale_anyway() -> bool:
    call = "y = R.nn.layer_norm(x, x, x, axes=[-1], center=False, scale=False)"
    found = result(module('x: R.Tensor((4,), "float32")', call), np.arange(4, dtype="float32"))
    return abs(found.mean()) > 0.1


# --- groups -----------------------------------------------------------------------------------

NARROW = """
    @T.prim_func(s_tir=True, private=True)
    def f(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("a"):
                v = T.axis.spatial(8, i)
                y[v] = x[v] + T.float32(1)
"""


@needs("wide_indices")
def sizes_of_32_bits() -> bool:
    eight = 'R.Tensor((8,), "float32")'
    body = f"a = R.call_tir(cls.f, (x,), out_ty={eight}); y = R.nn.relu(a)"
    return raises(LOWER, module(f"x: {eight}", body, NARROW))


@needs("transposed_matmul")
def transposes_that_others_read() -> bool:
    bodies = (
        "t = R.permute_dims(w); a = R.matmul(x, t); y = R.add(a, t)",
        "t = R.permute_dims(w); a = R.matmul(x, t); y = R.matmul(a, t)",
        "t = R.permute_dims(x); y = R.matmul(x, t)",
    )
    params, fuse = f"x: {MATRIX}, w: {MATRIX}", relax.transform.FuseTransposeMatmul()
    return any(raises(fuse, module(params, body)) for body in bodies)


@needs("device_targets")
def targets_are_lost() -> bool:
    devices = 'I.module_global_infos({"vdevice": [I.vdevice("llvm", 0)]})'
    params = 'x: R.Tensor((8, 64), "float32", "llvm:0")'
    mod = module(params, "y = R.exp(R.add(x, x))", f"    {devices}\n")
    (func,) = (f for _, f in lowered(mod).functions_items() if isinstance(f, tirx.PrimFunc))
    return "target" not in (func.attrs or {})


def lowered(mod: ir.IRModule) -> ir.IRModule:
    return relax.transform.DeadCodeElimination()(tvm.transform.Sequential(list(LOWER))(mod))


# --- memory -----------------------------------------------------------------------------------

INCREMENT = """
    @T.prim_func(private=True, s_tir=True)
    def increment(a: T.Buffer((T.int64(2), T.int64(2)), "float32")):
        for i, j in T.grid(T.int64(2), T.int64(2)):
            with T.sblock("increment"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = a[vi, vj] + T.float32(1)
"""


def written(body: str) -> ir.IRModule:
    """Return a function in which ``INCREMENT(v)`` adds 1 to a matrix in place."""
    call = f"R.call_tir_inplace(cls.increment, ({{}},), inplace_indices=[0], out_ty={MATRIX})"
    name = body.partition("INCREMENT(")[2].partition(")")[0]
    return module(f"x: {MATRIX}", body.replace(f"INCREMENT({name})", call.format(name)), INCREMENT)


ZEROS = np.zeros((2, 2), "float32")


@needs("in_place")
def writes_that_nothing_reads() -> bool:
    mod = relax.transform.DeadCodeElimination()(written("b = INCREMENT(x); y = R.exp(x)"))
    return not found_in(mod["main"], ir.Call)[0].op.name.endswith("call_tir_inplace")


@needs("constants")
def constants_that_are_overwritten() -> bool:
    run = machine(module("", 'y = R.const(5.0, "float32")'))["main"]
    run().copyfrom(np.float32(99))
    return float(run().numpy()) != 5


@needs("views")
def views_that_change() -> bool:
    body = "m = R.matmul(x, x); v = R.reshape(m, (4,)); b = INCREMENT(m); "
    made = result(written(f"{body}y = R.add(R.reshape(b, (4,)), v)"), ZEROS)
    return bool((made != 1).any())


PLANNED = (
    *(relax.transform.LegalizeOps(), relax.transform.ToNonDataflow()),
    *(relax.transform.RemovePurityChecking(), relax.transform.CallTIRRewrite()),
    relax.transform.StaticPlanBlockMemory(),
)


@needs("memory_planning")
def branches_share_memory() -> bool:
    matrix = 'R.Tensor((4, 32), "float32")'
    mod = tvm.script.from_source(f"""{HEADER}
    @R.function
    def main(c: R.Tensor((), "bool"), x: {matrix}):
        if c:
            y = R.nn.relu(R.exp(x))
        else:
            y = R.exp(R.nn.relu(x))
        return y
""")
    func = tvm.transform.Sequential(list(PLANNED))(mod)["main"]
    (branch,) = found_in(func, relax.If)
    bound = {b.var for block in branch.true_branch.blocks for b in block.bindings}
    return not bound.isdisjoint(relax.analysis.free_vars(branch.false_branch))


def shares_memory(mod: ir.IRModule) -> bool:
    """Tell whether TVM's planner gives two tensors of ``main`` the same storage."""
    func = tvm.transform.Sequential([relax.transform.RealizeVDevice(), *PLANNED])(mod)["main"]
    made = [c.args[0] for c in calls_in(func, "relax.memory.alloc_tensor")]
    return len(set(made)) < len(made)


@needs("memory_planning")
def devices_share_memory() -> bool:
    devices = '    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})'
    params = (f'{name}: R.Tensor((4, 32), "float32", "llvm:{name[1]}")' for name in ("x0", "x1"))
    return shares_memory(
        module(", ".join(params), "y = (R.exp(R.exp(x0)), R.exp(R.exp(x1)))", devices)
    )


@needs("memory_planning")
def results_are_other_tensors() -> bool:
    matrix = 'R.Tensor((4, 32), "float32")'
    return shares_memory(
        tvm.script.from_source(f"""{HEADER}
    @R.function(pure=False)
    def main(x: {matrix}):
        a = R.exp(x)
        b: {matrix} = R.call_inplace_packed("f", a, inplace_indices=[0], ty_args=[{matrix}])
        y = R.add(R.sin(x), b)
        return y
""")
    )


# --- code -------------------------------------------------------------------------------------

TWICE = """
    @T.prim_func(s_tir=True)
    def twice(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "twice"})
        for i in range(64):
            y[i] = x[i] + x[i]
"""
PRODUCT = """
    @T.prim_func(s_tir=True)
    def product(x: T.Buffer((64, 64), "float32"), w: T.Buffer((64, 64), "float32"),
                y: T.Buffer((64, 64), "float32")):
        T.func_attr({"global_symbol": "product"})
        for i, j, k in T.grid(64, 64, 64):
            y[i, j] = y[i, j] + x[i, k] * w[k, j]
"""
TALLY = """
    @T.prim_func(s_tir=True)
    def tally(h: T.Buffer((4,), "int64")):
        T.func_attr({"global_symbol": "tally"})
        h[0] = h[1] + T.int64(1)
"""


def code(mod: ir.IRModule, target: str = "llvm", kind: str = "ll") -> str:
    return tvm.compile(mod, target).mod.inspect_source(kind)


@needs("unaligned_arguments")
def arguments_are_aligned() -> bool:
    return "align 64" in code(tvm.script.from_source(HEADER + TWICE))


@needs("no_alias")
def one_function_speaks_for_all() -> bool:
    mod = tvm.script.from_source(HEADER + PRODUCT + TALLY)
    marked = {name: mod[name].with_attr("tirx.noalias", True) for name in ("product", "tally")}
    mixed = {**marked, "tally": mod["tally"]}
    told = [code(ir.IRModule(functions)).count("noalias") for functions in (marked, mixed)]
    return told[0] > 0 == told[1]


@needs("shifted_indices")
def indices_begin_elsewhere() -> bool:
    mod = tvm.script.from_source(HEADER + TWICE.replace("x[i]", "x[(7 - i) % 8]"))
    return "i % -8" in tirx.transform.FlattenBuffer()(mod)["twice"].script()


@needs("whole_buffers")
def sizes_depend_on_loops() -> bool:
    text = (Path(__file__).parents[1] / "data/passes/ReadWholeBuffers.txt").read_text()
    func = tvm.script.from_source(text.partition("# expected")[0])["backwards"]
    steps = (s_tir.transform.ConvertBlocksToOpaque(), s_tir.transform.CompactBufferAllocation())
    (buffer,) = tvm.transform.Sequential(list(steps))(ir.IRModule({"f": func}))[
        "f"
    ].body.block.alloc_buffers
    return len(found_in(buffer.ty.shape[0], ir.Var)) > 1


@needs("float_constants")
def constants_beyond_float32() -> bool:
    mod = tvm.script.from_source(HEADER + TWICE.replace("+ x[i]", "* T.float32(1e-50)"))
    return "e-50" in code(mod, "c", "c")


@needs("narrow_floats")
def zero_is_not_read() -> bool:
    mod = module('x: R.Tensor((1,), "float8_e4m3fn")', 'y = R.astype(x, "float32")')
    return result(mod, np.zeros(1, ml_dtypes.float8_e4m3fn))[0] != 0


@needs("single_elements")
def elements_behind_the_end() -> bool:
    func = kv_cache._attention_prefill_cpu(2, 4, 16, "float16", False, {})
    loads = found_in(func.body, ir.TensorLoad)
    return any(
        is_number(size, 1) and not is_number(index, 0)
        for load in loads
        for size, index in zip(load.source.ty.shape, load.indices, strict=True)
    )


# --- all --------------------------------------------------------------------------------------


@needs("disco_import")
def disco_is_not_there() -> bool:
    code = "import sys, tvm; sys.exit(tvm.runtime.disco is None)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


@pytest.mark.parametrize("name", sorted(p.stem for p in Path(mend.__file__).parent.glob("[!_]*")))
def test_tvm_needs_it(name: str) -> None:
    for bug in BUGS[name]:
        assert bug(), f"TVM mends this itself now ({bug.__name__}): delete mend/{name}.py"
