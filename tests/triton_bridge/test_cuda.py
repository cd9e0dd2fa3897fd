"""Launches of the matmul kernel in CUDA C++: their arguments, their grids, what the driver sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tvm import relax

from relax_fusion.estimator import registry
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.launch.arguments import Out, Part, TensorMap
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc, require_nvrtc
from relax_fusion.triton_bridge.launches import SourceStep
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection, Rope

from ..cuda_kernels.cases import adapted, gated, integers, matmul, plan, rotated
from ..support.emulated import H200, steps_of
from ..support.launches import parameters
from .common import kernels, launched
from .fake_driver import Job, Worker, build_driver, build_launcher
from .test_emit import emitted

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")

TILE = plan(16, 64)
SIZES = {"rows": "m", "features0": "136", "k": "136"}


def names(step: SourceStep) -> list[str]:
    """Return the parameters of a kernel, as its text has them."""
    (given,) = re.findall(r"#define PARAMETERS (.*)", step.source.text)
    return [re.search(r"(\w+)$", one.strip())[1] for one in given.split(",")]


def text(value: Any) -> str:
    if isinstance(value, TensorMap):
        shape = f" as {list(map(int, value.shape))}" if value.shape else ""
        return f"{value.block[0]} lines of {text(value.of)}{shape}"
    if isinstance(value, Part):
        return f"{text(value.of)} from {value.start}"
    if isinstance(value, Out):
        return f"out{value.index}"
    return "m" if "rows" in str(value) else getattr(value, "name", str(value))


def arguments(step: SourceStep) -> dict[str, str]:
    found = dict(zip(names(step), map(text, step.args), strict=True))
    assert len(step.args) == len(step.source.params)
    for kind, arg in zip(step.source.params, step.args, strict=True):
        assert kind.startswith("tensordesc") == isinstance(arg, TensorMap)
        assert (kind == "i32") == (text(arg) in ("m", "136", "192"))
    return found


def steps(work: Any, chosen: Any = TILE, **how: Any) -> list[Any]:
    return steps_of(work, chosen, parameters(work), **how)


W, U = "64 lines of w0 as [136, 136]", "64 lines of w0 from 18496 as [136, 136]"
X = "16 lines of x"
EVERY = ("bias", "residual", 0.5, "scale", "gelu", "bias")
WORKLOADS = {
    "plain": (matmul(), {"weight0": W, "up_weight0": W}),
    "steps": (
        matmul(*EVERY),
        {
            "weight0": W,
            "up_weight0": W,
            "vector0_0": "bias0_0",
            "vector0_1": "scale0_3",
            "vector0_2": "bias0_5",
            "residual0": "16 lines of residual0_1",
        },
    ),
    "residual": (
        matmul("residual"),
        {"weight0": W, "up_weight0": W, "residual0": "16 lines of residual0_0"},
    ),
    "gate_first": (
        gated(),
        {"weight0": W, "up_weight0": U, "vector0_0": "bias0", "vector0_1": "bias0 from 136"},
    ),
    "up_first": (
        gated(gate_first=False),
        {"weight0": U, "up_weight0": W, "vector0_0": "bias0 from 136", "vector0_1": "bias0"},
    ),
    "gate_and_up": (
        gated(merged=False),
        {
            "weight0": W,
            "up_weight0": W.replace("w0", "w1"),
            "vector0_0": "bias0",
            "vector0_1": "bias1",
        },
    ),
    "no_bias": (gated(bias=False), {"weight0": W, "up_weight0": U}),
}


@pytest.mark.parametrize(("work", "expected"), WORKLOADS.values(), ids=WORKLOADS)
def test_arguments_are_in_the_order_of_the_parameters(work: Any, expected: dict) -> None:
    (step,) = steps(work)
    assert arguments(step) == {**expected, "x": X, "out0": "out0", **SIZES}


def test_products_that_are_alike_are_a_launch_behind_the_norm() -> None:
    alike = Projection(136, "nk", ("bias",))
    outputs = alike, alike, replace(alike, epilogue=("bias", "gelu"))
    norm, both, last = steps(replace(matmul(), outputs=outputs, norm=Norm("rms", 1e-5)))
    assert norm.function.__name__ == "row_norm"
    found = arguments(both)
    for index in (0, 1):
        assert found[f"weight{index}"] == W.replace("w0", f"w{index}")
        assert found[f"out{index}"] == f"out{index}"
        assert found[f"vector{index}_0"] == f"bias{index}_0"
        assert found[f"features{index}"] == "136"
    assert arguments(last)["weight0"] == W.replace("w0", "w2")
    assert all(step.args[2].of is norm.args["y_ptr"] for step in (both, last))


@pytest.mark.parametrize(("layout", "start"), [("nk", 64 * 136), ("kn", 64)])
def test_pairs_of_a_rotation_are_two_weights_of_one_tensor(layout: Any, start: int) -> None:
    rope = Rope(128, 128, "float32", DynamicDim("s"))
    work = replace(rotated((256, rope), (128, None), layout=layout), rows=43)
    (step,) = steps(work)
    assert step.grid == (9,)  # tiles of 16 rows and 64 pairs
    found = dict(zip(names(step), step.args, strict=True))
    low, high = found["weight0"], found["up_weight0"]
    assert (high.of.of, high.of.start) == (low.of, start)
    sizes = (192, 136) if layout == "nk" else (136, 192)
    assert tuple(map(int, high.shape)) == sizes and high.strides == low.strides
    assert high.block == (64, 64)  # of a half of a head
    assert [text(found[f"vector0_{i}"]) for i in (0, 1)] == ["bias0_0", "bias0_0 from 64"]
    assert [text(found[name]) for name in ("cos0", "sin0")] == ["cos0", "sin0"]
    assert "positions0" in str(found["positions0"]) and "cos1" not in found
    kinds = dict(zip(names(step), step.source.params, strict=True))
    assert (kinds["cos0"], kinds["positions0"], kinds["vector0_1"]) == ("*fp32", "i32", "*fp16")


def test_products_that_are_rotated_alike_are_a_launch() -> None:
    rope, other = Rope(128, 128, "float16"), Rope(64, 128, "float16")
    alike = steps(rotated((128, rope), (256, replace(rope, features=256)), (128, None)))
    apart = steps(rotated((128, rope), (128, replace(rope, dtype="float32")), (128, other)))
    assert (len(alike), len(apart)) == (1, 3)
    assert "{cos0, sin0, features0, features0, positions0}" in alike[0].source.text
    assert "{nullptr, nullptr, 0, 1, 1}" in alike[0].source.text
    found = dict(zip(names(alike[0]), alike[0].args, strict=True))
    assert [text(found[f"positions{i}"]) for i in (0, 1)] == ["m", "m"]


@pytest.mark.parametrize("norm", [None, Norm("rms", 1e-5)], ids=["plain", "normed"])
def test_a_launch_in_front_makes_what_adapters_read(norm: Norm | None) -> None:
    work = replace(adapted(16, 24, 72, steps=("bias",)), norm=norm)  # of 1, 1 and 2 steps of 64
    *before, low, both, other_low, other = steps(work)
    assert len(before) == (norm is not None)
    for made, read, count in ((low, both, 2), (other_low, other, 1)):
        args, of = (dict(zip(names(step), step.args, strict=True)) for step in (read, made))
        for index in range(count):
            assert args[f"narrow{index}"].of is of[f"out{index}"]
            assert args[f"narrow{index}"].block == args["x"].block
        assert args["x"].of is of["x"].of
        assert "RELEASED = 1;" in made.source.text and "EARLY = 1;" in made.source.text
        assert "RELEASED = 0;" in read.source.text and "EARLY = 0;" in read.source.text
        assert "ADAPTER_STEPS = 0;" in made.source.text
    found = [text(dict(zip(names(s), s.args, strict=True))["adapter0"]) for s in (both, other)]
    assert found == ["64 lines of w0_b as [136, 16]", "64 lines of w2_b as [136, 72]"]
    assert "ADAPTER_STEPS = 1;" in both.source.text and "ADAPTER_STEPS = 2;" in other.source.text
    assert "sum *= 0.5f;" in low.source.text and "sum *=" not in both.source.text


@pytest.mark.parametrize("early", [True, False])
def test_weights_are_read_early_where_no_kernel_writes_them(early: bool) -> None:
    (step,) = steps(matmul(), early=early)
    assert step.source.options.dependent_launch and "DEPENDENT = 1;" in step.source.text
    assert f"EARLY = {int(early)};" in step.source.text


@pytest.mark.parametrize(
    ("rows", "chosen", "clusters"),
    [
        (43, plan(16, 64), 9),
        (4096, plan(16, 64), 132),  # as many as run at once
        (4096, plan(16, 64, blocks=2), 264),
        (43, plan(16, 64, cluster_m=2), 6),
        (4096, plan(16, 64, cluster_m=2), 66),
        (4096, plan(16, 64, split_k=2), 768),  # a cluster computes one tile
        (4096, plan(16, 64, groups_k=2), 768),
        (40, plan(64, 40, swapped=1), 4),
    ],
)
def test_clusters_are_as_many_as_have_tiles_or_run_at_once(
    rows: int, chosen: Any, clusters: int
) -> None:
    (step,) = steps(replace(matmul(), rows=rows), chosen)
    assert step.grid == (clusters,) and H200.sm_count == 132
    assert step.source.options.num_ctas == chosen.cluster


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the family among all others."""
    others = [f for f in registry.FAMILIES if not isinstance(f, CudaMatmul)]
    monkeypatch.setattr(registry, "FAMILIES", [CudaMatmul(), *others])
    with mock.patch.dict(registry._BY_NAME, cuda=registry.FAMILIES[0]):
        yield


