"""Measuring plans on a GPU: those of both back ends run, agree and get times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relax_fusion.estimator import AttentionSize
from relax_fusion.estimator.database import Database
from relax_fusion.hardware.target import device_of
from relax_fusion.tuning.contests import Tuning, shortlist
from relax_fusion.tuning.device import open_device
from relax_fusion.tuning.trial import Subject, Trial
from relax_fusion.workload import Attention, DynamicDim, NormMatmul, Projection, Workload

from ..support.contraction_cases import RMS
from ..support.estimator_cases import CACHE as LARGE
from ..support.estimator_cases import gated_ffn
from ..support.gpu import gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

STEPS = Projection(1024, "nk", ("bias", "residual"))
WORKLOADS = {
    "norm and matmul": NormMatmul(DynamicDim("rows"), 512, (STEPS,), RMS, "float16", "float16"),
    "gated": gated_ffn(n=2048),
    "cache": replace(LARGE, q_heads=8, kv_heads=2, head_dim=64, v_dim=64, scale=0.125),
}


@pytest.mark.parametrize("backend", ["tir", "triton", "auto"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_best_priced_plans_are_measured(tmp_path: Path, name: str, backend: str) -> None:
    work: Workload = WORKLOADS[name]
    target, tuning = gpu_target(), Tuning()
    contests = shortlist(work, device_of(target), backend, 3)
    if isinstance(work, Attention):  # of boxes of batch and keys, a few
        some = (AttentionSize(1, 1, 257), AttentionSize(2, 40, 300))
        contests = [replace(c, sizes=some if c.box == contests[-1].box else ()) for c in contests]
    database = Database(tmp_path / "times.jsonl")
    trial = Trial(target, open_device(target, None), database, float("inf"), tuning)
    subject = Subject(work, name, 1, tuple(contests))
    times = trial.run(subject, {})
    assert tuning.wrong == [] and tuning.left == []
    assert tuning.measurements == sum(len(c.sizes) * len(c.plans) for c in contests) > 0
    assert database.measured(str(target)).of(work) == times
    assert all(1e-6 < seconds < 1 for column in times.values() for seconds in column.values())
    assert all(outcome.gain >= 1 for outcome in subject.outcomes(times))
