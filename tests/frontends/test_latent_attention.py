"""DeepSeek-V3 of transformers: latent attention, whose keys share the features that are rotated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
import tvm
from tvm import relax

from relax_fusion import Report
from relax_fusion.frontends.torch import from_exported_program

from ..support.quick import machine, quick_host, quickly
from ..support.slow import quick_if

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_scaling": None,
    "first_k_dense_replace": 2,
    "use_cache": False,
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", quick_if("float32".__eq__, ("float32", "float16")))
def test_no_key_is_copied(dtype: str) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**SIZES, attn_implementation="sdpa")
    net = transformers.DeepseekV3Model(config).eval()
    ids, half = torch.randint(0, 64, (2, 12)), dtype == "float16"
    with torch.no_grad():
        exact = net(ids).last_hidden_state.numpy()
        exported = torch.export.export(net.half() if half else net, (ids,))
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    built = quickly(from_exported_program(exported), pipeline)
    (coverage,) = report.coverage
    assert coverage.per_layer == 7 and not coverage.launches.copies
    (got,) = machine(built)["main"](tvm.runtime.tensor(ids.numpy()))
    limits = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(got.numpy().astype("float32"), exact, **limits)
