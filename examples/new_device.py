"""Describe a GPU that the library does not know, and compare plans and predicted times.

python new_device.py
"""

from dataclasses import replace

import relax_fusion
from relax_fusion.hardware import register
from relax_fusion.models import LlamaConfig, export
from relax_fusion.studio import function_cost

# An A10 is of the architecture of an RTX 3080: instructions and limits are the same.  The other
# numbers are of its data sheet; the second-level cache's bandwidth is a guess.
A10 = replace(
    relax_fusion.device("rtx3080"),
    name="a10",
    label="A10",
    sm_count=72,
    clock_hz=1.695e9,
    dram_bytes_per_s=600e9,
    l2_bytes=6 << 20,
    l2_bytes_per_s=2.0e12,
    fma_float32_flops_per_s=31.2e12,
    tensor_float16_flops_per_s=125e12,
    tensor_bfloat16_flops_per_s=125e12,
    tensor_tf32_flops_per_s=62.5e12,
    tensor_int8_flops_per_s=250e12,
)
register(A10)

# One layer of LLaMA-3.1-8B, without weights.
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=2048,
)
mod = export(config, dtype="float16").mod
SIZES = {"prefill": {"seq_len": 512, "total_len": 512}, "decode": {"total_len": 512}}

for name in ("a10", "h200"):
    report = relax_fusion.Report()
    relax_fusion.partition(mod, name, report=report)
    print(f"For {report.device}")
    for function, sizes in SIZES.items():
        items = [item for item in report.work if item.function == function]
        whole = function_cost(function, items, sizes, relax_fusion.device(name), "triton")
        print(f"  {function}: {whole.seconds * 1e6:.0f} us, limited by {whole.limit}")
        for cost in whole.costs:
            print(f"    {cost.item.chain:45} {cost.plan:30} {cost.seconds * 1e6:5.0f} us")
