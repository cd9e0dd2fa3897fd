"""What MLC-LLM does with a module, and with the metadata that its pipeline completes."""

import tvm
from tvm import relax
from tvm.ir.transform import PassContext

from mlc_llm import compiler_pass as _  # noqa: F401


def compile(mod, target, opt, **arguments) -> tuple[tvm.IRModule, dict]:
    opt.update(target, None)
    metadata = {"model_type": "stub", "pipeline_parallel_stages": 1, "params": []}
    config = {"relax.backend.use_cuda_graph": opt.cudagraph}
    with target, PassContext(config=config):
        pipeline = relax.get_pipeline(
            "mlc_llm",
            target=target,
            flashinfer=opt.flashinfer,
            cublas_gemm=opt.cublas_gemm,
            faster_transformer=opt.faster_transformer,
            allreduce_strategy=0,
            metadata=metadata,
            **arguments,
        )
        return pipeline(mod), metadata
