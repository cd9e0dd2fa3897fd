"""The text of generated kernels: what a reader sees, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from relax_fusion import make_target
from relax_fusion.errors import TilingError
from relax_fusion.estimator import candidates, violations
from relax_fusion.estimator.families.generated.plan import GeneratedPlan, launches, many
from relax_fusion.estimator.families.generated.space import plans
from relax_fusion.hardware.target import device_of
from relax_fusion.tiling import Schedule, iteration_space, parse, place
from relax_fusion.triton_bridge.generated import Means, Parameter, function_of, kernel_text
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.dims import DynamicDim
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.values import Axis

from ...support.matmul_chains import TwoMatmuls
from ...tiling.graphs import chain, softmax

FILES = Path(__file__).parents[2] / "data" / "generated"


def scheduled(graph: Graph, expression: str, tile: Mapping[str, int], **sizes: int) -> Schedule:
    space = iteration_space(graph, sizes)
    single = [a.name for a in space.loops if not a.batch and tile[a.name] >= a.size]
    structure = place(space, parse(expression, space.ordered), single)
    return Schedule(space, structure, tuple(tile[a.name] for a in space.loops))


TWO = chain(512, 64, 256, 64)
TILES = {"m": 64, "n": 64, "k": 64, "h": 64}


def dynamic() -> Graph:
    g = GraphBuilder()
    i, j, k = Axis("i", DynamicDim("rows")), Axis("j", 48), Axis("k", 80)
    x, w = g.input("x", (i.size, 80), "float16"), g.input("w", (48, 80), "float16")
    g.output(g.sum("y", (i, j), (k,), x[i, k] * w[j, k], "float16"))
    return g.graph()


KERNELS = {
    "two_products": kernel_text(TWO, scheduled(TWO, "mhnk", TILES)),
    "online_softmax": kernel_text(
        softmax(100, 200), scheduled(softmax(100, 200), "itc", {"i": 64, "t": 64, "c": 64})
    ),
    "tensor_maps": kernel_text(
        TWO, scheduled(TWO, "mhnk", TILES), means=Means(tensor_maps=True, announces=True)
    ),
    "dynamic_rows": kernel_text(
        dynamic(),
        scheduled(dynamic(), "ijk", {"i": 16, "j": 48, "k": 32}, rows=1 << 20),
        {"rows": 1 << 20},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_read_as_they_did(name: str) -> None:
    """With RELAX_FUSION_REWRITE in the environment, the files are written anew: look at them."""
    file = FILES / f"{name}.txt"
    if os.environ.get("RELAX_FUSION_REWRITE"):
        file.write_text(KERNELS[name].text)
    assert KERNELS[name].text == file.read_text()


def test_a_text_is_a_function() -> None:
    function = function_of(KERNELS["two_products"])
    assert isinstance(function, JITFunction)
    assert function.arg_names == ["A_ptr", "B_ptr", "D_ptr", "E_ptr"]
    assert function is function_of(KERNELS["two_products"])


def test_parameters() -> None:
    assert KERNELS["tensor_maps"].operands[:2] == (
        Parameter("A", (64, 64)),
        Parameter("B", (64, 64)),
    )
    assert KERNELS["tensor_maps"].operands[-1] == Parameter("E")
    assert KERNELS["dynamic_rows"].sizes == ("rows",)


def test_what_has_no_kernel() -> None:
    with pytest.raises(TilingError, match="tiles of E are kept for all iterations of h"):
        kernel_text(TWO, scheduled(TWO, "mn(k,h)", {**TILES, "h": 32, "k": 32}))
    with pytest.raises(TilingError, match="the loop m has tiles of 48; blocks of Triton are"):
        kernel_text(TWO, scheduled(TWO, "mhnk", {**TILES, "m": 48}))
    with pytest.raises(TilingError, match="C has tiles of 131072 elements; at most 65536"):
        kernel_text(TWO, scheduled(TWO, "mhnk", {**TILES, "m": 512, "n": 256}))
    with pytest.raises(TilingError, match="C is float8_e4m3fn, which no generated kernel makes"):
        graph = chain(64, 64, 64, 64)
        tensors = tuple(
            type(t)(t.name, t.shape, "float8_e4m3fn") if t.name == "C" else t for t in graph.tensors
        )
        small = Graph(tensors, graph.blocks, graph.slots)
        kernel_text(small, scheduled(small, "mhnk", TILES))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("tl", "w", "y", "k"), "'tl' is, in a kernel, the name of something else as well"),
        (("x", "w", "ratio", "k"), "'ratio' is, in a kernel, the name of something else"),
        (("x", "x_2", "y", "k"), "'x_2' is, in a kernel, the name of something else"),
        (("x", "w", "x_ptr", "k"), "'x_ptr' is, in a kernel, the name of something else"),
        (("k_at", "w", "y", "k"), "'k' is, in a kernel, the name of something else"),
        (("in", "w", "y", "k"), "'in' is no name of Python; a kernel is written in it"),
        (("x y", "w", "y", "k"), "'x y' is no name of Python"),
        (("k", "i", "y", "k"), ""),
    ],
)
def test_names_that_a_kernel_cannot_have(names: tuple[str, ...], words: str) -> None:
    g = GraphBuilder()
    i, j, k = Axis("i", 16), Axis("j", 16), Axis(names[3], 16)
    x, w = g.input(names[0], (16, 16), "float16"), g.input(names[1], (16, 16), "float16")
    g.output(g.sum(names[2], (i, j), (k,), x[i, k] * w[k, j]))
    graph, tile = g.graph(), dict.fromkeys(("i", "j", names[3]), 16)
    schedule = scheduled(graph, f"i.j.{names[3]}", tile)
    if not words:
        assert kernel_text(graph, schedule).text
        return
    with pytest.raises(TilingError, match=words):
        kernel_text(graph, schedule)


def test_a_sum_that_is_no_product_of_matrices_has_small_tiles() -> None:
    g = GraphBuilder()
    i, j, k = Axis("i", 64), Axis("j", 64), Axis("k", 64)
    x, y = g.input("x", (64, 64), "float32"), g.input("y", (64, 64), "float32")
    g.output(g.sum("s", (i, j), (k,), x[i, k] + y[k, j]))
    graph = g.graph()
    with pytest.raises(TilingError, match="s is computed in tiles of 262144 elements that no"):
        kernel_text(graph, scheduled(graph, "ijk", {"i": 64, "j": 64, "k": 64}))


def test_few_integers_are_multiplied_in_float16() -> None:
    """A product of int8 sums 32 elements or more, which the interpreter does not know."""
    g = GraphBuilder()
    i, j, k = Axis("i", 16), Axis("j", 16), Axis("k", 12)
    x, w = g.input("x", (16, 12), "int8"), g.input("w", (12, 16), "int8")
    g.output(g.sum("s", (i, j), (k,), x[i, k] * w[k, j], "int32"))
    text = kernel_text(g.graph(), scheduled(g.graph(), "ijk", {"i": 16, "j": 16, "k": 12})).text
    assert "s = (tl.dot(x.to(tl.float16), w.to(tl.float16))).to(tl.int32)" in text


@pytest.mark.parametrize(
    ("dtype", "scale", "how"),
    [
        ("float16", "", "tl.dot(x, w)"),
        ("float16", "float16", 'input_precision="ieee"'),
        ("float16", "float32", 'input_precision="ieee"'),
        ("bfloat16", "bfloat16", ".to(tl.bfloat16), w)"),
        ("int8", "int8", 'input_precision="ieee"'),
    ],
)
def test_products_of_what_is_computed(dtype: str, scale: str, how: str) -> None:
    """A scaled element may be larger than its dtype holds."""
    g = GraphBuilder()
    i, j, k = Axis("i", 16), Axis("j", 16), Axis("k", 32)
    x, w = g.input("x", (16, 32), dtype), g.input("w", (32, 16), dtype)
    left = x[i, k] * g.input("s", (16,), scale)[i] if scale else x[i, k]
    g.output(g.sum("y", (i, j), (k,), left * w[k, j]))
    text = kernel_text(g.graph(), scheduled(g.graph(), "ijk", {"i": 16, "j": 16, "k": 32})).text
    assert how in text


CHAINS = {
    "split": TwoMatmuls(512, 256, 512, 256, ("kn", "kn"), (), (), "float16", "float16").chain,
    "batch": TwoMatmuls(1024, 128, 1024, 128, ("kn", "kn"), (), (), "float16", "float16", 4).chain,
    "steps": TwoMatmuls(
        *(1024, 768, 64, 768, ("nk", "nk"), ("bias", "gelu"), ("bias", "residual")),
        *("bfloat16", "bfloat16"),
    ).chain,
    "rows": TwoMatmuls(
        DynamicDim("n"), 72, 200, 56, ("kn", "nk"), (), (), "float16", "float16"
    ).chain,
    "narrow": TwoMatmuls(64, 8, 8, 8, ("kn", "kn"), (), (2.0,), "float16", "float16").chain,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_every_plan_that_is_offered_has_a_text(name: str, device: str) -> None:
    work, dev = CHAINS[name], device_of(make_target(device))
    found = [p for p in candidates(work, dev, "triton") if isinstance(p, GeneratedPlan)]
    assert len(found) >= 8
    assert name != "split" or any(plan.split for plan in found)
    for plan in found:
        for launched in launches(work.graph, plan):
            assert (
                "tl.store"
                in kernel_text(launched.graph, launched.schedule, many(launched.graph)).text
            )


@pytest.mark.parametrize("rows", [1, 40])
def test_every_plan_without_violations_has_a_text(rows: int) -> None:
    """Of one row, no product of matrices is made, and tiles are smaller."""
    work = TwoMatmuls(rows, 33, 257, 96, ("nk", "nk"), (), (), "float16", "float16").chain
    dev, refused = device_of(make_target("h200")), 0
    for plan in plans(work.graph):
        if violations(plan, work, dev):
            refused += 1
            continue
        for launched in launches(work.graph, plan):
            assert kernel_text(launched.graph, launched.schedule).text
    assert refused
