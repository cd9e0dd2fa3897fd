"""CUDA graphs: what is recorded, and that a replay reads the tensors of its own call.

There is no GPU here.  What is recorded is read off the lowered module.  The rest runs on the CPU,
where `Graphs` stands for the two functions of TVM's runtime that record and replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion import PipelineError, PipelineOptions, make_target
from relax_fusion.matching.pattern import is_call
from relax_fusion.models import Config, export, random_weights, zoo_config
from relax_fusion.pipeline import PHASES, phase5_bytecode
from relax_fusion.transforms.cuda_graph import (
    ADDRESSES,
    CONFIG,
    CaptureCUDAGraphs,
    addresses_module,
)
from relax_fusion.transforms.whole_graph import (
    BOUND_ATTR,
    HINTS_ATTR,
    RUN_OR_CAPTURE,
    KeepResults,
    is_run_or_capture,
)

from ..support import quick
from ..support.chains import HEADER
from ..support.quick import quick_host
from ..support.tiny_llama import TINY, TWO_LAYERS

CACHED_ALLOC = "vm.builtin.cuda_graph.get_cached_alloc"

# --- what is recorded ------------------------------------------------------------------------


def lowered(mod: ir.IRModule, **options: Any) -> ir.IRModule:
    """Return the module as the pipeline leaves it for an H200, up to the graphs.

    In the pipeline only `_metadata` comes between planning memory and the graphs.
    """
    later = {name: options.pop(name) for name in ("use_cuda_graph",) if name in options}
    mod = scheduled(mod) if not options else up_to_schedules(mod, **options)
    made = PipelineOptions(**H200, **options, **later)
    with made.target:
        for step in phase5_bytecode(made):
            mod = step(mod)
            if step.info.name == "CaptureCUDAGraphs":
                return mod
    raise AssertionError("the pipeline has no such pass")


H200: dict[str, Any] = {"target": make_target("h200"), "backend": "tir", "always_fuse": True}


def up_to_schedules(mod: ir.IRModule, **options: Any) -> ir.IRModule:
    made = PipelineOptions(**H200, **options)
    with made.target:
        for _, phase, _ in PHASES[:5]:
            mod = tvm.transform.Sequential(phase(made))(mod)
    return mod


scheduled = cache(up_to_schedules)


def decode(config: Config, dtype: str = "float16", **given: Any) -> ir.IRModule:
    """Return a model's ``decode`` alone: no time goes into kernels of many rows."""
    mod = export(config, dtype=dtype, max_seq_len=32, **given).mod
    del mod["prefill"]
    return mod


@cache
def tiny() -> ir.IRModule:
    """Return a decoder of one layer, the same module each time."""
    return decode(TINY)


def calls(func: relax.Function) -> list[tuple[str, relax.Call]]:
    """Return the calls of kernels and of packed functions, in order, by name."""
    found = []
    for block in func.body.blocks:
        for binding in block.bindings:
            op = binding.value.op if isinstance(binding.value, relax.Call) else None
            if isinstance(op, ir.GlobalVar):
                found.append((op.name_hint, binding.value))
            elif isinstance(op, relax.ExternFunc):
                found.append((str(op.global_symbol), binding.value))
    return found


def names_called(func: relax.Function) -> list[str]:
    return [name for name, _ in calls(func)]


def regions(mod: ir.IRModule, function: str) -> list[list[str]]:
    """Return the kernels of every graph that a function replays, in order."""
    found = []
    for block in mod[function].body.blocks:
        for binding in block.bindings:
            if is_run_or_capture(binding.value):
                found.append(names_called(mod[binding.value.args[1].fields[0]]))
    return found


def keys(mod: ir.IRModule, function: str) -> int:
    return names_called(mod[function]).count(ADDRESSES)


SUM = "runtime.disco.allreduce"
QKV, OUT, FFN = "fuse_rms_norm_matmul", "fuse_matmul_epilogue", "fuse_gated_ffn"


def kinds(names: list[str]) -> list[str]:
    """Return the names without the keys of workload and plan."""
    return [next((k for k in (QKV, OUT, FFN) if n.startswith(k)), n) for n in names]


