"""A library of cubins runs on a GPU in a C++ program, where no Python compiles anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_fusion.options import Backend

from ..launch.test_nvrtc import needs_nvrtc
from ..support.gpu import gpu_target, needs_gpu
from ..support.programs import build_program, call_program

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvrtc]


@I.ir_module
class Layer:
    @R.function
    def main(
        x: R.Tensor(("rows", 256), "float16"),
        g: R.Tensor((256,), "float16"),
        w: R.Tensor((512, 256), "float16"),
    ):
        with R.dataflow():
            h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)
            y = R.nn.softmax(R.matmul(h, R.permute_dims(w)), axis=-1)
            z = R.cumsum(R.astype(y, "float32"), axis=1)
            R.output(z)
        return z


def expected(x: np.ndarray, g: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return what `Layer` computes, in float64."""
    x, g, w = (v.astype("float64") for v in (x, g, w))
    scores = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g @ w.T
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return np.cumsum(exps / exps.sum(-1, keepdims=True), axis=1)


def arrays(rows: int) -> list[np.ndarray]:
    """Return operands of `Layer`."""
    rng = np.random.default_rng(0)
    shapes = [(rows, 256), (256,), (512, 256)]
    return [(rng.standard_normal(shape) / 16).astype("float16") for shape in shapes]


@pytest.mark.parametrize("backend", ["auto", "tir"])
def test_a_library_of_cubins_runs_in_a_program(backend: Backend, tmp_path: Path) -> None:
    target = gpu_target()
    pipeline = relax.get_pipeline("relax_fusion", target=target, backend=backend, cubins=True)
    tvm.compile(Layer, target, relax_pipeline=pipeline).export_library(str(tmp_path / "lib.so"))
    program = build_program(tmp_path)
    for rows in (1, 7, 300):
        given = arrays(rows)
        got = call_program(program, tmp_path / "lib.so", given, "cuda")
        np.testing.assert_allclose(got, expected(*given), rtol=2e-3, atol=2e-3)
