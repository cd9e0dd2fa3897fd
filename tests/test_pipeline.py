"""The pipeline as users call it: arguments, phases, dumps, cross-compiling, kernels per layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

import relax_fusion
from relax_fusion import (
    PATTERNS,
    PipelineError,
    PipelineOptions,
    Report,
    TilePlan,
    TilePlanError,
    errors,
    make_target,
)
from relax_fusion.matching.pattern import is_call
from relax_fusion.models import export
from relax_fusion.pipeline import PHASES
from relax_fusion.transforms.views import ReturnReshapedViews

from .support.chains import Chain, assert_numbers, module
from .support.quick import machine, quick_host, quickly
from .support.tiny_llama import TINY, TWO_LAYERS

H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
BLOCK = Chain(
    "main", "x[n,32] g[32] W[32,48]", H + "m = R.matmul(h, W); y = R.nn.silu(m)", "y", {"n": 5}
)


def pipeline(**options: object):
    return relax.get_pipeline("relax_fusion", **{"target": "llvm", **options})


def compiled(mod: tvm.IRModule, **options: object) -> relax.VirtualMachine:
    return machine(quickly(mod, pipeline(**options)))


def test_a_module_is_lowered_once() -> None:
    lowered = pipeline()(module([BLOCK]))
    with pytest.raises(PipelineError, match=r"'main' calls .*: a pipeline has lowered it already"):
        pipeline()(lowered)


def test_a_module_whose_memory_is_planned_is_lowered() -> None:
    kinds = relax.transform
    passes = [kinds.LegalizeOps(), kinds.ToNonDataflow(), kinds.RemovePurityChecking()]
    passes += [kinds.CallTIRRewrite(), kinds.StaticPlanBlockMemory()]
    planned = tvm.transform.Sequential(passes)(module([BLOCK]))
    with pytest.raises(PipelineError, match=r"'main' calls relax.memory.*has lowered it already"):
        pipeline()(planned)


# --- arguments -------------------------------------------------------------------------------


def test_every_argument_of_mlc_is_taken() -> None:
    report = Report()
    vm = compiled(
        module([BLOCK]),
        flashinfer=False,
        cublas_gemm=False,
        faster_transformer=False,
        allreduce_strategy=0,
        variable_bounds={"n": 64},
        cuda_graph_symbolic_capture_hints={"main": ["n"]},
        additional_tirs=None,
        metadata={"model_type": "llama"},
        ext_mods=[],
        debug_dump=None,
        report=report,
    )
    assert vm["main"](*map(tvm.runtime.tensor, BLOCK.arrays())).shape == (5, 48)
    assert report.fused[0].workload.rows.upper == 64


@pytest.mark.parametrize("name", ["flashinfer", "cublas_gemm", "faster_transformer"])
def test_libraries_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(PipelineError, match=name):
        pipeline(**{name: True})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flash_infer": True}, "no argument 'flash_infer'"),
        ({"disable": ["FuseEverything"]}, "FuseEverything"),
        ({"backend": "cutlass"}, "cutlass"),
        ({"variable_bounds": {"n": 0}}, "variable_bounds\\['n'\\]"),
        ({"variable_bounds": {"n": "many"}}, "must be a valid integer"),
        ({"target": None}, "no target"),
        ({"allow_tf32": "high"}, "allow_tf32 is 'high'"),
    ],
)
def test_bad_arguments(options: dict[str, object], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        pipeline(**options)


@pytest.mark.parametrize(
    "target", ["llvm", {"kind": "cuda", "arch": "sm_75", "model": "rtx3080"}], ids=str
)
def test_tf32_is_refused_where_no_tensor_cores_multiply_it(target: str | dict[str, str]) -> None:
    target = make_target(target) if isinstance(target, str) else tvm.target.Target(target)
    with pytest.raises(relax_fusion.TargetError, match=r"\(--allow-tf32\) needs a CUDA target"):
        pipeline(target=target, allow_tf32=True)


def test_tf32_is_a_part_of_the_workload_on_request_only() -> None:
    workloads = []
    for allowed in (False, True):
        report = Report()
        options = {"always_fuse": True, "report": report, "allow_tf32": allowed}
        made = relax_fusion.PipelineOptions(make_target("h200"), **options)
        tvm.transform.Sequential(PHASES[1][1](made))(module([BLOCK]))
        workloads.append(report.fused[0].workload)
    assert [work.allow_tf32 for work in workloads] == [False, True]
    assert workloads[0].key != workloads[1].key


def test_target_by_name_in_scope_and_unknown() -> None:
    pipeline(target="a100")
    with make_target("h200"):
        pipeline(target=None)
    with pytest.raises(relax_fusion.TargetError, match="h200"):
        pipeline(target="h201")


def test_bounds_and_capture_hints_reach_the_functions() -> None:
    options = PipelineOptions(
        make_target("h200"),
        variable_bounds={"n": 64},
        cuda_graph_symbolic_capture_hints={"main": ["n"]},
    )
    mod = tvm.transform.Sequential(PHASES[0][1](options))(module([BLOCK]))
    attrs = mod["main"].attrs
    assert dict(attrs["tir_var_upper_bound"]) == {"n": 64}
    assert list(attrs["relax.rewrite_cuda_graph.capture_symbolic_vars"]) == ["n"]


def test_metadata_and_additional_functions() -> None:
    @T.prim_func(s_tir=True)
    def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("twice"):
                vi = T.axis.spatial(4, i)
                b[vi] = a[vi] * T.float32(2)

    options = {"metadata": {"kind": "test"}, "additional_tirs": {"twice": twice}}
    built = quickly(module([BLOCK]), pipeline(**options))
    metadata = json.loads(machine(built)["_metadata"]())
    assert metadata["kind"] == "test" and set(metadata["memory_usage"]) == {"main"}
    given = tvm.runtime.tensor(np.ones(4, "float32"))
    result = tvm.runtime.tensor(np.zeros(4, "float32"))
    built.mod.get_function("twice", query_imports=True)(given, result)
    assert result.numpy().tolist() == [2.0] * 4


def test_disabled_passes_do_nothing() -> None:
    for name in PATTERNS:
        report = Report()
        options = PipelineOptions(make_target("llvm"), disable=(name,), report=report)
        for _, phase, _ in PHASES[:2]:
            tvm.transform.Sequential(phase(options))(module([BLOCK]))
        assert name not in {d.pattern for d in report.fused}


def test_aliases_inside_a_chain() -> None:
    body = H + "m = R.matmul(h, W); n = m; o = n; y = R.nn.silu(o)"
    chain = replace(BLOCK, body=body)
    report = Report()
    compiled(module([chain]), report=report)
    assert [d.workload.outputs[0].epilogue for d in report.fused] == [("silu",)]


# --- phases and dumps ------------------------------------------------------------------------

DUMPS = [*(f"debug-phase{i}.py" for i in range(5)), "debug-final.py"]


def test_dumps_can_be_read_again(tmp_path: Path) -> None:
    """TVM 0.27 cannot parse its own output after phase 5: VM calls print no types of results."""
    for _ in range(2):  # a second run writes over the first
        options = {"debug_dump": str(tmp_path / "dump"), "variable_bounds": BLOCK.sizes}
        compiled(module([BLOCK]), **options)
    written = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert written == sorted([*DUMPS, "passes.json", "report.json"])
    report = json.loads((tmp_path / "dump" / "report.json").read_text(encoding="utf-8"))
    assert report["target"] and report["decisions"] and report["sources"]
    unread = []
    for name in DUMPS:
        text = (tmp_path / "dump" / name).read_text()
        try:
            tvm.script.from_source(text)
        except Exception:
            unread.append(name)
    assert unread in ([], ["debug-final.py"])


def test_phases_one_by_one_with_one_replaced() -> None:
    options = PipelineOptions(quick_host(), disable=("FuseGatedFFN",))
    seen = []

    def own_phase2(_: PipelineOptions) -> list[tvm.ir.transform.Pass]:
        seen.append("phase 2")
        return [relax.transform.LegalizeOps(), relax.transform.FoldConstant()]

    mod = module([BLOCK])
    with options.target:
        for number, (_, phase, _) in enumerate(PHASES):
            mod = tvm.transform.Sequential((own_phase2 if number == 2 else phase)(options))(mod)
    built = quickly(mod, tvm.transform.Sequential([]), options.target)
    vm = machine(built)
    assert seen == ["phase 2"]
    assert_numbers(vm, module([BLOCK]), BLOCK)


def test_progress_names_every_phase() -> None:
    lines: list[str] = []
    compiled(module([BLOCK]), progress=lines.append)
    assert lines == [doing for _, _, doing in PHASES]


class Own(Exception):
    """A user's, of which TVM's FFI knows nothing, and which takes two arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize("err", [Own(1, 2), SystemExit(3), KeyboardInterrupt(), OSError(2, "x")])