def unbound(mod: ir.IRModule) -> ir.IRModule:
    """Return a decoder whose callers pass any memory, and no dim of which a hint names."""
    func = mod["decode"].without_attr(BOUND_ATTR).without_attr(HINTS_ATTR)
    mod.update_func(mod.get_global_var("decode"), func)
    return mod


def test_a_step_is_one_graph() -> None:
    mod = lowered(decode(TWO_LAYERS))
    (found,) = regions(mod, "decode")
    assert [kind for kind in kinds(found) if kind in (QKV, OUT, FFN)] == [
        *([QKV, OUT, FFN, OUT] * 2),
        QKV,
    ]
    assert "fused_take_reshape" in found and found[-2:] == ["argmax", "advance"]
    assert names_called(mod["decode"]) == [ADDRESSES, "vm.builtin.copy"]
    (key,) = (call for name, call in calls(mod["decode"]) if name == ADDRESSES)
    assert [a.name for a in key.args[:-1]] == ["packed_params", "caches", "length", "input_ids"]
    assert [str(dim) for dim in key.args[-1].values] == ["total_len"]
    taken = [b.value for block in mod["decode"].body.blocks for b in block.bindings]
    assert not [v for v in taken if isinstance(v, relax.TupleGetItem) and "packed" in str(v)]


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_of_one_of_several_workers_is_one_graph(batch: int) -> None:
    odd = replace(TWO_LAYERS, vocab_size=97)  # whose logits are a part of what is gathered
    mod = lowered(decode(odd, shards=2, batch=batch))
    (found,) = regions(mod, "decode")
    assert [n for n in kinds(found) if n in (QKV, OUT, FFN) or "disco" in n] == [
        SUM,
        *([QKV, OUT, SUM, FFN, OUT, SUM] * 2),
        *(QKV, "runtime.disco.allgather"),
    ]
    assert names_called(mod["decode"]) == [ADDRESSES, "vm.builtin.copy"]


