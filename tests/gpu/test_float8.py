"""Activations and weights of 8-bit floats, compiled by the pipeline and run on a GPU."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from ..mend.test_float8_activations import check_numbers, each, exported
from ..support.gpu import gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@each
@pytest.mark.parametrize("rows", [1, 5, 12, 40, 300])
def test_numbers(model: type[nn.Module], rows: int) -> None:
    target = gpu_target()
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    built = tvm.compile(exported(model)[0], target, relax_pipeline=pipeline)
    device = tvm.cuda(0)
    main = relax.VirtualMachine(built, device)["forward"]
    check_numbers(model, rows, main, device)