def test_what_progress_raises_comes_out_as_itself(err: BaseException) -> None:
    def fail(_: str) -> None:
        raise err

    @tvm.transform.module_pass(opt_level=0)
    def outer(mod: tvm.IRModule, _: object) -> tvm.IRModule:
        return pipeline(progress=fail)(mod)

    for made in (pipeline(progress=fail), outer):  # through TVM once, and twice
        with pytest.raises(type(err)) as caught:
            made(tvm.IRModule())
        assert caught.value is err


OF_PASSES = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]


@pytest.mark.parametrize("kind", OF_PASSES)
def test_errors_of_passes_keep_their_class(kind: type[Exception]) -> None:
    @tvm.transform.module_pass(opt_level=0)
    def fails(_mod: tvm.IRModule, _ctx: object) -> tvm.IRModule:
        raise kind("why")

    with pytest.raises(kind, match="why"):
        fails(tvm.IRModule())


# --- CUDA ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "off",
    [(), pytest.param(tuple(PATTERNS), marks=pytest.mark.slow)],
    ids=["ours", "all_passes_off"],
)
def test_matmuls_that_crash_tvms_own_rule(off: tuple[str, ...]) -> None:
    """A regression ends the process with a segmentation fault."""
    body = "t = R.permute_dims(W); y = R.matmul(x, t)"
    shapes = {"decode": "b,1,2048", "prefill": "1,512,2048"}
    chains = [
        Chain(name, f"x[{x}] W[3072,2048]", body, "y", dtype="float16")
        for name, x in shapes.items()
    ]
    target = make_target("h200")
    options = pipeline(target=target, disable=off, backend="tir", variable_bounds={"b": 8})
    built = tvm.compile(module(chains), target=target, relax_pipeline=options)
    assert "wgmma" in built.mod.imports[0].imports[0].inspect_source()