@needs_nvrtc
@pytest.mark.usefixtures("registered")
def test_plans_become_launches_of_compiled_kernels() -> None:
    work = NormMatmul(
        *(matmul().rows, 136, (Projection(136, "nk", ("residual",)),), Norm("rms", 1e-5)),
        *("float16", "float16"),
    )
    split = plan(16, 64, split_k=2)
    mod = emitted(work, PlanTable(((16, split), (None, plan(64, 64)))))
    assert launched(mod) == ["row_norm", "matmul"] * 2
    assert isinstance(mod["main"].ret_ty, relax.TensorType)
    found = kernels(mod)["matmul"]
    assert {k.options.num_ctas for k in found} == {1, 2}
    for kernel in found:
        assert kernel.block == (256, 1, 1) and kernel.image.startswith(b"\x7fELF")
        assert kernel.options.dependent_launch


@needs_nvrtc
def test_an_adapter_becomes_two_compiled_kernels() -> None:
    mod = emitted(adapted(16), PlanTable(((None, plan(64, 64)),)))
    assert launched(mod) == ["matmul", "matmul"]
    found = kernels(mod)["matmul"]
    assert sorted(len(k.tensor_maps) for k in found) == [3, 5]
    assert all(k.options.dependent_launch for k in found)


@needs_nvrtc
def test_what_the_driver_sees(tmp_path: Path) -> None:
    (step,) = steps(gated(), plan(16, 64, cluster_m=2))
    kernel = step.source.compile("key", require_nvrtc())
    weight, up, x, out, bias = (0x7F0000000000 + 0x100000 * i for i in range(5))
    maps = [weight, 136, 136, 136, 1, up, 136, 136, 136, 1, x, 43, 136, 136, 1]
    call = [*maps, out, bias, bias + 272, 43, 136, 136, 6, 1, 1]
    sizes = (128, 128, 128, 8, 8, 8, 4, 4, 4)
    with Worker() as worker:
        library = build_launcher(kernel, tmp_path)
        answer = worker.do(Job(build_driver(tmp_path), library, [call], sizes=sizes))
    assert answer.errors == []
    (launch,) = answer.launches
    assert launch["grid"] == [12, 1, 1] and launch["block"] == [256, 1, 1]
    assert launch["attributes"] == {"cluster": [2, 1, 1], "spread": 1, "dependent": 1}
    assert launch["shared"] == kernel.shared_bytes == 2 * (16 + 2 * 64) * 128 + 4096 + 32
    encoded = answer.of("cuTensorMapEncodeTiled")
    assert [e["base"] for e in encoded] == [weight, up, x]
    assert [e["box"] for e in encoded] == [[64, 32], [64, 32], [64, 16]]
    assert [e["dims"] for e in encoded] == [[136, 136], [136, 136], [136, 43]]
    assert {(e["type"], e["swizzle"], e["strides"][0]) for e in encoded} == {(6, 3, 272)}


