"""Kernels of the chain engine on a GPU: against their graphs, and through the pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from ..support.accuracy import assert_accurate
from ..support.chain_reference import evaluate
from ..support.chains import Chain, module
from ..support.generated import check
from ..support.gpu import gpu_target, needs_gpu
from ..support.region_cases import CASES
from ..support.strange_graphs import KINDS

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("first", range(1000, 1300, 25))
def test_random_graphs_under_random_schedules(first: int) -> None:
    pytest.importorskip("torch", reason="needs torch, which launches the kernels")
    said = check(list(range(first, first + 25)), (16, 32, 64, 128), "cuda")
    assert said["wrong"] == []
    assert said["run"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_strange_graphs_under_random_schedules(kind: str) -> None:
    pytest.importorskip("torch", reason="needs torch, which launches the kernels")
    said = check(list(range(100, 112)), (16, 32, 64), "cuda", kind)
    assert said["wrong"] == []
    assert said["run"] > 5


TWO = "h = R.matmul(x, WA); y = R.matmul(h, WB)"
NT = "a = R.permute_dims(WA); b = R.permute_dims(WB); h = R.matmul(x, a)\n"
CHAINS = [
    Chain("plain", "x[512,64] WA[64,256] WB[256,128]", TWO, "y", {}, "float16"),
    Chain("split", "x[512,256] WA[256,512] WB[512,256]", TWO, "y", {}, "float16"),
    Chain("odd", "x[77,72] WA[72,200] WB[200,56]", TWO, "y", {}, "float16"),
    Chain("rows", "x[n,128] WA[128,512] WB[512,128]", TWO, "y", {"n": 333}, "bfloat16"),
    Chain("batch", "x[4,100,128] WA[4,128,512] WB[4,512,64]", TWO, "y", {}, "float16"),
    Chain(
        "steps",
        "x[n,768] WA[64,768] p[64] WB[768,64] q[768] r[n,768]",
        NT + "g = R.nn.gelu(R.add(h, p)); y = R.add(R.add(R.matmul(g, b), q), r)",
        "y",
        {"n": 130},
        "float16",
    ),
    Chain(
        "token_mixer",
        "x[8,196,512] g[512] c[512] WA[196,256] p[256] WB[256,196] q[196]",
        "n = R.permute_dims(R.nn.layer_norm(x, g, c, axes=[-1]), [0, 2, 1])\n"
        "h = R.nn.gelu(R.add(R.matmul(n, WA), p)); m = R.add(R.matmul(h, WB), q)\n"
        "y = R.add(R.permute_dims(m, [0, 2, 1]), x)",
        *("y", {}, "float16"),
    ),
    Chain(
        "three_layers",
        "x[n,128] WA[128,128] WB[128,128] WC[128,128] p[128]",
        "a = R.nn.relu(R.add(R.matmul(x, WA), p)); b = R.nn.relu(R.matmul(a, WB))\n"
        "y = R.matmul(b, WC)",
        *("y", {"n": 1000}, "bfloat16"),
    ),
    *(case.chain for case in CASES),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_chains_of_the_pipeline(chain: Chain) -> None:
    mod, target = module([chain]), gpu_target()
    options = {"backend": "triton", "always_fuse": True}
    pipeline = relax.get_pipeline("relax_fusion", target=target, **options)
    built = tvm.compile(mod, target, relax_pipeline=pipeline)
    device = tvm.cuda(0)
    run, arrays = relax.VirtualMachine(built, device)[chain.name], chain.arrays()
    found = run(*(tvm.runtime.tensor(a, device) for a in arrays)).numpy()
    func = mod[chain.name]
    (exact,) = evaluate(func, arrays)
    near = [evaluate(func, arrays, noise=np.random.default_rng(seed))[0] for seed in range(4)]
    assert_accurate(found, exact, np.stack(near), str(found.dtype), 0)
