"""A compiled library runs in a C++ program, where no Python is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from ..support.programs import build_program, call_program
from ..support.quick import LIBRARIES, quick_host, quickly


@I.ir_module
class FFN:
    @R.function
    def main(
        x: R.Tensor(("rows", 32), "float32"),
        g: R.Tensor((32,), "float32"),
        up: R.Tensor((96, 32), "float32"),
        down: R.Tensor((32, 48), "float32"),
    ):
        with R.dataflow():
            h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)
            both = R.split(R.matmul(h, R.permute_dims(up)), 2, axis=-1)
            a = R.multiply(R.nn.silu(both[0]), both[1])
            y = R.add(x, R.matmul(a, R.permute_dims(down)))
            R.output(y)
        return y


def expected(x: np.ndarray, g: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Return what `FFN` computes, in float64."""
    x, g, up, down = (v.astype("float64") for v in (x, g, up, down))
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g
    gate, value = np.split(h @ up.T, 2, axis=-1)
    return x + (gate / (1 + np.exp(-gate)) * value) @ down.T


def arrays(rows: int, dtype: str = "float32") -> list[np.ndarray]:
    """Return operands of `FFN`."""
    rng = np.random.default_rng(0)
    shapes = [(rows, 32), (32,), (96, 32), (32, 48)]
    return [(rng.standard_normal(shape) / 4).astype(dtype) for shape in shapes]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), variable_bounds={"rows": 5})
    path = tmp_path_factory.mktemp("library") / "lib.so"
    quickly(FFN, pipeline).export_library(str(path), options=LIBRARIES)
    return path


@pytest.mark.parametrize("rows", [1, 5])
def test_a_fused_model_runs_in_a_program(program: Path, library: Path, rows: int) -> None:
    given = arrays(rows)
    got = call_program(program, library, given)
    assert got.shape == (rows, 32)
    np.testing.assert_allclose(got, expected(*given), rtol=1e-5, atol=1e-6)


def test_the_program_tells_what_is_wrong(program: Path, library: Path) -> None:
    with pytest.raises(AssertionError, match=r"x.shape\[1\]|32"):
        call_program(program, library, [arrays(1)[0][:, :16].copy(), *arrays(1)[1:]])
    with pytest.raises(AssertionError, match=r"nowhere\.so"):
        call_program(program, library.with_name("nowhere.so"), arrays(1))