@pytest.mark.parametrize("length", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_an_encoder_of_static_sizes_is_one_graph(length: int | None) -> None:
    config = replace(zoo_config("bert-base"), num_layers=1, hidden_size=64, num_heads=2)
    mod = lowered(export(config, dtype="float16", max_seq_len=16, seq_len=length).mod)
    whole = names_called(mod["encode"]) == [ADDRESSES, "vm.builtin.copy"]
    assert whole == (length is not None)
    assert len(regions(mod, "encode")) == int(whole)


def test_a_decoders_projections_between_two_attentions_are_one_graph() -> None:
    mod = lowered(unbound(export(TWO_LAYERS, dtype="float16", max_seq_len=32).mod))
    found = [kinds(names) for names in regions(mod, "decode")]
    assert found == [[QKV], [OUT, FFN, OUT, QKV], [OUT, FFN, OUT]]
    assert keys(mod, "decode") == 3
    # Of a prompt, one row is left behind the last attention
    assert [kinds(names) for names in regions(mod, "prefill")] == [[OUT, FFN, OUT]]
    assert keys(mod, "prefill") == 1


@pytest.mark.parametrize("name", ["demo-llama", "demo-gpt2"])
def test_what_depends_on_the_position_is_in_no_graph(name: str) -> None:
    mod = lowered(unbound(decode(replace(zoo_config(name), num_layers=1))))
    inside = [n for names in regions(mod, "decode") for n in names]
    assert len(inside) >= 4
    assert not [n for n in inside if "append" in n or "attention" in n]


def test_the_result_is_in_no_graph() -> None:
    """What a graph writes is overwritten by the next call; a caller may keep its logits."""
    mod = lowered(unbound(decode(TINY)))
    last = kinds(names_called(mod["decode"]))[-3:]
    assert last == [QKV, "argmax", "advance"], "the final norm and the lm_head, and the choice"


def test_a_symbolic_batch_is_recorded_only_where_a_hint_asks() -> None:
    mod, bounds = decode(TINY, batch="batch_size"), {"batch_size": 8}
    assert regions(lowered(mod, variable_bounds=bounds), "decode") == []
    hints = {"decode": ["batch_size"]}
    hinted = lowered(mod, variable_bounds=bounds, cuda_graph_symbolic_capture_hints=hints)
    assert len(regions(hinted, "decode")) == 1
    made = [call for name, call in calls(hinted["decode"]) if name == ADDRESSES]
    assert all(isinstance(call.args[-1], relax.ShapeExpr) for call in made), (
        "the batch is a key too"
    )


@pytest.mark.parametrize("given", [True, False])
def test_the_pass_context_wins(given: bool) -> None:
    mod = tiny()
    with tvm.transform.PassContext(config={CONFIG: given}):
        made = lowered(mod, use_cuda_graph=not given)
    assert len(regions(made, "decode")) == (2 if given else 0)
    assert keys(made, "decode") == 0, "then it is TVM's own pass, and nothing else"


def test_switched_off() -> None:
    mod = tiny()
    assert regions(lowered(mod, use_cuda_graph=False), "decode") == []
    with pytest.raises(PipelineError, match="use_cuda_graph is 'no'"):
        PipelineOptions(make_target("h200"), use_cuda_graph="no")


def test_other_targets_have_no_such_pass() -> None:
    for target in ("llvm", "metal"):
        names = [p.info.name for p in phase5_bytecode(PipelineOptions(make_target(target)))]
        assert "CaptureCUDAGraphs" not in names


STEPS = """
    @T.prim_func(s_tir=True, private=True)
    def more(a: T.Buffer((T.int64(8),), "float32"), b: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(T.int64(8)):
            with T.sblock("more"):
                vi = T.axis.spatial(T.int64(8), i)
                b[vi] = a[vi] + T.float32(1)

    @T.prim_func(s_tir=True, private=True)
    def add(a: T.Buffer((T.int64(8),), "float32"), w: T.Buffer((T.int64(8),), "float32"),
            b: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(T.int64(8)):
            with T.sblock("add"):
                vi = T.axis.spatial(T.int64(8), i)
                b[vi] = a[vi] + w[vi]

    @T.prim_func(s_tir=True, private=True)
    def double(a: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": 1})
        for i in range(T.int64(8)):
            with T.sblock("double"):
                vi = T.axis.spatial(T.int64(8), i)
                a[vi] = a[vi] * T.float32(2)

    @T.prim_func(s_tir=True, private=True)
    def asks_the_host(a: T.Buffer((T.int64(8),), "float32"), b: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": 1})
        with T.sblock("root"):
            T.reads(a[0:8])
            T.writes(b[0:8])
            T.evaluate(T.call_packed("of_the_host", a.data, b.data))
"""


def steps(body: str, result: str) -> ir.IRModule:
    """Return ``main(x, w)`` where w is a weight; every tensor has eight elements."""
    text = f"""
    @R.function
    def main(x: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
        R.func_attr({{"num_input": 1}})
        cls = Module
        with R.dataflow():
            a = R.call_tir(cls.more, (x,), out_ty=R.Tensor((8,), "float32"))
            b = R.call_tir(cls.add, (a, w), out_ty=R.Tensor((8,), "float32"))
            {body}
            y = R.call_tir(cls.more, (c,), out_ty=R.Tensor((8,), "float32"))
            R.output({result})
        return {result}
"""
    return tvm.script.from_source(HEADER + STEPS + text)


MORE = "c = R.call_tir(cls.more, (b,), out_ty=R.Tensor((8,), 'float32'))"
DOUBLE = MORE.replace("call_tir(cls.more", "call_tir_inplace(cls.double").replace(
    "'float32')", "'float32'), inplace_indices=[0]"
)


@pytest.mark.parametrize(
    ("body", "recorded"),
    [
        (MORE, [["add", "more"]]),
        (DOUBLE, [["add", "double"]]),
        ("c = R.call_pure_packed('f', b, ty_args=[R.Tensor((8,), 'float32')])", []),
        ("c = R.call_dps_packed('f', (b,), out_ty=[R.Tensor((8,), 'float32')])", []),
        (MORE.replace("more", "asks_the_host"), []),
        ("c = R.ccl.allreduce(b, 'max')", [["add", SUM]]),
    ],
    ids=["kernels", "in_place", "packed", "packed_dps", "packed_in_a_prim_func", "collective"],
)
def test_only_launches_of_kernels_are_recorded(body: str, recorded: list[list[str]]) -> None:
    mod = steps(body, "y")
    assert regions(lowered(mod), "main") == recorded
    with tvm.transform.PassContext(config={CONFIG: True}):  # TVM itself would
        assert regions(lowered(mod), "main") != []


def test_memory_on_another_device() -> None:
    """TVM's pass fails on storage that is planned on a second device."""
    mod = lowered(steps(MORE, "y"), use_cuda_graph=False)

    def moved(call: ir.Call) -> ir.Call:
        if not is_call(call, "relax.memory.alloc_storage"):
            return call
        size, _, *rest = call.args
        return relax.Call(call.op, [size, tirx.IntImm("int64", 1), *rest], call.attrs)

    main = tvm_ffi.structural_map(mod["main"], (ir.Call, moved))
    mod.update_func(mod.get_global_var("main"), main)
    with tvm.transform.PassContext(config={CONFIG: True}), pytest.raises(RuntimeError):
        CaptureCUDAGraphs()(mod)
    assert CaptureCUDAGraphs()(mod).same_as(mod)


# --- replaying -------------------------------------------------------------------------------


class Graphs:
    """What TVM's runtime does with graphs, on a CPU: a replay gets the recording's arguments."""

    def __init__(self) -> None:
        self.vm: Any = None
        self.recorded: dict[tuple[int, ...], tuple[Any, list[Any], Any]] = {}
        self.storages: dict[int, Any] = {}
        self.replays = 0

    def run_or_capture(self, _vm: Any, body: Any, args: Any, index: int, *key: Any) -> Any:
        name = (index, *(int(d) for shape in key for d in shape))
        if name in self.recorded:
            self.replays += 1
            body, args, result = self.recorded[name]
            self.vm.invoke_closure(body, *args)
            return result
        args = list(args)
        result = self.vm.invoke_closure(body, *args)
        self.recorded[name] = (body, args, result)
        return result

    def cached_alloc(self, _vm: Any, body: Any, index: int) -> Any:
        if index not in self.storages:
            self.storages[index] = self.vm.invoke_closure(body)
        return self.storages[index]


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    if tvm.get_global_func(RUN_OR_CAPTURE, allow_missing=True) is not None:
        pytest.skip("this TVM records graphs itself; tests/gpu has the test for it")
    made = Graphs()
    tvm.register_global_func(RUN_OR_CAPTURE, made.run_or_capture)
    tvm.register_global_func(CACHED_ALLOC, made.cached_alloc)
    yield made
    for name in (RUN_OR_CAPTURE, CACHED_ALLOC):
        tvm_ffi.registry.remove_global_func(name)


def machine(mod: ir.IRModule, graphs: Graphs | None = None, **given: Any) -> Any:
    """Compile for the CPU, with graphs if there is something to record them."""
    options = PipelineOptions(quick_host(), **given)
    with options.target:
        for number, (_, phase, _) in enumerate(PHASES):
            for step in phase(options):
                plans = number == 5 and step.info.name == "PlanMemory" and graphs
                mod = step(KeepResults()(mod) if plans else mod)
                mod = CaptureCUDAGraphs()(mod) if plans else mod
    built = quick.quickly(mod, tvm.transform.Sequential([]), options.target)
    vm = quick.machine(built)
    if graphs is not None:
        graphs.vm = vm
    return vm


def tensor(value: float) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.full(8, value, "float32"))


