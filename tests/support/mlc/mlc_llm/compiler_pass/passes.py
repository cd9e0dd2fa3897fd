"""Passes that note that they ran, and attach what matters to others."""

import json

import tvm
from tvm import ir, relax

RAN: list[str] = []


def make(name, change=lambda mod, *arguments: mod):
    """Return the class of a pass."""

    class Pass:
        def __init__(self, *arguments) -> None:
            self.arguments = arguments

        def transform_module(self, mod, _ctx):
            RAN.append(name)
            return change(mod, *self.arguments)

    Pass.__name__ = name
    return tvm.transform.module_pass(opt_level=0, name=name)(Pass)


def cache(mod, target, flashinfer, metadata):
    metadata["kv_cache"] = {"head_dim": 64, "flashinfer": flashinfer}
    return mod


def bounds(mod, given):
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            func = func.with_attr("tir_var_upper_bound", {k: v for k, v in given.items() if v > 0})
            mod[gvar] = func.with_attr("tir_non_negative_var", ["vocab_size"])
    return mod


def sampling(mod, target, given):
    builder = relax.BlockBuilder(mod)
    probabilities = relax.Var("p", relax.TensorType((4, 8), "float32"))
    with builder.function("sample", [probabilities]):
        builder.emit_func_output(builder.emit(relax.op.exp(probabilities)))
    mod = builder.finalize()
    mod["sample"] = mod["sample"].with_attr("tir_var_upper_bound", {"num_samples": 7})
    return mod


def stages(mod, number):
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            mod[gvar] = func.with_attr("pipeline_parallel_stages", number)
    return mod


def additional(mod, functions):
    for name, func in functions.items():
        mod[name] = func.with_attr("global_symbol", name)
    return mod


def with_metadata(mod, metadata):
    metadata["memory_usage"] = {gvar.name_hint: 0 for gvar in mod.get_global_vars()}
    builder = relax.BlockBuilder(mod)
    with builder.function("_metadata", []):
        builder.emit_func_output(ir.StringImm(json.dumps(metadata)))
    return builder.finalize()


CHANGES = {
    "DispatchKVCacheCreation": cache,
    "AttachVariableBounds": bounds,
    "AttachPipelineParallelStages": stages,
    "AttachAdditionalPrimFuncs": additional,
    "AttachGPUSamplingFunc": sampling,
    "AttachMetadataWithMemoryUsage": with_metadata,
}
ATTACHED = ("AttachSoftmaxWithTemperature", "AttachCUDAGraphSymbolicCaptureHints")
ATTACHED += ("AttachLogitProcessFunc", "AttachAllocEmbeddingTensorFunc", "AttachSpecDecodeAuxFuncs")
ATTACHED += ("AttachMemoryPlanAttr", "AttachSequenceLengthPaddingFactor", "DispatchTritonKernel")
ATTACHED += ("FuseFTDequantizeEpilogue", "ScatterTupleGetItem", "PipelineParallelRewrite")
ATTACHED += ("AttachCUDAGraphAllocInitFunc", "FuseAddRMSNorm", "FuseTransposeMatmul")
for _name in (*CHANGES, *ATTACHED):
    globals()[_name] = make(_name, CHANGES.get(_name, lambda mod, *arguments: mod))