@pytest.mark.slow  # tests/cli/test_cli.py cross-compiles one, too
def test_cross_compiles_a_llama_for_h200(tmp_path: Path) -> None:
    target = make_target("h200")
    mod = export(TINY, dtype="float16", max_seq_len=32).mod
    options = pipeline(target=target, variable_bounds={"seq_len": 16})
    built = tvm.compile(mod, target=target, relax_pipeline=options)
    built.export_library(str(tmp_path / "llama.so"))
    assert (tmp_path / "llama.so").stat().st_size > 10_000


# --- kernels of a layer ----------------------------------------------------------------------

LAYER = {
    "norm + q, k, v + rope": "fuse_rms_norm_matmul",
    "cache update": "kv_append",
    "attention": "fuse_attention_chain",
    "output projection + residual": "fuse_matmul_epilogue",
    "norm + gate, up + activation": "fuse_gated_ffn",
    "down projection + residual": "fuse_matmul_epilogue",
}
"""Of a decoder layer while decoding on a CPU; by Triton's kernels, attention updates the cache."""


def test_kernels_of_a_decoder_layer() -> None:
    mods = [export(config, max_seq_len=32).mod for config in (TINY, TWO_LAYERS)]
    for mod in mods:
        del mod["prefill"]
    one, two = (kernels(mod, "decode") for mod in mods)
    assert len(two) - len(one) == len(LAYER) == 6
    # Beside the layers: the embedding, cosines and sines of the positions, the head with its norm,
    # the choice of a token, and making it the next
    assert len(one) - len(LAYER) == 5
    start = next(i for i, name in enumerate(one) if name.startswith("fuse_rms_norm_matmul"))
    for name, prefix in zip(one[start:], LAYER.values(), strict=False):
        assert name.startswith(prefix), f"{name} where a layer has {prefix}"


def kernels(mod: tvm.IRModule, function: str) -> list[str]:
    """Return the names of the kernels that a function calls after phase 3.

    Reshapes are no kernels: phase 5 turns them into views, which is done here at once.
    """
    options = PipelineOptions(make_target("llvm"))
    with options.target:
        for _, phase, _ in PHASES[:4]:
            mod = tvm.transform.Sequential(phase(options))(mod)
    mod = relax.transform.RewriteDataflowReshape()(ReturnReshapedViews()(mod))
    found = []
    for block in mod[function].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if is_call(value, "relax.call_tir", "relax.call_tir_inplace"):
                found.append(value.args[0].name_hint)
    return found


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ({"FuseGatedFNN": TilePlan(4, 64, 64, family="cpu_tiles")}, "plans names 'FuseGatedFNN'"),
        ({"FuseGatedFFN": 5}, r"plans\['FuseGatedFFN'\] is 5"),
        ([1], r"plans is \[1\]"),
    ],
)
def test_plans_that_are_none_are_refused(plans: object, message: str) -> None:
    with pytest.raises((PipelineError, TilePlanError), match=message):
        relax.get_pipeline("relax_fusion", target="llvm", plans=plans)


@pytest.mark.parametrize("bounds", [{"s": True}, {"s": 2**63}, {"s": 0}, ["s"]])
def test_bounds_that_are_none_are_refused(bounds: object) -> None:
    with pytest.raises(PipelineError, match="variable_bounds"):
        relax.get_pipeline("relax_fusion", target="llvm", variable_bounds=bounds)
