"""Layers of every format of quantised weights: no kernel writes a weight, numbers are equal."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import ir, relax, te, tirx

from relax_fusion import FuseDequantize, Reason, Report
from relax_fusion.hardware import target
from relax_fusion.matching.expressions import loads_of
from relax_fusion.matching.stages import read_stages
from relax_fusion.mend.narrow_floats import RoundNarrowFloats

from ..support.quantised import FORMATS, Cast, Groups, numpy_dtype
from ..support.quantised_functions import (
    K,
    Layer,
    N,
    add_function,
    add_projection,
    called,
    check_numbers,
    compiled,
    lowered,
    projected,
    random_array,
    run_by_pipeline,
)

op = relax.op
FFN = 256


def add_decoder_layer(bb: relax.BlockBuilder, name: str, format) -> None:
    """Add norm, gated FFN, residual and lm_head, and an embedding."""
    layer, rows = Layer(bb, format), tirx.Var("rows", "int64")
    x = layer.param((1, rows, K), format.dtype)
    gamma = layer.param((K,), format.dtype)
    ids = layer.param((rows,), "int32")
    up, down, head = (layer.packed(*size) for size in ((2 * FFN, K), (K, FFN), (48, K)))

    def emit():
        h = bb.emit(op.nn.rms_norm(x, gamma, [-1], 1e-5))
        both = bb.emit(op.split(projected(layer, h, up, 2 * FFN, K), 2, axis=-1))
        a = bb.emit(op.multiply(op.nn.silu(both[0]), both[1]))
        y = bb.emit(op.add(projected(layer, a, down, K, FFN), x))
        logits = projected(layer, y, head, 48, K, "float32")
        table = format.emit(bb, head, 48, K)
        table = table if format.layout == "nk" else op.permute_dims(table)
        return logits, op.take(table, ids, axis=0)

    add_function(bb, name, layer, emit)


def written_weights(mod: ir.IRModule) -> list[str]:
    """Return the functions that write a matrix made, element by element, of fewer bytes."""
    found = []
    for gvar, func in mod.functions_items():
        stages = read_stages(func) if isinstance(func, tirx.PrimFunc) else None
        if stages is None or any(stage.reduced for stage in stages):
            continue
        *inputs, out = (p for p in func.params if tirx.is_buffer_var(p))
        loads = [load for stage in stages for load in loads_of(stage.value)]
        is_lookup = any(loads_of(i) for load in loads for i in load.indices)
        if not is_lookup and sum(map(sample_bytes, inputs)) < sample_bytes(out):
            found.append(gvar.name_hint)
    return found


def sample_bytes(buffer: tirx.Var) -> int:
    sizes = [int(d) if isinstance(d, tirx.IntImm) else 64 for d in buffer.ty.shape]
    return int(np.prod(sizes)) * tvm.DataType(str(buffer.ty.dtype)).bits


# --- no weight is written --------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers() -> ir.IRModule:
    bb = relax.BlockBuilder()
    for name, format in FORMATS.items():
        add_decoder_layer(bb, name, format)
    return bb.get()


def test_written_weights_are_seen(layers: ir.IRModule) -> None:
    alone = relax.transform.FuseTIR()(relax.transform.LegalizeOps()(layers))
    assert len(written_weights(alone)) >= len(FORMATS)


def test_no_weight_of_any_format_is_written(layers: ir.IRModule) -> None:
    report = Report()
    mod = lowered(layers, report=report)
    assert written_weights(mod) == []
    for name in FORMATS:
        kernels = [c.args[0].name_hint for c in called(mod[name])]
        fused = [d for d in report.fused if d.function == name]
        packed = name not in ("f16_f32", "operators", "codebook")
        assert sum("dequantize_matmul" in k for k in kernels) == (0 if packed else 3)
        assert sum("dequantize_take" in k for k in kernels) == 1
        assert all("packed" in d.spelling for d in fused) and bool(fused) == packed
        others = [d for d in report.declined if d.pattern != "FuseChains"]
        reasons = {d.decline.reason for d in others if d.function == name}
        assert reasons == (set() if packed else {Reason.MATERIALISED})


# --- numbers ---------------------------------------------------------------------------------

SCHEDULED = ("q4f16_1", "q3f16_0", "q4bf16_1", "q4f16_autoawq")
"""Formats that our rules' kernels are run with, too."""