def test_inputs_and_weights_at_other_addresses(graphs: Graphs) -> None:
    main = machine(steps(DOUBLE, "y"), graphs)["main"]
    weights = [tensor(10), tensor(20)]
    kept = []
    for x, w in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 1)):
        kept.append((main(tensor(x), weights[w]), 2 * (x + 1 + 10 * (w + 1)) + 1))
    assert len(graphs.recorded) == 2 and graphs.replays == 3
    for result, expected in kept:  # looked at last: no call wrote over an earlier one's result
        np.testing.assert_array_equal(result.numpy(), np.full(8, expected, "float32"))


@pytest.mark.parametrize("outside", [False, True])
def test_weights_in_a_tuple_at_other_addresses(graphs: Graphs, outside: bool) -> None:
    """What is recorded gets a tuple as a whole, and takes its fields, as others may, too."""
    text = HEADER + STEPS
    last = "(x, b)" if not outside else "(x, w)"
    text += f"""
    @R.function
    def main(
        x: R.Tensor((8,), "float32"),
        p: R.Tuple(R.Tensor((8,), "float32"), R.Tuple(R.Tensor((8,), "float32"))),
    ):
        R.func_attr({{"num_input": 1}})
        cls = Module
        with R.dataflow():
            w = p[0]
            a = R.call_tir(cls.more, (w,), out_ty=R.Tensor((8,), "float32"))
            q = p[1]
            v = q[0]
            b = R.call_tir(cls.add, (a, v), out_ty=R.Tensor((8,), "float32"))
            c = R.call_tir(cls.add, {last}, out_ty=R.Tensor((8,), "float32"))
            y = R.call_tir(cls.add, (c, b), out_ty=R.Tensor((8,), "float32"))
            R.output(y)
        return y
"""
    main = machine(tvm.script.from_source(text), graphs)["main"]
    weights = [tensor(10), tensor(20), tensor(40)]
    for w, v in ((0, 1), (0, 2), (1, 2), (0, 1)):
        y = main(tensor(1), [weights[w], [weights[v]]]).numpy()[0]
        first, both = (sum(weights[i].numpy()[0] for i in which) for which in ([w], [w, v]))
        assert y == 2 + both + (first if outside else both + 1)
    assert len(graphs.recorded) == 3 and graphs.replays == 1