@needs_nvrtc
@pytest.mark.parametrize(
    ("work", "element", "kind", "depth"),
    [
        (integers("scale", out="float32"), 1, 0, 128),
        (matmul("scale", dtype="float32", k=272), 4, 11, 32),
    ],
    ids=["int8", "tf32"],
)
def test_what_the_driver_sees_of_other_dtypes(
    tmp_path: Path, work: NormMatmul, element: int, kind: int, depth: int
) -> None:
    (step,) = steps(work, plan(16, 64, block_k=depth))
    kernel = step.source.compile("key", require_nvrtc())
    assert kernel.params[3:5] == ("*fp32", "*fp32")  # the result, and the scales
    weight, x, out, scale = (0x7F0000000000 + 0x100000 * i for i in range(4))
    maps = [weight, 136, 272, 272, 1, weight, 136, 272, 272, 1, x, 43, 272, 272, 1]
    call = [*maps, out, scale, 43, 136, 272, 9, 1, 1]
    with Worker() as worker:
        library = build_launcher(kernel, tmp_path)
        driver = build_driver(tmp_path)
        answer = worker.do(Job(driver, library, [call], sizes=(128, 128, 128, 8, 8, 4, 4, 4)))
    assert answer.errors == []
    encoded = answer.of("cuTensorMapEncodeTiled")
    assert [e["box"] for e in encoded] == [[depth, 64], [depth, 64], [depth, 16]]
    assert {(e["type"], e["swizzle"], e["strides"][0]) for e in encoded} == {
        (kind, 3, 272 * element)
    }
