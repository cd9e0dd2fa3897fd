"""The attention kernels of the TIR path, run on a GPU."""

from __future__ import annotations

import pytest

from .attention_cases import Case, cases
from .common import gpu_target, needs_gpu, plans_for, run_on_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_attention_matches_reference(case: Case) -> None:
    arrays = case.inputs()
    inputs = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    plans = plans_for(case.work, gpu_target())
    (got,) = run_on_gpu(case.work, plans, inputs, [(case.out_shape(), case.work.out_dtype)])
    case.check(arrays, got)
