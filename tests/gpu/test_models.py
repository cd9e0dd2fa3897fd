"""Whole models on a GPU against the same models on the CPU of the same machine."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import Report, host_target, models

from ..support.gpu import gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def _generate(name: str, target: tvm.target.Target, device: object) -> tuple[np.ndarray, Report]:
    exported = models.export(models.zoo_config(name), dtype="float32", max_seq_len=64)
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report, always_fuse=True)
    compiled = tvm.compile(exported.mod, target=target, relax_pipeline=pipeline)
    session = models.Generator(compiled, exported, models.random_weights(exported), device=device)
    logits = [session.prefill(np.arange(1, 34, dtype="int32")[None])]
    logits += [session.decode(np.array([[7 * i]], dtype="int32")) for i in range(10)]
    return np.stack(logits), report


@pytest.mark.parametrize("name", ["demo-llama", "demo-gpt2"])
def test_gpu_and_cpu_agree(name: str) -> None:
    on_gpu, report = _generate(name, gpu_target(), tvm.cuda(0))
    on_cpu, _ = _generate(name, host_target(), tvm.cpu())
    assert not report.declined, "this test is about the fused kernels"
    # Both sum in float32 in different orders: sqrt(k) rounding steps at the logits' magnitude,
    # through the layers' longest reduction (8192), and four matmuls in each of two layers.
    allowed = 8 * np.sqrt(8192) * np.finfo("float32").eps * np.abs(on_cpu).max()
    assert np.abs(on_gpu - on_cpu).max() <= allowed
