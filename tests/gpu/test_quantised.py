"""Matmuls and lookups of every format of quantised weights, compiled by the pipeline and run."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from ..support.gpu import gpu_target, needs_gpu
from ..support.quantised import FORMATS
from ..support.quantised_functions import K, add_projection, check_numbers

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("rows", [1, 12, K])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_rounded_as_before(name: str, rows: int) -> None:
    bb = relax.BlockBuilder()
    add_projection(bb, name, FORMATS[name], rows)
    pipeline = relax.get_pipeline("relax_fusion", target=gpu_target(), backend="tir")
    built = tvm.compile(bb.get(), gpu_target(), relax_pipeline=pipeline)
    device = tvm.cuda(0)
    machine = relax.VirtualMachine(built, device)
    check_numbers(machine, name, np.eye(K)[-rows:], device)
