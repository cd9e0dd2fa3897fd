"""MLC-LLM's LLaMA, Qwen 2 and GPT-2 generate on two workers what one generates.

They need the sources of MLC-LLM at commit 79d603f: RELAX_FUSION_MLC=PATH of a checkout.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_fusion import Report
from relax_fusion.parallel import Workers

from ..support import mlc_shards
from .test_generation import CHECKOUT, ERRORS, build
from .test_generation import report as report

pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="set RELAX_FUSION_MLC to a checkout of MLC-LLM at 79d603f"
)
STEPS = 8


@pytest.mark.parametrize("quantization", ["q0f32", "q4f32_1", "q0f16"])
@pytest.mark.parametrize("model", mlc_shards.MODELS)
def test_two_workers_generate_what_one_does(
    report: Report, model: str, quantization: str, tmp_path: Path
) -> None:
    logits = []
    for shards in (1, 2):
        library = tmp_path / f"{shards}.so"
        fields = {**mlc_shards.MODELS[model], "tensor_parallel_shards": shards}
        build(model, fields, quantization).export_library(str(library))
        params = mlc_shards.parameters(model, quantization, shards)
        with Workers(shards, kind="threads") as workers:
            found = workers.call(mlc_shards.generated, str(library), params, STEPS)
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        logits.append(found[0])
    one, two = logits
    assert np.abs(one - two).max() <= ERRORS[quantization] * np.abs(one).max()
    np.testing.assert_array_equal(one.argmax(-1), two.argmax(-1))