@pytest.fixture(scope="module")
def loops() -> relax.VirtualMachine:
    bb = relax.BlockBuilder()
    for name, format in FORMATS.items():
        add_projection(bb, name, format, K)
    return compiled(bb.get(), FuseDequantize(), RoundNarrowFloats())


@pytest.fixture(scope="module")
def kernels() -> relax.VirtualMachine:
    bb = relax.BlockBuilder()
    for name in SCHEDULED:
        add_projection(bb, name, FORMATS[name], K)
        add_projection(bb, f"{name} row", FORMATS[name], 1)
    return run_by_pipeline(bb.get())


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_rounded_as_before(loops: relax.VirtualMachine, name: str) -> None:
    check_numbers(loops, name, np.eye(K))


@pytest.mark.parametrize("name", SCHEDULED)
def test_weights_are_rounded_as_before_in_kernels(kernels: relax.VirtualMachine, name: str) -> None:
    check_numbers(kernels, name, np.eye(K))
    check_numbers(kernels, f"{name} row", np.eye(K)[77:78])


# --- which rules take the kernels ----------------------------------------------------------------


def rules_of(mod: ir.IRModule, target: str) -> set[str]:
    report = Report()
    lowered(mod, target, phases=5, report=report)
    return {s.rule for s in report.schedules}


@pytest.mark.parametrize("target", ["llvm", "h200"])
@pytest.mark.parametrize(
    "name, fused",
    [
        ("q4f16_1", ("llvm", "h200")),
        ("q4f16_0", ("llvm", "h200")),
        ("q4f16_autoawq", ("llvm",)),
        ("f16_f32", ()),
        ("codebook", ()),
    ],
)
def test_rules_of_one_row(name: str, fused: tuple[str, ...], target: str) -> None:
    bb = relax.BlockBuilder()
    layer = Layer(bb, FORMATS[name])
    x, packed = layer.param((1, K), FORMATS[name].dtype), layer.packed(64, K)
    add_function(bb, "main", layer, lambda: [projected(layer, x, packed, 64, K)])
    wanted = "FusedRule" if target in fused else "GenericMatmulRule"
    assert rules_of(bb.get(), target) == {wanted}


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_a_width_that_only_the_run_knows(layout: str) -> None:
    format, n = Groups(layout=layout), tirx.Var("n", "int64")
    bb = relax.BlockBuilder()
    layer = Layer(bb, format)
    x, packed = layer.param((3, K), "float16"), layer.packed(n, K)
    add_function(bb, "main", layer, lambda: [projected(layer, x, packed, n, K, "float32")])
    mod, rng = bb.get(), np.random.default_rng(1)
    assert rules_of(mod, "llvm") == {"FusedRule"}
    given = [random_array(rng, *each) for each in format.shapes(N, K)]
    arrays = [np.eye(K, dtype="float16")[40:43], *given]
    (got,) = run_by_pipeline(mod)["main"](*map(tvm.runtime.tensor, arrays))
    # A fused kernel does not round the weight
    np.testing.assert_allclose(got.numpy(), format.decoded(given, K).T[40:43], rtol=1e-3)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("rows", [1, K])
@pytest.mark.parametrize("stored", ["int8", "uint8"])
def test_bytes_that_are_made_bfloat16_on_the_way_to_panels(
    monkeypatch: pytest.MonkeyPatch, stored: str, rows: int, cores: int
) -> None:
    """Rows of words that are longer than those of the weight are of no format that we know."""
    monkeypatch.setattr(target, "usable_cores", lambda: cores)
    bb = relax.BlockBuilder()
    layer = Layer(bb, Cast(stored, "bfloat16"))
    x, bytes_ = layer.param((rows, K), "bfloat16"), layer.param((N, K + 1), stored)

    def cut(w: te.Tensor) -> te.Tensor:
        return te.compute((N, K), lambda j, i: w[j, i].astype("bfloat16"), "cut")

    def emit():
        whole = bb.emit(bb.call_te(cut, bytes_))
        return [op.matmul(x, op.permute_dims(whole))]

    add_function(bb, "main", layer, emit)
    mod, rng = bb.get(), np.random.default_rng(1)
    assert rules_of(mod, "llvm") == {"GenericMatmulRule"}
    given = random_array(rng, (N, K + 1), stored)
    x = np.eye(K, dtype=numpy_dtype("bfloat16"))[:rows]
    (got,) = run_by_pipeline(mod)["main"](*map(tvm.runtime.tensor, (x, given)))
    np.testing.assert_array_equal(got.numpy(), given[:, :rows].T.astype(x.dtype))