def test_a_weight_that_is_overwritten_where_it_is(graphs: Graphs) -> None:
    main, w = machine(steps(MORE, "y"), graphs)["main"], tensor(10)
    assert main(tensor(1), w).numpy()[0] == 14
    w.copyfrom(np.full(8, 100, "float32"))
    assert main(tensor(1), w).numpy()[0] == 104
    assert len(graphs.recorded) == 1


def test_decoding_with_graphs_and_without(graphs: Graphs) -> None:
    exported = export(TINY, max_seq_len=32, batch="batch_size")
    hints = {"decode": ["batch_size"]}
    options = {"variable_bounds": {"batch_size": 4}, "cuda_graph_symbolic_capture_hints": hints}
    mod = decode(TINY, "float32", batch="batch_size")
    machines = [machine(mod, g, **options) for g in (None, graphs)]
    weights = [[tvm.runtime.tensor(w) for w in random_weights(exported, seed)] for seed in range(2)]
    recorded, reach, alive = [], tvm.runtime.ShapeTuple([4]), []
    for batch, seed in ((1, 0), (3, 0), (1, 1)):
        results = []
        for vm in machines:
            caches = [
                tvm.runtime.tensor(np.zeros((batch, *map(int, s[1:])), "float32"))
                for s in exported.cache_shapes
            ]
            ids = tvm.runtime.tensor(np.full((batch, 1), 7, "int32"))
            bound = (ids, tvm.runtime.tensor(np.zeros(1, "int32")), reach, caches, weights[seed])
            alive.append(bound)
            results.append([vm["decode"](*bound)[0].numpy() for _ in range(4)])
        np.testing.assert_array_equal(*results)
        recorded.append(len(graphs.recorded))
    assert recorded == [1, 2, 3], "one recording for each set of arguments"
    assert graphs.replays == 9


def test_a_key_is_addresses_and_dims() -> None:
    text = """
    @R.function(pure=False)
    def key(x: R.Tensor((4,), "float32"), s: R.Shape(ndim=2)):
        t = ((x, x), s)
        k = R.call_packed("relax_fusion_addresses", x, t, s, ty_args=[R.Shape(ndim=-1)])
        return k

    @R.function(pure=False)
    def wrong(x: R.Any):
        k = R.call_packed("relax_fusion_addresses", x, ty_args=[R.Shape(ndim=-1)])
        return k
"""
    mod = tvm.script.from_source(HEADER + text).with_attr("external_mods", [addresses_module()])
    vm = quick.machine(quick.quickly(mod))
    x = tvm.runtime.tensor(np.zeros(4, "float32"))
    key = list(vm["key"](x, tvm.runtime.ShapeTuple([3, 2**40])))
    assert key == [*[np.from_dlpack(x).ctypes.data] * 3, *[3, 2**40] * 2]
    with pytest.raises(RuntimeError, match="takes tensors, shapes, and arrays"):
        vm["wrong"](7)
