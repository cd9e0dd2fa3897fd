"""A LLaMA of MLC-LLM generates with TVM's paged cache what numpy computes in float64.

It needs the sources of MLC-LLM at commit 79d603f: RELAX_FUSION_MLC=PATH of a checkout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relax_fusion import Report
from relax_fusion.mlc import install

from ..support import mlc_llama as llama
from ..support.gpu import gpu_target, needs_gpu
from ..support.quick import quick_host, quickly
from .conftest import forget

CHECKOUT = os.environ.get("RELAX_FUSION_MLC", "")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="set RELAX_FUSION_MLC to a checkout of MLC-LLM at 79d603f"
)
ERRORS = {"q0f32": 4e-6, "q4f32_1": 4e-6, "q0f16": 4e-3, "q4f16_1": 8e-3}
"""Largest differences that are allowed, of the largest logit: twice what was measured."""
PROMPTS = {0: [5, 17, 300, 42, 7, 99, 100, 3], 1: [1, 2, 3], 2: [250]}
STEPS = 8


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(CHECKOUT) / "python"))
        found = Report()
        install(report=found)
        yield found
    forget()


def build(
    model: str, fields: dict[str, Any], quantization: str, target: Target | None = None
) -> relax.VMExecutable:
    """Compile by MLC-LLM's entry point: what comes out of phase 0, on a CPU in little time."""
    from mlc_llm.interface import compile as compiler
    from mlc_llm.interface.compiler_flags import ModelConfigOverride, OptimizationFlags
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    built: list[Any] = []

    def compile_it(mod: tvm.IRModule, args: Any, pipeline: Any) -> None:
        if target is None:
            built.append(quickly(mod, pipeline))
        else:
            built.append(tvm.compile(mod, target, relax_pipeline=pipeline))

    compiler.compile(
        config=deepcopy(fields),
        quantization=QUANTIZATION[quantization],
        model_type=MODELS[model],
        target=target or quick_host(),
        opt=OptimizationFlags.from_str("O2"),
        build_func=compile_it,
        system_lib_prefix="",
        output=Path("none.so"),
        overrides=ModelConfigOverride(max_batch_size=llama.SEQUENCES),
    )
    return built[0]


def compiled(quantization: str, kind_of_device: str) -> tuple[llama.Engine, llama.Weights]:
    """Return MLC-LLM's engine's calls of a compiled LLaMA, and its weights in float64."""
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    target = gpu_target() if kind_of_device == "cuda" else None
    executable, kind = (
        build("llama", llama.CONFIG, quantization, target),
        QUANTIZATION[quantization],
    )
    config = MODELS["llama"].config.from_dict(dict(llama.CONFIG))
    model, mapping = MODELS["llama"].quantize[kind.kind](config, kind)
    params, exact = {}, {}
    for name, value in llama.weights().items():
        given = tvm.runtime.tensor(value.astype(kind.model_dtype))
        if name in mapping.param_map:
            packed = mapping.map_func[name](given)
            params |= dict(zip(mapping.param_map[name], packed, strict=True))
            exact[name] = llama.unpacked(*(p.numpy() for p in packed), value.shape[-1])
        else:
            params[name] = given
            exact[name] = given.numpy().astype("float64")
    names = [name for name, _ in model.named_parameters()]
    device = tvm.device(kind_of_device, 0)
    return llama.Engine(executable, [params[name] for name in names], device), exact


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("quantization", ERRORS)
def test_generation(report: Report, quantization: str, device: str) -> None:
    engine, exact = compiled(quantization, device)
    assert report.fused
    clear: list[bool] = []
    tokens = {sequence: list(prompt) for sequence, prompt in PROMPTS.items()}

    def check(rows: np.ndarray, behind: int = 1) -> None:
        """Compare logits with those of the last `behind` tokens of each sequence."""
        wanted = np.concatenate([llama.logits(exact, t)[-behind:] for t in tokens.values()])
        allowed = ERRORS[quantization] * np.abs(wanted).max()
        assert np.abs(rows - wanted).max() <= allowed
        second, first = np.sort(wanted, -1)[:, -2:].T
        is_no_tie = first - second > 2 * allowed
        clear.extend(is_no_tie)
        assert (rows.argmax(-1) == wanted.argmax(-1))[is_no_tie].all()

    rows = engine.prefill(tokens)
    check(rows)
    for _ in range(STEPS):
        new = {s: [int(row.argmax())] for s, row in zip(tokens, rows, strict=True)}
        for s, token in new.items():
            tokens[s] += token
        rows = engine.call("batch_decode", new)
        check(rows)
    drafts = {s: [int(rows[s].argmax()), 7, 11] for s in tokens}
    for sequence, draft in drafts.items():
        tokens[sequence] += draft
    check(engine.call("batch_verify", drafts), behind=3)
    for sequence in tokens:  # two of the drafts are refused
        engine.drop(sequence, 2)
        tokens[sequence] = [*tokens[sequence][:-2], 23]
    check(engine.call("batch_decode", {s: [23] for s in tokens}))
    assert sum(clear) > len(clear) / 2
